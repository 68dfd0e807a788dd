package control_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

func TestDrain(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		running, paused, stopped := w.with(still), w.reach(sandbox.StatePaused), w.reach(sandbox.StateStopped)
		stubborn, lost, slow := w.with(still), w.reach(sandbox.StatePaused), w.with(still)
		w.node.set(func(n *fakeNode) {
			n.before = func(ctx context.Context, call, id string) error {
				switch {
				case call == "snapshot" && (id == stubborn.ID || id == lost.ID):
					return errBroken
				case call == "snapshot" && id == slow.ID:
					<-ctx.Done()
					return ctx.Err()
				case call == "create":
					time.Sleep(5 * time.Second)
				}
				return nil
			}
		})
		coming, _ := w.create(control.CreateRequest{Policy: still})
		start := time.Now()
		report, err := w.c.Drain(ctx, w.admin, time.Minute)
		w.must(err)
		if d := time.Since(start); d != time.Minute {
			t.Errorf("it took %s", d)
		}
		done := map[string]bool{}
		for _, id := range report.Done {
			done[id] = true
		}
		for what, id := range map[string]string{"running": running.ID, "paused": paused.ID, "coming": coming.ID} {
			if !done[id] || report.Left[id] != "" {
				t.Errorf("%s: %q", what, report.Left[id])
			}
			w.settled(id, sandbox.StateSuspended)
		}
		if got := w.settled(stubborn.ID, sandbox.StateRunning); !done[stubborn.ID] || got.Image == "" {
			t.Errorf("what can't be suspended is not saved: %+v", report)
		}
		if done[lost.ID] || report.Left[lost.ID] == "" || done[slow.ID] || report.Left[slow.ID] == "" || len(report.Left) != 2 {
			t.Errorf("left: %+v", report.Left)
		}
		w.settled(stopped.ID, sandbox.StateStopped)
		w.node.heals()
		w.stop()
		w.start()
		synctest.Wait()
		w.settled(slow.ID, sandbox.StateSuspended)
		start = time.Now()
		report, err = w.c.Drain(ctx, w.admin, time.Minute)
		if err != nil || len(report.Done) != 2 || len(report.Left) != 0 || time.Since(start) > time.Second {
			t.Errorf("again: %+v %v after %s", report, err, time.Since(start))
		}
		if _, err := w.c.Drain(ctx, w.user, time.Minute); !sandbox.IsClass(err, sandbox.Denied) {
			t.Errorf("a user drains the host: %v", err)
		}
		if _, err := w.c.Drain(ctx, w.admin, 0); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("in no time: %v", err)
		}
	})
}
