package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// opened is a store with a project and a template.
func opened(t *testing.T) (*Store, string) {
	t.Helper()
	s, err := Open(t.Context(), filepath.Join(t.TempDir(), "cloche.db"), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	p := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: "default", Quotas: sandbox.Quotas{Running: 1 << 30}, CreatedAt: time.Now()}
	if err := s.CreateProject(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutTemplate(t.Context(), sandbox.Template{Digest: "sha256:" + strings.Repeat("a", 64), Project: p.ID, CreatedAt: time.Now()}, "base:latest"); err != nil {
		t.Fatal(err)
	}
	return s, p.ID
}

// fill makes n running sandboxes, without a commit for each, which is what
// takes the time.
func fill(t *testing.T, s *Store, project string, n int) (ids []string) {
	t.Helper()
	err := s.write(t.Context(), func(tx *sql.Tx) error {
		for range n {
			now := time.Now()
			sb := sandbox.Sandbox{
				ID: sandbox.NewID(sandbox.KindSandbox), Project: project, Template: "base", Resources: sandbox.DefaultResources,
				Policy: sandbox.DefaultPolicy, CreatedAt: now, Labels: map[string]string{"a": "b"}, Env: map[string]string{"PATH": strings.Repeat("x", 500)},
			}
			op := sandbox.Operation{ID: sandbox.NewID(sandbox.KindOperation), CreatedAt: now}
			if err := errors.Join(pin(t.Context(), tx, &sb), s.insertCreate(t.Context(), tx, sb, op)); err != nil {
				return err
			}
			sb, err := sandboxByID(t.Context(), tx, project, sb.ID)
			if err != nil {
				return err
			}
			sb.State, sb.Epoch, sb.Operation = sandbox.StateRunning, 1, ""
			if err := errors.Join(endOperation(t.Context(), tx, op.ID, "", nil, now), putState(t.Context(), tx, sb)); err != nil {
				return err
			}
			ids = append(ids, sb.ID)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

// suspendAll suspends them in one commit.
func suspendAll(t *testing.T, s *Store, project string, ids []string) {
	t.Helper()
	err := s.write(t.Context(), func(tx *sql.Tx) error {
		for _, id := range ids {
			sb, err := sandboxByID(t.Context(), tx, project, id)
			if err != nil {
				return err
			}
			n := sandbox.Snapshot{ID: sandbox.NewID(sandbox.KindSnapshot), Kind: sandbox.SnapshotMemory, Purpose: sandbox.PurposeSuspend, State: sandbox.SnapshotCreating}
			if err := s.beginSnapshot(t.Context(), tx, sb, n, "", time.Now(), ""); err != nil {
				return err
			}
			if err := readied(t.Context(), tx, n, sandbox.SnapshotStatus{SizeBytes: 1 << 20}, time.Now()); err != nil {
				return err
			}
			sb.State, sb.Image = sandbox.StateSuspended, n.ID
			if err := putState(t.Context(), tx, sb); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// slow tells whether this is a build that nobody measures.
func slow() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// TestThousandSuspended: what control asks of the store again and again stays
// cheap beside 1 000 suspended sandboxes.
func TestThousandSuspended(t *testing.T) {
	s, project := opened(t)
	n := 1000
	if slow() {
		n = 200
	}
	suspendAll(t, s, project, fill(t, s, project, n))
	fill(t, s, project, 3)
	suspended := sandbox.SandboxFilter{States: []sandbox.State{sandbox.StateSuspended}}
	for name, ask := range map[string]func(context.Context) (int, error){
		"a page of 100": func(ctx context.Context) (int, error) {
			list, _, err := s.Sandboxes(ctx, project, suspended, sandbox.Page{Limit: 100})
			return len(list) - 100, err
		},
		"a page of 100 of all projects": func(ctx context.Context) (int, error) {
			list, _, err := s.Sandboxes(ctx, "", sandbox.SandboxFilter{}, sandbox.Page{Limit: 100})
			return len(list) - 100, err
		},
		"the usage": func(ctx context.Context) (int, error) {
			u, err := s.UsageOf(ctx, "")
			return u.Suspended - n + u.Running - 3, err
		},
		"the garbage": func(ctx context.Context) (int, error) { l, err := s.GarbageSnapshots(ctx, 100); return len(l), err },
		"the idle": func(ctx context.Context) (int, error) {
			l, err := s.IdleSandboxes(ctx, time.Now().Add(24*time.Hour), 100)
			return len(l) - 3, err
		},
		"the expired": func(ctx context.Context) (int, error) {
			l, err := s.ExpiredSandboxes(ctx, time.Now(), 100)
			return len(l), err
		},
	} {
		best := time.Hour
		for range 5 {
			start := time.Now()
			if off, err := ask(t.Context()); err != nil || off != 0 {
				t.Fatalf("%s is off by %d: %v", name, off, err)
			}
			best = min(best, time.Since(start))
		}
		t.Logf("%s: %v", name, best)
		if best > 50*time.Millisecond && !slow() {
			t.Errorf("%s took %v", name, best)
		}
	}
}

// TestPlans: the queries go by an index and not through whole tables.
func TestPlans(t *testing.T) {
	s, project := opened(t)
	for query, want := range map[string]string{
		"SELECT * FROM sandboxes WHERE project = '" + project + "' ORDER BY created_at DESC, id DESC LIMIT 100": "sandboxes_by_age",
		"SELECT * FROM sandboxes ORDER BY created_at DESC, id DESC LIMIT 100":                                   "sandboxes_by_age_all",
		"SELECT * FROM snapshots WHERE sandbox = 'x' ORDER BY created_at DESC, id DESC LIMIT 100":               "snapshots_by_sandbox",
		strings.NewReplacer("?1", "0", "?2", "1").Replace(idleQuery):                                            "sandboxes_by_state",
		strings.NewReplacer("?1", "0", "?2", "1").Replace(expiredQuery):                                         "sandboxes_by_expiry",
		strings.Replace(garbageQuery, "LIMIT ?", "LIMIT 1", 1):                                                  "sandboxes_by_image",
		"SELECT sum(milli_cpu), sum(disk_mib) FROM sandboxes WHERE state <> 'deleted' AND project = 'x'":        "COVERING INDEX sandboxes_usage",
		"SELECT sum(milli_cpu), sum(disk_mib) FROM sandboxes WHERE state <> 'deleted'":                          "COVERING INDEX sandboxes_usage",
		"UPDATE sandboxes SET base = '' WHERE base = 'x' AND base <> ''":                                        "sandboxes_by_base",
	} {
		steps, err := collect(t.Context(), s.w, func(r scanner) (d string, err error) {
			var id, parent, unused int
			err = r.Scan(&id, &parent, &unused, &d)
			return d, err
		}, "EXPLAIN QUERY PLAN "+query)
		if err != nil {
			t.Fatal(err)
		}
		plan := strings.Join(steps, "\n")
		if !strings.Contains(plan, want) {
			t.Errorf("%s goes by\n%s\nnot by %s", query, plan, want)
		}
	}
}

// TestMigrate: a store of the first version, with rows.
func TestMigrate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cloche.db")
	init, err := migrations.ReadFile("migrations/00001_init.sql")
	if err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	row := func(id, state string, generation int) string {
		return fmt.Sprintf(`INSERT INTO sandboxes VALUES ('%s','p','base','d','gvisor','%s',%d,'{}','{}','{"milli_cpu":2,"memory_mib":3,"disk_mib":4}',1,7,NULL,NULL,'');`, id, state, generation)
	}
	_, err = db.Exec(strings.ReplaceAll(string(init), "-- +goose Up", "") + `
		CREATE TABLE goose_db_version (id INTEGER PRIMARY KEY AUTOINCREMENT, version_id INTEGER NOT NULL, is_applied INTEGER NOT NULL, tstamp TIMESTAMP DEFAULT (datetime('now')));
		INSERT INTO goose_db_version (version_id, is_applied) VALUES (0, 1), (1, 1);
		INSERT INTO projects VALUES ('p', 'default', 1);` +
		row("running", "running", 1) + row("failed", "failed", 1) + row("creating", "creating", 1) + `
		INSERT INTO sessions VALUES ('s', 'p', 'running', '{"args":["x"]}', 1, 'k', 1);
		INSERT INTO operations VALUES ('o', 'p', 'create', 'running', '', 'succeeded', '', NULL, NULL, 'k', 1, NULL, NULL, 1, 1, 1);`)
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := Open(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for id, epoch := range map[string]int64{"running": 1, "failed": 0, "creating": 0} {
		sb, err := s.Sandbox(t.Context(), "p", id)
		if err != nil || sb.Epoch != epoch || sb.Policy != sandbox.DefaultPolicy || !sb.TouchedAt.Equal(sb.UpdatedAt) || sb.Image != "" || sb.ImageAt != nil {
			t.Errorf("%+v %v", sb, err)
		}
	}
	if u, err := s.UsageOf(t.Context(), "p"); err != nil || u != (sandbox.Usage{Running: 2, Suspended: 1, MilliCPU: 4, MemoryMiB: 6, DiskMiB: 12}) {
		t.Errorf("%+v %v", u, err)
	}
	if ses, err := s.Session(t.Context(), "p", "running", "s"); err != nil || ses.Parent != "" || ses.ParentOffset != 0 {
		t.Errorf("%+v %v", ses, err)
	}
	if op, err := s.Operation(t.Context(), "p", "o"); err != nil || op.Snapshot != "" || op.Children != nil {
		t.Errorf("%+v %v", op, err)
	}
	if list, err := s.Projects(t.Context()); err != nil || list[0].Quotas != (sandbox.Quotas{}) {
		t.Errorf("%+v %v", list, err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestBackup: the copy is a store of its own, and a failed one leaves no file.
func TestBackup(t *testing.T) {
	s, project := opened(t)
	id := fill(t, s, project, 1)[0]
	path := filepath.Join(t.TempDir(), "copy.db")
	if err := s.Backup(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	fill(t, s, project, 1)
	c, err := Open(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if list, _, err := c.Sandboxes(t.Context(), "", sandbox.SandboxFilter{}, sandbox.Page{}); err != nil || len(list) != 1 || list[0].ID != id {
		t.Errorf("%v %v", list, err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	path += "2"
	if err := s.Backup(ctx, path); !sandbox.IsClass(err, sandbox.Unavailable) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("a part of it is left: %v", err)
	}
}
