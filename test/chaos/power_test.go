package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/store/sqlite"
	"cloche.dev/cloche/test/chaos/lossdisk"
)

// told is a snapshot that was told durable before the power was cut.
type told struct{ id, sum string }

// TestASnapshotOutlivesThePower takes snapshots on a disk that drops unflushed
// writes, cuts the power at a random instant, and boots: what was told durable
// verifies, and nothing bears a snapshot's name that is not one.
func TestASnapshotOutlivesThePower(t *testing.T) {
	seed := seedOf(t)
	for round := range 8 {
		rnd := newRand(seed, uint64(round))
		d := lossdisk.Mount(t, 256<<20)
		dir := filepath.Join(d.Dir, "snapshots")
		s, err := snapshot.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		syncTree(t, d.Dir)
		// At first one, and the power goes as soon as it is told; then at any time.
		when := time.Duration(0)
		if round > 0 {
			when = time.Duration(rnd.Int64N(int64(400 * time.Millisecond)))
		}
		kept, lost := takeUntilCut(t, rnd, s, d, when)
		if err := d.Reboot(); err != nil {
			t.Fatal(err)
		}
		t.Logf("round %d: cut after %v; %d KiB were lost; %d snapshots had been told durable", round, when, lost>>10, len(kept))
		checkSnapshots(t, dir, kept)
	}
}

// takeUntilCut takes snapshots until the power is cut; it returns those that
// were told before.
func takeUntilCut(t *testing.T, rnd *rand.Rand, s *snapshot.Store, d *lossdisk.Disk, when time.Duration) (kept []told, lost int64) {
	t.Helper()
	var wg sync.WaitGroup
	if when > 0 {
		wg.Go(func() {
			time.Sleep(when)
			lost, _ = d.Cut()
		})
	}
	for !d.IsOff() && len(kept) < 20 {
		m, err := takeOne(t.Context(), rnd, s)
		switch {
		case d.IsOff():
			continue // the answer came after the loss: it was told to nobody
		case err != nil:
			t.Fatal(err)
		}
		kept = append(kept, told{m.ID, m.Files[0].SHA256})
		if len(kept) > 2 && rnd.IntN(2) == 0 {
			i := rnd.IntN(len(kept))
			gone := kept[i]
			kept = append(kept[:i:i], kept[i+1:]...) // either is right from now on
			if err := s.Delete(gone.id); err != nil && !d.IsOff() {
				t.Fatal(err)
			}
		}
		if when == 0 {
			lost, _ = d.Cut()
		}
	}
	wg.Wait()
	return kept, lost
}

func takeOne(ctx context.Context, rnd *rand.Rand, s *snapshot.Store) (*snapshot.Manifest, error) {
	draft, err := s.Begin(sandbox.NewID(sandbox.KindSnapshot))
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"pages", "state"} {
		data := make([]byte, 4096+rnd.IntN(2<<20))
		for i := range data {
			data[i] = byte(rnd.Uint32())
		}
		if err := os.WriteFile(filepath.Join(draft.Dir(), name), data, 0o600); err != nil {
			return nil, err
		}
	}
	return draft.Commit(ctx, snapshot.Manifest{
		Project: "prj", Sandbox: sandbox.NewID(sandbox.KindSandbox), Kind: sandbox.SnapshotMemory, TakenAt: time.Now().UTC(),
		Needs: sandbox.Needs{Driver: "fake", Digest: "sha256:x"}, Resources: sandbox.DefaultResources, Key: []byte("key"),
	})
}

// checkSnapshots holds a directory of snapshots to what was told of it.
func checkSnapshots(t *testing.T, dir string, kept []told) {
	t.Helper()
	s, err := snapshot.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Sweep(); err != nil {
		t.Fatal(err)
	}
	ids, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]string{}
	for _, id := range ids {
		// Without the stamps, so that every byte is read again.
		_ = os.Remove(filepath.Join(s.Dir(id), "stamps.json"))
		m, err := s.Verify(t.Context(), id)
		if err != nil {
			t.Errorf("what bears a snapshot's name after the loss is none: %v", err)
			continue
		}
		sums[id] = m.Files[0].SHA256
	}
	for _, k := range kept {
		if sums[k.id] != k.sum {
			t.Errorf("the snapshot %s was told durable and is lost", k.id)
		}
	}
}

// TestARowOutlivesThePower writes rows on such a disk: what the store told, it
// still has after the loss.
func TestARowOutlivesThePower(t *testing.T) {
	d := lossdisk.Mount(t, 64<<20)
	path := filepath.Join(d.Dir, "cloche.db")
	open := func() *sqlite.Store {
		s, err := sqlite.Open(t.Context(), path, time.Now)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open()
	project := func(i int) sandbox.Project {
		return sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: fmt.Sprintf("p%d", i), CreatedAt: time.Now()}
	}
	want := map[string]bool{}
	for i := range 40 {
		p := project(i)
		if err := s.CreateProject(t.Context(), p); err != nil {
			t.Fatal(err)
		}
		want[p.ID] = true
	}
	lost, flushes := d.Cut()
	_ = s.Close() // what it writes now is lost
	if err := d.Reboot(); err != nil {
		t.Fatal(err)
	}
	s = open()
	list, err := s.Projects(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list {
		delete(want, p.ID)
	}
	if len(want) > 0 {
		t.Errorf("%d rows of 40 were told and are lost", len(want))
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	t.Logf("%d KiB were lost, after %d flushes", lost>>10, flushes)
}

// TestASkippedFsyncIsCaught runs the test above in a process that leaves the
// fsyncs of snapshots out: it must fail there.
func TestASkippedFsyncIsCaught(t *testing.T) {
	mustFail(t, "TestASnapshotOutlivesThePower", failpoint.SkipFsync, "told durable and is lost")
}

func syncTree(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
}

// mustFail runs one test of this binary with a precaution left out, and demands
// that it fails for the reason that the precaution is there for.
func mustFail(t *testing.T, test, skip, why string) {
	t.Helper()
	if !faults {
		t.Skip("SKIP: needs the tag clochefaults, as `make chaos` builds it")
	}
	out, err := again(t, test, failpoint.EnvSkip+"="+skip)
	switch {
	case strings.Contains(out, "--- SKIP"):
		t.Skipf("SKIP: NOT CHECKED: %s was skipped\n%.2000s", test, out)
	case err == nil:
		t.Errorf("%s passes with %s skipped:\n%.4000s", test, skip, out)
	case !strings.Contains(out, why):
		t.Errorf("%s with %s skipped fails, but not since %q: %v\n%.8000s", test, skip, why, err, out)
	default:
		t.Logf("%s with %s skipped fails, as it must: …%s…", test, skip, why)
	}
}
