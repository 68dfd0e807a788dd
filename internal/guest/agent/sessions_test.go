package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"hash"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"connectrpc.com/connect"
)

func TestExit(t *testing.T) {
	g := newGuest(t, &guestv1.SetupRequest{Env: map[string]string{"GREETING": "hello"}})
	for _, c := range []struct {
		name   string
		m      *guestv1.StartRequest
		out    string
		err    string
		code   int32
		signal int32
		reason string
	}{
		{"zero", &guestv1.StartRequest{Args: []string{"true"}}, "", "", 0, 0, "exited"},
		{"code", &guestv1.StartRequest{Args: []string{"sh", "-c", "exit 42"}}, "", "", 42, 0, "exited"},
		{"streams apart", &guestv1.StartRequest{Args: []string{"sh", "-c", "echo out; echo err >&2"}}, "out\n", "err\n", 0, 0, "exited"},
		{"signal", &guestv1.StartRequest{Args: []string{"sh", "-c", "kill -9 $$"}}, "", "", 137, 9, "signaled"},
		{"not UTF-8", &guestv1.StartRequest{Args: []string{"sh", "-c", `printf '\377\376\000\200'`}}, "\xff\xfe\x00\x80", "", 0, 0, "exited"},
		{"env", &guestv1.StartRequest{Args: []string{"sh", "-c", "echo $GREETING $MORE $USER $HOME"}, Env: map[string]string{"MORE": "x"}}, "hello x root /root\n", "", 0, 0, "exited"},
		{"cwd", &guestv1.StartRequest{Args: []string{"pwd"}, Cwd: "/usr"}, "/usr\n", "", 0, 0, "exited"},
		{"cwd missing", &guestv1.StartRequest{Args: []string{"pwd"}, Cwd: "/nowhere"}, "", "", 126, 0, "start_failed"},
		{"no such command", &guestv1.StartRequest{Args: []string{"no-such-command"}}, "", "", 127, 0, "start_failed"},
		{"no such file", &guestv1.StartRequest{Args: []string{"/no/such"}}, "", "", 127, 0, "start_failed"},
		{"not executable", &guestv1.StartRequest{Args: []string{"/etc/passwd"}}, "", "", 126, 0, "start_failed"},
		{"no such user", &guestv1.StartRequest{Args: []string{"true"}, User: "nobodyhere"}, "", "", 126, 0, "start_failed"},
		{"user by name", &guestv1.StartRequest{Args: []string{"id", "-u"}, User: "nobody"}, "65534\n", "", 0, 0, "exited"},
		{"user by number", &guestv1.StartRequest{Args: []string{"sh", "-c", "id -u; id -g; id -G"}, User: "4321"}, "4321\n4321\n4321\n", "", 0, 0, "exited"},
		{"user and group", &guestv1.StartRequest{Args: []string{"sh", "-c", "id -u; id -g; id -G"}, User: "nobody:daemon"}, "65534\n1\n1\n", "", 0, 0, "exited"},
		{"timeout", &guestv1.StartRequest{Args: []string{"sleep", "60"}, TimeoutMs: 100}, "", "", 143, 15, "timeout"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g.t = t
			r := g.follow(g.start(c.m), nil)
			if r.out.String() != c.out || r.err.String() != c.err {
				t.Errorf("stdout %q, stderr %q", &r.out, &r.err)
			}
			if x := r.exit; x.Code != c.code || x.Signal != c.signal || x.Reason != c.reason || (x.Reason == "start_failed") != (x.Message != "") {
				t.Errorf("exit %v", r.exit)
			}
		})
	}
	list, err := g.c.Sessions(t.Context(), connect.NewRequest(&guestv1.SessionsRequest{}))
	if err != nil || len(list.Msg.Sessions) != 0 {
		t.Errorf("sessions left: %v %v", list, err)
	}
}

func TestTimeoutOfOneThatIgnoresSIGTERM(t *testing.T) {
	g := newGuest(t, nil)
	began := time.Now()
	r := g.follow(g.start(&guestv1.StartRequest{Args: []string{"sh", "-c", "trap '' TERM; echo up; while :; do sleep 1; done"}, TimeoutMs: 200}), nil)
	if r.exit.Signal != 9 || r.exit.Reason != "timeout" || time.Since(began) < 5*time.Second || time.Since(began) > 8*time.Second {
		t.Errorf("after %v: %v", time.Since(began), r.exit)
	}
}

func TestStartTwice(t *testing.T) {
	g := newGuest(t, nil)
	file := g.dir() + "/ran"
	m := &guestv1.StartRequest{Session: "ses_x", Args: []string{"sh", "-c", "echo ran >> " + file + "; exit 3"}}
	g.start(m)
	g.start(m)
	if r := g.follow("ses_x", nil); r.exit.Code != 3 {
		t.Errorf("exit %v", r.exit)
	}
	if b := g.read(file); b != "ran\n" {
		t.Errorf("it ran as %q", b)
	}
}

// An orphan keeps stdout open, and lives on while it writes to it.
func TestOrphanHoldsStdout(t *testing.T) {
	g := newGuest(t, nil)
	file := g.dir() + "/alive"
	began := time.Now()
	r := g.run("(trap '' PIPE; i=0; while [ $i -lt 40 ]; do i=$((i+1)); head -c 65536 /dev/zero; sleep 0.05; done; echo yes > " + file + ") & echo main")
	if d := time.Since(began); d > 1800*time.Millisecond || !strings.Contains(r.out.String(), "main\n") || r.exit.Code != 0 {
		t.Errorf("after %v: %v", d, r.exit)
	}
	eventually(t, func() bool { return g.read(file) == "yes\n" })
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatal("it never happened")
}

func TestSignalReachesTheGroup(t *testing.T) {
	g := newGuest(t, nil)
	id := g.sh("sleep 300.5 & set -m 2>/dev/null; sleep 300.5 & echo up; wait")
	go func() {
		time.Sleep(300 * time.Millisecond)
		_, _ = g.c.Signal(context.Background(), connect.NewRequest(&guestv1.SignalRequest{Session: id, Signal: 15}))
	}()
	if r := g.follow(id, nil); r.exit.Signal != 15 {
		t.Errorf("exit %v", r.exit)
	}
	eventually(t, func() bool {
		return !strings.Contains(g.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'").out.String(), "\n300.5\n")
	})
	_, err := g.c.Signal(t.Context(), connect.NewRequest(&guestv1.SignalRequest{Session: id, Signal: 15}))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("signal to a freed session: %v", err)
	}
}

// hashOf follows a session and hashes its stdout, without keeping it.
func (g *guest) hashOf(session string, each func(n uint64)) (hash.Hash, *result) {
	h, n := sha256.New(), uint64(0)
	var exit *guestv1.Exit
	r := g.follow(session, func(ev *guestv1.Event) {
		h.Write(ev.GetStdout())
		n += uint64(len(ev.GetStdout()))
		if each != nil {
			each(n)
		}
		exit = ev.GetExit()
	})
	r.exit = exit
	return h, r
}

func TestBigLineAndThroughput(t *testing.T) {
	g := newGuest(t, nil)
	size := 256 << 20 // under the race detector; e2e writes longer lines
	if testing.Short() {
		size = 64 << 20
	}
	began := time.Now()
	h, r := g.hashOf(g.sh(fmt.Sprintf("head -c %d /dev/zero | tr '\\0' a", size)), nil)
	d := time.Since(began)
	t.Logf("%d MB in %v: %.0f MB/s", size>>20, d, float64(size)/1e6/d.Seconds())
	want := sha256.New()
	piece := bytes.Repeat([]byte("a"), 1<<20)
	for range size >> 20 {
		want.Write(piece)
	}
	if r.offset != uint64(size) || !bytes.Equal(h.Sum(nil), want.Sum(nil)) {
		t.Errorf("got %d bytes", r.offset)
	}
	most := 0
	for _, f := range strings.Fields(g.run("grep -h VmRSS /proc/[0-9]*/status | tr -dc '0-9\\n'").out.String()) {
		if n, err := strconv.Atoi(f); err == nil && g.cmd == nil {
			most = max(most, n)
		}
	}
	if most > 64<<10 { // kB
		t.Errorf("a process of the guest holds %d kB", most)
	}
	t.Logf("largest process inside: %d kB", most)
}

func TestTinyWrites(t *testing.T) {
	g := newGuest(t, nil)
	r := g.follow(g.start(&guestv1.StartRequest{Args: []string{"python3", "-S", "-c", "import os\nfor i in range(1000000): os.write(1, b'.')"}}), nil)
	if r.out.Len() != 1000000 || r.exit.Code != 0 {
		t.Errorf("%d bytes, %v %s", r.out.Len(), r.exit, &r.err)
	}
	r = g.follow(g.start(&guestv1.StartRequest{Args: []string{"python3", "-S", "-c", "import os\nfor i in range(100000): os.write(1, b'.'); os.write(2, b'!')"}}), nil)
	if r.out.Len() != 100000 || r.err.Len() != 100000 {
		t.Errorf("%d and %d bytes, %v", r.out.Len(), r.err.Len(), r.exit)
	}
}

// Nobody follows: the command stops after the bounds, and nothing is lost.
func TestBackPressure(t *testing.T) {
	g := newGuest(t, nil)
	id := g.sh("head -c 10000000 /dev/urandom | tee /dev/stderr | sha256sum > /dev/null; echo end")
	time.Sleep(500 * time.Millisecond)
	list, err := g.c.Sessions(t.Context(), connect.NewRequest(&guestv1.SessionsRequest{}))
	if err != nil || len(list.Msg.Sessions) != 1 || list.Msg.Sessions[0].Produced > 1<<20 || list.Msg.Sessions[0].Exited {
		t.Fatalf("%v %v", list, err)
	}
	if r := g.follow(id, nil); r.err.Len() != 10000000 || r.out.String() != "end\n" {
		t.Errorf("%d bytes, %v", r.err.Len(), r.exit)
	}
}

// What the main process wrote before it ended is told, although it was still
// in the pipe when the process ended and nobody read for long.
func TestExitWaitsForOutput(t *testing.T) {
	g := newGuest(t, nil)
	id := g.sh("(sleep 20) & head -c 1200000 /dev/zero")
	time.Sleep(1500 * time.Millisecond)
	if r := g.follow(id, nil); r.out.Len() != 1200000 || r.exit.Code != 0 {
		t.Errorf("%d bytes, %v", r.out.Len(), r.exit)
	}
}

func TestAgentKilledMidStream(t *testing.T) {
	g := newGuest(t, nil)
	file := g.dir() + "/copy"
	id := g.sh("head -c 60000000 /dev/urandom | tee " + file)
	kills, next := 0, uint64(5000000)
	h, r := g.hashOf(id, func(n uint64) {
		if n > next && kills < 5 {
			kills, next = kills+1, n+10000000
			g.killAgent()
		}
	})
	b := g.read(file)
	want := sha256.Sum256([]byte(b))
	if kills != 5 || len(b) != 60000000 || r.offset != 60000000 || !bytes.Equal(h.Sum(nil), want[:]) {
		t.Errorf("%d kills, %d of %d bytes", kills, r.offset, len(b))
	}
	if gen, _ := g.link.Generation(); gen < 2 { // a kill may hit one that has not dialled yet
		t.Errorf("generation %d", gen)
	}
}

func (g *guest) stdin(id string, offset uint64, data string, closeIt bool) (*guestv1.StdinResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	r, err := g.c.Stdin(ctx, connect.NewRequest(&guestv1.StdinRequest{Session: id, Offset: offset, Data: []byte(data), Close: closeIt}))
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

func TestStdin(t *testing.T) {
	g := newGuest(t, nil)
	id := g.start(&guestv1.StartRequest{Args: []string{"cat"}, Stdin: true})
	for _, c := range []struct {
		offset uint64
		data   string
		want   uint64
	}{{0, "hello ", 6}, {0, "hello ", 6}, {0, "hello wor", 9}, {9, "ld", 11}, {2, "xx", 11}} {
		if r, err := g.stdin(id, c.offset, c.data, false); err != nil || r.Accepted != c.want {
			t.Errorf("%+v: %v %v", c, r, err)
		}
	}
	if _, err := g.stdin(id, 20, "gap", false); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("a gap: %v", err)
	}
	if r, err := g.stdin(id, 11, "", true); err != nil || !r.Closed {
		t.Errorf("close: %v %v", r, err)
	}
	if r := g.follow(id, nil); r.out.String() != "hello world" {
		t.Errorf("%q %v", &r.out, r.exit)
	}
}

func TestStdinOfOneThatNeverReads(t *testing.T) {
	g := newGuest(t, nil)
	id := g.start(&guestv1.StartRequest{Args: []string{"sleep", "3"}, Stdin: true})
	if _, err := g.stdin(id, 0, strings.Repeat("x", 1<<20), false); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("no room: %v", err)
	}
	if r := g.run("echo other"); r.out.String() != "other\n" {
		t.Errorf("another session: %q", &r.out)
	}
	if r := g.follow(id, nil); r.exit.Code != 0 {
		t.Errorf("%v", r.exit)
	}
}

func TestTerminal(t *testing.T) {
	g := newGuest(t, nil)
	id := g.start(&guestv1.StartRequest{Args: []string{"sh", "-c", "tty; stty size; read x; stty size; sleep 100; echo not reached"}, Tty: &guestv1.WindowSize{Rows: 33, Cols: 99}})
	go func() {
		time.Sleep(500 * time.Millisecond)
		_, _ = g.c.Resize(context.Background(), connect.NewRequest(&guestv1.ResizeRequest{Session: id, Size: &guestv1.WindowSize{Rows: 44, Cols: 111}}))
		_, _ = g.stdin(id, 0, "\n", false)
		time.Sleep(500 * time.Millisecond)
		_, _ = g.stdin(id, 1, "\x03", false)
	}()
	r := g.follow(id, nil)
	out := r.out.String()
	if !strings.Contains(out, "/dev/pts/") || !strings.Contains(out, "33 99") || !strings.Contains(out, "44 111") || strings.Contains(out, "not reached") || r.exit.Code != 130 {
		t.Errorf("%q %v", out, r.exit)
	}
}

func TestMalformed(t *testing.T) {
	g := newGuest(t, nil)
	for name, m := range map[string]*guestv1.StartRequest{
		"no command":     {Session: "a"},
		"no session":     {Args: []string{"true"}},
		"NUL":            {Session: "a", Args: []string{"a\x00b"}},
		"bad env":        {Session: "a", Args: []string{"true"}, Env: map[string]string{"A=B": "x"}},
		"bad timeout":    {Session: "a", Args: []string{"true"}, TimeoutMs: -1},
		"endless a name": {Session: strings.Repeat("a", 100), Args: []string{"true"}},
	} {
		if _, err := g.c.Start(t.Context(), connect.NewRequest(m)); connect.CodeOf(err) != connect.CodeInvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Without PID 1's own limits a fork bomb of an ordinary user takes the sandbox with it.
func TestProcessLimit(t *testing.T) {
	g := newGuest(t, &guestv1.SetupRequest{MaxProcsPerUser: 20})
	r := g.follow(g.start(&guestv1.StartRequest{User: "54321", Cwd: "/", Args: []string{"sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do sleep 1 & done; wait; echo all"}}), nil)
	if strings.Contains(r.out.String(), "all") || !strings.Contains(r.err.String(), "fork") {
		t.Errorf("%q %q", &r.out, &r.err)
	}
	if r := g.run("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do sleep 0.1 & done; wait; echo all"); r.out.String() != "all\n" {
		t.Errorf("root: %q %q", &r.out, &r.err)
	}
}

func TestSetup(t *testing.T) {
	if os.Getenv("CLOCHE_TEST_MACHINE") == "" {
		t.Skip("SKIP: it would name this host; needs CLOCHE_TEST_MACHINE")
	}
	g := newGuest(t, &guestv1.SetupRequest{Hostname: "renamed"})
	r := g.run("hostname; cat /etc/hostname; grep -c '^127.0.1.1.*renamed' /etc/hosts; grep -c localhost /etc/hosts; ps -o pid,comm -p 1")
	if want := "renamed\nrenamed\n1\n"; !strings.HasPrefix(r.out.String(), want) {
		t.Errorf("%q %q", &r.out, &r.err)
	}
	// Orphans are reaped, and PID 1 shrugs off signals.
	g.run("for i in 1 2 3 4 5; do (true &) ; done; kill -TERM 1; kill -INT 1; kill -HUP 1; kill -USR1 1")
	eventually(t, func() bool { return g.run("cat /proc/[0-9]*/stat | grep -c ' Z '").out.String() == "0\n" })
}
