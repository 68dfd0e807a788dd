package control_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

func ptr[T any](v T) *T { return &v }

// with is a running sandbox with a policy.
func (w *world) with(p control.PolicyPatch) sandbox.Sandbox {
	w.t.Helper()
	sb, op := w.create(control.CreateRequest{Policy: p})
	w.wants(w.ended(op), sandbox.OpSucceeded, "")
	return w.is(sb.ID, sandbox.StateRunning)
}

// still is a policy that leaves a sandbox alone.
var still = control.PolicyPatch{IdleAction: ptr(sandbox.ReactNone), Checkpoint: ptr(time.Duration(0))}

func idleFor(after time.Duration, action sandbox.Reaction) control.PolicyPatch {
	return control.PolicyPatch{IdleAfter: &after, IdleAction: &action, Checkpoint: ptr(time.Duration(0))}
}

// operations are a sandbox's, newest first.
func (w *world) operations(id string) []sandbox.Operation {
	w.t.Helper()
	ops, _, err := w.c.Operations(w.t.Context(), w.user, sandbox.OperationFilter{Sandbox: id}, sandbox.Page{})
	w.must(err)
	return ops
}

func TestIdle(t *testing.T) {
	bubble(t, func(w *world) {
		suspended := w.with(idleFor(time.Minute, sandbox.ReactSuspend))
		stopped := w.with(idleFor(time.Minute, sandbox.ReactStop))
		deleted := w.with(idleFor(time.Minute, sandbox.ReactDelete))
		none := w.with(still)
		paused := w.with(idleFor(time.Minute, sandbox.ReactSuspend))
		w.done(paused, sandbox.VerbPause)
		time.Sleep(59 * time.Second)
		for _, sb := range []sandbox.Sandbox{suspended, stopped, deleted, none} {
			w.is(sb.ID, sandbox.StateRunning)
		}
		time.Sleep(15 * time.Second)
		w.settled(suspended.ID, sandbox.StateSuspended)
		w.settled(stopped.ID, sandbox.StateStopped)
		w.settled(paused.ID, sandbox.StateSuspended)
		w.settled(none.ID, sandbox.StateRunning)
		if end := w.settled(deleted.ID, sandbox.StateDeleted).End; end == nil || end.Reason != sandbox.EndIdle {
			t.Errorf("end %+v", end)
		}
		if op := w.operations(suspended.ID)[0]; op.Key != sandbox.IdleKey || op.Verb != sandbox.VerbSuspend {
			t.Errorf("%+v", op)
		}
		if end := w.node.released[stopped.ID]; end.Reason != sandbox.EndStopped || end.Detail == "" {
			t.Errorf("the node heard of the end %+v", end)
		}
	})
}

func TestTouches(t *testing.T) {
	bubble(t, func(w *world) {
		touched, held, polled := w.with(idleFor(time.Minute, sandbox.ReactSuspend)), w.with(idleFor(time.Minute, sandbox.ReactSuspend)), w.with(idleFor(time.Minute, sandbox.ReactSuspend))
		release := w.c.Hold(held.ID)
		second := w.c.Hold(held.ID)
		for range 10 {
			time.Sleep(30 * time.Second)
			w.c.Touch(touched.ID)
			w.mustGet(polled.ID)
		}
		w.is(polled.ID, sandbox.StateSuspended)
		w.is(touched.ID, sandbox.StateRunning)
		w.is(held.ID, sandbox.StateRunning)
		release()
		release() // again: nothing
		time.Sleep(2 * time.Minute)
		w.is(held.ID, sandbox.StateRunning)
		w.is(touched.ID, sandbox.StateSuspended)
		second()
		time.Sleep(50 * time.Second)
		w.is(held.ID, sandbox.StateRunning)
		time.Sleep(30 * time.Second)
		w.is(held.ID, sandbox.StateSuspended)
	})
}

func (w *world) mustGet(id string) sandbox.Sandbox {
	w.t.Helper()
	sb, err := w.c.Get(w.t.Context(), w.user, id)
	w.must(err)
	return sb
}

// TestTouchesAreWrittenAtTheEnd: stopping loses none, and each ten seconds
// loses no more.
func TestTouchesAreWrittenAtTheEnd(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(still)
		time.Sleep(time.Hour)
		w.c.Touch(sb.ID)
		at := time.Now()
		w.stop()
		w.start()
		if got := w.mustGet(sb.ID).TouchedAt; !got.Equal(at) {
			t.Errorf("touched at %s, want %s", got, at)
		}
		time.Sleep(time.Minute)
		w.c.Touch(sb.ID)
		at = time.Now()
		time.Sleep(11 * time.Second)
		if got := w.mustGet(sb.ID).TouchedAt; !got.Equal(at) {
			t.Errorf("touched at %s, want %s", got, at)
		}
	})
}

// TestIdleFailureIsNotHammered: a suspend that fails is a touch.
func TestIdleFailureIsNotHammered(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(idleFor(10*time.Second, sandbox.ReactSuspend))
		w.node.fails("snapshot", errBroken)
		time.Sleep(10 * time.Minute)
		w.settled(sb.ID, sandbox.StateRunning)
		if n := len(w.operations(sb.ID)); n < 3 || n > 12 {
			t.Errorf("it was asked %d times in ten minutes", n)
		}
	})
}

func TestExpiry(t *testing.T) {
	bubble(t, func(w *world) {
		for action, state := range map[sandbox.Reaction]sandbox.State{sandbox.ReactSuspend: sandbox.StateSuspended, sandbox.ReactStop: sandbox.StateStopped} {
			p := still
			p.OnExpiry = &action
			sb, op := w.create(control.CreateRequest{TTL: time.Minute, Policy: p})
			w.wants(w.ended(op), sandbox.OpSucceeded, "")
			w.node.fails("snapshot", errBroken)
			time.Sleep(62 * time.Second)
			w.is(sb.ID, sandbox.StateRunning)
			if w.mustGet(sb.ID).ExpiresAt == nil {
				t.Error("a failed suspend took the TTL away")
			}
			w.node.heals()
			time.Sleep(62 * time.Second)
			if got := w.settled(sb.ID, state); got.ExpiresAt != nil {
				t.Errorf("it still expires at %s", got.ExpiresAt)
			}
			w.done(sb, sandbox.VerbWake)
			time.Sleep(5 * time.Minute)
			w.settled(sb.ID, sandbox.StateRunning)
			if n := len(w.operations(sb.ID)); n > 4 {
				t.Errorf("%d operations", n)
			}
		}
	})
}

func crashing() control.PolicyPatch {
	p := still
	p.OnCrash = ptr(sandbox.ReactStart)
	return p
}

func TestCrash(t *testing.T) {
	bubble(t, func(w *world) {
		sb, none := w.with(crashing()), w.with(still)
		bare := w.with(crashing()) // nothing was saved of it
		for _, one := range []sandbox.Sandbox{sb, none} {
			w.done(one, sandbox.VerbSnapshot)
		}
		saved := w.mustGet(sb.ID)
		time.Sleep(time.Second)
		for _, id := range []string{sb.ID, none.ID, bare.ID} {
			w.node.end(id, sandbox.EndCrashed)
		}
		time.Sleep(time.Second)
		w.settled(none.ID, sandbox.StateFailed)
		w.settled(bare.ID, sandbox.StateFailed)
		if end := w.mustGet(none.ID).End; end.Reason != sandbox.EndCrashed || !strings.Contains(end.Told(nil).Detail, "is lost") {
			t.Errorf("the end does not tell the loss: %+v", end)
		}
		got := w.settled(sb.ID, sandbox.StateRunning)
		if op := w.operations(sb.ID)[0]; op.Verb != sandbox.VerbStart || op.Key != sandbox.CrashKey || got.Epoch != op.Generation {
			t.Errorf("%+v", op)
		}
		src := w.node.last().Source
		if src == nil || src.Snapshot != saved.Image || src.Kind != sandbox.SnapshotMemory || src.Continue || src.Replace {
			t.Errorf("started from %+v", src)
		}
	})
}

// TestCrashLoop: again and again, but not more often than the bound.
func TestCrashLoop(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(crashing())
		w.done(sb, sandbox.VerbSnapshot)
		start := time.Now()
		for time.Since(start) < 30*time.Minute {
			if w.mustGet(sb.ID).State == sandbox.StateRunning {
				w.node.end(sb.ID, sandbox.EndCrashed)
			}
			time.Sleep(time.Second)
		}
		var starts []time.Time
		for _, op := range w.operations(sb.ID) {
			if op.Key == sandbox.CrashKey {
				starts = append(starts, op.CreatedAt)
			}
		}
		if len(starts) < 7 || len(starts) > 10 {
			t.Errorf("%d starts in half an hour", len(starts))
		}
		for i := range starts[:len(starts)-3] {
			if d := starts[i].Sub(starts[i+3]); d < 10*time.Minute {
				t.Errorf("four starts within %s", d)
			}
		}
	})
}

func TestCrashGivesUp(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(crashing())
		w.done(sb, sandbox.VerbSnapshot)
		w.node.fails("create", sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_corrupt", "the snapshot is corrupt"))
		time.Sleep(time.Second)
		w.node.end(sb.ID, sandbox.EndCrashed)
		time.Sleep(30 * time.Minute)
		if n := len(w.operations(sb.ID)); n != 3 {
			t.Errorf("%d operations, want create, snapshot and one start", n)
		}
	})
}

// TestCrashWhileDown: the host went down with the machine, and control with it.
func TestCrashWhileDown(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(crashing())
		w.done(sb, sandbox.VerbSnapshot)
		w.stop()
		w.node.set(func(n *fakeNode) { delete(n.machines, sb.ID) })
		w.start()
		time.Sleep(time.Second)
		w.settled(sb.ID, sandbox.StateRunning)
	})
}

func TestPolicyIsValidated(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.running()
		if sb.Policy != sandbox.DefaultPolicy {
			t.Errorf("policy %+v", sb.Policy)
		}
		for _, bad := range []control.PolicyPatch{
			{IdleAfter: ptr(time.Second)},
			{IdleAfter: ptr(400 * 24 * time.Hour)},
			{IdleAction: ptr(sandbox.ReactStart)},
			{IdleAction: ptr(sandbox.Reaction(""))},
			{OnExpiry: ptr(sandbox.ReactNone)},
			{OnExpiry: ptr(sandbox.ReactStart)},
			{OnCrash: ptr(sandbox.ReactDelete)},
			{Checkpoint: ptr(time.Millisecond)},
			{Checkpoint: ptr(-time.Second)},
			{Checkpoint: ptr(30 * 24 * time.Hour)},
		} {
			if _, err := w.c.SetPolicy(w.t.Context(), w.user, sb.ID, bad); !sandbox.IsClass(err, sandbox.Invalid) {
				t.Errorf("%+v: %v", bad, err)
			}
			_, _, _, err := w.c.CreateSandbox(w.t.Context(), w.user, control.CreateRequest{Template: "base", Policy: bad}, sandbox.Idempotency{})
			if !sandbox.IsClass(err, sandbox.Invalid) {
				t.Errorf("create %+v: %v", bad, err)
			}
		}
		got, err := w.c.SetPolicy(w.t.Context(), w.user, sb.ID, control.PolicyPatch{IdleAfter: ptr(time.Hour), WakeOnAccess: ptr(true)})
		want := sandbox.DefaultPolicy
		want.Idle.After, want.WakeOnAccess = time.Hour, true
		if err != nil || got.Policy != want {
			t.Errorf("%+v %v", got.Policy, err)
		}
		if _, err := w.c.SetPolicy(w.t.Context(), w.reader, sb.ID, still); !sandbox.IsClass(err, sandbox.Denied) {
			t.Errorf("a reader: %v", err)
		}
	})
}

// wakes is a sandbox that may be woken.
func wakes() control.PolicyPatch {
	p := still
	p.WakeOnAccess = ptr(true)
	return p
}

func TestAccess(t *testing.T) {
	bubble(t, func(w *world) {
		for _, verb := range []sandbox.Verb{sandbox.VerbPause, sandbox.VerbSuspend, sandbox.VerbStop} {
			sb := w.with(wakes())
			w.done(sb, verb)
			time.Sleep(time.Millisecond)
			w.must(w.c.Access(w.t.Context(), w.user.Project, sb.ID))
			w.settled(sb.ID, sandbox.StateRunning)
			if op := w.operations(sb.ID)[0]; op.Verb != sandbox.VerbWake || op.Key != sandbox.AccessKey {
				t.Errorf("%+v", op)
			}
		}
		asleep := w.with(still)
		w.done(asleep, sandbox.VerbSuspend)
		w.must(w.c.Access(w.t.Context(), w.user.Project, asleep.ID))
		w.settled(asleep.ID, sandbox.StateSuspended)
		if err := w.c.Access(w.t.Context(), sandbox.NewID(sandbox.KindProject), asleep.ID); !sandbox.IsClass(err, sandbox.NotFound) {
			t.Errorf("another project: %v", err)
		}
		failed := w.with(wakes())
		w.done(failed, sandbox.VerbSnapshot)
		w.node.end(failed.ID, sandbox.EndOOM)
		synctest.Wait()
		w.must(w.c.Access(w.t.Context(), w.user.Project, failed.ID)) // who asks finds that it failed
		w.settled(failed.ID, sandbox.StateFailed)
	})
}

// TestAccessesRace: many at once make one wake, while it is still going to sleep.
func TestAccessesRace(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(wakes())
		w.node.set(func(n *fakeNode) {
			n.before = func(_ context.Context, call, _ string) error {
				if call == "snapshot" || call == "create" {
					time.Sleep(3 * time.Second)
				}
				return nil
			}
		})
		op, err := w.do(sb, sandbox.VerbSuspend)
		w.must(err)
		start := time.Now()
		errs := make(chan error)
		for range 20 {
			go func() { errs <- w.c.Access(w.t.Context(), w.user.Project, sb.ID) }()
		}
		for range 20 {
			w.must(<-errs)
		}
		if d := time.Since(start); d != 6*time.Second {
			t.Errorf("it took %s", d)
		}
		w.wants(w.op(op.ID), sandbox.OpSucceeded, "")
		if n := len(w.operations(sb.ID)); n != 3 {
			t.Errorf("%d operations, want create, suspend and wake", n)
		}
	})
}

func TestAccessFails(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(wakes())
		w.done(sb, sandbox.VerbSuspend)
		w.node.fails("create", errBroken)
		if err := w.c.Access(w.t.Context(), w.user.Project, sb.ID); sandbox.AsError(err) == nil || sandbox.AsError(err).Code != "engine_broken" {
			t.Errorf("%v", err)
		}
		w.settled(sb.ID, sandbox.StateSuspended)
		w.node.blocks("create")
		start := time.Now()
		if err := w.c.Access(w.t.Context(), w.user.Project, sb.ID); sandbox.AsError(err) == nil || sandbox.AsError(err).Code != "wake_slow" {
			t.Errorf("%v", err)
		}
		if d := time.Since(start); d < 2*time.Minute || d > 3*time.Minute {
			t.Errorf("it waited for %s", d)
		}
		w.node.heals()
	})
}
