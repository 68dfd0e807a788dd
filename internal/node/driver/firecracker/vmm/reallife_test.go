package vmm

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestRealLife is a machine's life by the client's own methods: configured,
// started, paused, saved, killed, loaded twice side by side, resumed.
func TestRealLife(t *testing.T) {
	bin := realDir(t)
	version := realVersion(t, bin, Firecracker)
	dir, ctx := workDir(t), t.Context()
	v := launch(t, filepath.Join(bin, Firecracker), dir, "life-1")
	c := New(v.socket)
	defer c.Close()

	wantInfo(t, c, Info{"life-1", NotStarted, version})
	wantFault(t, c.Start(ctx), "kernel")
	wantFault(t, c.Save(ctx, "state", "mem"), "before starting")
	cfg := Config{
		VCPUs: 1, MemoryMiB: 64, Kernel: filepath.Join(bin, "vmlinux"), Initrd: "/nope", Args: "panic=0",
		Drives:   []Drive{{ID: "template", Path: "template", ReadOnly: true}, {ID: "disk", Path: "disk", Writeback: true}},
		VsockCID: 3, VsockPath: "v.sock", Entropy: true,
	}
	wantFault(t, c.Configure(ctx, cfg), "initrd")
	cfg.Initrd = ""
	for _, step := range []func() error{
		func() error { return c.Configure(ctx, cfg) },
		func() error { return c.Start(ctx) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	wantInfo(t, c, Info{"life-1", Running, version})
	wantFault(t, c.Save(ctx, "state", "mem"), "running")
	wantFault(t, c.Start(ctx), "after starting")
	wantFault(t, c.Configure(ctx, cfg), "after starting")
	for range 2 {
		if err := c.Pause(ctx); err != nil {
			t.Fatal(err)
		}
	}
	wantInfo(t, c, Info{"life-1", Paused, version})
	wantFault(t, c.Save(ctx, "/nope/state", "mem"), "No such file")
	if err := c.Save(ctx, "state", "mem"); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(filepath.Join(dir, "mem")); err != nil || st.Size() != 64<<20 {
		t.Errorf("the memory file: %v, %v", st, err)
	}
	if err := c.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	wantInfo(t, c, Info{"life-1", Running, version})
	v.kill()
	if _, err := c.Info(ctx); !errors.Is(err, ErrGone) {
		t.Errorf("of a killed VMM: %v", err)
	}

	for _, id := range []string{"life-2", "life-3"} {
		v := launch(t, filepath.Join(bin, Firecracker), dir, id)
		c := New(v.socket)
		defer c.Close()
		if err := c.Load(ctx, "state", "mem"); err != nil {
			t.Fatal(err)
		}
		wantInfo(t, c, Info{id, Paused, version})
		wantFault(t, c.Load(ctx, "state", "mem"), "after starting")
		if err := c.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		wantInfo(t, c, Info{id, Running, version})
	}

	v = launch(t, filepath.Join(bin, Firecracker), dir, "life-4")
	c = New(v.socket)
	defer c.Close()
	wantFault(t, c.Load(ctx, "nope", "mem"), "No such file")
	v.exited(t)
	if err := c.Load(ctx, "state", "mem"); !errors.Is(err, ErrGone) {
		t.Errorf("after a failed load: %v", err)
	}
}

// TestRealSilence asks a VMM that is stopped, and kills it while it is asked.
func TestRealSilence(t *testing.T) {
	bin := realDir(t)
	v := launch(t, filepath.Join(bin, Firecracker), workDir(t), "silent")
	c := New(v.socket)
	defer c.Close()
	if err := v.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	began := time.Now()
	_, err := c.Info(ctx)
	if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > 5*time.Second {
		t.Errorf("a stopped VMM: %v after %v", err, took)
	}
	asked := make(chan error, 1)
	go func() {
		_, err := c.Info(t.Context())
		asked <- err
	}()
	// However far that request has come, the kill ends it.
	v.kill()
	if err := <-asked; !errors.Is(err, ErrGone) {
		t.Errorf("killed while it was asked: %v", err)
	}
}

// TestRealManyConnections shows that a client leaves none of the ten
// connections that a VMM has, and that it can be asked by several at once.
func TestRealManyConnections(t *testing.T) {
	bin := realDir(t)
	version := realVersion(t, bin, Firecracker)
	v := launch(t, filepath.Join(bin, Firecracker), workDir(t), "many")
	c := New(v.socket)
	defer c.Close()
	for range 50 {
		wantInfo(t, c, Info{"many", NotStarted, version})
	}
	got := make(chan error, 8)
	for range cap(got) {
		go func() {
			_, err := c.Info(t.Context())
			got <- err
		}()
	}
	for range cap(got) {
		if err := <-got; err != nil {
			t.Error(err)
		}
	}

	// What a VMM says when they are all taken is a Fault too.
	var held []net.Conn
	for range 10 {
		conn, err := net.Dial("unix", v.socket)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, conn)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err := c.Info(ctx)
	var fault *Fault
	if !errors.As(err, &fault) || fault.Status != 503 {
		t.Errorf("the eleventh connection: %v", err)
	}
	for _, conn := range held {
		conn.Close()
	}
	for err = c.ask(ctx); err != nil && ctx.Err() == nil; err = c.ask(ctx) {
		time.Sleep(time.Millisecond)
	}
	if err != nil {
		t.Errorf("after they were closed: %v", err)
	}
}

func (c *Client) ask(ctx context.Context) error {
	_, err := c.Info(ctx)
	return err
}

func TestRealVersions(t *testing.T) {
	bin := realDir(t)
	firecracker, jailer := realVersion(t, bin, Firecracker), realVersion(t, bin, Jailer)
	if err := CheckVersion(firecracker, jailer, true); err != nil {
		t.Error(err)
	}
	t.Logf("firecracker %s, jailer %s; for users: %v", firecracker, jailer, CheckVersion(firecracker, jailer, false))
}

func wantInfo(t *testing.T, c *Client, want Info) {
	t.Helper()
	if got, err := c.Info(t.Context()); err != nil || got != want {
		t.Errorf("info is %+v, %v; want %+v", got, err, want)
	}
}

func wantFault(t *testing.T, err error, say string) {
	t.Helper()
	var fault *Fault
	if !errors.As(err, &fault) || fault.Status != 400 || !strings.Contains(fault.Message, say) {
		t.Errorf("got %v; want a fault about %q", err, say)
	}
}
