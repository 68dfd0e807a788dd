package agent_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/agent"
	"cloche.dev/cloche/internal/guest/supervisor"
	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/node/guestlink"
	"cloche.dev/cloche/internal/sandbox"
)

// TestMain makes the test binary the guest too: a real supervisor process
// with a real agent process below it.
func TestMain(m *testing.M) {
	role := ""
	if os.Getenv("CLOCHE_TEST_GUEST") != "" && len(os.Args) == 2 {
		role = os.Args[1]
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	switch role {
	case "supervisor":
		_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
		_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
		if err := enterPrivate(os.Getenv("CLOCHE_TEST_PRIVATE")); err != nil {
			fmt.Fprintln(os.Stderr, "private:", err)
			os.Exit(1)
		}
		fmt.Fprintln(os.Stderr, supervisor.Run(context.Background(), supervisor.Config{
			Agent: []string{"/proc/self/exe", "agent"}, Env: os.Environ(), Log: log,
		}))
		os.Exit(1)
	case "agent":
		_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0, 0, 0)
		f := os.NewFile(3, "supervisor")
		conn, err := net.FileConn(f)
		_ = f.Close() // as the real one does: no child of the agent must hold it
		if err == nil {
			err = agent.Run(context.Background(), agent.Config{Supervisor: conn, Dial: os.Getenv("CLOCHE_DIAL"), Build: "test", Log: log})
		}
		fmt.Fprintln(os.Stderr, "agent:", err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(m)
}

// guest is a guest under test, and the host's link to it: a supervisor process
// on this host or, with CLOCHE_TEST_MACHINE=gvisor, PID 1 of a real machine.
type guest struct {
	t      *testing.T
	cmd    *exec.Cmd // nil in a machine
	root   string    // where a private guest's directories come from; "": it has none of its own
	listen func() (net.Listener, error)
	link   *guestlink.Link
	c      guestv1connect.GuestClient
}

func newGuest(t *testing.T, setup *guestv1.SetupRequest) *guest {
	t.Helper()
	g := &guest{t: t}
	if os.Getenv("CLOCHE_TEST_MACHINE") == "gvisor" {
		g.startMachine()
	} else {
		g.startProcess()
	}
	g.link = guestlink.Start(guestlink.Config{
		Listen: g.listen, Key: guestapi.NewKey(), Epoch: 1, Setup: setup,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	t.Cleanup(g.link.Close)
	var err error
	if g.c, err = g.link.Client(g.ctx(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return g
}

func (g *guest) startProcess() {
	g.t.Helper()
	sock := filepath.Join(g.t.TempDir(), "agent.sock")
	g.listen = func() (net.Listener, error) {
		_ = os.Remove(sock)
		return net.Listen("unix", sock)
	}
	exe, err := os.Executable()
	if err != nil {
		g.t.Fatal(err)
	}
	g.cmd = exec.Command(exe, "supervisor")
	g.cmd.Env = append(os.Environ(), "CLOCHE_TEST_GUEST=1", "CLOCHE_DIAL=unix:"+sock)
	g.cmd.Stderr = os.Stderr
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if g.root != "" {
		g.cmd.Env = append(g.cmd.Env, "CLOCHE_TEST_PRIVATE="+g.root)
		g.cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS
	}
	if err := g.cmd.Start(); err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(g.kill)
}

// kill ends the supervisor and everything below it.
func (g *guest) kill() {
	for range 5 {
		for _, pid := range descendants(g.cmd.Process.Pid) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	_ = g.cmd.Process.Kill()
	_ = g.cmd.Wait()
}

func descendants(pid int) []int {
	all, _ := filepath.Glob("/proc/[0-9]*/stat")
	parent := map[int]int{}
	for _, f := range all {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		rest := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
		p, _ := strconv.Atoi(strings.Split(f, "/")[2])
		parent[p], _ = strconv.Atoi(string(rest[1]))
	}
	var out []int
	for p := range parent {
		for q := parent[p]; q > 1; q = parent[q] {
			if q == pid {
				out = append(out, p)
				break
			}
		}
	}
	return out
}

// killAgent kills the agent from inside.
func (g *guest) killAgent() {
	g.t.Helper()
	if g.cmd == nil {
		g.sh(`for p in /proc/[0-9]*; do if [ "$(tr '\0' ' ' < $p/cmdline)" = "/.cloche/guest agent " ]; then kill -9 ${p#/proc/}; fi; done`)
		return
	}
	for _, pid := range descendants(g.cmd.Process.Pid) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if bytes.HasSuffix(b, []byte("\x00agent\x00")) {
			_ = unix.Kill(pid, unix.SIGKILL)
			return
		}
	}
	g.t.Error("no agent runs")
}

// dir is a fresh directory in the guest.
func (g *guest) dir() string {
	g.t.Helper()
	if g.cmd != nil {
		return g.t.TempDir()
	}
	dir := "/tmp/" + sandbox.NewID(sandbox.KindSession)
	if _, err := g.c.Mkdir(g.t.Context(), connect.NewRequest(&guestv1.MkdirRequest{Path: dir})); err != nil {
		g.t.Fatal(err)
	}
	return dir
}

// read is a file's content, "" where there is none.
func (g *guest) read(path string) string {
	c, err := g.link.Client(g.ctx(10 * time.Second))
	if err != nil {
		return ""
	}
	s, err := c.Read(g.ctx(30*time.Second), connect.NewRequest(&guestv1.ReadRequest{Path: path, Whole: true}))
	if err != nil {
		return ""
	}
	defer s.Close()
	var b bytes.Buffer
	for s.Receive() {
		b.Write(s.Msg().GetData())
	}
	return b.String()
}

func (g *guest) ctx(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	g.t.Cleanup(cancel)
	return ctx
}

// result is a session's whole log.
type result struct {
	out, err bytes.Buffer
	exit     *guestv1.Exit
	offset   uint64
}

func (g *guest) start(m *guestv1.StartRequest) string {
	g.t.Helper()
	if m.Session == "" {
		m.Session = sandbox.NewID(sandbox.KindSession)
	}
	ctx := g.ctx(30 * time.Second)
	for { // a start may be repeated, and some tests kill the agent
		c, err := g.link.Client(ctx)
		if err == nil {
			_, err = c.Start(ctx, connect.NewRequest(m))
		}
		if err == nil {
			break
		}
		if connect.CodeOf(err) != connect.CodeUnavailable || ctx.Err() != nil {
			g.t.Fatalf("start: %v", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	return m.Session
}

func (g *guest) sh(script string) string {
	g.t.Helper()
	return g.start(&guestv1.StartRequest{Args: []string{"/bin/sh", "-c", script}})
}

// follow follows a session to its exit from any number of connections on,
// acknowledging as it goes, and calls each for every event.
func (g *guest) follow(session string, each func(*guestv1.Event)) *result {
	g.t.Helper()
	r := new(result)
	ctx := g.ctx(120 * time.Second)
	for r.exit == nil {
		c, err := g.link.Client(ctx)
		if err != nil {
			g.t.Fatal(err)
		}
		if err := g.followOnce(ctx, c, session, r, each); err != nil && r.exit == nil {
			if ctx.Err() != nil || connect.CodeOf(err) == connect.CodeInvalidArgument {
				g.t.Fatalf("follow: %v", err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	return r
}

func (g *guest) followOnce(ctx context.Context, c guestv1connect.GuestClient, session string, r *result, each func(*guestv1.Event)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Follow(ctx, connect.NewRequest(&guestv1.FollowRequest{Session: session, Offset: r.offset}))
	if err != nil {
		return err
	}
	defer s.Close()
	acked := r.offset
	for s.Receive() {
		ev := s.Msg()
		if ev.GetOffset() != r.offset {
			g.t.Errorf("event at offset %d, not %d", ev.GetOffset(), r.offset)
			return nil
		}
		r.offset += uint64(len(ev.GetStdout()) + len(ev.GetStderr()))
		if each != nil {
			each(ev)
		} else {
			r.out.Write(ev.GetStdout())
			r.err.Write(ev.GetStderr())
		}
		r.exit = ev.GetExit()
		if r.offset-acked >= 256<<10 || r.exit != nil {
			if _, err := c.Ack(ctx, connect.NewRequest(&guestv1.AckRequest{Session: session, Offset: r.offset, Exit: r.exit != nil})); err != nil {
				return err
			}
			acked = r.offset
		}
	}
	return s.Err()
}

func (g *guest) run(script string) *result {
	g.t.Helper()
	return g.follow(g.sh(script), nil)
}
