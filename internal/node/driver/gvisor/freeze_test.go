package gvisor

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
)

// unlink closes a machine's connection and its listener.
func (f *fixture) unlink(m driver.Machine, l *link) {
	f.t.Helper()
	listener, err := m.Guest()
	if err != nil {
		f.t.Fatal(err)
	}
	_ = listener.Close()
	_ = l.conn.Close()
}

// killControl kills the control process with SIGKILL and waits until its
// machine can be asked of the next one.
func (f *fixture) killControl() {
	f.t.Helper()
	if err := f.engineProcess().Kill(); err != nil {
		f.t.Fatal(err)
	}
	e, err := f.d.from(f.o.Engine)
	if err != nil {
		f.t.Fatal(err)
	}
	lock, err := lockFile(f.ctx(time.Minute), filepath.Join(e.dir, enginerpc.LockName))
	if err != nil {
		f.t.Fatal(err)
	}
	_ = lock.Close()
}

// TestPauseSurvivesControl kills the control process while a machine is
// paused, and at every point of a pause and a resume: the next one must find
// out where the machine stands, since one resume too many ends it.
func TestPauseSurvivesControl(t *testing.T) {
	f := newFixture(t)
	m := f.create(f.spec(128))
	l := f.link(m)
	ctx := f.ctx(2 * time.Minute)
	alive := func() {
		t.Helper()
		if r := l.run(0, "hostname"); r.Out != "box\n" {
			t.Fatalf("it does not answer: %+v", r)
		}
	}
	alive()
	for _, c := range []struct {
		paused bool   // truly
		note   string // what the dead control process had written
	}{
		{true, enginerpc.Paused},
		{true, enginerpc.Pausing},
		{true, enginerpc.Resuming},
		{false, ""},
		{false, enginerpc.Pausing},
		{false, enginerpc.Resuming},
	} {
		if c.paused {
			if err := m.Pause(ctx); err != nil {
				t.Fatal(err)
			}
		}
		f.killControl()
		rec, err := readRecord(f.d.machineDir(m.ID()))
		if err != nil {
			t.Fatal(err)
		}
		rec.Pause = c.note
		data, err := json.Marshal(rec)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(f.d.machineDir(m.ID()), enginerpc.RecordName), data, 0o600); err != nil {
			t.Fatal(err)
		}
		for range 2 { // whatever it was, it can be brought to either
			if err := m.Pause(ctx); err != nil {
				t.Fatalf("%+v: pause: %v", c, err)
			}
			if err := m.Resume(ctx); err != nil {
				t.Fatalf("%+v: resume: %v", c, err)
			}
			alive()
		}
	}
}

// TestSnapshotOntoFullDisk writes images where there is no room: that is an
// ordinary error, and the machine goes on.
func TestSnapshotOntoFullDisk(t *testing.T) {
	f := newFixture(t)
	m := f.create(f.spec(128))
	l := f.link(m)
	l.run(0, "write", "/file", strings.Repeat("x", 100_000))
	small := t.TempDir()
	if err := syscall.Mount("tmpfs", small, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("SKIP: a small filesystem can't be mounted here: %v", err)
	}
	// An image that failed may still be open in the sentry for a moment.
	defer func() {
		if err := syscall.Unmount(small, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	for _, kind := range []sandbox.SnapshotKind{sandbox.SnapshotDisk, sandbox.SnapshotMemory} {
		dir := filepath.Join(small, string(kind))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if kind == sandbox.SnapshotMemory {
			f.unlink(m, l) // as a node does
		}
		_, err := m.Snapshot(f.ctx(time.Minute), dir, kind)
		t.Logf("a %s snapshot onto a full disk: %v", kind, err)
		if kind == sandbox.SnapshotMemory {
			l = f.link(m)
		}
		if !sandbox.IsClass(err, sandbox.NoCapacity) {
			t.Errorf("%s snapshot onto a full disk = %v", kind, err)
		}
		if r := l.run(0, "hostname"); r.Out != "box\n" {
			t.Errorf("after a failed %s snapshot: %+v", kind, r)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		if kind == sandbox.SnapshotMemory {
			f.unlink(m, l)
		}
		if _, err := m.Snapshot(f.ctx(time.Minute), t.TempDir(), kind); err != nil {
			t.Errorf("a %s snapshot after a failed one = %v", kind, err)
		}
	}
}

// TestSnapshotOutlivesItsAsker cancels the asking for a snapshot: the machine
// must go on all the same, and be ready for the next.
func TestSnapshotOutlivesItsAsker(t *testing.T) {
	f := newFixture(t)
	m := f.create(f.spec(128))
	l := f.link(m)
	for _, after := range []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(context.Background(), after)
		_, _ = m.Snapshot(ctx, t.TempDir(), sandbox.SnapshotDisk) // whether it made it is not the point
		cancel()
		if r := l.run(0, "hostname"); r.Out != "box\n" {
			t.Fatalf("cancelled after %v: %+v", after, r)
		}
	}
	if paused, err := m.Paused(f.ctx(time.Minute)); err != nil || paused {
		t.Errorf("Paused = %v, %v", paused, err)
	}
	if _, err := m.Snapshot(f.ctx(time.Minute), t.TempDir(), sandbox.SnapshotDisk); err != nil {
		t.Error(err)
	}
}
