package sqlite

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// TestFullDisk: SQLite's own page limit stands for a full disk; both answer
// SQLITE_FULL. Nothing is changed, and reads go on.
func TestFullDisk(t *testing.T) {
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "cloche.db"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.w.Exec("PRAGMA max_page_count = 1"); err != nil {
		t.Fatal(err)
	}
	p := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: strings.Repeat("x", 1<<20), CreatedAt: time.Now()}
	err = s.CreateProject(t.Context(), p)
	if e := sandbox.AsError(err); e == nil || e.Class != sandbox.Unavailable || e.Code != "disk_full" || e.Hint == "" {
		t.Errorf("%v", err)
	}
	if list, err := s.Projects(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%d projects, %v", len(list), err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func FuzzPageToken(f *testing.F) {
	_, next := cut([]sandbox.Sandbox{{ID: sandbox.NewID(sandbox.KindSandbox), CreatedAt: time.Unix(1, 2)}, {}}, 1,
		func(sb sandbox.Sandbox) (time.Time, string) { return sb.CreatedAt, sb.ID })
	f.Add(next)
	f.Add("")
	f.Fuzz(func(t *testing.T, token string) {
		_, id, err := parseToken(token, sandbox.KindSandbox)
		if err == nil && !sandbox.ValidID(sandbox.KindSandbox, id) {
			t.Errorf("%q gives the id %q", token, id)
		}
		if err != nil && !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("%q: %v", token, err)
		}
	})
}
