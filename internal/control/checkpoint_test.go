package control_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

func every(d time.Duration) control.PolicyPatch {
	return control.PolicyPatch{IdleAction: ptr(sandbox.ReactNone), Checkpoint: &d}
}

func TestCheckpoints(t *testing.T) {
	bubble(t, func(w *world) {
		sb, never := w.with(every(time.Minute)), w.with(still)
		time.Sleep(10*time.Minute + 5*time.Second)
		n := 0
		for _, req := range w.node.asked() {
			if req.Sandbox == never.ID {
				t.Error("a checkpoint of one that wants none")
			}
			n++
		}
		if n < 8 || n > 10 {
			t.Errorf("%d checkpoints in ten minutes", n)
		}
		got := w.settled(sb.ID, sandbox.StateRunning)
		if age := time.Since(*got.ImageAt); age > 66*time.Second {
			t.Errorf("the last is %s old", age)
		}
		time.Sleep(20 * time.Second)
		w.onlyRooted()
		if files := w.node.snapshots(); len(files) != 1 {
			t.Errorf("the node keeps %q", files)
		}
		if ops := w.operations(sb.ID); len(ops) != 1 {
			t.Errorf("a checkpoint is an operation: %+v", ops)
		}
		w.done(sb, sandbox.VerbPause)
		before := len(w.node.asked())
		time.Sleep(10 * time.Minute)
		if len(w.node.asked()) != before {
			t.Error("a checkpoint of a paused sandbox")
		}
	})
}

// TestCheckpointsKeepTheirShare: what stands still for 3 s goes on for 150 s.
func TestCheckpointsKeepTheirShare(t *testing.T) {
	bubble(t, func(w *world) {
		w.node.set(func(n *fakeNode) { n.stood = 3 * time.Second })
		w.with(every(10 * time.Second))
		time.Sleep(15 * time.Minute)
		n := len(w.node.asked())
		if share := float64(n*3) / (15 * 60); share > 0.021 || n < 4 {
			t.Errorf("%d checkpoints, a share of %.3f", n, share)
		}
	})
}

func TestCheckpointUnchanged(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(every(time.Minute))
		w.done(sb, sandbox.VerbSnapshot)
		image := w.mustGet(sb.ID).Image
		w.node.set(func(n *fakeNode) { n.same = true })
		time.Sleep(10 * time.Minute)
		if got := w.settled(sb.ID, sandbox.StateRunning); got.Image != image {
			t.Errorf("image %q, want %q", got.Image, image)
		}
		if list := w.snaps(sb.ID); len(list) > 2 {
			t.Errorf("%d rows", len(list))
		}
	})
}

// TestCheckpointGivesWay to a verb, and is taken again after it.
func TestCheckpointGivesWay(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(every(time.Minute))
		superseded := make(chan struct{})
		w.node.set(func(n *fakeNode) {
			n.before = func(ctx context.Context, call, _ string) error {
				switch call {
				case "checkpoint":
					select {
					case <-superseded:
					case <-ctx.Done():
					}
					return sandbox.Errorf(sandbox.Unavailable, "superseded", "a verb came")
				case "pause":
					close(superseded)
				}
				return nil
			}
		})
		time.Sleep(70 * time.Second)
		if list := w.snaps(sb.ID); len(list) != 1 || list[0].State != sandbox.SnapshotCreating {
			t.Fatalf("%+v", list)
		}
		w.done(sb, sandbox.VerbPause)
		w.node.heals()
		w.done(sb, sandbox.VerbResume)
		time.Sleep(20 * time.Second)
		if got := w.settled(sb.ID, sandbox.StateRunning); got.Image == "" {
			t.Error("it was not taken again")
		}
		w.onlyRooted()
	})
}

// TestCheckpointFails: the image before stays, and it is tried ever less often.
func TestCheckpointFails(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(every(time.Second))
		time.Sleep(10 * time.Second)
		var image string
		tries := 0
		w.node.set(func(n *fakeNode) {
			n.before = func(_ context.Context, call, _ string) error {
				if call == "checkpoint" {
					tries++
					return errBroken
				}
				return nil
			}
		})
		time.Sleep(10 * time.Second)
		image = w.mustGet(sb.ID).Image // one may have been under way
		time.Sleep(time.Hour)
		if tries < 10 || tries > 25 {
			t.Errorf("%d tries in an hour", tries)
		}
		if got := w.settled(sb.ID, sandbox.StateRunning); got.Image != image || image == "" {
			t.Errorf("image %q, want %q", got.Image, image)
		}
		w.node.heals()
		time.Sleep(6 * time.Minute)
		if got := w.settled(sb.ID, sandbox.StateRunning); got.Image == image {
			t.Error("it was not taken again")
		}
	})
}

// TestCheckpointInterrupted: control ends before, and after the node took it.
func TestCheckpointInterrupted(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(every(time.Minute))
		for _, spoil := range []func(){
			func() { w.node.blocks("checkpoint") },
			func() { w.node.set(func(n *fakeNode) { n.lost["checkpoint"] = true }) },
		} {
			spoil()
			time.Sleep(70 * time.Second)
			w.stop()
			w.node.heals()
			if list := w.snaps(sb.ID); list[0].State != sandbox.SnapshotCreating {
				t.Fatalf("%+v", list)
			}
			w.start()
			time.Sleep(20 * time.Second)
			w.settled(sb.ID, sandbox.StateRunning)
			w.onlyRooted()
			time.Sleep(70 * time.Second)
			if w.mustGet(sb.ID).Image == "" {
				t.Error("it was not taken again")
			}
		}
	})
}

// TestCheckpointOfAnEarlierMachine is not the later one's image.
func TestCheckpointOfAnEarlierMachine(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(every(time.Minute))
		w.done(sb, sandbox.VerbSnapshot)
		gate := make(chan struct{})
		w.node.set(func(n *fakeNode) {
			n.before = func(_ context.Context, call, _ string) error {
				if call == "checkpoint" {
					<-gate // it heeds nothing
				}
				return nil
			}
		})
		time.Sleep(70 * time.Second)
		w.done(sb, sandbox.VerbRollback)
		image := w.mustGet(sb.ID).Image
		w.node.set(func(n *fakeNode) { n.fences = map[string]int64{} }) // nor does the node fence it
		close(gate)
		synctest.Wait()
		if got := w.settled(sb.ID, sandbox.StateRunning); got.Image != image {
			t.Errorf("image %q, want %q", got.Image, image)
		}
	})
}
