package gvisor

import (
	"bufio"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
)

// built are the binaries and the image that all tests share.
var built struct {
	once                 sync.Once
	dir                  string
	engine, guest, image string
	err                  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if built.dir != "" {
		_ = os.RemoveAll(built.dir)
	}
	os.Exit(code)
}

// prebuilt names a directory with what the tests build elsewhere, for a machine
// without a compiler: L1 of test/nested. It is "" elsewhere.
var prebuilt = os.Getenv("CLOCHE_TEST_PREBUILT")

func build() error {
	dir, err := os.MkdirTemp("", "cloche-gvisor-test-")
	if err != nil {
		return err
	}
	built.dir = dir
	built.engine, built.guest, built.image = filepath.Join(dir, "cloche-gvisor"), filepath.Join(dir, "guest"), filepath.Join(dir, "image.erofs")
	sources := map[string]string{built.engine: "cloche.dev/cloche/cmd/cloche-gvisor", built.guest: "./testdata/guest"}
	if prebuilt != "" {
		built.engine, built.guest, sources = filepath.Join(prebuilt, "cloche-gvisor"), filepath.Join(prebuilt, "gvisor-guest"), nil
	}
	for out, pkg := range sources {
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", out, pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if msg, err := cmd.CombinedOutput(); err != nil {
			return &exec.Error{Name: string(msg), Err: err}
		}
	}
	tree := filepath.Join(dir, "tree")
	for _, d := range []string{"etc", "tmp", "home"} {
		if err := os.MkdirAll(filepath.Join(tree, d), 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(tree, "tmp"), 0o1777|os.ModeSticky); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(tree, "etc", "mark"), []byte("from the image"), 0o644); err != nil {
		return err
	}
	if msg, err := exec.Command("mkfs.erofs", "-Enoinline_data", "-x-1", built.image, tree).CombinedOutput(); err != nil {
		return &exec.Error{Name: string(msg), Err: err}
	}
	return nil
}

// fixture is a driver with its directories.
type fixture struct {
	t    testing.TB
	d    *Driver
	o    Options
	nets *netns.Manager
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: machines need root")
	}
	if _, err := exec.LookPath("mkfs.erofs"); err != nil {
		t.Skip("SKIP: the tests' image needs mkfs.erofs (package erofs-utils)")
	}
	built.once.Do(func() { built.err = build() })
	if built.err != nil {
		t.Fatal(built.err)
	}
	dir, err := os.MkdirTemp("", "cg") // short: a socket's path is
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, nets: netns.New(netns.Options{Dir: filepath.Join(dir, "run", "netns")})}
	f.o = Options{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Engine: built.engine, Guest: built.guest,
		Networks: f.nets, Log: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
	}
	f.d = f.open()
	t.Cleanup(func() {
		ctx := f.ctx(time.Minute)
		ids, err := f.d.List(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, id := range ids {
			f.discard(id)
		}
		if err := f.d.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
		if t.Failed() {
			for _, e := range f.d.known() {
				log, _ := os.ReadFile(filepath.Join(e.dir, "control.log"))
				t.Logf("the engine's log:\n%s", log)
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return f
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", p)
	return len(p), nil
}

func (f *fixture) open() *Driver {
	f.t.Helper()
	d, err := New(f.o)
	if err != nil {
		f.t.Fatal(err)
	}
	return d
}

func (f *fixture) ctx(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	f.t.Cleanup(cancel)
	return ctx
}

func (f *fixture) spec(memory int) driver.Spec {
	f.t.Helper()
	id := sandbox.NewID(sandbox.KindSandbox)
	ns, err := f.nets.Create(context.Background(), id)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() {
		if err := f.nets.Delete(context.Background(), id); err != nil {
			f.t.Error(err)
		}
	})
	return driver.Spec{
		ID: id, Image: built.image, Guest: built.guest, NetNS: ns, Hostname: "box",
		Resources: sandbox.Resources{MilliCPU: 2000, MemoryMiB: memory, DiskMiB: 64}, MaxProcs: 64,
		Supervisor: map[string]string{"GREETING": "hello"},
	}
}

func (f *fixture) create(spec driver.Spec) driver.Machine {
	f.t.Helper()
	m, err := f.d.Create(f.ctx(time.Minute), spec)
	if err != nil {
		f.t.Fatalf("create: %v", err)
	}
	return m
}

func (f *fixture) discard(id string) {
	f.t.Helper()
	if err := f.d.Discard(f.ctx(time.Minute), id); err != nil {
		f.t.Errorf("discard: %v", err)
	}
}

// link is a connection to the guest of a machine.
type link struct {
	t    testing.TB
	conn net.Conn
	dec  *json.Decoder
}

func (f *fixture) link(m driver.Machine) *link {
	f.t.Helper()
	l, err := m.Guest()
	if err != nil {
		f.t.Fatal(err)
	}
	stop := time.AfterFunc(20*time.Second, func() { _ = l.Close() }) // a guest that is silent shall not hang the test
	defer stop.Stop()
	conn, err := l.Accept()
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = conn.Close() })
	return &link{f.t, conn, json.NewDecoder(bufio.NewReader(conn))}
}

type result struct {
	Out  string `json:"out"`
	Code int    `json:"code"`
}

// run runs the test guest with args as a user.
func (l *link) run(uid int, args ...string) result {
	l.t.Helper()
	r, err := l.try(uid, args...)
	if err != nil {
		l.t.Fatalf("run %v: %v", args, err)
	}
	return r
}

func (l *link) try(uid int, args ...string) (result, error) {
	var r result
	if err := l.conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		return r, err
	}
	if err := json.NewEncoder(l.conn).Encode(map[string]any{"args": args, "uid": uid}); err != nil {
		return r, err
	}
	return r, l.dec.Decode(&r)
}
