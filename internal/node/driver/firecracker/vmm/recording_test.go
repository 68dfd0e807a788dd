package vmm

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// exchange is one recorded request with its answer.
type exchange struct {
	where              string // file:line
	method, path, body string
	status             int
	answer             string
	exits              bool // the process ended after it
}

func (e exchange) request() string {
	return strings.TrimSpace(e.method + " " + e.path + " " + e.body)
}

// frame puts a real VMM's headers around an answer: the same ones always, with
// a space after the status and no reason, and no length where there is no body.
func frame(status int, body string) string {
	head := fmt.Sprintf("HTTP/1.1 %d \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n", status)
	if body != "" {
		head += fmt.Sprintf("Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	return head + "\r\n" + body
}

// process is what was recorded of one VMM.
type process struct {
	file, id  string
	exchanges []exchange
}

func (p process) name() string { return p.file + " " + p.id }

// readRecording reads a file of testdata in the form that 1.13.0.txt describes.
func readRecording(t testing.TB, file string) []process {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	var list []process
	var open *exchange
	for i, line := range strings.Split(string(data), "\n") {
		where := fmt.Sprintf("testdata/%s:%d", file, i+1)
		word, rest, _ := strings.Cut(line, " ")
		switch {
		case line == "" || word == "#" || word == "##":
		case word == "vmm":
			list = append(list, process{file: file, id: rest})
		case word == "exits":
			p := &list[len(list)-1]
			p.exchanges[len(p.exchanges)-1].exits = true
		case open == nil:
			path, body, _ := strings.Cut(rest, " ")
			open = &exchange{where: where, method: word, path: path, body: body}
		default:
			if open.status, err = strconv.Atoi(word); err != nil {
				t.Fatalf("%s: %v", where, err)
			}
			length, answer, _ := strings.Cut(rest, " ")
			if n, _ := strconv.Atoi(length); n != len(answer) {
				t.Fatalf("%s: %d bytes are recorded as %s: the copy is broken", where, len(answer), length)
			}
			open.answer = answer
			p := &list[len(list)-1]
			p.exchanges = append(p.exchanges, *open)
			open = nil
		}
	}
	return list
}

// fakeVMM answers the requests of one recording in their order, on a socket of
// its own, byte for byte as the recorded VMM did. What is asked of it must be
// what was asked then.
type fakeVMM struct {
	t      *testing.T
	socket string
	listen net.Listener
	// real asks a real VMM instead, translated there and back; nil for the
	// recorded answers.
	real func(e exchange) (status int, answer string)

	mu      sync.Mutex
	pending []exchange
	used    int
	conns   map[net.Conn]bool
	wait    sync.WaitGroup
}

func serve(t *testing.T, p process, ask func(e exchange) (int, string)) *fakeVMM {
	t.Helper()
	f := &fakeVMM{t: t, socket: filepath.Join(t.TempDir(), "api.sock"), real: ask, pending: p.exchanges, conns: map[net.Conn]bool{}}
	var err error
	if f.listen, err = net.Listen("unix", f.socket); err != nil {
		t.Fatal(err)
	}
	f.listen.(*net.UnixListener).SetUnlinkOnClose(false)
	f.wait.Go(func() {
		for {
			conn, err := f.listen.Accept()
			if err != nil {
				return
			}
			f.mu.Lock()
			f.conns[conn] = true
			f.mu.Unlock()
			f.wait.Go(func() { f.talk(conn) })
		}
	})
	t.Cleanup(f.kill)
	return f
}

// kill is what the end of a process does to its sockets: the file stays.
func (f *fakeVMM) kill() {
	f.listen.Close()
	f.mu.Lock()
	for c := range f.conns {
		c.Close()
	}
	f.mu.Unlock()
	f.wait.Wait()
}

// talk answers one connection's requests; like a VMM it closes
// none but by its end.
func (f *fakeVMM) talk(conn net.Conn) {
	defer func() {
		conn.Close()
		f.mu.Lock()
		delete(f.conns, conn)
		f.mu.Unlock()
	}()
	in := bufio.NewReader(conn)
	for {
		req, err := http.ReadRequest(in)
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
				f.t.Errorf("the client sent no request: %v", err)
			}
			return
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			f.t.Errorf("the client's body: %v", err)
			return
		}
		answer, exits := f.next(req, string(body))
		if exits {
			// Before the client knows, so that it can't come again in between.
			f.listen.Close()
		}
		if _, err := io.WriteString(conn, answer); err != nil || exits {
			return
		}
	}
}

// next holds a request against the recording and returns the answer.
func (f *fakeVMM) next(req *http.Request, body string) (answer string, exits bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	got := strings.TrimSpace(req.Method + " " + req.RequestURI + " " + body)
	if len(f.pending) == 0 {
		f.t.Errorf("asked beyond the recording: %s", got)
		return frame(http.StatusTeapot, ""), false
	}
	e := f.pending[0]
	f.pending = f.pending[1:]
	f.used++
	if got != e.request() {
		f.t.Errorf("%s:\n asked %s\n  want %s", e.where, got, e.request())
	}
	checkForm(f.t, req, body)
	if f.real == nil {
		return frame(e.status, e.answer), e.exits
	}
	status, real := f.real(e)
	return frame(status, real), e.exits
}

// checkForm wants requests in the form that Firecracker's own small HTTP server
// takes: it knows no chunked body, and bodies of at most 51 200 bytes.
func checkForm(t *testing.T, req *http.Request, body string) {
	t.Helper()
	if len(req.TransferEncoding) != 0 || req.ContentLength != int64(len(body)) || req.ProtoMinor != 1 || req.Host == "" {
		t.Errorf("%s %s: transfer encoding %v, length %d of %d, %s, host %q",
			req.Method, req.URL, req.TransferEncoding, req.ContentLength, len(body), req.Proto, req.Host)
	}
	if want := map[bool]string{true: "application/json"}[body != ""]; req.Header.Get("Content-Type") != want {
		t.Errorf("%s %s: content type %q", req.Method, req.URL, req.Header.Get("Content-Type"))
	}
}

// left is how many recorded exchanges nobody has asked for.
func (f *fakeVMM) left() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.pending)
}
