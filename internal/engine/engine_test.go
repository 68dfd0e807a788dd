package engine

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/version"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

func TestVersion(t *testing.T) {
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(mod), "gvisor.dev/gvisor "+gvisorVersion) {
		t.Errorf("go.mod does not pin %s", gvisorVersion)
	}
	if version.Version() != Version {
		t.Errorf("gVisor takes itself for %q, not %q", version.Version(), Version)
	}
}

func TestEnd(t *testing.T) {
	killed, exited := unix.WaitStatus(unix.SIGKILL), func(code int) unix.WaitStatus { return unix.WaitStatus(code << 8) }
	for _, c := range []struct {
		name   string
		e      ending
		reason sandbox.EndReason
		detail string
	}{
		{"asked", ending{asked: true, watched: true, status: killed, oom: true}, sandbox.EndKilled, "request"},
		{"nobody watched", ending{}, sandbox.EndUnknown, "no process watched"},
		{"nobody watched, but the kernel killed", ending{oom: true}, sandbox.EndOOM, "memory"},
		{"sentry killed by the kernel", ending{watched: true, status: killed, oom: true}, sandbox.EndOOM, "sentry"},
		{"sentry killed", ending{watched: true, status: killed}, sandbox.EndKilled, "signal 9"},
		{"sentry crashed", ending{watched: true, status: unix.WaitStatus(unix.SIGSEGV)}, sandbox.EndCrashed, "signal 11"},
		{"sentry panicked", ending{watched: true, status: exited(2), panicky: "panic: x"}, sandbox.EndCrashed, "panic: x"},
		{"PID 1 killed by the kernel", ending{watched: true, status: exited(137), oom: true}, sandbox.EndOOM, "PID 1"},
		{"PID 1 killed", ending{watched: true, status: exited(137)}, sandbox.EndExited, "signal 9"},
		{"PID 1 ended", ending{watched: true, status: exited(0)}, sandbox.EndExited, "code 0"},
		{"PID 1 failed", ending{watched: true, status: exited(2), console: "panic: oh"}, sandbox.EndExited, "oh"},
	} {
		if end := c.e.end(); end.Reason != c.reason || !strings.Contains(end.Detail, c.detail) || end.At.IsZero() {
			t.Errorf("%s: %+v", c.name, end)
		}
	}
}

func TestRotating(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	r, err := openRotating(path, 100)
	if err != nil {
		t.Fatal(err)
	}
	for range 50 {
		if _, err := r.Write([]byte(strings.Repeat("x", 30))); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, path + ".1"} {
		if st, err := os.Stat(p); err != nil || st.Size() > 100 {
			t.Errorf("%s: %v, %v", p, st, err)
		}
	}
}

func TestReaperKeepsEarlyExits(t *testing.T) {
	r := newReaper()
	early := sys.Process{PID: 1 << 30, Start: 1} // beyond any real number
	r.keep(early.PID, 7)
	if ws := <-r.adopt(early); ws != 7 {
		t.Errorf("status %d", ws)
	}
	// A process that lives is not the one whose exit was kept.
	own, err := sys.FindProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	r.keep(own.PID, 7)
	select {
	case <-r.adopt(own):
		t.Error("a living process has exited")
	default:
	}
	r.order = nil
	for i := range maxStray + 10 {
		r.keep(1<<30+i, 0)
	}
	if len(r.order) > maxStray || len(r.stray) > maxStray {
		t.Errorf("%d exits are kept", len(r.stray))
	}
}

func TestSpec(t *testing.T) {
	req := &enginerpc.CreateRequest{
		ID: "x", Dir: "/dir", Image: "/image", NetNS: "/ns", Args: []string{"/a"}, DiskBytes: 5, MemoryBytes: 1 << 20, MilliCPU: 500,
		Binds: []enginerpc.Bind{{Source: "/s", Target: "/t"}}, MaxProcs: 7, MaxTasks: 9,
	}
	s := ociSpec(req)
	if q, p := *s.Linux.Resources.CPU.Quota, *s.Linux.Resources.CPU.Period; q*2 != int64(p) {
		t.Errorf("half a core is %d of %d", q, p)
	}
	tmp := 0
	for _, m := range s.Mounts {
		if m.Destination == "/tmp" {
			tmp++
		}
	}
	if tmp != 1 {
		t.Error("without a mount on /tmp gVisor puts an unbounded tmpfs there")
	}
	if _, err := runscConfig("/root", req); err != nil {
		t.Error(err)
	}
}

func FuzzPrintable(f *testing.F) {
	f.Add("a\x1b[31mb\n\x00\xff")
	f.Fuzz(func(t *testing.T, s string) {
		out := printable(s)
		for _, r := range out {
			if r < ' ' || r == 0x7f {
				t.Errorf("%q holds %q", out, r)
			}
		}
		if len(cut(out)) > maxDetail+len("…") {
			t.Error("too long")
		}
	})
}
