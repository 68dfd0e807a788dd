package sqlite

import (
	"fmt"
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
	if e := sandbox.AsError(err); e == nil || e.Class != sandbox.Unavailable || e.Code != "store_full" || e.Hint == "" {
		t.Errorf("%v", err)
	}
	if list, err := s.Projects(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%d projects, %v", len(list), err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestFullDiskMidway: a lifecycle verb that meets the full disk half way leaves
// nothing of itself, and is taken once there is room.
func TestFullDiskMidway(t *testing.T) {
	s, project := opened(t)
	id := fill(t, s, project, 1)[0]
	var pages int
	if err := s.w.QueryRow("PRAGMA page_count").Scan(&pages); err != nil {
		t.Fatal(err)
	}
	if _, err := s.w.Exec(fmt.Sprintf("PRAGMA max_page_count = %d", pages)); err != nil {
		t.Fatal(err)
	}
	ask := func() error {
		op := sandbox.Operation{ID: sandbox.NewID(sandbox.KindOperation), CreatedAt: time.Now(), Input: []byte(`"` + strings.Repeat("x", 1<<20) + `"`)}
		_, _, _, err := s.BeginVerb(t.Context(), project, id, sandbox.VerbPause, sandbox.Begin{Op: op}, sandbox.Idempotency{})
		return err
	}
	if e := sandbox.AsError(ask()); e == nil || e.Class != sandbox.Unavailable || e.Code != "store_full" || !e.Retryable {
		t.Errorf("%v", e)
	}
	if sb, err := s.Sandbox(t.Context(), project, id); err != nil || sb.State != sandbox.StateRunning || sb.Operation != "" || sb.Generation != 1 {
		t.Errorf("%+v %v", sb, err)
	}
	if _, err := s.w.Exec("PRAGMA max_page_count = 1000000"); err != nil {
		t.Fatal(err)
	}
	if err := ask(); err != nil {
		t.Error(err)
	}
}

// TestReadOnly: the disk was mounted read-only meanwhile, as far as SQLite can tell.
func TestReadOnly(t *testing.T) {
	s, project := opened(t)
	if _, err := s.w.Exec("PRAGMA query_only = 1"); err != nil {
		t.Fatal(err)
	}
	err := s.Touch(t.Context(), map[string]time.Time{"x": time.Now()})
	if e := sandbox.AsError(err); e == nil || e.Class != sandbox.Unavailable || e.Code != "store_readonly" || e.Hint == "" {
		t.Errorf("%v", err)
	}
	if _, err := s.UsageOf(t.Context(), project); err != nil {
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
