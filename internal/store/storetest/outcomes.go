package storetest

import (
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

func outcomes(e *env) {
	sb, op := e.create(nil)
	o := well(op, e.tick())
	o.Driver = "gvisor"
	e.must(e.s.FinishOperation(e.ctx, op.ID, o))
	if got := e.get(sb.ID); got.Driver != "gvisor" || got.Epoch != 1 || got.Image != "" || got.ImageAt != nil || got.Operation != "" {
		e.Errorf("created: %+v", got)
	}
	stop := e.begin(sb.ID, sandbox.VerbStop)
	at := e.tick()
	o = well(stop, at)
	o.End = &sandbox.End{Reason: sandbox.EndStopped, At: at}
	e.must(e.s.FinishOperation(e.ctx, stop.ID, o))
	got := e.get(sb.ID)
	if got.State != sandbox.StateStopped || got.Image != stop.Snapshot || got.ImageAt == nil || !got.ImageAt.Equal(at) || got.Driver != "gvisor" {
		e.Errorf("stopped: %+v", got)
	}
	if got.Epoch != 1 || got.End == nil || got.End.Reason != sandbox.EndStopped {
		e.Errorf("stopped: %+v", got)
	}
	start := e.do(sb.ID, sandbox.VerbStart)
	if got := e.get(sb.ID); got.Epoch != start.Generation || got.Image != stop.Snapshot {
		e.Errorf("started: %+v", got)
	}
	// Image, Base and ImageAt as they are told; nil leaves them.
	snap := e.begin(sb.ID, sandbox.VerbSnapshot)
	o = well(snap, e.tick())
	earlier := at.Add(-time.Minute)
	o.ImageAt = &earlier
	e.must(e.s.FinishOperation(e.ctx, snap.ID, o))
	e.do(sb.ID, sandbox.VerbPause)
	if got := e.get(sb.ID); got.Image != snap.Snapshot || got.Base != snap.Snapshot || !got.ImageAt.Equal(earlier) {
		e.Errorf("after a snapshot: %+v", got)
	}
	none := ""
	op = e.begin(sb.ID, sandbox.VerbResume)
	o = well(op, e.tick())
	o.Image = &none
	e.must(e.s.FinishOperation(e.ctx, op.ID, o))
	if got := e.get(sb.ID); got.Image != "" || got.ImageAt != nil {
		e.Errorf("no image: %+v", got)
	}
	e.do(sb.ID, sandbox.VerbSuspend)
	e.deleted(sb.ID)
	if got := e.get(sb.ID); got.Image != "" || got.ImageAt != nil || got.End.Reason != sandbox.EndDeleted {
		e.Errorf("a deleted one: %+v", got)
	}
}

// wrongOutcome: what would leave rows that contradict each other changes nothing.
func wrongOutcome(e *env) {
	sb := e.running()
	op := e.begin(sb.ID, sandbox.VerbSuspend)
	refuse := func(what string, change func(*sandbox.Outcome)) {
		e.Helper()
		o := well(op, e.tick())
		change(&o)
		err := e.s.FinishOperation(e.ctx, op.ID, o)
		if err == nil {
			e.Fatalf("%s was taken", what)
		}
		e.wants(err, sandbox.Internal, "wrong_outcome")
	}
	refuse("a success without its snapshot", func(o *sandbox.Outcome) { o.Snapshot = nil })
	refuse("another's snapshot", func(o *sandbox.Outcome) { o.Snapshot.Snapshot = sandbox.NewID(sandbox.KindSnapshot) })
	refuse("no image", func(o *sandbox.Outcome) { o.Image = nil })
	nothing := sandbox.NewID(sandbox.KindSnapshot)
	refuse("an image that isn't there", func(o *sandbox.Outcome) { o.Image = &nothing })
	if got := e.get(sb.ID); got.State != sandbox.StateSuspending || got.Operation != op.ID || e.snapshot(op.Snapshot).State != sandbox.SnapshotCreating {
		e.Errorf("it changed %+v", got)
	}
	e.finish(op)
	op = e.begin(sb.ID, sandbox.VerbRestore)
	refuse("a snapshot that nobody took", func(o *sandbox.Outcome) { o.Snapshot = taken(nothing, e.clock) })
}

func lost(e *env) {
	for _, verb := range []sandbox.Verb{sandbox.VerbPause, sandbox.VerbSuspend, sandbox.VerbSnapshot, sandbox.VerbFork} {
		sb := e.running()
		op := e.begin(sb.ID, verb)
		e.wants(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateFailed)), sandbox.Internal, "wrong_transition")
		o := failed(sandbox.StateFailed)
		o.End = &sandbox.End{Reason: sandbox.EndCrashed, At: e.tick()}
		e.must(e.s.FinishOperation(e.ctx, op.ID, o))
		if got := e.get(sb.ID); got.State != sandbox.StateFailed || got.End == nil || got.End.Reason != sandbox.EndCrashed {
			e.Errorf("%s: %+v", verb, got)
		}
		if op.Snapshot != "" && e.snapshot(op.Snapshot).State != sandbox.SnapshotFailed {
			e.Errorf("%s left its snapshot", verb)
		}
	}
	// A sandbox that had no machine lost none.
	id := e.running().ID
	e.do(id, sandbox.VerbSuspend)
	op := e.begin(id, sandbox.VerbRestore)
	o := failed(sandbox.StateFailed)
	o.End = &sandbox.End{Reason: sandbox.EndCrashed, At: e.tick()}
	e.wants(e.s.FinishOperation(e.ctx, op.ID, o), sandbox.Internal, "wrong_transition")
	e.must(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateSuspended)))
	if got := e.get(id); got.Image == "" || e.snapshot(got.Image).State != sandbox.SnapshotReady {
		e.Errorf("a failed restore took the image: %+v", got)
	}
}

// wayBack: where several states lead through one, each has its own ends.
func wayBack(e *env) {
	for _, verb := range []sandbox.Verb{sandbox.VerbSnapshot, sandbox.VerbSuspend, sandbox.VerbStop} {
		id := e.running().ID
		e.do(id, sandbox.VerbPause)
		op := e.begin(id, verb)
		if got := e.operationOf(id); op.From != sandbox.StatePaused || got.From != sandbox.StatePaused {
			e.Errorf("%s began from %q and %q", verb, op.From, got.From)
		}
		e.wants(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateRunning)), sandbox.Internal, "wrong_transition")
		e.must(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StatePaused)))
	}
	id := e.running().ID
	snap := e.do(id, sandbox.VerbSnapshot).Snapshot
	e.do(id, sandbox.VerbSuspend)
	op := e.rollback(id, snap)
	o := failed(sandbox.StateFailed)
	o.End = &sandbox.End{Reason: sandbox.EndCrashed, At: e.tick()}
	e.wants(e.s.FinishOperation(e.ctx, op.ID, o), sandbox.Internal, "wrong_transition")
	e.must(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateSuspended)))
}

func wrongBegin(e *env) {
	id := e.running().ID
	ask := func(verb sandbox.Verb, change func(*sandbox.Begin)) error {
		b := e.bring(verb)
		change(&b)
		_, _, _, err := e.s.BeginVerb(e.ctx, e.project, id, verb, b, sandbox.Idempotency{})
		return err
	}
	for _, verb := range []sandbox.Verb{sandbox.VerbSuspend, sandbox.VerbStop, sandbox.VerbSnapshot, sandbox.VerbFork} {
		e.wants(ask(verb, func(b *sandbox.Begin) { b.Snapshot = nil }), sandbox.Internal, "wrong_begin")
		e.wants(ask(verb, func(b *sandbox.Begin) { b.To = "x" }), sandbox.Internal, "wrong_begin")
	}
	e.wants(ask(sandbox.VerbPause, func(b *sandbox.Begin) { b.Snapshot = e.bring(sandbox.VerbStop).Snapshot }), sandbox.Internal, "wrong_begin")
	e.wants(ask(sandbox.VerbPause, func(b *sandbox.Begin) { b.Children = children(1, e.clock) }), sandbox.Internal, "wrong_begin")
	for _, n := range []int{0, sandbox.MaxChildren + 1} {
		e.wants(ask(sandbox.VerbFork, func(b *sandbox.Begin) { b.Children = children(n, e.clock) }), sandbox.Invalid, "wrong_count")
	}
	if got := e.get(id); got.State != sandbox.StateRunning || got.Generation != 1 {
		e.Errorf("it changed %+v", got)
	}
}

func guards(e *env) {
	ask := func(id string, verb sandbox.Verb) error {
		_, _, _, err := e.s.BeginVerb(e.ctx, e.project, id, verb, e.bring(verb), sandbox.Idempotency{})
		return err
	}
	// A crash without an image can't be started again; with one it can.
	id := e.running().ID
	crash := func() {
		e.Helper()
		ok, err := e.s.Observed(e.ctx, id, e.get(id).Epoch, sandbox.End{Reason: sandbox.EndKilled, At: e.tick()})
		if err != nil || !ok {
			e.Fatalf("%v %v", ok, err)
		}
	}
	crash()
	e.wants(ask(id, sandbox.VerbStart), sandbox.FailedPrecondition, "has_disk")
	id = e.running().ID
	e.do(id, sandbox.VerbSnapshot)
	crash()
	e.do(id, sandbox.VerbStart)
	if got := e.get(id); got.State != sandbox.StateRunning || got.End != nil {
		e.Errorf("%+v", got)
	}
	// A disk is no memory: it can't be restored.
	op := e.begin(id, sandbox.VerbSuspend)
	disk := e.running().ID
	stop := e.do(disk, sandbox.VerbStop)
	o := well(op, e.tick())
	o.Image = &stop.Snapshot
	e.must(e.s.FinishOperation(e.ctx, op.ID, o))
	e.wants(ask(id, sandbox.VerbRestore), sandbox.FailedPrecondition, "has_suspended_as")
	e.wants(ask(id, sandbox.VerbWake), sandbox.FailedPrecondition, "has_suspended_as")
	e.must(ask(disk, sandbox.VerbWake))
}

// past walks a family: what a sandbox or an ancestor of it was can be gone back to.
func past(e *env) {
	ask := func(id, to string) error {
		b := e.bring(sandbox.VerbRollback)
		b.To = to
		_, op, _, err := e.s.BeginVerb(e.ctx, e.project, id, sandbox.VerbRollback, b, sandbox.Idempotency{})
		if err == nil {
			if op.Snapshot != to {
				e.Errorf("the operation goes back to %q, not %q", op.Snapshot, to)
			}
			e.finish(op)
		}
		return err
	}
	a := e.running().ID
	first := e.do(a, sandbox.VerbSnapshot).Snapshot
	second := e.do(a, sandbox.VerbSnapshot).Snapshot
	e.must(ask(a, first))
	if got := e.get(a); got.Base != first || got.Image != first || got.State != sandbox.StateRunning || got.Epoch != got.Generation {
		e.Errorf("rolled back: %+v", got)
	}
	e.must(ask(a, second)) // forward on the abandoned timeline is this sandbox's too
	fork := e.do(a, sandbox.VerbFork)
	child := fork.Children[0]
	e.finish(e.operationOf(child))
	e.must(ask(child, first))
	e.must(ask(child, fork.Snapshot))
	own := e.do(child, sandbox.VerbSnapshot).Snapshot
	e.wants(ask(a, own), sandbox.FailedPrecondition, "has_snapshot")
	from := e.createFrom(own)
	e.finish(e.operationOf(from))
	e.must(ask(from, own))
	e.must(ask(from, first))
	stranger := e.running().ID
	e.wants(ask(stranger, first), sandbox.FailedPrecondition, "has_snapshot")
	e.onlyWay(a, second, ask)
	e.wants(ask(a, sandbox.NewID(sandbox.KindSnapshot)), sandbox.NotFound, "snapshot_not_found")
	// One that is not ready.
	b := e.bring(sandbox.VerbSnapshot)
	op := e.beginWith(a, sandbox.VerbSnapshot, b)
	e.must(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateRunning)))
	e.wants(ask(a, b.Snapshot.ID), sandbox.FailedPrecondition, "snapshot_not_ready")
	// A rollback that failed leaves all as it was.
	before := e.get(a)
	op = e.rollback(a, first)
	e.must(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateRunning)))
	if got := e.get(a); got.Image != before.Image || got.Base != before.Base || got.Epoch != before.Epoch || e.snapshot(first).State != sandbox.SnapshotReady {
		e.Errorf("a failed rollback made %+v of %+v", got, before)
	}
}

// onlyWay: each of the links to the past does without the others. off is a
// snapshot of a that is not on the way from its base to the template.
func (e *env) onlyWay(a, off string, ask func(id, to string) error) {
	e.Helper()
	on := e.get(a).Base
	if on == off {
		on = e.snapshot(off).Parent
		e.must(ask(a, on))
	}
	// From a snapshot: no parent, and off is not on its way.
	from := e.createFrom(on)
	e.finish(e.operationOf(from))
	e.must(ask(from, off))
	// From a fork whose snapshot is gone.
	e.must(ask(a, on))
	fork := e.do(a, sandbox.VerbFork)
	child := fork.Children[0]
	e.finish(e.operationOf(child))
	e.do(child, sandbox.VerbStop)
	list, err := e.s.GarbageSnapshots(e.ctx, 100)
	e.must(err)
	for _, n := range list {
		e.must(e.s.RemoveSnapshot(e.ctx, n.ID))
	}
	_, err = e.s.Snapshot(e.ctx, e.project, fork.Snapshot)
	e.wants(err, sandbox.NotFound, "snapshot_not_found")
	e.must(ask(child, off))
	// From a grandchild whose forebears' rows are gone.
	e.must(ask(child, on))
	fork = e.do(child, sandbox.VerbFork)
	e.finish(e.operationOf(fork.Children[0]))
	e.do(fork.Children[0], sandbox.VerbSnapshot)
	e.deleted(child)
	long := e.clock.Add(-time.Hour * 1000)
	e.must(e.s.Prune(e.ctx, e.tick().Add(time.Hour), long, long))
	e.must(ask(fork.Children[0], on))
	e.wants(ask(fork.Children[0], off), sandbox.FailedPrecondition, "has_snapshot") // nothing tells any more
}

// operationOf is what is under way for a sandbox.
func (e *env) operationOf(id string) sandbox.Operation {
	e.Helper()
	op, err := e.s.Operation(e.ctx, e.project, e.get(id).Operation)
	e.must(err)
	return op
}

// createFrom begins a sandbox from a snapshot.
func (e *env) createFrom(snapshot string) string {
	e.Helper()
	sb := newSandbox(e.project, "", e.tick())
	sb.Source = snapshot
	sb, _, _, err := e.s.CreateSandbox(e.ctx, sb, e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{})
	e.must(err)
	return sb.ID
}
