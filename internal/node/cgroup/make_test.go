package cgroup

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestMake makes a group in a directory that looks like a version 2 tree; in a
// real one, the drivers' tests do.
func TestMake(t *testing.T) {
	root := t.TempDir()
	tree := &Tree{root: root, v2: true}
	order := filepath.Join(root, "cgroup.subtree_control")
	if _, err := tree.Group("/a").Make(nil); err == nil {
		t.Error("a group was made in no control group")
	}
	if err := os.WriteFile(order, []byte("memory io\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	swap := filepath.Join(root, "a/memory.swap.max")
	if err := errors.Join(os.Mkdir(filepath.Join(root, "a"), 0o755), os.WriteFile(swap, []byte("max"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // it may be there already
		dir, err := tree.Group("/a").Make([]Value{
			{Name: "memory.max", Value: "1"},
			{Name: "memory.swap.max", Value: "0", Optional: true},
			{Name: "memory.none", Value: "0", Optional: true},
			{Name: "pids.max", Value: "2"},
			{Name: "cpu.max", Value: "3 4"},
		})
		if err != nil {
			t.Fatal(err)
		}
		if dir.Name() != filepath.Join(root, "a") {
			t.Errorf("its directory is %s", dir.Name())
		}
		_ = dir.Close()
	}
	for name, want := range map[string]string{"a/memory.max": "1", "a/memory.swap.max": "0", "a/pids.max": "2", "a/cpu.max": "3 4"} {
		got, err := os.ReadFile(filepath.Join(root, name))
		if err != nil || string(got) != want {
			t.Errorf("%s holds %q, not %q: %v", name, got, want, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(root, "a/memory.none")); !os.IsNotExist(err) {
		t.Errorf("a limit that the kernel does not know was set: %v", err)
	}
	if _, err := (&Tree{root: root}).Group("/a").Make(nil); err == nil {
		t.Error("a group of version 1 was made")
	}
}
