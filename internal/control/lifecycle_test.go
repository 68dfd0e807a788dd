package control_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

var errBusy = sandbox.Errorf(sandbox.Unavailable, "node_busy", "the node is busy")

func TestCreateAndDelete(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.running()
		if sb.Driver != "fake" || sb.Digest != digestA || sb.Operation != "" {
			t.Errorf("row %+v", sb)
		}
		req := w.node.created()[0]
		if req.Config.User != "user" || req.Resources != sandbox.DefaultResources || strings.Contains(req.Hostname, "_") || req.Generation != 1 {
			t.Errorf("request %+v", req)
		}
		op := w.ended(w.del(sb.ID))
		w.wants(op, sandbox.OpSucceeded, "")
		if op.Key != w.user.KeyID {
			t.Errorf("the acting key is %q", op.Key)
		}
		gone := w.is(sb.ID, sandbox.StateDeleted)
		if gone.End == nil || gone.End.Reason != sandbox.EndDeleted || w.node.has(sb.ID) {
			t.Errorf("end %+v", gone.End)
		}
		if _, _, _, err := w.c.Delete(w.t.Context(), w.user, sb.ID, sandbox.Idempotency{}); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
			t.Errorf("delete of a deleted one: %v", err)
		}
		list, _, err := w.c.List(w.t.Context(), w.user, sandbox.SandboxFilter{}, sandbox.Page{})
		if err != nil || len(list) != 0 {
			t.Errorf("a deleted one is listed: %v %v", list, err)
		}
	})
}

func TestCreateFails(t *testing.T) {
	bubble(t, func(w *world) {
		w.node.create = func(context.Context, sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			return sandbox.MachineStatus{}, sandbox.Errorf(sandbox.Internal, "engine_broken", "the engine is broken")
		}
		sb, op := w.create(control.CreateRequest{})
		w.wants(w.ended(op), sandbox.OpFailed, "engine_broken")
		if end := w.is(sb.ID, sandbox.StateFailed).End; end == nil || end.Reason != sandbox.EndCreateFailed {
			t.Errorf("end %+v", end)
		}
		if n := len(w.node.created()); n != 1 {
			t.Errorf("a final fault was tried %d times", n)
		}
		w.wants(w.ended(w.del(sb.ID)), sandbox.OpSucceeded, "")
		if end := w.is(sb.ID, sandbox.StateDeleted).End; end.Reason != sandbox.EndCreateFailed {
			t.Errorf("deleting hides why it ended: %+v", end)
		}
	})
}

func TestCreateTriesAgain(t *testing.T) {
	bubble(t, func(w *world) {
		n := 0
		w.node.create = func(context.Context, sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			if n++; n <= 3 {
				return sandbox.MachineStatus{}, errBusy
			}
			return sandbox.MachineStatus{}, nil
		}
		sb := w.running()
		for _, req := range w.node.created() {
			if req.Sandbox != sb.ID || req.Generation != 1 {
				t.Errorf("tried again as %+v", req)
			}
		}
	})
}

func TestTransientFaultsEnd(t *testing.T) {
	bubble(t, func(w *world) {
		w.node.create = func(context.Context, sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			return sandbox.MachineStatus{}, errBusy
		}
		_, op := w.create(control.CreateRequest{})
		w.wants(w.ended(op), sandbox.OpFailed, "node_busy")
	})
}

// TestNoCapacityIsDelay: far longer than a fault is tried.
func TestNoCapacityIsDelay(t *testing.T) {
	bubble(t, func(w *world) {
		full := true
		w.node.create = func(context.Context, sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			w.node.mu.Lock()
			defer w.node.mu.Unlock()
			if full {
				return sandbox.MachineStatus{}, sandbox.Errorf(sandbox.NoCapacity, "memory_full", "the host has no memory left")
			}
			return sandbox.MachineStatus{}, nil
		}
		sb, op := w.create(control.CreateRequest{})
		time.Sleep(10 * time.Minute)
		got := w.op(op.ID)
		if got.State != sandbox.OpRunning || got.Delay == nil || !strings.Contains(got.Delay.Reason, "no memory") || got.Error != nil {
			t.Errorf("it is %+v", got)
		}
		w.node.set(func(*fakeNode) { full = false })
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
		if w.op(op.ID).Delay != nil {
			t.Error("an ended operation is delayed")
		}
		w.is(sb.ID, sandbox.StateRunning)
	})
}

func TestNoCapacityEndsAtItsBound(t *testing.T) {
	bubble(t, func(w *world) {
		w.node.create = func(context.Context, sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			return sandbox.MachineStatus{}, sandbox.Errorf(sandbox.NoCapacity, "memory_full", "the host has no memory left")
		}
		_, op := w.create(control.CreateRequest{})
		got := w.ended(op)
		w.wants(got, sandbox.OpFailed, "memory_full")
		if d := got.EndedAt.Sub(got.CreatedAt); d > 5*time.Minute || d < 4*time.Minute {
			t.Errorf("it was delayed for %s", d)
		}
	}, func(o *control.Options) { o.CreateWait = 5 * time.Minute })
}

func TestQueueAtTheNodeIsDelay(t *testing.T) {
	bubble(t, func(w *world) {
		gate := make(chan struct{})
		w.node.create = func(context.Context, sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			<-gate
			return sandbox.MachineStatus{}, nil
		}
		w.node.set(func(n *fakeNode) { n.waiting = 3 })
		_, op := w.create(control.CreateRequest{})
		time.Sleep(1500 * time.Millisecond)
		if got := w.op(op.ID); got.Delay == nil || !strings.Contains(got.Delay.Reason, "3 wait") || got.StartedAt == nil {
			t.Errorf("queued: %+v", got)
		}
		w.node.set(func(n *fakeNode) { n.waiting = 0 })
		time.Sleep(time.Second)
		if got := w.op(op.ID); got.Delay != nil || got.State != sandbox.OpRunning {
			t.Errorf("no longer queued: %+v", got)
		}
		close(gate)
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
	})
}

func TestOwnQueueIsDelay(t *testing.T) {
	bubble(t, func(w *world) {
		gate := make(chan struct{})
		w.node.create = func(context.Context, sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			<-gate
			return sandbox.MachineStatus{}, nil
		}
		_, first := w.create(control.CreateRequest{})
		synctest.Wait()
		_, second := w.create(control.CreateRequest{})
		synctest.Wait()
		if got := w.op(second.ID); got.State != sandbox.OpAccepted || got.Delay == nil {
			t.Errorf("the second is %+v", got)
		}
		close(gate)
		w.wants(w.ended(first), sandbox.OpSucceeded, "")
		w.wants(w.ended(second), sandbox.OpSucceeded, "")
	}, func(o *control.Options) { o.Creates = 1 })
}

func TestDeleteSupersedesCreate(t *testing.T) {
	bubble(t, func(w *world) {
		var cause error
		w.node.create = func(ctx context.Context, _ sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			<-ctx.Done()
			cause = context.Cause(ctx)
			return sandbox.MachineStatus{}, ctx.Err()
		}
		sb, op := w.create(control.CreateRequest{})
		synctest.Wait()
		w.wants(w.ended(w.del(sb.ID)), sandbox.OpSucceeded, "")
		w.wants(w.ended(op), sandbox.OpFailed, "superseded")
		w.is(sb.ID, sandbox.StateDeleted)
		if cause == nil {
			t.Error("the create's context was not cancelled")
		}
	})
}

// TestCreateThatDoesNotHeed: its late success is discarded, its machine goes.
func TestCreateThatDoesNotHeed(t *testing.T) {
	bubble(t, func(w *world) {
		gate := make(chan struct{})
		w.node.create = func(_ context.Context, req sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			<-gate
			st := sandbox.MachineStatus{Sandbox: req.Sandbox, Generation: req.Generation, Driver: "fake", Ready: true}
			w.node.set(func(n *fakeNode) { n.machines[req.Sandbox] = st })
			return st, nil
		}
		sb, _ := w.create(control.CreateRequest{})
		synctest.Wait()
		w.wants(w.ended(w.del(sb.ID)), sandbox.OpSucceeded, "")
		close(gate)
		synctest.Wait()
		w.is(sb.ID, sandbox.StateDeleted)
		if !w.node.has(sb.ID) {
			t.Fatal("the test's node should have a late machine")
		}
		time.Sleep(6 * time.Minute) // the next census
		synctest.Wait()
		if w.node.has(sb.ID) {
			t.Error("the late machine stays")
		}
	})
}

func TestDeleteIsTriedUntilItSucceeds(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.running()
		n := 0
		w.node.delete = func(context.Context, string) error {
			if n++; n < 40 {
				return errors.New("a mount is busy")
			}
			return nil
		}
		op := w.del(sb.ID)
		time.Sleep(time.Minute)
		if got := w.op(op.ID); got.State != sandbox.OpRunning || got.Delay == nil || !strings.Contains(got.Delay.Reason, "busy") {
			t.Errorf("meanwhile it is %+v", got)
		}
		w.is(sb.ID, sandbox.StateDeleting)
		_, again, replayed, err := w.c.Delete(w.t.Context(), w.user, sb.ID, sandbox.Idempotency{})
		if err != nil || !replayed || again.ID != op.ID {
			t.Errorf("a second delete: %+v %v %v", again, replayed, err)
		}
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
	})
}

func TestStaleAnswerIsNotBelieved(t *testing.T) {
	bubble(t, func(w *world) {
		n := 0
		w.node.create = func(_ context.Context, req sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			if n++; n == 1 {
				return sandbox.MachineStatus{Sandbox: req.Sandbox, Generation: req.Generation - 1, Ready: true}, nil
			}
			return sandbox.MachineStatus{}, nil
		}
		w.running()
		if len(w.node.created()) != 2 {
			t.Errorf("created %d times", len(w.node.created()))
		}
	})
}

func TestRestartInTheMiddle(t *testing.T) {
	bubble(t, func(w *world) {
		block := func(ctx context.Context, _ sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			<-ctx.Done()
			return sandbox.MachineStatus{}, ctx.Err()
		}
		w.node.create = block
		w.node.delete = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
		creating, createOp := w.create(control.CreateRequest{})
		deleting, _ := w.create(control.CreateRequest{})
		synctest.Wait()
		deleteOp := w.del(deleting.ID)
		time.Sleep(time.Second)
		w.stop()
		w.is(creating.ID, sandbox.StateCreating)
		if got := w.op(createOp.ID); got.State.Done() || got.Error != nil {
			t.Errorf("stopping ended an operation: %+v", got)
		}
		w.node.set(func(n *fakeNode) { n.create, n.delete = nil, nil })
		time.Sleep(time.Minute)
		w.start()
		w.wants(w.ended(createOp), sandbox.OpSucceeded, "")
		w.wants(w.ended(deleteOp), sandbox.OpSucceeded, "")
		w.is(creating.ID, sandbox.StateRunning)
		w.is(deleting.ID, sandbox.StateDeleted)
	})
}

// TestVerbsWhileNotRunning: the rows are written, the next Run does them.
func TestVerbsWhileNotRunning(t *testing.T) {
	bubble(t, func(w *world) {
		w.stop()
		_, op := w.create(control.CreateRequest{})
		time.Sleep(time.Minute)
		if w.op(op.ID).State != sandbox.OpAccepted {
			t.Error("something ran")
		}
		w.start()
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
	})
}

func TestMachineEnds(t *testing.T) {
	bubble(t, func(w *world) {
		for _, reason := range []sandbox.EndReason{sandbox.EndOOM, sandbox.EndExited, sandbox.EndKilled} {
			sb := w.running()
			w.node.end(sb.ID, reason)
			synctest.Wait()
			if end := w.is(sb.ID, sandbox.StateFailed).End; end == nil || end.Reason != reason {
				t.Errorf("end %+v, want %s", end, reason)
			}
			if !w.node.has(sb.ID) {
				t.Error("the machine's logs went with it")
			}
			w.wants(w.ended(w.del(sb.ID)), sandbox.OpSucceeded, "")
		}
	})
}

// TestMachineEndsBeforeItsRowRuns: the end is told while the create's answer
// is on its way.
func TestMachineEndsBeforeItsRowRuns(t *testing.T) {
	bubble(t, func(w *world) {
		w.node.create = func(_ context.Context, req sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			st := sandbox.MachineStatus{Sandbox: req.Sandbox, Generation: req.Generation, Driver: "fake", Ready: true}
			w.node.set(func(n *fakeNode) { n.machines[req.Sandbox] = st })
			w.node.end(req.Sandbox, sandbox.EndExited)
			time.Sleep(time.Second) // the observer has it now
			return st, nil
		}
		sb, op := w.create(control.CreateRequest{})
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
		synctest.Wait()
		if end := w.is(sb.ID, sandbox.StateFailed).End; end == nil || end.Reason != sandbox.EndExited {
			t.Errorf("end %+v", end)
		}
	})
}

func TestHostRestart(t *testing.T) {
	bubble(t, func(w *world) {
		lost, kept := w.running(), w.running()
		w.stop()
		w.node.set(func(n *fakeNode) {
			delete(n.machines, lost.ID)
			n.machines["sbx_stranger"] = sandbox.MachineStatus{Sandbox: "sbx_stranger", Generation: 3}
		})
		w.start()
		time.Sleep(time.Second)
		if end := w.is(lost.ID, sandbox.StateFailed).End; end.Reason != sandbox.EndHostRestart {
			t.Errorf("end %+v", end)
		}
		w.is(kept.ID, sandbox.StateRunning)
		if w.node.has("sbx_stranger") {
			t.Error("a machine without a row stays")
		}
	})
}

func TestTTL(t *testing.T) {
	bubble(t, func(w *world) {
		sb, op := w.create(control.CreateRequest{TTL: time.Minute})
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
		longer := w.running()
		_, err := w.c.SetTTL(w.t.Context(), w.user, longer.ID, time.Hour)
		w.must(err)
		time.Sleep(58 * time.Second)
		w.is(sb.ID, sandbox.StateRunning)
		time.Sleep(4 * time.Second)
		gone := w.is(sb.ID, sandbox.StateDeleted)
		if gone.End == nil || gone.End.Reason != sandbox.EndExpired {
			t.Errorf("end %+v", gone.End)
		}
		ops, _, err := w.c.Operations(w.t.Context(), w.user, sandbox.OperationFilter{Sandbox: sb.ID}, sandbox.Page{})
		if err != nil || len(ops) != 2 || ops[0].Key != sandbox.SystemKey {
			t.Errorf("%+v %v", ops, err)
		}
		_, err = w.c.SetTTL(w.t.Context(), w.user, longer.ID, 0)
		w.must(err)
		w.later(2 * time.Hour)
		time.Sleep(3 * time.Second)
		w.is(longer.ID, sandbox.StateRunning)
	})
}

func TestRowsAreKeptAndPruned(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.running()
		op := w.del(sb.ID)
		w.ended(op)
		w.later(23 * time.Hour)
		w.is(sb.ID, sandbox.StateDeleted)
		w.later(3 * time.Hour)
		if _, err := w.c.Get(w.t.Context(), w.user, sb.ID); !sandbox.IsClass(err, sandbox.NotFound) {
			t.Errorf("a day later: %v", err)
		}
		w.op(op.ID)
		w.later(7 * 24 * time.Hour)
		if _, err := w.c.Operation(w.t.Context(), w.user, op.ID, 0); !sandbox.IsClass(err, sandbox.NotFound) {
			t.Errorf("a week later: %v", err)
		}
	})
}

func TestDuplicates(t *testing.T) {
	bubble(t, func(w *world) {
		var mu sync.Mutex
		ids := map[string]int{}
		var wg sync.WaitGroup
		for range 20 {
			wg.Go(func() {
				sb, op, _, err := w.c.CreateSandbox(w.t.Context(), w.user, control.CreateRequest{Template: "base"}, sandbox.Idempotency{Key: "k"})
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				ids[sb.ID+op.ID]++
				mu.Unlock()
			})
		}
		wg.Wait()
		if len(ids) != 1 {
			t.Errorf("%d sandboxes", len(ids))
		}
		_, _, _, err := w.c.CreateSandbox(w.t.Context(), w.user, control.CreateRequest{Template: "base", TTL: time.Hour}, sandbox.Idempotency{Key: "k"})
		if e := sandbox.AsError(err); e == nil || e.Code != "idempotency_mismatch" {
			t.Errorf("another request: %v", err)
		}
		synctest.Wait()
		if n := len(w.node.created()); n != 1 {
			t.Errorf("%d machines", n)
		}
		w.later(25 * time.Hour)
		_, _, replayed, err := w.c.CreateSandbox(w.t.Context(), w.user, control.CreateRequest{Template: "base"}, sandbox.Idempotency{Key: "k"})
		if err != nil || replayed {
			t.Errorf("a day later: %v %v", replayed, err)
		}
	})
}

func TestDeletesRace(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.running()
		var mu sync.Mutex
		ops := map[string]bool{}
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				_, op, _, err := w.c.Delete(w.t.Context(), w.user, sb.ID, sandbox.Idempotency{})
				if err != nil {
					if !sandbox.IsClass(err, sandbox.FailedPrecondition) {
						t.Error(err)
					}
					return
				}
				mu.Lock()
				ops[op.ID] = true
				mu.Unlock()
			})
		}
		wg.Wait()
		if len(ops) != 1 {
			t.Errorf("%d deletes", len(ops))
		}
		synctest.Wait()
		w.is(sb.ID, sandbox.StateDeleted)
	})
}

func TestLongPoll(t *testing.T) {
	bubble(t, func(w *world) {
		gate := make(chan struct{})
		w.node.create = func(context.Context, sandbox.MachineRequest) (sandbox.MachineStatus, error) {
			<-gate
			return sandbox.MachineStatus{}, nil
		}
		_, op := w.create(control.CreateRequest{})
		start := time.Now()
		got, err := w.c.Operation(w.t.Context(), w.user, op.ID, 10*time.Second)
		if err != nil || got.State.Done() || time.Since(start) != 10*time.Second {
			t.Errorf("%+v %v after %s", got, err, time.Since(start))
		}
		time.AfterFunc(3*time.Second, func() { close(gate) })
		start = time.Now()
		got, err = w.c.Operation(w.t.Context(), w.user, op.ID, time.Minute)
		if err != nil || !got.State.Done() || time.Since(start) != 3*time.Second {
			t.Errorf("%+v %v after %s", got, err, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
		defer cancel()
		if _, err := w.c.Events(ctx, w.user, 1<<40, 10, time.Minute); !sandbox.IsClass(err, sandbox.Unavailable) {
			t.Errorf("a cancelled wait: %v", err)
		}
	})
}
