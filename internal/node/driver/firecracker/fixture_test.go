package firecracker

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/drivertest"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
)

// binariesEnv names a directory with a real firecracker, its jailer and a
// vmlinux. prebuiltEnv names the directory of the nested run, which has these
// and more: see conformance_test.go.
const (
	binariesEnv = "CLOCHE_FIRECRACKER"
	prebuiltEnv = "CLOCHE_TEST_PREBUILT"
)

// binaries finds the real programs, or skips the test and says what is missing.
func binaries(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: machines need root")
	}
	dir := os.Getenv(binariesEnv)
	if dir == "" {
		dir = os.Getenv(prebuiltEnv)
	}
	if dir == "" {
		t.Skipf("SKIP: no real Firecracker: $%s names no directory with firecracker, jailer and vmlinux", binariesEnv)
	}
	for _, name := range []string{"firecracker", "jailer", "vmlinux"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Skipf("SKIP: no real Firecracker: %v", err)
		}
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skipf("SKIP: no KVM: %v", err)
	}
	return dir
}

// boots tells whether guests get anywhere: then machines are waited for, as they
// should be, and need a guest that lives.
func boots() bool { return os.Getenv(binariesEnv) == "" && os.Getenv(prebuiltEnv) != "" }

func fileHash(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// allowTested lets the release pass that the tests have: it has CVE-2026-1386,
// which needs somebody else who can write to a jail's directory.
func allowTested(version string) error {
	return vmm.CheckVersion(version, version, version == "1.12.1")
}

// optionsFor are the options of a driver over the programs in dir.
func optionsFor(t testing.TB, programs, dir string, nets Networks) Options {
	t.Helper()
	out, err := installed.AskVersion(context.Background(), filepath.Join(programs, "firecracker"))
	if err != nil {
		t.Fatal(err)
	}
	version, err := vmm.ParseVersion(vmm.Firecracker, out)
	if err != nil {
		t.Fatal(err)
	}
	pair := installed.Pair{
		Version: version, Firecracker: filepath.Join(programs, "firecracker"), Jailer: filepath.Join(programs, "jailer"),
		Hash: fileHash(t, filepath.Join(programs, "firecracker")),
	}
	k := installed.Kernel{Name: "tested", Image: filepath.Join(programs, "vmlinux"), Hash: fileHash(t, filepath.Join(programs, "vmlinux"))}
	if _, err := os.Stat(filepath.Join(programs, "modules")); err == nil {
		k.Modules = filepath.Join(programs, "modules")
	}
	return Options{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Networks: nets, AllowVersion: allowTested,
		Pair: func() (installed.Pair, installed.Kernel, error) { return pair, k, nil },
		ByHash: func(hash string) (installed.Pair, error) {
			if hash != pair.Hash {
				return installed.Pair{}, sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_missing", "there is no other")
			}
			return pair, nil
		},
		Log: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
	}
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", bytes.TrimSpace(p))
	return len(p), nil
}

// fixture is a driver over the real programs, which where nothing boots does not
// wait for a guest.
type fixture struct {
	t     testing.TB
	dir   string
	d     *Driver
	o     Options
	nets  *netns.Manager
	image string
	ids   []string

	memory int // MiB of its machines
}

// newFixture makes one whose directories' paths are longer than any socket's.
func newFixture(t testing.TB) *fixture {
	t.Helper()
	programs := binaries(t)
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 25))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, dir: dir, nets: netns.New(netns.Options{Dir: filepath.Join(dir, "net")}), image: filepath.Join(dir, "image.erofs")}
	f.o = optionsFor(t, programs, dir, f.nets)
	f.o.Guest, f.memory = filepath.Join(dir, "guest"), 64
	if boots() {
		_, files := prebuilt(t)
		f.o.Guest, f.image, f.memory = files.Guest, files.Image, 128
	} else {
		for path, content := range map[string]string{f.image: strings.Repeat("no filesystem ", 1000), f.o.Guest: "no program"} {
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	f.d = f.open()
	t.Cleanup(f.clean)
	return f
}

func (f *fixture) clean() {
	ctx := f.ctx()
	ids, err := f.d.List(ctx)
	if err != nil {
		f.t.Error(err)
	}
	for _, id := range append(ids, f.ids...) {
		if err := f.d.Discard(ctx, id); err != nil {
			f.t.Errorf("discard: %v", err)
		}
		f.nothingLeft(id)
		if err := f.nets.Delete(ctx, id); err != nil {
			f.t.Error(err)
		}
	}
	if err := f.d.Close(ctx); err != nil {
		f.t.Errorf("close: %v", err)
	}
	if there, err := f.d.tree.Group(f.d.parent).Exists(); err != nil || there {
		f.t.Errorf("the parent control group is left: %v, %v", there, err)
	}
	if users, err := f.d.users.List(); err != nil || len(users) > 0 {
		f.t.Errorf("user ids are left: %v, %v", users, err)
	}
}

// open makes a driver over the fixture's directories.
func (f *fixture) open() *Driver {
	f.t.Helper()
	d, err := New(f.o)
	if err != nil {
		f.t.Fatal(err)
	}
	d.test.noReport = !boots()
	return d
}

// restart ends the driver as the end of its process would, and makes another.
func (f *fixture) restart() {
	f.t.Helper()
	if err := f.d.Close(f.ctx()); err != nil {
		f.t.Fatal(err)
	}
	f.d = f.open()
}

// patience bounds every single thing.
func patience() time.Duration {
	if boots() {
		return 5 * time.Minute // under emulation
	}
	return time.Minute
}

func (f *fixture) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience())
	f.t.Cleanup(cancel)
	return ctx
}

func (f *fixture) spec() driver.Spec {
	f.t.Helper()
	id := sandbox.NewID(sandbox.KindSandbox)
	ns, err := f.nets.Create(context.Background(), id)
	if err != nil {
		f.t.Fatal(err)
	}
	f.ids = append(f.ids, id)
	return driver.Spec{
		ID: id, Image: f.image, Guest: f.o.Guest, NetNS: ns, Hostname: "box",
		Resources: sandbox.Resources{MilliCPU: 300, MemoryMiB: f.memory, DiskMiB: 16}, Supervisor: map[string]string{"GREETING": "hello"},
	}
}

func (f *fixture) create() *machine {
	f.t.Helper()
	m, err := f.d.Create(f.ctx(), f.spec())
	if err != nil {
		f.t.Fatalf("create: %v", err)
	}
	return m.(*machine)
}

func (f *fixture) adopt(id string) *machine {
	f.t.Helper()
	m, err := f.d.Adopt(f.ctx(), id)
	if err != nil {
		f.t.Fatalf("adopt: %v", err)
	}
	return m.(*machine)
}

func (f *fixture) snapshot(m driver.Machine, kind sandbox.SnapshotKind) driver.Image {
	f.t.Helper()
	image, err := m.Snapshot(f.ctx(), f.t.TempDir(), kind)
	if err != nil {
		f.t.Fatalf("snapshot: %v", err)
	}
	return image
}

func (f *fixture) restore(image driver.Image) *machine {
	f.t.Helper()
	m, err := f.d.Restore(f.ctx(), f.spec(), image)
	if err != nil {
		f.t.Fatalf("restore: %v", err)
	}
	return m.(*machine)
}

// rest pauses a machine that is needed no more, whose guest would go on to use
// all that it gets.
func (f *fixture) rest(m *machine) {
	f.t.Helper()
	if err := m.Pause(f.ctx()); err != nil {
		f.t.Errorf("pause: %v", err)
	}
}

// nothingLeft asserts that nothing of a machine is on the host.
func (f *fixture) nothingLeft(id string) {
	f.t.Helper()
	if left, err := leftovers(f.d, id); err != nil || len(left) > 0 {
		f.t.Errorf("left of %s: %q, %v", id, left, err)
	}
}

// leftovers looks for a machine's id wherever one might be left.
func leftovers(d *Driver, id string) ([]string, error) {
	left, err := drivertest.Traces(id, []string{id, strings.ReplaceAll(id, "_", "-")}, d.o.StateDir)
	if err != nil {
		return nil, err
	}
	there, err := d.jail(id).Group().Exists()
	if there {
		left = append(left, "cgroup "+d.jail(id).Group().Path())
	}
	return left, err
}

// hostPIDs lists a machine's processes.
func hostPIDs(d *Driver, id string) ([]int, error) { return d.jail(id).Group().Procs() }

// alive asserts that a machine's VMM answers and its watcher has seen no end.
func (f *fixture) alive(m *machine) {
	f.t.Helper()
	if _, err := m.Paused(f.ctx()); err != nil {
		f.t.Errorf("it does not answer: %v", err)
	}
	select {
	case <-m.Exited():
		f.t.Errorf("it has ended: %+v", m.End())
	default:
	}
}

// ended waits for a machine's end.
func (f *fixture) ended(m *machine) sandbox.End {
	f.t.Helper()
	select {
	case <-m.Exited():
	case <-f.ctx().Done():
		f.t.Fatal("it has not ended")
	}
	return m.End()
}
