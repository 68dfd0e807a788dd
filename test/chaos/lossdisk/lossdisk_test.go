package lossdisk

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestOnlyTheFlushedOutlivesThePower writes two files and syncs one.
func TestOnlyTheFlushedOutlivesThePower(t *testing.T) {
	d := Mount(t, 64<<20)
	kept, lost := filepath.Join(d.Dir, "kept"), filepath.Join(d.Dir, "lost")
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	f, err := os.Create(kept)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if err := os.WriteFile(lost, data, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{kept, lost} {
		if got, err := os.ReadFile(p); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("before the loss: %s has %d bytes: %v", p, len(got), err)
		}
	}
	_, flushes := d.Cut()
	if err := d.Reboot(); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(kept); err != nil || !bytes.Equal(got, data) {
		t.Errorf("what was synced has %d bytes: %v", len(got), err)
	}
	if got, err := os.ReadFile(lost); err == nil && bytes.Equal(got, data) {
		t.Errorf("what was not synced is there (%d flushes)", flushes)
	}
}
