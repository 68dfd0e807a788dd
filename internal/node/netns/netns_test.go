package netns

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

func mounts(t *testing.T, dir string) int {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(data), " "+dir+"/")
}

func TestManager(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIP: network namespaces need root")
	}
	ctx := context.Background()
	dir := filepath.Join(t.TempDir(), "netns")
	m := New(Options{Dir: dir})
	if ids, err := m.List(ctx); err != nil || len(ids) != 0 {
		t.Errorf("List before anything = %v, %v", ids, err)
	}
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]string, 8)
	var wg sync.WaitGroup
	for i := range ids {
		ids[i] = sandbox.NewID(sandbox.KindSandbox)
		wg.Go(func() {
			for range 2 { // making it again makes it anew
				if path, err := m.Create(ctx, ids[i]); err != nil || path != filepath.Join(dir, ids[i]) {
					t.Errorf("Create = %s, %v", path, err)
				}
			}
		})
	}
	wg.Wait()
	slices.Sort(ids)
	if got, err := m.List(ctx); err != nil || !slices.Equal(got, ids) {
		t.Errorf("List = %v, %v", got, err)
	}
	if n := mounts(t, dir); n != 2*len(ids) {
		t.Errorf("%d mounts for %d pairs", n, len(ids))
	}
	if now, err := os.Readlink("/proc/self/ns/net"); err != nil || now != own {
		t.Errorf("we are in %s now, %v", now, err)
	}
	for _, id := range ids {
		for range 2 {
			if err := m.Delete(ctx, id); err != nil {
				t.Error(err)
			}
		}
	}
	if n := mounts(t, dir); n != 0 {
		t.Errorf("%d mounts are left", n)
	}
	if got, err := m.List(ctx); err != nil || len(got) != 0 {
		t.Errorf("List at the end = %v, %v", got, err)
	}
	for _, id := range []string{"", "..", "sbx_x", "../" + ids[0]} {
		if _, err := m.Create(ctx, id); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("Create(%q) = %v", id, err)
		}
		if err := m.Delete(ctx, id); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("Delete(%q) = %v", id, err)
		}
	}
}
