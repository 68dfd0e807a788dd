package control_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

var errBroken = sandbox.Errorf(sandbox.Internal, "engine_broken", "the engine is broken")

// do asks for a verb as a user would, whatever its method.
func (w *world) do(sb sandbox.Sandbox, verb sandbox.Verb) (op sandbox.Operation, err error) {
	ctx := w.t.Context()
	none := sandbox.Idempotency{}
	time.Sleep(time.Millisecond) // lists are ordered by time
	switch verb {
	case sandbox.VerbDelete:
		_, op, _, err = w.c.Delete(ctx, w.user, sb.ID, none)
	case sandbox.VerbSnapshot:
		_, op, _, err = w.c.TakeSnapshot(ctx, w.user, sb.ID, control.SnapshotRequest{Name: "n"}, none)
	case sandbox.VerbFork:
		_, op, _, err = w.c.Fork(ctx, w.user, sb.ID, control.ForkRequest{Count: 2}, none)
	case sandbox.VerbRollback:
		list, _, err := w.c.Snapshots(ctx, w.user, sandbox.SnapshotFilter{Sandbox: sb.ID, Purposes: []sandbox.SnapshotPurpose{sandbox.PurposeNamed}}, sandbox.Page{})
		w.must(err)
		if len(list) == 0 {
			w.t.Fatal("it has no snapshot to go back to")
		}
		_, op, _, err = w.c.Rollback(ctx, w.user, sb.ID, list[len(list)-1].ID, none)
		return op, err
	default:
		_, op, _, err = w.c.Do(ctx, w.user, sb.ID, verb, control.VerbRequest{}, none)
	}
	return op, err
}

// done asks for a verb and waits until it has succeeded.
func (w *world) done(sb sandbox.Sandbox, verb sandbox.Verb) sandbox.Operation {
	w.t.Helper()
	op, err := w.do(sb, verb)
	w.must(err)
	op = w.ended(op)
	w.wants(op, sandbox.OpSucceeded, "")
	return op
}

// reach makes a sandbox with a named snapshot and leads it into a state.
func (w *world) reach(state sandbox.State) sandbox.Sandbox {
	w.t.Helper()
	sb := w.running()
	w.done(sb, sandbox.VerbSnapshot)
	switch state {
	case sandbox.StateRunning:
	case sandbox.StatePaused:
		w.done(sb, sandbox.VerbPause)
	case sandbox.StateSuspended:
		w.done(sb, sandbox.VerbSuspend)
	case sandbox.StateStopped:
		w.done(sb, sandbox.VerbStop)
	case sandbox.StateFailed:
		w.node.end(sb.ID, sandbox.EndOOM)
		synctest.Wait()
	default:
		w.t.Fatalf("no way leads to %s", state)
	}
	return w.is(sb.ID, state)
}

// nodeCalls are what a verb asks the node, by the state that it leads through.
var nodeCalls = map[sandbox.State][]string{
	sandbox.StatePausing: {"pause"}, sandbox.StateResuming: {"resume"},
	sandbox.StateSuspending: {"snapshot", "release"}, sandbox.StateStopping: {"snapshot", "release"},
	sandbox.StateRestoring: {"create"}, sandbox.StateStarting: {"create"}, sandbox.StateRolling: {"create"},
	sandbox.StateSnapping: {"snapshot"}, sandbox.StateForking: {"snapshot"}, sandbox.StateDeleting: {"delete"},
}

// machineOf is what a node should have for a sandbox that settled in a state.
func machineOf(s sandbox.State) string {
	switch s {
	case sandbox.StateRunning, sandbox.StatePaused:
		return string(s)
	}
	return "none"
}

// settled checks that row, node and snapshots agree on a state.
func (w *world) settled(id string, state sandbox.State) sandbox.Sandbox {
	w.t.Helper()
	sb := w.is(id, state)
	if got := w.node.is(id); got != machineOf(state) {
		w.t.Errorf("the sandbox is %s and its machine %s", state, got)
	}
	if sb.Operation != "" {
		w.t.Errorf("an operation is left: %s", sb.Operation)
	}
	if sb.Image != "" {
		snap, err := w.c.Snapshot(w.t.Context(), w.user, sb.Image)
		if err != nil || snap.State != sandbox.SnapshotReady || sb.ImageAt == nil {
			w.t.Errorf("its image is %+v of %v: %v", snap, sb.ImageAt, err)
		}
	}
	return sb
}

// steady lists the table's rows that a user asks for in a steady state.
func steady() (list []sandbox.Transition) {
	for _, t := range sandbox.Transitions {
		if t.From != sandbox.StateNone && !t.From.Transitional() && t.Verb != sandbox.VerbExit {
			list = append(list, t)
		}
	}
	return list
}

func name(t sandbox.Transition) string { return fmt.Sprintf("%s %s", t.From, t.Verb) }

// TestTableSucceeds walks every row of the table, and then everything that the
// table does not have.
func TestTableSucceeds(t *testing.T) {
	bubble(t, func(w *world) {
		for _, tr := range steady() {
			w.t.Log(name(tr))
			sb := w.reach(tr.From)
			w.done(sb, tr.Verb)
			w.settled(sb.ID, tr.To)
		}
		for _, from := range []sandbox.State{sandbox.StateRunning, sandbox.StatePaused, sandbox.StateSuspended, sandbox.StateStopped, sandbox.StateFailed} {
			sb := w.reach(from)
			for verb := range map[sandbox.Verb]bool{
				sandbox.VerbPause: true, sandbox.VerbResume: true, sandbox.VerbSuspend: true, sandbox.VerbRestore: true, sandbox.VerbStop: true,
				sandbox.VerbStart: true, sandbox.VerbWake: true, sandbox.VerbSnapshot: true, sandbox.VerbFork: true, sandbox.VerbRollback: true,
			} {
				if _, ok := sandbox.Find(from, verb); ok {
					continue
				}
				if _, err := w.do(sb, verb); sandbox.AsError(err) == nil || sandbox.AsError(err).Code != "wrong_state" {
					t.Errorf("%s %s: %v", from, verb, err)
				}
			}
			w.settled(sb.ID, from)
		}
	})
}

// TestTableFails: each verb's first question to the node fails for good; the
// sandbox is then where the table says.
func TestTableFails(t *testing.T) {
	bubble(t, func(w *world) {
		for _, tr := range steady() {
			if tr.Verb == sandbox.VerbDelete {
				continue // tried until it succeeds
			}
			w.t.Log(name(tr))
			sb := w.reach(tr.From)
			before := w.settled(sb.ID, tr.From)
			w.node.fails(nodeCalls[tr.Via][0], errBroken)
			op, err := w.do(sb, tr.Verb)
			w.must(err)
			w.wants(w.ended(op), sandbox.OpFailed, "engine_broken")
			w.node.heals()
			synctest.Wait()
			after := w.settled(sb.ID, tr.Else)
			if after.Image != before.Image || after.Epoch != before.Epoch {
				t.Errorf("%s: a failure changed the image %q to %q or the epoch %d to %d", name(tr), before.Image, after.Image, before.Epoch, after.Epoch)
			}
		}
		time.Sleep(time.Minute) // the reaper
		w.onlyRooted()
	})
}

// onlyRooted checks that the node has the files of ready snapshots and no others.
func (w *world) onlyRooted() {
	w.t.Helper()
	list, _, err := w.store.Snapshots(w.t.Context(), "", sandbox.SnapshotFilter{}, sandbox.Page{Limit: 1000})
	w.must(err)
	rows := map[string]bool{}
	for _, s := range list {
		rows[s.ID] = true
		if s.State != sandbox.SnapshotReady {
			w.t.Errorf("a snapshot is left %s", s.State)
		}
	}
	files := w.node.snapshots()
	for _, id := range files {
		if !rows[id] {
			w.t.Errorf("the files of %s have no row", id)
		}
	}
	if len(files) != len(rows) {
		w.t.Errorf("%d snapshots have rows and %d have files", len(rows), len(files))
	}
}

// TestTableRestarts: control ends before each of a verb's effects, and after
// each, before it hears of it. A new one goes on.
func TestTableRestarts(t *testing.T) {
	for what, spoil := range map[string]func(*fakeNode, string){
		"before": (*fakeNode).blocks,
		"after":  func(n *fakeNode, call string) { n.set(func(n *fakeNode) { n.lost[call] = true }) },
	} {
		bubble(t, func(w *world) {
			for _, tr := range steady() {
				for _, call := range nodeCalls[tr.Via] {
					w.t.Log(what, name(tr), call)
					sb := w.reach(tr.From)
					spoil(w.node, call)
					op, err := w.do(sb, tr.Verb)
					w.must(err)
					time.Sleep(time.Second)
					w.is(sb.ID, tr.Via)
					w.stop()
					w.node.heals()
					w.start()
					w.wants(w.ended(op), sandbox.OpSucceeded, "")
					synctest.Wait()
					w.settled(sb.ID, tr.To)
				}
			}
			time.Sleep(time.Minute)
			w.onlyRooted()
		})
	}
}

// TestDeleteSupersedes each verb before and after each of its effects.
func TestDeleteSupersedes(t *testing.T) {
	bubble(t, func(w *world) {
		for _, tr := range steady() {
			if tr.Verb == sandbox.VerbDelete {
				continue
			}
			for _, call := range nodeCalls[tr.Via] {
				for _, lose := range []bool{false, true} {
					w.t.Log(name(tr), call, lose)
					sb := w.reach(tr.From)
					if lose {
						w.node.set(func(n *fakeNode) { n.lost[call] = true })
					} else {
						w.node.blocks(call)
					}
					op, err := w.do(sb, tr.Verb)
					w.must(err)
					time.Sleep(time.Second)
					w.is(sb.ID, tr.Via)
					del := w.del(sb.ID)
					synctest.Wait()
					w.node.heals()
					w.wants(w.ended(del), sandbox.OpSucceeded, "")
					w.wants(w.ended(op), sandbox.OpFailed, "superseded")
					w.settled(sb.ID, sandbox.StateDeleted)
				}
			}
		}
		time.Sleep(time.Minute)
		w.onlyRooted()
	})
}

// TestMachineEndsMeanwhile: the machine ends while a verb has it in hand; the
// verb fails and the sandbox with it, with the machine's end.
func TestMachineEndsMeanwhile(t *testing.T) {
	bubble(t, func(w *world) {
		for _, tr := range steady() {
			if !tr.From.HasMachine() || tr.Verb == sandbox.VerbDelete || tr.Verb == sandbox.VerbRollback {
				continue
			}
			w.t.Log(name(tr))
			sb := w.reach(tr.From)
			call := nodeCalls[tr.Via][0]
			w.node.set(func(n *fakeNode) {
				n.before = func(ctx context.Context, c, id string) error {
					if c == call && id == sb.ID {
						w.node.end(id, sandbox.EndOOM)
						time.Sleep(time.Second)
					}
					return nil
				}
			})
			op, err := w.do(sb, tr.Verb)
			w.must(err)
			w.wants(w.ended(op), sandbox.OpFailed, "no_machine")
			w.node.heals()
			got := w.settled(sb.ID, sandbox.StateFailed)
			if got.End == nil || got.End.Reason != sandbox.EndOOM || got.Image == "" {
				t.Errorf("%s: end %+v, image %q", name(tr), got.End, got.Image)
			}
			w.done(sb, sandbox.VerbStart)
			if got := w.settled(sb.ID, sandbox.StateRunning); got.End != nil {
				t.Errorf("%s: a machine that runs again has ended: %+v", name(tr), got.End)
			}
		}
	})
}

// TestMachineEndsUnseen: nobody told the end of a machine that is not there.
func TestMachineEndsUnseen(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.reach(sandbox.StatePaused)
		w.node.set(func(n *fakeNode) { delete(n.machines, sb.ID) })
		op, err := w.do(sb, sandbox.VerbSuspend)
		w.must(err)
		w.wants(w.ended(op), sandbox.OpFailed, "no_machine")
		if end := w.settled(sb.ID, sandbox.StateFailed).End; end == nil || end.Reason != sandbox.EndUnknown {
			t.Errorf("end %+v", end)
		}
	})
}

// TestRollbackLosesTheMachine: the present machine was given up, and the
// snapshot's can't be made.
func TestRollbackLosesTheMachine(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.reach(sandbox.StateRunning)
		w.node.set(func(n *fakeNode) {
			n.create = func(_ context.Context, req sandbox.MachineRequest) (sandbox.MachineStatus, error) {
				w.node.set(func(n *fakeNode) { delete(n.machines, req.Sandbox) })
				return sandbox.MachineStatus{}, errBroken
			}
		})
		op, err := w.do(sb, sandbox.VerbRollback)
		w.must(err)
		w.wants(w.ended(op), sandbox.OpFailed, "engine_broken")
		w.node.heals()
		if end := w.settled(sb.ID, sandbox.StateFailed).End; end == nil || end.Reason != sandbox.EndRolledBack {
			t.Errorf("end %+v", end)
		}
		w.done(sb, sandbox.VerbRollback)
		w.settled(sb.ID, sandbox.StateRunning)
	})
}
