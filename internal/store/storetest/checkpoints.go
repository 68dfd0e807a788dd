package storetest

import (
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// checkpoint begins one.
func (e *env) checkpoint(id string) string {
	e.Helper()
	n := sandbox.Snapshot{ID: sandbox.NewID(sandbox.KindSnapshot), Kind: sandbox.SnapshotDisk, CreatedAt: e.tick()}
	e.must(e.s.BeginCheckpoint(e.ctx, id, e.get(id).Generation, n))
	return n.ID
}

func checkpoints(e *env) {
	a := e.running()
	end := func(id string, epoch int64, status *sandbox.SnapshotStatus, failure *sandbox.Error, want sandbox.SnapshotState) {
		e.Helper()
		e.must(e.s.FinishCheckpoint(e.ctx, id, epoch, status, failure))
		if got := e.snapshot(id); got.State != want {
			e.Errorf("the checkpoint is %s, want %s", got.State, want)
		}
	}
	first := e.checkpoint(a.ID)
	if n := e.snapshot(first); n.Purpose != sandbox.PurposeCheckpoint || n.State != sandbox.SnapshotCreating || n.Digest != digestA || n.Sandbox != a.ID {
		e.Errorf("%+v", n)
	}
	at := e.tick()
	end(first, a.Epoch, taken(first, at), nil, sandbox.SnapshotReady)
	if got := e.get(a.ID); got.Image != first || !got.ImageAt.Equal(at) || got.Generation != a.Generation || got.State != sandbox.StateRunning {
		e.Errorf("%+v", got)
	}
	end(first, a.Epoch, nil, sandbox.Errorf(sandbox.Internal, "late", "late"), sandbox.SnapshotReady) // it has ended
	failing := e.checkpoint(a.ID)
	end(failing, a.Epoch, nil, sandbox.Errorf(sandbox.Unavailable, "superseded", "x"), sandbox.SnapshotFailed)
	unchanged := e.checkpoint(a.ID)
	end(unchanged, a.Epoch, &sandbox.SnapshotStatus{Unchanged: true}, nil, sandbox.SnapshotFailed)
	old := e.checkpoint(a.ID)
	end(old, a.Epoch+1, taken(old, e.tick()), nil, sandbox.SnapshotFailed)
	if got := e.get(a.ID); got.Image != first {
		e.Errorf("%+v", got)
	}
	// What came between and holds more is not put back.
	for _, verb := range []sandbox.Verb{sandbox.VerbSnapshot, sandbox.VerbSuspend} {
		late := e.checkpoint(a.ID)
		image := e.do(a.ID, verb).Snapshot
		end(late, a.Epoch, taken(late, e.tick()), nil, sandbox.SnapshotFailed)
		if got := e.get(a.ID); got.Image != image {
			e.Errorf("after %s: %+v", verb, got)
		}
	}
	_, err := e.s.Snapshot(e.ctx, e.project, first)
	e.must(err)
	e.beginCheckpointRefused(a)
	// A crash between leaves the checkpoint, which is newer than what there was.
	b := e.running()
	crashed := e.checkpoint(b.ID)
	if ok, err := e.s.Observed(e.ctx, b.ID, b.Epoch, sandbox.End{Reason: sandbox.EndKilled, At: e.tick()}); err != nil || !ok {
		e.Fatalf("%v %v", ok, err)
	}
	end(crashed, b.Epoch, taken(crashed, e.tick()), nil, sandbox.SnapshotReady)
	left := e.checkpoint(b.ID) // of the disk that the machine has left
	end(left, b.Epoch, taken(left, e.tick()), nil, sandbox.SnapshotReady)
	if got := e.get(b.ID); got.Image != left || got.State != sandbox.StateFailed {
		e.Errorf("a failed sandbox whose disk was saved: %+v", got)
	}
	// One that ends when the sandbox starts from its image comes too late.
	late := e.checkpoint(b.ID)
	start := e.begin(b.ID, sandbox.VerbStart)
	end(late, b.Epoch, taken(late, e.tick()), nil, sandbox.SnapshotFailed)
	if got := e.get(b.ID); got.Image != left {
		e.Errorf("the image that it starts from was replaced: %+v", got)
	}
	e.finish(start)
	gone := e.checkpoint(b.ID)
	e.deleted(b.ID)
	end(gone, e.get(b.ID).Epoch, taken(gone, e.tick()), nil, sandbox.SnapshotFailed)
	e.must(e.s.Prune(e.ctx, e.tick().Add(time.Hour), time.Time{}.Add(1), time.Time{}.Add(1)))
}

// beginCheckpointRefused: a is suspended.
func (e *env) beginCheckpointRefused(a sandbox.Sandbox) {
	e.Helper()
	n := sandbox.Snapshot{ID: sandbox.NewID(sandbox.KindSnapshot), Kind: sandbox.SnapshotDisk, CreatedAt: e.tick()}
	e.wants(e.s.BeginCheckpoint(e.ctx, a.ID, e.get(a.ID).Generation, n), sandbox.Conflict, "stale_generation")
	e.do(a.ID, sandbox.VerbRestore)
	e.wants(e.s.BeginCheckpoint(e.ctx, a.ID, a.Generation, n), sandbox.Conflict, "stale_generation")
	e.wants(e.s.BeginCheckpoint(e.ctx, sandbox.NewID(sandbox.KindSandbox), 1, n), sandbox.NotFound, "sandbox_not_found")
	e.wants(e.s.FinishCheckpoint(e.ctx, n.ID, 1, nil, nil), sandbox.NotFound, "snapshot_not_found")
}

func touches(e *env) {
	sb := e.running()
	touched := e.get(sb.ID).TouchedAt
	at := e.clock.Add(time.Hour)
	e.must(e.s.Touch(e.ctx, map[string]time.Time{sb.ID: at, sandbox.NewID(sandbox.KindSandbox): at}))
	if got := e.get(sb.ID); !got.TouchedAt.Equal(at) || !got.UpdatedAt.Equal(sb.UpdatedAt) || touched.After(at) {
		e.Errorf("%+v", got)
	}
	e.must(e.s.Touch(e.ctx, map[string]time.Time{sb.ID: touched}))
	e.must(e.s.Touch(e.ctx, nil))
	e.do(sb.ID, sandbox.VerbPause) // earlier than the touch
	if got := e.get(sb.ID); !got.TouchedAt.Equal(at) {
		e.Errorf("it went back to %s", got.TouchedAt)
	}
	e.clock = at.Add(time.Hour)
	op := e.begin(sb.ID, sandbox.VerbResume)
	if got := e.get(sb.ID); !got.TouchedAt.Equal(op.CreatedAt) {
		e.Errorf("a verb is a touch: %+v", got)
	}
}

func idle(e *env) {
	after := sandbox.DefaultPolicy.Idle.After
	running, paused, none, suspended, busy := e.running(), e.running(), e.running(), e.running(), e.running()
	e.do(paused.ID, sandbox.VerbPause)
	e.do(suspended.ID, sandbox.VerbSuspend)
	p := sandbox.DefaultPolicy
	p.Idle.Action = sandbox.ReactNone
	got, err := e.s.SetPolicy(e.ctx, e.project, none.ID, p)
	if err != nil || got.Policy != p || got.Generation != none.Generation {
		e.Errorf("%+v %v", got, err)
	}
	p = sandbox.DefaultPolicy
	p.Idle = sandbox.IdlePolicy{After: after * 2, Action: sandbox.ReactDelete}
	_, err = e.s.SetPolicy(e.ctx, e.project, busy.ID, p)
	e.must(err)
	e.begin(busy.ID, sandbox.VerbPause)
	first := e.get(running.ID).TouchedAt.Add(after)
	found := func(at time.Time, limit int, want ...string) {
		e.Helper()
		list, err := e.s.IdleSandboxes(e.ctx, at, limit)
		e.must(err)
		var got []string
		for _, sb := range list {
			got = append(got, sb.ID)
		}
		if len(got) != len(want) || len(got) > 0 && got[0] != want[0] {
			e.Errorf("idle at %s: %v, want %v", at, got, want)
		}
	}
	found(first.Add(-1), 10)
	found(first, 10, running.ID)
	found(first.Add(time.Hour), 10, running.ID, paused.ID)
	found(first.Add(time.Hour), 1, running.ID)
	e.finish(e.operationOf(busy.ID))
	found(first.Add(time.Hour), 10, running.ID, paused.ID)
	found(first.Add(2*after), 10, running.ID, paused.ID, busy.ID)
	other := e.newProject("other")
	_, err = e.s.SetPolicy(e.ctx, other, none.ID, p)
	e.wants(err, sandbox.NotFound, "sandbox_not_found")
	e.begin(none.ID, sandbox.VerbDelete)
	_, err = e.s.SetPolicy(e.ctx, e.project, none.ID, p)
	e.wants(err, sandbox.FailedPrecondition, "wrong_state")
}
