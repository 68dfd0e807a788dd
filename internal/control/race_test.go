package control_test

import (
	"context"
	"encoding/json"
	"flag"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

var seeds = flag.Uint64("seeds", 2, "how many histories TestVerbsRace runs")

// chaos makes the node slow, and faulty now and then: before a call's effect,
// after it, or by the machine's end.
func (w *world) chaos(rnd *rand.Rand) {
	w.node.set(func(n *fakeNode) {
		n.before = func(ctx context.Context, call, id string) error {
			if call == "capacity" {
				return nil
			}
			w.node.mu.Lock()
			wait, dice := time.Duration(rnd.IntN(3000))*time.Millisecond, rnd.IntN(30)
			if call == "snapshot" || call == "pause" || call == "resume" {
				w.node.lost[call] = dice == 0
			}
			living := w.node.living(id)
			w.node.mu.Unlock()
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return ctx.Err()
			}
			switch {
			case dice == 1:
				return errBusy
			case dice == 2 && call != "delete" && call != "release" && call != "delete snapshot":
				return errBroken
			case dice == 3 && living && call != "release":
				w.node.end(id, sandbox.EndOOM)
			}
			return nil
		}
	})
}

// TestVerbsRace: many ask at random while the node fails at random and control
// is started anew. Whatever came of it, at the end rows, machines and snapshots
// agree, every operation has ended, and each state follows from the one before.
func TestVerbsRace(t *testing.T) {
	for seed := range *seeds {
		bubble(t, func(w *world) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			var ids []string
			for range 3 {
				ids = append(ids, w.with(control.PolicyPatch{
					IdleAction: ptr(sandbox.ReactNone), Checkpoint: ptr(20 * time.Second), OnCrash: ptr(sandbox.ReactStart),
				}).ID)
			}
			w.chaos(rand.New(rand.NewPCG(seed, 2)))
			for range 2 {
				w.storm(rnd, ids)
				w.stop()
				w.start()
			}
			w.node.heals()
			time.Sleep(3 * time.Minute)
			synctest.Wait()
			w.quiet(seed)
		}, func(o *control.Options) { o.SnapshotTimeout, o.MachineTimeout = 30*time.Second, 10*time.Second })
	}
}

// storm asks for verbs from several goroutines for two minutes.
func (w *world) storm(rnd *rand.Rand, ids []string) {
	verbs := []sandbox.Verb{
		sandbox.VerbPause, sandbox.VerbResume, sandbox.VerbSuspend, sandbox.VerbRestore, sandbox.VerbStop, sandbox.VerbStart, sandbox.VerbWake,
		sandbox.VerbSnapshot, sandbox.VerbFork, sandbox.VerbRollback, sandbox.VerbDelete,
	}
	var mu sync.Mutex
	dice := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return rnd.IntN(n)
	}
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			for range 25 {
				time.Sleep(time.Duration(dice(10_000)) * time.Millisecond)
				verb := verbs[dice(len(verbs))]
				if verb == sandbox.VerbDelete && dice(10) != 0 {
					continue
				}
				w.askAny(ids[dice(len(ids))], verb)
			}
		})
	}
	wg.Wait()
}

// askAny asks for a verb; a refusal must be one that is allowed.
func (w *world) askAny(id string, verb sandbox.Verb) {
	ctx, none := w.t.Context(), sandbox.Idempotency{}
	var err error
	switch verb {
	case sandbox.VerbDelete:
		_, _, _, err = w.c.Delete(ctx, w.user, id, none)
	case sandbox.VerbSnapshot:
		_, _, _, err = w.c.TakeSnapshot(ctx, w.user, id, control.SnapshotRequest{}, none)
	case sandbox.VerbFork:
		_, _, _, err = w.c.Fork(ctx, w.user, id, control.ForkRequest{Count: 1}, none)
	case sandbox.VerbRollback:
		list, _, e := w.c.Snapshots(ctx, w.user, sandbox.SnapshotFilter{Sandbox: id, States: []sandbox.SnapshotState{sandbox.SnapshotReady}}, sandbox.Page{})
		if e != nil || len(list) == 0 {
			return
		}
		_, _, _, err = w.c.Rollback(ctx, w.user, id, list[0].ID, none)
	default:
		_, _, _, err = w.c.Do(ctx, w.user, id, verb, control.VerbRequest{}, none)
	}
	if e := sandbox.AsError(err); e != nil && e.Class != sandbox.FailedPrecondition && e.Class != sandbox.NotFound && e.Class != sandbox.Unavailable && e.Code != "engine_broken" {
		w.t.Errorf("%s: %v", verb, err)
	}
}

// quiet checks that all has come to rest and agrees.
func (w *world) quiet(seed uint64) {
	w.t.Helper()
	left, err := w.store.Unfinished(w.t.Context())
	w.must(err)
	for _, op := range left {
		w.t.Errorf("seed %d: %s of %s has not ended: %s %+v", seed, op.Verb, op.Sandbox, op.Step, op.Delay)
	}
	list, _, err := w.store.Sandboxes(w.t.Context(), "", sandbox.SandboxFilter{}, sandbox.Page{Limit: 500})
	w.must(err)
	seen := map[sandbox.State]int{}
	for _, sb := range list {
		w.settled(sb.ID, sb.State)
		seen[sb.State]++
		if m, ok := w.node.machines[sb.ID]; ok && m.End == nil && m.Generation != sb.Epoch {
			w.t.Errorf("seed %d: the machine's epoch is %d and the row's %d", seed, m.Generation, sb.Epoch)
		}
	}
	w.onlyRooted()
	w.follows(seed)
	w.t.Logf("seed %d: %d sandboxes, %v", seed, len(list), seen)
}

// follows checks each sandbox's events against the table.
func (w *world) follows(seed uint64) {
	w.t.Helper()
	at := map[string]sandbox.State{}
	for after := int64(0); ; {
		events, err := w.store.Events(w.t.Context(), "", after, 500)
		w.must(err)
		if len(events) == 0 {
			return
		}
		for _, e := range events {
			after = e.Seq
			if e.Type != "sandbox.state" {
				continue
			}
			from, to := moves(w.t, e)
			if from != at[e.Sandbox] {
				w.t.Errorf("seed %d: an event leads from %q, where the sandbox was %q", seed, from, at[e.Sandbox])
			}
			ok := slices.ContainsFunc(sandbox.Transitions, func(t sandbox.Transition) bool {
				return t.From == from && t.Via == to || t.Via == from && (t.To == to || t.Else == to || to == sandbox.StateFailed && t.Else.HasMachine())
			})
			if !ok {
				w.t.Errorf("seed %d: the table does not lead from %q to %q", seed, from, to)
			}
			at[e.Sandbox] = to
		}
	}
}

func moves(t *testing.T, e sandbox.Event) (from, to sandbox.State) {
	t.Helper()
	var d struct{ From, To sandbox.State }
	if err := json.Unmarshal(e.Data, &d); err != nil {
		t.Fatal(err)
	}
	return d.From, d.To
}
