package linear_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/store/sqlite"
	"cloche.dev/cloche/test/linear"
)

const (
	digest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	shard  = 125 // histories over one store
	shards = 80
)

// below is what control stands on in these tests.
type below interface {
	sandbox.Node
	Crash(id string)
	is(id string) string // "running", "paused" or ""
	Stop()
}

// world is a control over a real store and a node that is not.
type world struct {
	c     *control.Control
	node  below
	admin sandbox.Caller
}

// noBuilder has every template.
type noBuilder struct{}

func (noBuilder) ImportTar(context.Context, io.Reader, sandbox.RuntimeConfig) (sandbox.Built, error) {
	return sandbox.Built{}, nil
}

func (noBuilder) BuildDebian(context.Context, sandbox.DebianSource, sandbox.RuntimeConfig, func(string)) (sandbox.Built, error) {
	return sandbox.Built{}, nil
}
func (noBuilder) Image(context.Context, string) (string, error) { return "", nil }
func (noBuilder) Digests(context.Context) ([]string, error)     { return nil, nil }
func (noBuilder) Remove(context.Context, string) error          { return nil }

// inWorld runs f over a fresh store inside a bubble, where the time that
// nobody computes in costs none.
func inWorld(t *testing.T, node func(dir string) (below, error), wrap func(sandbox.Store) sandbox.Store, f func(t *testing.T, w *world)) {
	t.Helper()
	dir := storeDir(t)
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		db, err := sqlite.Open(ctx, filepath.Join(dir, "cloche.db"), nil)
		if err != nil {
			t.Fatal(err)
		}
		prj := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: "default", CreatedAt: time.Now()}
		if err := db.CreateProject(ctx, prj); err != nil {
			t.Fatal(err)
		}
		tpl := sandbox.Template{Digest: digest, Project: prj.ID, Source: "tar", CreatedAt: time.Now()}
		if _, err := db.PutTemplate(ctx, tpl, "base:latest"); err != nil {
			t.Fatal(err)
		}
		store := sandbox.Store(db)
		if wrap != nil {
			store = wrap(store)
		}
		n, err := node(dir)
		if err != nil {
			t.Fatal(err)
		}
		w := &world{node: n, admin: sandbox.Caller{KeyID: sandbox.NewID(sandbox.KindKey), Project: prj.ID, Role: sandbox.RoleAdmin}}
		w.c = control.New(control.Options{
			Store: store, Node: w.node, Builder: noBuilder{}, Log: slog.New(slog.DiscardHandler),
			MintKey: func(id string) (string, []byte) { return id, []byte(id) },
		})
		run, stop := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- w.c.Run(run) }()
		f(t, w)
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
		n.Stop()
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
}

// storeDir is in memory where the host has such a place: what is tested is the
// order of commits, not the disk.
func storeDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "linear")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// one is one sandbox of a world, as a history sees it.
type one struct {
	t  *testing.T
	w  *world
	id atomic.Value

	mu       sync.Mutex
	children []string
}

func (o *one) sandbox() string { id, _ := o.id.Load().(string); return id }

func refusal(err error) linear.Answer {
	e := sandbox.AsError(err)
	return linear.Answer{Refused: string(e.Class) + "/" + e.Code}
}

// Ask implements linear.System.
func (o *one) Ask(ctx context.Context, a linear.Ask) linear.Answer {
	idem := sandbox.Idempotency{Key: a.Key}
	var op sandbox.Operation
	var err error
	out := linear.Answer{}
	switch verb := sandbox.Verb(a.Verb); verb {
	case sandbox.VerbCreate:
		var sb sandbox.Sandbox
		sb, op, _, err = o.w.c.CreateSandbox(ctx, o.w.admin, control.CreateRequest{Template: "base"}, idem)
		o.id.Store(sb.ID)
	case sandbox.VerbDelete:
		_, op, _, err = o.w.c.Delete(ctx, o.w.admin, o.sandbox(), idem)
	case sandbox.VerbRollback:
		_, op, _, err = o.w.c.Rollback(ctx, o.w.admin, o.sandbox(), a.To, idem)
	case sandbox.VerbSnapshot:
		req := control.SnapshotRequest{Name: "s", Kind: sandbox.SnapshotMemory}
		if a.Disk {
			req.Kind = sandbox.SnapshotDisk
		}
		var snap sandbox.Snapshot
		snap, op, _, err = o.w.c.TakeSnapshot(ctx, o.w.admin, o.sandbox(), req, idem)
		out.Snapshot = snap.ID
		if err != nil && op.ID != "" { // it was begun, and its row is gone again
			out.Snapshot, err = op.Snapshot, nil
		}
	case sandbox.VerbFork:
		var children []sandbox.NewSandbox
		children, op, _, err = o.w.c.Fork(ctx, o.w.admin, o.sandbox(), control.ForkRequest{Count: 1}, idem)
		o.mu.Lock()
		for _, c := range children {
			o.children = append(o.children, c.Sandbox.ID)
		}
		o.mu.Unlock()
	default:
		_, op, _, err = o.w.c.Do(ctx, o.w.admin, o.sandbox(), verb, control.VerbRequest{}, idem)
	}
	if err != nil {
		return refusal(err)
	}
	out.Op = op.ID
	return out
}

// Look implements linear.System.
func (o *one) Look(ctx context.Context) linear.Answer {
	sb, err := o.w.c.Get(ctx, o.w.admin, o.sandbox())
	if err != nil {
		return refusal(err)
	}
	return linear.Answer{State: string(sb.State), Op: sb.Operation, Generation: sb.Generation}
}

// Wait implements linear.System.
func (o *one) Wait(ctx context.Context, id string) linear.Answer {
	for range 100 {
		op, err := o.w.c.Operation(ctx, o.w.admin, id, control.MaxWait)
		switch {
		case err != nil:
			return refusal(err)
		case op.State == sandbox.OpSucceeded:
			return linear.Answer{}
		case op.State == sandbox.OpFailed:
			return linear.Answer{Failed: op.Error.Code}
		}
	}
	o.t.Errorf("%s has not ended in 100 minutes", id)
	return linear.Answer{Failed: "never ended"}
}

// Crash implements linear.System.
func (o *one) Crash(context.Context) { o.w.node.Crash(o.sandbox()) }

// settled demands that nothing is left of what was deleted.
func (o *one) settled(ctx context.Context) error {
	for _, id := range o.children {
		if _, op, _, err := o.w.c.Delete(ctx, o.w.admin, id, sandbox.Idempotency{}); err == nil {
			o.Wait(ctx, op.ID)
		}
	}
	for _, id := range append(o.children, o.sandbox()) {
		if is := o.w.node.is(id); is != "" {
			return fmt.Errorf("%s was deleted and its machine is %s", id, is)
		}
	}
	return nil
}

// agrees demands that a sandbox and its machine are in the same state once
// nothing is under way.
func (o *one) agrees(ctx context.Context) error {
	var last string
	for range 20 { // an end is told to the row a moment later
		sb, err := o.w.c.Get(ctx, o.w.admin, o.sandbox())
		if err != nil {
			return err
		}
		is, should := o.w.node.is(o.sandbox()), ""
		if sb.State == sandbox.StateRunning || sb.State == sandbox.StatePaused {
			should = string(sb.State)
		}
		if is == should {
			return nil
		}
		last = fmt.Sprintf("the sandbox is %s and its machine is %q", sb.State, is)
		time.Sleep(time.Second)
	}
	return fmt.Errorf("%s", last)
}

func seed(t *testing.T) uint64 {
	t.Helper()
	n := uint64(time.Now().UnixNano())
	if s := os.Getenv("LINEAR_SEED"); s != "" {
		var err error
		if n, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("LINEAR_SEED=%d", n)
	return n
}

// tally counts what was checked.
type tally struct{ histories, steps, accepted, refused, failed atomic.Int64 }

func (y *tally) add(h *linear.History) {
	a, r, f := h.Count()
	y.histories.Add(1)
	y.steps.Add(int64(h.Steps()))
	y.accepted.Add(int64(a))
	y.refused.Add(int64(r))
	y.failed.Add(int64(f))
}

func (y *tally) String() string {
	return fmt.Sprintf("%d histories of %d steps: %d verbs accepted, %d refused, %d operations failed",
		y.histories.Load(), y.steps.Load(), y.accepted.Load(), y.refused.Load(), y.failed.Load())
}

// histories runs n histories in one world and returns the first that fails its
// check.
func histories(t *testing.T, w *world, n int, rng *rand.Rand, y *tally) error {
	ctx := t.Context()
	for range n {
		o := &one{t: t, w: w}
		plan := linear.Plan{Clients: 2 + rng.IntN(3), Calls: 4 + rng.IntN(5), Verbs: linear.Verbs, Pause: 4 * time.Millisecond}
		plan.Before = func() error { return o.agrees(ctx) }
		h, err := linear.Run(ctx, o, plan, rng)
		y.add(h)
		if err == nil {
			err = o.settled(ctx)
		}
		if err == nil {
			err = h.Check(time.Minute)
		}
		if err != nil {
			return fmt.Errorf("%w\n%s", err, h)
		}
	}
	return nil
}

// run runs n histories spread over worlds that run at once.
func run(t *testing.T, n int, node func(dir string, rng *rand.Rand) (below, error), wrap func(sandbox.Store) sandbox.Store) *tally {
	base := seed(t)
	y := &tally{}
	begin := time.Now()
	t.Run("shards", func(t *testing.T) {
		for i := range (n + shard - 1) / shard {
			t.Run(strconv.Itoa(i), func(t *testing.T) {
				t.Parallel()
				rng := rand.New(rand.NewPCG(base, uint64(i)))
				inWorld(t, func(dir string) (below, error) { return node(dir, rng) }, wrap, func(t *testing.T, w *world) {
					if err := histories(t, w, min(shard, n-i*shard), rng, y); err != nil {
						t.Error(err)
					}
				})
			})
		}
	})
	t.Logf("%s, in %.1f s", y, time.Since(begin).Seconds())
	return y
}

// count is how many histories a test runs.
func count() int {
	if testing.Short() {
		return 1000
	}
	return shard * shards
}

// TestControl runs random histories against control and a real store over a
// node that is slow and fails.
func TestControl(t *testing.T) {
	run(t, count(), func(_ string, rng *rand.Rand) (below, error) {
		return newFakeNode(rand.New(rand.NewPCG(rng.Uint64(), 1)), 0.08), nil
	}, nil)
}

// TestNode runs them against control, a real store and the real node over a
// driver that is slow and fails.
func TestNode(t *testing.T) {
	run(t, count(), func(dir string, rng *rand.Rand) (below, error) {
		return newRealNode(dir, rand.New(rand.NewPCG(rng.Uint64(), 1)), 0.06)
	}, nil)
}

// brokenStore lets verbs through that the table refuses, by asking for another
// one in their place.
type brokenStore struct {
	sandbox.Store
	n atomic.Int64
}

func (s *brokenStore) BeginVerb(ctx context.Context, project, id string, verb sandbox.Verb, b sandbox.Begin, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error) {
	sb, op, again, err := s.Store.BeginVerb(ctx, project, id, verb, b, idem)
	if e := sandbox.AsError(err); e != nil && e.Code == "wrong_state" && s.n.Add(1)%16 == 0 && b.Snapshot == nil {
		b.To = ""
		for _, other := range []sandbox.Verb{sandbox.VerbPause, sandbox.VerbResume, sandbox.VerbRestore} {
			if sb, op, again, err := s.Store.BeginVerb(ctx, project, id, other, b, idem); err == nil {
				return sb, op, again, nil
			}
		}
	}
	return sb, op, again, err
}

// lateStore sometimes reads a sandbox as it was before.
type lateStore struct {
	sandbox.Store
	mu  sync.Mutex
	was map[string]sandbox.Sandbox
	n   int
}

func (s *lateStore) Sandbox(ctx context.Context, project, id string) (sandbox.Sandbox, error) {
	sb, err := s.Store.Sandbox(ctx, project, id)
	s.mu.Lock()
	defer s.mu.Unlock()
	old, ok := s.was[id]
	s.was[id] = sb
	if s.n++; ok && project == "" && s.n%8 == 0 && err == nil {
		return old, nil
	}
	return sb, err
}

// TestTheCheckerBites holds that what is wrong is found: histories made by
// hand, a store whose guard is broken, and one whose reads are late.
func TestTheCheckerBites(t *testing.T) {
	for name, wrap := range map[string]func(sandbox.Store) sandbox.Store{
		"a guard lets verbs through": func(s sandbox.Store) sandbox.Store { return &brokenStore{Store: s} },
		"reads are late":             func(s sandbox.Store) sandbox.Store { return &lateStore{Store: s, was: map[string]sandbox.Sandbox{}} },
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed(t), 7))
			inWorld(t, func(string) (below, error) { return newFakeNode(rng, 0), nil }, wrap, func(t *testing.T, w *world) {
				y := &tally{}
				err := histories(t, w, 100, rng, y)
				if err == nil {
					t.Fatalf("none of %s was found wrong", y)
				}
				t.Logf("found wrong after %s: %.60s", y, strings.ReplaceAll(err.Error(), "\n", " "))
			})
		})
	}
}
