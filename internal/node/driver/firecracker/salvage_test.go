package firecracker

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

// TestTheDiskOfADeadMachineIsSaved kills a VMM from outside and boots another
// over its disk.
func TestTheDiskOfADeadMachineIsSaved(t *testing.T) {
	f := newFixture(t)
	ctx := f.ctx()
	m := f.create()
	disk := filepath.Join(f.d.machineDir(m.ID()), diskName)
	file, err := os.OpenFile(disk, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt([]byte("synced by the guest"), 9<<20); err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	if err := m.record().Process.Kill(); err != nil {
		t.Fatal(err)
	}
	f.restart() // of the daemon, which did not see it
	for range 2 {
		if err := f.d.Halt(ctx, m.ID()); err != nil {
			t.Fatal(err)
		}
	}
	dir := t.TempDir()
	image, err := f.d.Salvage(ctx, m.ID(), dir)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(filepath.Join(dir, diskName))
	if err != nil {
		t.Fatal(err)
	}
	if raw := st.Sys().(*syscall.Stat_t); raw.Uid != 0 || raw.Gid != 0 || raw.Nlink < 2 {
		t.Errorf("the saved disk is %d:%d's and has %d names", raw.Uid, raw.Gid, raw.Nlink)
	}
	if _, err := f.d.Salvage(ctx, m.ID(), t.TempDir()); err != nil {
		t.Errorf("a second time: %v", err)
	}
	if err := f.d.Discard(ctx, m.ID()); err != nil {
		t.Fatal(err)
	}
	f.nothingLeft(m.ID())
	y := f.restore(image)
	f.alive(y)
	got, err := os.ReadFile(filepath.Join(f.d.machineDir(y.ID()), diskName))
	if err != nil || !bytes.Equal(got[9<<20:9<<20+19], []byte("synced by the guest")) {
		t.Errorf("the new machine's disk does not hold what the old one's did: %v", err)
	}
	for name, id := range map[string]string{"a discarded machine": m.ID(), "one that never was": sandbox.NewID(sandbox.KindSandbox)} {
		if _, err := f.d.Salvage(ctx, id, t.TempDir()); !sandbox.IsClass(err, sandbox.NotFound) {
			t.Errorf("the disk of %s: %v", name, err)
		}
		if err := f.d.Halt(ctx, id); err != nil {
			t.Errorf("halting %s: %v", name, err)
		}
	}
}

// TestHaltKeepsTheDisk halts a machine that lives.
func TestHaltKeepsTheDisk(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	if err := f.d.Halt(f.ctx(), m.ID()); err != nil {
		t.Fatal(err)
	}
	f.ended(m)
	if _, err := f.d.Salvage(f.ctx(), m.ID(), t.TempDir()); err != nil {
		t.Error(err)
	}
}
