package firecracker

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// The tests in this file and its neighbours run a real VMM at the level of its
// API, in seconds: they say nothing of a guest, which gets nowhere where KVM
// boots nothing. The contract is held where it boots: see conformance_test.go.

// TestLife is a machine's whole life.
func TestLife(t *testing.T) {
	f := newFixture(t)
	ctx := f.ctx()
	m := f.create()
	f.alive(m)
	for range 2 { // each is idempotent
		if err := m.Pause(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if paused, err := m.Paused(ctx); err != nil || !paused {
		t.Errorf("Paused = %v, %v", paused, err)
	}
	of := f.snapshot(m, sandbox.SnapshotMemory)
	if paused, err := m.Paused(ctx); err != nil || !paused {
		t.Errorf("the snapshot of a paused machine left it with Paused = %v, %v", paused, err)
	}
	for range 2 {
		if err := m.Resume(ctx); err != nil {
			t.Fatal(err)
		}
	}
	image := f.snapshot(m, sandbox.SnapshotMemory)
	if paused, err := m.Paused(ctx); err != nil || paused {
		t.Errorf("after a snapshot: Paused = %v, %v", paused, err)
	}
	f.wellMade(image)
	y, z := f.restore(image), f.restore(of)
	for _, x := range []*machine{m, y, z} {
		f.alive(x)
		if paused, err := x.Paused(ctx); err != nil || paused {
			t.Errorf("Paused = %v, %v", paused, err)
		}
	}
	if st, err := y.Stats(ctx); err != nil || st.MemoryBytes <= 0 || st.CPU <= 0 || st.Processes < 3 || st.DiskBytes <= 0 || st.DiskBytes > 8<<20 {
		t.Errorf("Stats = %+v, %v", st, err)
	}
	if err := m.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if end := f.ended(m); end.Reason != sandbox.EndKilled || end.Detail != "by its driver" {
		t.Errorf("End() = %+v", end)
	}
	f.alive(y)
	if err := m.Pause(ctx); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("pausing what has ended = %v", err)
	}
	if _, err := f.d.Adopt(ctx, m.ID()); !ended(err, sandbox.EndKilled) {
		t.Errorf("Adopt of what has ended = %v", err)
	}
}

// ended tells whether an error says that a machine has ended for that reason.
func ended(err error, reason sandbox.EndReason) bool {
	var e *driver.Ended
	return errors.As(err, &e) && e.End.Reason == reason && sandbox.IsClass(err, sandbox.NotFound)
}

// wellMade looks at the files of a memory image.
func (f *fixture) wellMade(image driver.Image) {
	f.t.Helper()
	entries, err := os.ReadDir(image.Dir)
	if err != nil {
		f.t.Fatal(err)
	}
	want := map[string]os.FileMode{"state": 0o444, "mem": 0o444, "disk": 0o600}
	for _, e := range entries {
		st, err := e.Info()
		if err != nil {
			f.t.Fatal(err)
		}
		raw := st.Sys().(*syscall.Stat_t)
		if st.Mode() != want[e.Name()] || raw.Uid != 0 || raw.Gid != 0 || raw.Nlink != 1 {
			f.t.Errorf("%s is %v of %d:%d with %d names", e.Name(), st.Mode(), raw.Uid, raw.Gid, raw.Nlink)
		}
		delete(want, e.Name())
	}
	if len(want) > 0 || image.Stood <= 0 || image.Needs.Driver != Name || !strings.HasPrefix(image.Needs.Engine, "firecracker 1.") ||
		len(image.Needs.EngineHash) != 64 || len(image.Needs.CPU) == 0 {
		f.t.Errorf("missing files: %v; the image is %+v", want, image)
	}
	if err := f.d.Missing(image.Needs); err != nil {
		f.t.Errorf("Missing = %v", err)
	}
}

// TestADiskImageIsTheDisk takes a disk through two machines.
func TestADiskImageIsTheDisk(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	disk := func(m *machine) string { return filepath.Join(f.d.machineDir(m.ID()), diskName) }
	file, err := os.OpenFile(disk(m), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt([]byte("written by the guest"), 9<<20); err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	image := f.snapshot(m, sandbox.SnapshotDisk)
	if image.Needs.Engine != "" || image.Needs.Driver != Name {
		t.Errorf("a disk image needs %+v", image.Needs)
	}
	y := f.restore(image)
	got := make([]byte, 20)
	if file, err = os.Open(disk(y)); err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if _, err := file.ReadAt(got, 9<<20); err != nil || string(got) != "written by the guest" {
		t.Errorf("the disk holds %q, %v", got, err)
	}
	spec := f.spec()
	spec.Resources.DiskMiB *= 2
	if _, err := f.d.Restore(f.ctx(), spec, image); sandbox.AsError(err).Code != "image_damaged" {
		t.Errorf("a disk of another size: %v", err)
	}
	f.nothingLeft(spec.ID)
}

// TestAdoption takes machines up with another driver.
func TestAdoption(t *testing.T) {
	f := newFixture(t)
	ctx := f.ctx()
	m, paused, dead := f.create(), f.create(), f.create()
	if err := paused.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	f.restart()
	m = f.adopt(m.ID())
	f.alive(m)
	if again := f.adopt(m.ID()); again != m {
		t.Error("adopting twice makes two machines")
	}
	f.dials(m)
	paused = f.adopt(paused.ID())
	if is, err := paused.Paused(ctx); err != nil || !is {
		t.Errorf("Paused = %v, %v", is, err)
	}
	// What dies is noticed, and that nobody said anything.
	pid := m.record().Process.PID
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if end := f.ended(m); end.Reason != sandbox.EndKilled || end.Detail == "by its driver" {
		t.Errorf("End() = %+v", end)
	}
	// What died unseen is known to be dead, and no more.
	if err := f.d.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if err := dead.record().Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := dead.record().Process.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	f.d = f.open()
	if _, err := f.d.Adopt(ctx, dead.ID()); !ended(err, sandbox.EndUnknown) {
		t.Errorf("Adopt of what died unseen = %v", err)
	}
	if _, err := f.d.Adopt(ctx, m.ID()); !ended(err, sandbox.EndKilled) {
		t.Errorf("Adopt of what died before = %v", err)
	}
	ids, err := f.d.List(ctx)
	want := []string{m.ID(), paused.ID(), dead.ID()}
	slices.Sort(want)
	if err != nil || !slices.Equal(ids, want) {
		t.Errorf("List = %v, %v, not %v", ids, err, want)
	}
	if _, err := f.d.Adopt(ctx, sandbox.NewID(sandbox.KindSandbox)); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("Adopt of nothing = %v", err)
	}
}

// TestAMachineOfAnotherBootIsNotKilled has a record name a process that is not
// the machine's.
func TestAMachineOfAnotherBootIsNotKilled(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	other := f.create()
	if err := m.Kill(f.ctx()); err != nil {
		t.Fatal(err)
	}
	if err := m.note(func(r *record) { r.Process, r.End = other.record().Process, nil }); err != nil {
		t.Fatal(err)
	}
	f.restart()
	if _, err := f.d.Adopt(f.ctx(), m.ID()); !ended(err, sandbox.EndUnknown) {
		t.Errorf("Adopt = %v", err)
	}
	if err := f.d.Discard(f.ctx(), m.ID()); err != nil {
		t.Fatal(err)
	}
	f.nothingLeft(m.ID())
	f.alive(f.adopt(other.ID()))
}

// TestCreateRefuses what can't be made.
func TestCreateRefuses(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	for name, c := range map[string]struct {
		change func(*driver.Spec)
		code   string
	}{
		"twice":           {func(s *driver.Spec) { s.ID = m.ID() }, "machine_exists"},
		"no image":        {func(s *driver.Spec) { s.Image = "" }, "relative_path"},
		"a missing image": {func(s *driver.Spec) { s.Image = "/none" }, "file_missing"},
		"64 processors":   {func(s *driver.Spec) { s.Resources.MilliCPU = 64_000 }, "too_many_cpus"},
		"a long environment": {func(s *driver.Spec) {
			s.Supervisor = map[string]string{"LONG": strings.Repeat("x", 2000)}
		}, "boot_parameters"},
		"a bad hostname": {func(s *driver.Spec) { s.Hostname = "a b" }, "boot_parameters"},
	} {
		s := f.spec()
		id := s.ID
		c.change(&s)
		_, err := f.d.Create(f.ctx(), s)
		if err == nil || sandbox.AsError(err).Code != c.code {
			t.Errorf("%s: %v", name, err)
		}
		f.nothingLeft(id)
	}
	f.alive(m)
	o := f.o
	o.AllowVersion = nil
	d, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	defer d.stop()
	if p, _, _ := o.Pair(); p.Version != "1.12.1" {
		return
	}
	if _, err := d.Create(f.ctx(), f.spec()); err == nil || sandbox.AsError(err).Code != "firecracker_vulnerable" {
		t.Errorf("the release of the tests: %v", err)
	}
}

// TestCancelledAtEveryStep ends the context at each step of a creation and a
// restoration: the error is the context's, and nothing is left.
func TestCancelledAtEveryStep(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	image := f.snapshot(m, sandbox.SnapshotMemory)
	f.rest(m)
	for _, restores := range []bool{false, true} {
		for _, step := range makeSteps(restores) {
			ctx, cancel := context.WithCancel(context.Background())
			f.d.test.at = func(s string) {
				if s == step {
					cancel()
				}
			}
			s := f.spec()
			var err error
			var m driver.Machine
			if restores {
				m, err = f.d.Restore(ctx, s, image)
			} else {
				m, err = f.d.Create(ctx, s)
			}
			cancel()
			f.d.test.at = nil
			if err == nil && lastSteps[step] {
				_ = f.d.Discard(f.ctx(), m.ID()) // it was made before it could notice
			} else if !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled at %s (restores: %v): %v", step, restores, err)
			}
			f.nothingLeft(s.ID)
		}
	}
}

// lastSteps are those after which a creation doesn't look at its context any
// more.
var lastSteps = map[string]bool{"make.running": true, "make.ready": true, "make.booting": true}

func makeSteps(restores bool) []string {
	steps := []string{"make.claimed", "make.user", "make.jail", "make.disk", "make.furnished", "make.tap", "make.process", "make.started"}
	if restores {
		return append(steps, "make.loaded", "make.running", "make.ready")
	}
	return append(steps, "make.configured", "make.booting", "make.running", "make.ready")
}

// TestAFailedLoadEndsTheProcess restores what is no image: nothing of the VMM is
// used again.
func TestAFailedLoadEndsTheProcess(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	for name, c := range map[string]struct {
		damage func(dir string) error
		code   string
	}{
		"half a state": {func(dir string) error { return os.Truncate(filepath.Join(dir, stateName), 5000) }, "image_refused"},
		"garbage for a state": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, stateName), []byte(strings.Repeat("garbage", 1000)), 0o600)
		}, "image_refused"},
		"half a memory": {func(dir string) error { return os.Truncate(filepath.Join(dir, memName), int64(f.memory)<<19) }, "image_damaged"},
		"a link for a memory": {func(dir string) error {
			return errors.Join(os.Remove(filepath.Join(dir, memName)), os.Symlink("/dev/zero", filepath.Join(dir, memName)))
		}, "image_damaged"},
	} {
		image := f.snapshot(m, sandbox.SnapshotMemory)
		if err := c.damage(image.Dir); err != nil {
			t.Fatal(err)
		}
		s := f.spec()
		_, err := f.d.Restore(f.ctx(), s, image)
		if err == nil || sandbox.AsError(err).Code != c.code {
			t.Errorf("%s: %v", name, err)
		}
		f.nothingLeft(s.ID)
	}
	f.alive(m)
}

// TestRestoreLeavesTheImageAlone compares an image's files before and after.
func TestRestoreLeavesTheImageAlone(t *testing.T) {
	f := newFixture(t)
	image := f.snapshot(f.create(), sandbox.SnapshotMemory)
	f.wellMade(image)
	y := f.restore(image)
	f.wellMade(image)                               // owners, modes, and no name more
	if err := os.RemoveAll(image.Dir); err != nil { // what it still reads is open
		t.Fatal(err)
	}
	f.alive(y)
	f.snapshot(y, sandbox.SnapshotMemory)
}

// TestSnapshotOntoFullDisk writes images where there is no room: that is an
// ordinary error, and the machine goes on.
func TestSnapshotOntoFullDisk(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	small := t.TempDir()
	if err := syscall.Mount("tmpfs", small, "tmpfs", 0, "size=16k"); err != nil {
		t.Skipf("SKIP: a small filesystem can't be mounted here: %v", err)
	}
	defer func() {
		if err := syscall.Unmount(small, 0); err != nil {
			t.Error(err)
		}
	}()
	for _, kind := range []sandbox.SnapshotKind{sandbox.SnapshotMemory, sandbox.SnapshotDisk} {
		if _, err := m.Snapshot(f.ctx(), small, kind); !sandbox.IsClass(err, sandbox.NoCapacity) {
			t.Errorf("a %s snapshot onto a full disk: %v", kind, err)
		}
		if paused, err := m.Paused(f.ctx()); err != nil || paused {
			t.Errorf("after that: Paused = %v, %v", paused, err)
		}
		if _, err := m.Snapshot(f.ctx(), "/nowhere", kind); err == nil {
			t.Errorf("a %s snapshot to nowhere was written", kind)
		}
	}
	if !m.record().Held {
		f.restore(f.snapshot(m, sandbox.SnapshotMemory))
	}
}

// TestSnapshotOutlivesItsAsker cancels the asking at each step: the machine must
// go on all the same, and be ready for the next.
func TestSnapshotOutlivesItsAsker(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	for _, step := range snapshotSteps {
		ctx, cancel := context.WithCancel(context.Background())
		f.d.test.at = func(s string) {
			if s == step {
				cancel()
			}
		}
		_, err := m.Snapshot(ctx, t.TempDir(), sandbox.SnapshotMemory)
		cancel()
		f.d.test.at = nil
		if !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled at %s: %v", step, err)
		}
		if paused, err := m.Paused(f.ctx()); err != nil || paused {
			t.Errorf("cancelled at %s: Paused = %v, %v", step, paused, err)
		}
		if _, err := os.Stat(filepath.Join(f.jailRoot(m), roomName)); err == nil {
			t.Errorf("cancelled at %s: the room is left", step)
		}
	}
	// In the middle of the VMM's writing.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if _, err := m.Snapshot(ctx, t.TempDir(), sandbox.SnapshotMemory); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("cancelled in the middle: %v", err)
	}
	f.snapshot(m, sandbox.SnapshotMemory)
}

var snapshotSteps = []string{"snapshot.noted", "snapshot.paused", "snapshot.saved", "snapshot.copied", "snapshot.resumed", "snapshot.moved"}
