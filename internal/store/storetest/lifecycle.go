package storetest

import (
	"context"
	"slices"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

func createSandbox(e *env) {
	in := newSandbox(e.project, "base", e.tick())
	in.Labels, in.Env = map[string]string{"a/b": "c"}, map[string]string{"X": "y"}
	at := e.clock.Add(time.Hour)
	in.ExpiresAt = &at
	sb, op, replayed, err := e.s.CreateSandbox(e.ctx, in, e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{})
	e.must(err)
	if replayed || sb.State != sandbox.StateCreating || sb.Digest != digestA || sb.Template != "base" || sb.Generation != 1 || sb.Operation != op.ID {
		e.Errorf("sandbox %+v", sb)
	}
	if op.State != sandbox.OpAccepted || op.Sandbox != sb.ID || op.Generation != 1 || op.Project != e.project || op.Key != "key_test" {
		e.Errorf("operation %+v", op)
	}
	got := e.get(sb.ID)
	if got.Labels["a/b"] != "c" || got.Env["X"] != "y" || got.Resources != in.Resources || !got.ExpiresAt.Equal(at) || !got.CreatedAt.Equal(in.CreatedAt) {
		e.Errorf("read back %+v", got)
	}
	// The release moves; the sandbox keeps its digest.
	e.put(e.project, digestB, "base:latest")
	if got := e.get(sb.ID); got.Digest != digestA {
		e.Errorf("the digest moved to %s", got.Digest)
	}
}

func createRefused(e *env) {
	for _, ref := range []string{"nope", "base:other", digestB} {
		_, _, _, err := e.s.CreateSandbox(e.ctx, newSandbox(e.project, ref, e.tick()), e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{})
		e.wants(err, sandbox.NotFound, "template_not_found")
	}
	if list, err := e.s.Unfinished(e.ctx); err != nil || len(list) != 0 {
		e.Errorf("a refused create left %v, %v", list, err)
	}
}

// walks leads to every state that a row can be in.
func (e *env) walks() map[sandbox.State]func() string {
	after := func(begin sandbox.Verb, done ...sandbox.Verb) func() string {
		return func() string {
			id := e.running().ID
			for _, verb := range done {
				e.do(id, verb)
			}
			if begin != "" {
				e.begin(id, begin)
			}
			return id
		}
	}
	return map[sandbox.State]func() string{
		sandbox.StateCreating:   func() string { sb, _ := e.create(nil); return sb.ID },
		sandbox.StateRunning:    after(""),
		sandbox.StatePausing:    after(sandbox.VerbPause),
		sandbox.StatePaused:     after("", sandbox.VerbPause),
		sandbox.StateResuming:   after(sandbox.VerbResume, sandbox.VerbPause),
		sandbox.StateSuspending: after(sandbox.VerbSuspend),
		sandbox.StateSuspended:  after("", sandbox.VerbSuspend),
		sandbox.StateRestoring:  after(sandbox.VerbRestore, sandbox.VerbSuspend),
		sandbox.StateStopping:   after(sandbox.VerbStop),
		sandbox.StateStopped:    after("", sandbox.VerbStop),
		sandbox.StateStarting:   after(sandbox.VerbStart, sandbox.VerbStop),
		sandbox.StateForking:    after(sandbox.VerbFork),
		sandbox.StateSnapping:   after(sandbox.VerbSnapshot),
		sandbox.StateRolling: func() string {
			id := e.running().ID
			e.rollback(id, e.do(id, sandbox.VerbSnapshot).Snapshot)
			return id
		},
		sandbox.StateDeleting: after(sandbox.VerbDelete),
		sandbox.StateDeleted:  after("", sandbox.VerbDelete),
		sandbox.StateFailed: func() string {
			sb, op := e.create(nil)
			e.must(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateFailed)))
			return sb.ID
		},
	}
}

// table asks every verb in every state.
func table(e *env) {
	verbs := []sandbox.Verb{
		sandbox.VerbDelete, sandbox.VerbStop, sandbox.VerbStart, sandbox.VerbPause, sandbox.VerbResume, sandbox.VerbSuspend, sandbox.VerbRestore,
		sandbox.VerbWake, sandbox.VerbFork, sandbox.VerbSnapshot, sandbox.VerbRollback, sandbox.VerbExit, sandbox.VerbCreate, sandbox.VerbBuild,
	}
	walks := e.walks()
	for _, state := range sandbox.States {
		for _, verb := range verbs {
			id := walks[state]()
			before := e.get(id)
			if before.State != state {
				e.Fatalf("walked to %s, not to %s", before.State, state)
			}
			sb, op, _, err := e.s.BeginVerb(e.ctx, e.project, id, verb, e.bring(verb), sandbox.Idempotency{})
			t, ok := sandbox.Find(state, verb)
			ok = ok && verb != sandbox.VerbExit
			if ok && (t.Guard == sandbox.HasSnapshot || t.Guard != sandbox.Always && before.Image == "") {
				e.wants(err, sandbox.FailedPrecondition, string(t.Guard))
				ok = false
			} else if !ok {
				e.wants(err, sandbox.FailedPrecondition, "wrong_state")
			}
			if !ok {
				if after := e.get(id); after.Generation != before.Generation || after.State != before.State {
					e.Errorf("%s from %s was refused and changed the row", verb, state)
				}
				continue
			}
			if err != nil || sb.State != t.Via || sb.Generation != before.Generation+1 || op.Generation != sb.Generation || sb.Operation != op.ID {
				e.Errorf("%s from %s: %+v %+v %v", verb, state, sb, op, err)
			}
		}
	}
}

func supersede(e *env) {
	sb, first := e.create(nil)
	second := e.begin(sb.ID, sandbox.VerbDelete)
	got, err := e.s.Operation(e.ctx, e.project, first.ID)
	e.must(err)
	if got.State != sandbox.OpFailed || got.Error == nil || got.Error.Code != "superseded" || got.EndedAt == nil {
		e.Errorf("the first is %+v", got)
	}
	list, err := e.s.Unfinished(e.ctx)
	if err != nil || len(list) != 1 || list[0].ID != second.ID {
		e.Errorf("unfinished %v %v", list, err)
	}
}

func staleFinish(e *env) {
	sb, first := e.create(nil)
	e.begin(sb.ID, sandbox.VerbDelete)
	before := e.get(sb.ID)
	e.wants(e.s.FinishOperation(e.ctx, first.ID, sandbox.Outcome{To: sandbox.StateRunning}), sandbox.Conflict, "stale_generation")
	if after := e.get(sb.ID); after.State != before.State || after.Operation != before.Operation || after.End != nil {
		e.Errorf("a stale end changed %+v to %+v", before, after)
	}
}

func finishTwice(e *env) {
	sb, op := e.create(nil)
	e.must(e.s.FinishOperation(e.ctx, op.ID, sandbox.Outcome{To: sandbox.StateRunning}))
	e.wants(e.s.FinishOperation(e.ctx, op.ID, sandbox.Outcome{To: sandbox.StateFailed, Failure: sandbox.Errorf(sandbox.Internal, "x", "x")}), sandbox.Conflict, "stale_generation")
	if got := e.get(sb.ID); got.State != sandbox.StateRunning || got.Operation != "" {
		e.Errorf("after both: %+v", got)
	}
}

func wrongEnd(e *env) {
	sb, op := e.create(nil)
	for _, to := range []sandbox.State{sandbox.StatePaused, sandbox.StateDeleted, sandbox.StateFailed, "wild"} {
		e.wants(e.s.FinishOperation(e.ctx, op.ID, sandbox.Outcome{To: to}), sandbox.Internal, "wrong_transition")
	}
	if got := e.get(sb.ID); got.State != sandbox.StateCreating {
		e.Errorf("it is %s", got.State)
	}
	// A delete can't fail, or the row would stay between states with nothing under way.
	del := e.begin(sb.ID, sandbox.VerbDelete)
	failure := sandbox.Errorf(sandbox.Internal, "x", "x")
	e.wants(e.s.FinishOperation(e.ctx, del.ID, sandbox.Outcome{To: sandbox.StateDeleting, Failure: failure}), sandbox.Internal, "wrong_transition")
	e.wants(e.s.FinishOperation(e.ctx, sandbox.NewID(sandbox.KindOperation), sandbox.Outcome{To: sandbox.StateRunning}), sandbox.NotFound, "operation_not_found")
}

func observed(e *env) {
	sb, op := e.create(nil)
	end := sandbox.End{Reason: sandbox.EndOOM, Detail: "d", At: e.clock}
	see := func(id string, epoch int64, want bool) {
		e.Helper()
		if got, err := e.s.Observed(e.ctx, id, epoch, end); err != nil || got != want {
			e.Fatalf("observed: %v %v, want %v", got, err, want)
		}
	}
	see(sb.ID, 0, false) // creating
	see(sb.ID, 1, false)
	e.finish(op)
	// What keeps its machine raises the generation and leaves the epoch.
	e.do(sb.ID, sandbox.VerbPause)
	e.do(sb.ID, sandbox.VerbResume)
	see(sb.ID, 3, false)
	see(sb.ID, 0, false)
	see(sandbox.NewID(sandbox.KindSandbox), 1, false)
	see(sb.ID, 1, true)
	see(sb.ID, 1, false)
	if got := e.get(sb.ID); got.State != sandbox.StateFailed || got.End == nil || got.End.Reason != sandbox.EndOOM || !got.End.At.Equal(end.At) {
		e.Errorf("%+v", got)
	}
	paused := e.running().ID
	e.do(paused, sandbox.VerbPause)
	see(paused, 1, true)
	gone := e.running().ID
	e.do(gone, sandbox.VerbSuspend)
	see(gone, 1, false)
}

func idempotency(e *env) {
	idem := sandbox.Idempotency{Key: "k", Request: [32]byte{1}}
	first, op, _, err := e.s.CreateSandbox(e.ctx, newSandbox(e.project, "base", e.tick()), e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, idem)
	e.must(err)
	again, op2, replayed, err := e.s.CreateSandbox(e.ctx, newSandbox(e.project, "base", e.tick()), e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, idem)
	e.must(err)
	if !replayed || again.ID != first.ID || op2.ID != op.ID {
		e.Errorf("replay %+v %+v %v", again, op2, replayed)
	}
	// The same key means another thing on another route, sandbox and project.
	_, del, replayed, err := e.s.BeginVerb(e.ctx, e.project, first.ID, sandbox.VerbDelete, e.bring(sandbox.VerbDelete), idem)
	if err != nil || replayed {
		e.Errorf("another route: %v %v", replayed, err)
	}
	_, del2, replayed, err := e.s.BeginVerb(e.ctx, e.project, first.ID, sandbox.VerbDelete, e.bring(sandbox.VerbDelete), idem)
	if err != nil || !replayed || del2.ID != del.ID {
		e.Errorf("a repeated delete: %+v %v %v", del2, replayed, err)
	}
	second := e.running()
	if _, _, replayed, err := e.s.BeginVerb(e.ctx, e.project, second.ID, sandbox.VerbDelete, e.bring(sandbox.VerbDelete), idem); err != nil || replayed {
		e.Errorf("another sandbox: %v %v", replayed, err)
	}
	other := e.newProject("other")
	e.put(other, digestA, "base:latest")
	if _, _, replayed, err := e.s.CreateSandbox(e.ctx, newSandbox(other, "base", e.tick()), e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, idem); err != nil || replayed {
		e.Errorf("another project: %v %v", replayed, err)
	}
	b1, _, err := e.s.CreateOperation(e.ctx, e.build(), idem)
	e.must(err)
	b2, replayed, err := e.s.CreateOperation(e.ctx, e.build(), idem)
	if err != nil || !replayed || b1.ID != b2.ID {
		e.Errorf("a repeated build: %v %v", replayed, err)
	}
}

func (e *env) build() sandbox.Operation {
	op := e.newOp(sandbox.VerbBuild)
	op.Project, op.Input = e.project, []byte(`{"a":1}`)
	return op
}

func idempotencyMismatch(e *env) {
	sb := newSandbox(e.project, "base", e.tick())
	_, _, _, err := e.s.CreateSandbox(e.ctx, sb, e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{Key: "k", Request: [32]byte{1}})
	e.must(err)
	_, _, _, err = e.s.CreateSandbox(e.ctx, newSandbox(e.project, "base", e.tick()), e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{Key: "k", Request: [32]byte{2}})
	e.wants(err, sandbox.Conflict, "idempotency_mismatch")
}

func idempotencyExpires(e *env) {
	idem := sandbox.Idempotency{Key: "k", Request: [32]byte{1}}
	_, _, _, err := e.s.CreateSandbox(e.ctx, newSandbox(e.project, "base", e.tick()), e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, idem)
	e.must(err)
	e.clock = e.clock.Add(25 * time.Hour)
	idem.Request = [32]byte{2}
	for i, want := range []bool{false, true} {
		_, _, replayed, err := e.s.CreateSandbox(e.ctx, newSandbox(e.project, "base", e.tick()), e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, idem)
		if err != nil || replayed != want {
			e.Errorf("call %d a day later: %v %v", i, replayed, err)
		}
	}
}

func duplicates(e *env) {
	const callers = 16
	ids := make([]string, callers)
	at := e.tick()
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			sb, op, _, err := e.s.CreateSandbox(e.ctx, newSandbox(e.project, "base", at), newOp(sandbox.VerbCreate, at), sandbox.Capacity{}, sandbox.Idempotency{Key: "k"})
			if err != nil {
				e.Error(err)
			}
			ids[i] = sb.ID + op.ID
		})
	}
	wg.Wait()
	if slices.Sort(ids); ids[0] != ids[callers-1] {
		e.Errorf("several rows: %v", ids)
	}
	list, _, err := e.s.Sandboxes(e.ctx, e.project, sandbox.SandboxFilter{}, sandbox.Page{})
	if err != nil || len(list) != 1 {
		e.Errorf("%d rows, %v", len(list), err)
	}
}

func cancelled(e *env) {
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	_, _, _, err := e.s.CreateSandbox(ctx, newSandbox(e.project, "base", e.tick()), e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{})
	if !sandbox.IsClass(err, sandbox.Unavailable) {
		e.Errorf("a write: %v", err)
	}
	if _, err := e.s.Unfinished(ctx); !sandbox.IsClass(err, sandbox.Unavailable) {
		e.Errorf("a read: %v", err)
	}
	if list, err := e.s.Unfinished(e.ctx); err != nil || len(list) != 0 {
		e.Errorf("it left %v %v", list, err)
	}
}
