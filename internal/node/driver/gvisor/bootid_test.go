package gvisor

import (
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// TestBootID proves what the agent relies on for a boot id of its own: gVisor
// lets a file be mounted over the one in procfs, and the mount and a new
// content survive a memory snapshot and a restore.
func TestBootID(t *testing.T) {
	f := newFixture(t)
	m := f.create(f.spec(128))
	l := f.link(m)
	const file, shown = "/run/boot_id", "/proc/sys/kernel/random/boot_id"
	for _, args := range [][]string{{"write", file, "first"}, {"bind", file, shown}} {
		if r := l.run(0, args...); r.Code != 0 {
			t.Fatalf("%v: %+v", args, r)
		}
	}
	if r := l.run(1000, "cat", shown); r.Out != "first" {
		t.Fatalf("boot id: %+v", r)
	}
	f.unlink(m, l)
	dir := t.TempDir()
	image, err := m.Snapshot(f.ctx(time.Minute), dir, sandbox.SnapshotMemory)
	if err != nil {
		t.Fatal(err)
	}
	restored, err := f.d.Restore(f.ctx(time.Minute), f.spec(128), image)
	if err != nil {
		t.Fatal(err)
	}
	l = f.link(restored)
	if r := l.run(1000, "cat", shown); r.Out != "first" {
		t.Errorf("boot id after the restore: %+v", r)
	}
	if r := l.run(0, "write", file, "second"); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	if r := l.run(1000, "cat", shown); r.Out != "second" {
		t.Errorf("boot id after it was replaced: %+v", r)
	}
}
