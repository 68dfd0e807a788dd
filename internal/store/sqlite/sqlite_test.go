package sqlite_test

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/store/sqlite"
	"cloche.dev/cloche/internal/store/storetest"
)

// childEnv names the store that a re-executed test binary writes to until it
// is killed.
const childEnv = "CLOCHE_STORE_CHILD"

func TestMain(m *testing.M) {
	if path := os.Getenv(childEnv); path != "" {
		if err := child(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func open(t testing.TB, now func() time.Time) sandbox.Store {
	t.Helper()
	s, err := sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "cloche.db"), now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func TestConformance(t *testing.T) { storetest.Run(t, open) }

func TestModel(t *testing.T) { storetest.Model(t, open) }

// child writes histories and tells each answer on its stdout, so that the
// parent knows what was promised before the kill.
func child(path string) error {
	ctx := context.Background()
	s, err := sqlite.Open(ctx, path, nil)
	if err != nil {
		return err
	}
	list, err := s.Projects(ctx)
	if err != nil {
		return err
	}
	for {
		if err := history(ctx, s, list[0].ID); err != nil {
			return err
		}
	}
}

// history is one sandbox's life up to its deletion, each answer told.
func history(ctx context.Context, s sandbox.Store, project string) error {
	now := time.Now()
	newOp := func() sandbox.Operation {
		return sandbox.Operation{ID: sandbox.NewID(sandbox.KindOperation), CreatedAt: now}
	}
	sb, op, _, err := s.CreateSandbox(ctx, sandbox.Sandbox{
		ID: sandbox.NewID(sandbox.KindSandbox), Project: project, Template: "base", CreatedAt: now,
	}, newOp(), sandbox.Capacity{}, sandbox.Idempotency{Key: sandbox.NewID("k")})
	if err != nil {
		return err
	}
	fmt.Println(sb.ID, sandbox.StateCreating)
	if err := s.FinishOperation(ctx, op.ID, sandbox.Outcome{To: sandbox.StateRunning, Epoch: 1}); err != nil {
		return err
	}
	fmt.Println(sb.ID, sandbox.StateRunning)
	b := sandbox.Begin{Op: newOp(), Snapshot: &sandbox.Snapshot{
		ID: sandbox.NewID(sandbox.KindSnapshot), Kind: sandbox.SnapshotMemory, Purpose: sandbox.PurposeSuspend, CreatedAt: now,
	}}
	if _, op, _, err = s.BeginVerb(ctx, project, sb.ID, sandbox.VerbSuspend, b, sandbox.Idempotency{}); err != nil {
		return err
	}
	fmt.Println(sb.ID, sandbox.StateSuspending)
	err = s.FinishOperation(ctx, op.ID, sandbox.Outcome{
		To: sandbox.StateSuspended, Snapshot: &sandbox.SnapshotStatus{Snapshot: op.Snapshot, TakenAt: now}, Image: &op.Snapshot,
	})
	if err != nil {
		return err
	}
	fmt.Println(sb.ID, sandbox.StateSuspended)
	if _, _, _, err = s.BeginVerb(ctx, project, sb.ID, sandbox.VerbDelete, sandbox.Begin{Op: newOp()}, sandbox.Idempotency{}); err != nil {
		return err
	}
	fmt.Println(sb.ID, sandbox.StateDeleting)
	return nil
}

// TestKill kills a writing process a few times: what it was answered is there,
// and nothing contradicts itself.
func TestKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cloche.db")
	prepare(t, path)
	rank := map[sandbox.State]int{
		sandbox.StateCreating: 1, sandbox.StateRunning: 2, sandbox.StateSuspending: 3, sandbox.StateSuspended: 4, sandbox.StateDeleting: 5,
	}
	total := 0
	for round := range 5 {
		told := runAndKill(t, path, 20+round*13)
		s, err := sqlite.Open(t.Context(), path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := storetest.CheckInvariants(t.Context(), s); err != nil {
			t.Error(err)
		}
		for id, state := range told {
			sb, err := s.Sandbox(t.Context(), "", id)
			if err != nil || rank[sb.State] < rank[sandbox.State(state)] || sb.State == sandbox.StateSuspended && sb.Image == "" {
				t.Errorf("round %d: %s was told to be %s and is %s, %v", round, id, state, sb.State, err)
			}
		}
		total += len(told)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d sandboxes checked", total)
}

func prepare(t *testing.T, path string) {
	t.Helper()
	s, err := sqlite.Open(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: "default", CreatedAt: time.Now()}
	if err := s.CreateProject(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PutTemplate(t.Context(), sandbox.Template{Digest: "sha256:" + strings.Repeat("a", 64), Project: p.ID, CreatedAt: time.Now()}, "base:latest"); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// runAndKill runs child and kills it after it has told `lines` answers.
func runAndKill(t *testing.T, path string, lines int) map[string]string {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	told := map[string]string{}
	n := 0
	for sc := bufio.NewScanner(out); sc.Scan(); n++ {
		id, state, ok := strings.Cut(sc.Text(), " ")
		if ok {
			told[id] = state
		}
		if n == lines {
			if err := cmd.Process.Kill(); err != nil {
				t.Error(err)
			}
		}
	}
	if err := cmd.Wait(); err == nil || n < lines {
		t.Errorf("the child ended by itself after %d lines: %v", n, err)
	}
	return told
}

func TestNewerStoreIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cloche.db")
	prepare(t, path)
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec("INSERT INTO goose_db_version (version_id, is_applied) VALUES (9999, 1)"); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = sqlite.Open(t.Context(), path, nil)
	if e := sandbox.AsError(err); e == nil || e.Class != sandbox.FailedPrecondition || e.Code != "store_newer" || e.Hint == "" || !strings.Contains(e.Message, "9999") {
		t.Errorf("%v", err)
	}
}

func TestFileIsPrivate(t *testing.T) {
	dir := t.TempDir()
	s, err := sqlite.Open(t.Context(), filepath.Join(dir, "cloche.db"), nil)
	if err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) < 2 {
		t.Errorf("%v %v", files, err)
	}
	for _, f := range files {
		if st, err := f.Info(); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s has the mode %v", f.Name(), st.Mode())
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestUnusablePath(t *testing.T) {
	_, err := sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "no", "cloche.db"), nil)
	if !sandbox.IsClass(err, sandbox.Unavailable) {
		t.Errorf("a missing directory: %v", err)
	}
	path := filepath.Join(t.TempDir(), "cloche.db")
	if err := os.WriteFile(path, []byte(strings.Repeat("this is no database ", 100)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := sqlite.Open(t.Context(), path, nil); !sandbox.IsClass(err, sandbox.Unavailable) {
		t.Errorf("a foreign file: %v", err)
	}
}

// TestLockedStore: another process holds the write lock.
func TestLockedStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cloche.db")
	prepare(t, path)
	s, err := sqlite.Open(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	if _, err := db.Exec("BEGIN IMMEDIATE"); err != nil {
		t.Fatal(err)
	}
	err = s.DeleteSession(t.Context(), "x")
	if e := sandbox.AsError(err); e == nil || e.Class != sandbox.Unavailable || e.Code != "store_busy" || e.Hint == "" {
		t.Errorf("%v", err)
	}
	if _, err := s.Projects(t.Context()); err != nil {
		t.Errorf("reads go on: %v", err)
	}
	if err := db.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
