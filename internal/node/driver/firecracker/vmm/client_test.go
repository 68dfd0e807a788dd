package vmm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const infoAnswer = `{"id":"p1","state":"Running","vmm_version":"1.12.1","app_name":"Firecracker"}`

// hostile listens as a VMM that does anything with a connection whose request
// it has begun to read, and then closes it.
func hostile(t testing.TB, talk func(conn net.Conn)) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "api.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var wait sync.WaitGroup
	wait.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wait.Go(func() {
				defer conn.Close()
				_, _ = conn.Read(make([]byte, 4096))
				talk(conn)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		wait.Wait()
	})
	return socket
}

func saying(answer string) func(net.Conn) {
	return func(conn net.Conn) { _, _ = io.WriteString(conn, answer) }
}

// untilClosed keeps silent until the client has gone.
func untilClosed(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func client(t *testing.T, socket string) *Client {
	t.Helper()
	c := New(socket)
	t.Cleanup(c.Close)
	return c
}

// TestDead asks VMMs that are no more, in each way that shows.
func TestDead(t *testing.T) {
	stale := filepath.Join(t.TempDir(), "stale.sock")
	l, err := net.Listen("unix", stale)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	whole := frame(200, infoAnswer)
	for name, socket := range map[string]string{
		"no socket":            filepath.Join(t.TempDir(), "none.sock"),
		"no folder":            filepath.Join(t.TempDir(), "none", "api.sock"),
		"stale socket":         stale,
		"ends at once":         hostile(t, saying("")),
		"ends in a header":     hostile(t, saying(whole[:30])),
		"ends before the body": hostile(t, saying(whole[:len(whole)-len(infoAnswer)])),
		"ends in the body":     hostile(t, saying(whole[:len(whole)-1])),
		"ends in a chunk":      hostile(t, saying("HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{")),
	} {
		_, err := client(t, socket).Info(within(t, 10*time.Second))
		if e := sandbox.AsError(err); !errors.Is(err, ErrGone) || e.Class != sandbox.Unavailable || e.Code != "vmm_gone" {
			t.Errorf("%s: %v", name, err)
		}
		if got, want := NotThere(err), strings.HasPrefix(name, "no ") || name == "stale socket"; got != want {
			t.Errorf("%s: NotThere(%v) = %v", name, err, got)
		}
	}
}

// TestDeathBetweenRequests has a VMM die that kept the connection of the
// request before, as every one does.
func TestDeathBetweenRequests(t *testing.T) {
	f := serve(t, readRecording(t, "1.13.0.txt")[0], nil)
	c := client(t, f.socket)
	if _, err := c.Info(within(t, 10*time.Second)); err != nil {
		t.Fatal(err)
	}
	f.kill()
	if err := c.Pause(within(t, 10*time.Second)); !errors.Is(err, ErrGone) || !strings.Contains(err.Error(), "PATCH /vm: the VMM is gone") {
		t.Errorf("the request after its death: %v", err)
	}
}

// TestContext has VMMs that never get to an end of their answer.
func TestContext(t *testing.T) {
	drip := func(start string) string {
		return hostile(t, func(conn net.Conn) {
			for _, err := io.WriteString(conn, start); err == nil; _, err = conn.Write([]byte("a")) {
				time.Sleep(time.Millisecond)
			}
		})
	}
	for name, socket := range map[string]string{
		"silence":          hostile(t, untilClosed),
		"a dripping head":  drip("HTTP/1.1 200 \r\nA: "),
		"a dripping body":  drip("HTTP/1.1 200 \r\n\r\n"),
		"half a body":      hostile(t, func(conn net.Conn) { saying("HTTP/1.1 200 \r\nContent-Length: 9\r\n\r\n{")(conn); untilClosed(conn) }),
		"a drip of chunks": drip("HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n"),
	} {
		began := time.Now()
		_, err := client(t, socket).Info(within(t, 30*time.Millisecond))
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > 5*time.Second {
			t.Errorf("%s: %v after %v", name, err, took)
		}
		if e := sandbox.AsError(err); e.Class != sandbox.Unavailable {
			t.Errorf("%s: class %s", name, e.Class)
		}
	}

	// One that doesn't read what it is sent.
	release := make(chan struct{})
	deaf := hostile(t, func(net.Conn) { <-release })
	defer close(release)
	err := client(t, deaf).Configure(within(t, 30*time.Millisecond), Config{Args: "x"})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a VMM that takes no request: %v", err)
	}
	err = client(t, deaf).put(within(t, 30*time.Millisecond), "/boot-source", bootBody{Args: strings.Repeat("x", 4<<20)})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a VMM that takes no body: %v", err)
	}

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	dead := client(t, filepath.Join(t.TempDir(), "none.sock"))
	if _, err := dead.Info(ended); !errors.Is(err, context.Canceled) || errors.Is(err, ErrGone) {
		t.Errorf("with an ended context: %v", err)
	}
}

func TestClose(t *testing.T) {
	c := New(hostile(t, untilClosed))
	done := make(chan error, 1)
	go func() { done <- c.Start(t.Context()) }()
	time.Sleep(10 * time.Millisecond) // most often it is under way by now
	c.Close()
	c.Close()
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("under way: %v", err)
	}
	if err := c.Start(t.Context()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("afterwards: %v", err)
	}
}

// TestSocketPaths: a VMM can replace its socket, but not lead the client to
// somebody else's; and a path may be longer than a socket address.
func TestSocketPaths(t *testing.T) {
	socket := hostile(t, saying(frame(200, infoAnswer)))
	dir := t.TempDir()
	link := filepath.Join(dir, "link.sock")
	if err := os.Symlink(socket, link); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "file.sock")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, file, dir, "/dev/null"} {
		_, err := client(t, path).Info(within(t, 10*time.Second))
		if !errors.Is(err, errNotSocket) || sandbox.AsError(err).Code != "vmm_socket" {
			t.Errorf("%s: %v", path, err)
		}
	}
	long := filepath.Join(dir, strings.Repeat("long/", 40))
	if err := os.MkdirAll(long, 0o700); err != nil {
		t.Fatal(err)
	}
	moved := filepath.Join(long, "api.sock")
	if err := os.Rename(socket, moved); err != nil {
		t.Fatal(err)
	}
	if _, err := client(t, moved).Info(within(t, 10*time.Second)); err != nil {
		t.Errorf("a path of %d bytes: %v", len(moved), err)
	}
}

// counter counts what a VMM got rid of before the client hung up.
type counter struct {
	mu sync.Mutex
	n  int
}

func (c *counter) add(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n += n
}

func (c *counter) got() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// TestBounds has VMMs that would fill the memory.
func TestBounds(t *testing.T) {
	for name, c := range map[string]struct {
		start, again string
		most         int // bytes that the client may take, beside the sockets' buffers
	}{
		"status":           {"HTTP/1.1 200 ", "aaaaaaaaaaaaaaaa", maxHeader},
		"a header":         {"HTTP/1.1 200 \r\nA: ", "aaaaaaaaaaaaaaaa", maxHeader},
		"headers":          {"HTTP/1.1 200 \r\n", "A: aaaaaaaaaaaaaaaa\r\n", maxHeader},
		"told length":      {fmt.Sprintf("HTTP/1.1 200 \r\nContent-Length: %d\r\n\r\n", maxBody+1), strings.Repeat("a", 1024), 4096},
		"body":             {"HTTP/1.1 200 \r\n\r\n", strings.Repeat(" ", 1024), 2 * maxBody},
		"chunks":           {"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n", "8000\r\n" + strings.Repeat(" ", 0x8000) + "\r\n", 2 * maxBody},
		"small chunks":     {"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n", "1\r\n \r\n", 3 * maxBody},
		"chunk extensions": {"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n1;", strings.Repeat("a", 1024), 3 * maxBody},
		"trailers":         {"HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\nTrailer: A\r\n\r\n0\r\n", "A: aaaaaaaaaaaaaaaa\r\n", 3 * maxBody},
		"early answers":    {"", "HTTP/1.1 100 \r\n\r\n", maxHeader},
	} {
		var sent counter
		socket := hostile(t, func(conn net.Conn) {
			again := strings.Repeat(c.again, 1+4096/len(c.again))
			for n, err := io.WriteString(conn, c.start); err == nil; n, err = io.WriteString(conn, again) {
				sent.add(n)
			}
		})
		_, err := client(t, socket).Info(within(t, 20*time.Second))
		if e := sandbox.AsError(err); e == nil || e.Code != "vmm_answer" || len(e.Message) > 2*maxMessage {
			t.Errorf("%s: %.300v", name, err)
		}
		// A unix socket holds less than a megabyte.
		if n := sent.got(); n > c.most+1<<20 {
			t.Errorf("%s: the client took %d bytes", name, n)
		}
	}
}

// TestStrangeAnswers are whole, but no Firecracker's.
func TestStrangeAnswers(t *testing.T) {
	info := func(c *Client, ctx context.Context) error { return c.ask(ctx) }
	start := func(c *Client, ctx context.Context) error { return c.Start(ctx) }
	for name, c := range map[string]struct {
		answer string
		do     func(*Client, context.Context) error
	}{
		"no HTTP":                 {"SSH-2.0-OpenSSH_9.2\r\n", info},
		"empty JSON":              {frame(200, "{}"), info},
		"another JSON":            {frame(200, "[]"), info},
		"more than JSON":          {frame(200, infoAnswer+"x"), info},
		"deep JSON":               {frame(200, strings.Repeat("[", 100_000)), info},
		"another state":           {frame(200, strings.Replace(infoAnswer, "Running", "Dreaming", 1)), info},
		"another id":              {frame(200, strings.Replace(infoAnswer, "p1", "../p1", 1)), info},
		"no id":                   {frame(200, strings.Replace(infoAnswer, "p1", "", 1)), info},
		"a long id":               {frame(200, strings.Replace(infoAnswer, "p1", strings.Repeat("p", 65), 1)), info},
		"a broken version":        {frame(200, strings.Replace(infoAnswer, "1.12.1", `1\n2`, 1)), info},
		"nothing where something": {frame(204, ""), info},
		"something where nothing": {frame(200, infoAnswer), start},
		"elsewhere":               {"HTTP/1.1 302 \r\nLocation: http://localhost/\r\nContent-Length: 0\r\n\r\n", start},
		"another protocol":        {"HTTP/1.1 101 \r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", start},
		"no status":               {"HTTP/1.1 \r\n\r\n", start},
		"a status of no class":    {frame(42, ""), start},
		"two lengths":             {"HTTP/1.1 204 \r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", start},
	} {
		err := c.do(client(t, hostile(t, saying(c.answer))), within(t, 10*time.Second))
		if e := sandbox.AsError(err); e == nil || e.Class != sandbox.Internal || e.Code != "vmm_answer" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestFaults are refusals in other words than those recorded.
func TestFaults(t *testing.T) {
	for name, c := range map[string]struct {
		answer string
		want   Fault
	}{
		"HTTP server's":   {frame(400, `{"error":"no\nway"}`), Fault{400, "no way"}},
		"both":            {frame(400, `{"error":"a","fault_message":"b"}`), Fault{400, "b"}},
		"no words":        {frame(503, ""), Fault{503, ""}},
		"no JSON":         {frame(500, "oh"), Fault{500, ""}},
		"another JSON":    {frame(400, `{"fault_message":["a"]}`), Fault{400, ""}},
		"control":         {frame(400, `{"fault_message":"a\u001b[31m\u202eb\u0000"}`), Fault{400, "a [31m b "}},
		"not UTF-8":       {frame(400, "{\"fault_message\":\"a\xff\xfeb\"}"), Fault{400, "a\ufffd\ufffdb"}},
		"long":            {frame(400, `{"fault_message":"`+strings.Repeat("é", 9000)+`"}`), Fault{400, strings.Repeat("é", maxMessage/2)}},
		"long and uneven": {frame(400, `{"fault_message":"a`+strings.Repeat("é", 9000)+`"}`), Fault{400, "a" + strings.Repeat("é", maxMessage/2-1) + "?"}},
	} {
		err := client(t, hostile(t, saying(c.answer))).Start(within(t, 10*time.Second))
		var got *Fault
		if !errors.As(err, &got) || *got != c.want {
			t.Errorf("%s: %v", name, err)
		}
		if got != nil && got.Error() == "" {
			t.Errorf("%s: a fault without a word", name)
		}
	}
}
