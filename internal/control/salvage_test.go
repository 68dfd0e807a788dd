package control_test

import (
	"testing"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

// startAgain asks for a start as a client would.
func (w *world) startAgain(id string) error {
	_, op, _, err := w.c.Do(w.t.Context(), w.user, id, sandbox.VerbStart, control.VerbRequest{}, sandbox.Idempotency{})
	if err == nil {
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
	}
	return err
}

func TestADiskThatOutlivesItsMachineIsSavedAndStartedFrom(t *testing.T) {
	bubble(t, func(w *world) {
		w.node.set(func(n *fakeNode) { n.keeps = true })
		crash, plain := w.with(crashing()), w.with(still)
		older := w.done(plain, sandbox.VerbSnapshot)
		time.Sleep(6 * time.Minute)
		for _, req := range w.node.asked() {
			if req.Snapshot != older.Snapshot {
				t.Errorf("a checkpoint of a disk that outlives its machine: %+v", req)
			}
		}
		w.node.end(crash.ID, sandbox.EndCrashed)
		w.node.end(plain.ID, sandbox.EndHostRestart)
		time.Sleep(time.Second)

		got := w.settled(crash.ID, sandbox.StateRunning)
		if src := w.node.last().Source; src == nil || src.Snapshot != got.Image || src.Kind != sandbox.SnapshotDisk || src.Continue {
			t.Errorf("started from %+v, its image is %s", src, got.Image)
		}
		left := w.settled(plain.ID, sandbox.StateFailed)
		if left.Image == older.Snapshot || left.ImageAt == nil || !left.ImageAt.Equal(left.End.At) {
			t.Errorf("its image is %s of %v, it ended at %v", left.Image, left.ImageAt, left.End.At)
		}
		w.must(w.startAgain(plain.ID))
		if src := w.node.last().Source; src == nil || src.Snapshot != left.Image {
			t.Errorf("started from %+v", src)
		}
		before := len(w.node.asked())
		time.Sleep(10 * time.Minute)
		if len(w.node.asked()) != before {
			t.Error("it is saved again")
		}
	})
}

func TestAStartDoesNotOvertakeTheDiskThatIsSaved(t *testing.T) {
	bubble(t, func(w *world) {
		w.node.set(func(n *fakeNode) { n.keeps = true })
		sb := w.with(still)
		w.done(sb, sandbox.VerbSnapshot)
		time.Sleep(time.Second)
		older := w.mustGet(sb.ID).Image
		refused := func(class sandbox.Class, code string) {
			t.Helper()
			err := w.startAgain(sb.ID)
			if e := sandbox.AsError(err); e == nil || e.Class != class || e.Code != code || !e.Retryable || e.Hint == "" {
				t.Errorf("%+v", e)
			}
			if w.mustGet(sb.ID).State != sandbox.StateFailed {
				t.Error("it was moved")
			}
		}
		w.node.blocks("checkpoint")
		w.node.end(sb.ID, sandbox.EndKilled)
		time.Sleep(time.Second)
		refused(sandbox.Unavailable, "disk_being_saved")
		w.stop()
		w.start() // the durability must be known before anything is started
		refused(sandbox.Unavailable, "disk_being_saved")
		w.stop()
		w.node.fails("checkpoint", sandbox.Errorf(sandbox.NoCapacity, "disk_full", "the disk is full"))
		w.start()
		time.Sleep(time.Second)
		refused(sandbox.NoCapacity, "disk_not_saved")
		w.node.heals()
		time.Sleep(time.Minute)
		if now := w.mustGet(sb.ID).Image; now == older {
			t.Error("it was not saved")
		}
		w.must(w.startAgain(sb.ID))
	})
}

// TestNothingIsLeftToSave: the node has lost the machine and all of it.
func TestNothingIsLeftToSave(t *testing.T) {
	bubble(t, func(w *world) {
		w.node.set(func(n *fakeNode) {
			n.keeps = true
			n.host.Drivers = []sandbox.DriverStatus{{Name: "fake", State: sandbox.DriverReady, Default: true, Durability: sandbox.DurabilityCrash}}
		})
		sb := w.with(still)
		w.done(sb, sandbox.VerbSnapshot)
		older := w.mustGet(sb.ID).Image
		time.Sleep(time.Second)
		w.stop()
		w.node.set(func(n *fakeNode) { delete(n.machines, sb.ID) })
		w.start()
		time.Sleep(time.Minute)
		w.settled(sb.ID, sandbox.StateFailed)
		if err := w.startAgain(sb.ID); sandbox.AsError(err).Code != "disk_being_saved" { // nobody knew yet what the driver's disks outlive
			t.Error(err)
		}
		time.Sleep(2 * time.Second)
		w.must(w.startAgain(sb.ID))
		if src := w.node.last().Source; src == nil || src.Snapshot != older {
			t.Errorf("started from %+v", src)
		}
	})
}

func TestADriverIsAskedForByName(t *testing.T) {
	bubble(t, func(w *world) {
		drivers := []sandbox.DriverStatus{
			{Name: "fake", State: sandbox.DriverReady, Default: true},
			{Name: "vm", State: sandbox.DriverProbing},
			{Name: "old", State: sandbox.DriverUnavailable, Reason: "it can't boot", Hint: "buy another"},
		}
		w.node.set(func(n *fakeNode) { n.host.Drivers = drivers })
		refused := func(req control.CreateRequest, class sandbox.Class, code string) {
			t.Helper()
			_, _, _, err := w.c.CreateSandbox(w.t.Context(), w.user, req, sandbox.Idempotency{})
			if e := sandbox.AsError(err); e == nil || e.Class != class || e.Code != code || e.Hint == "" || (e.RetryAfter > 0) != (code == "driver_probing") {
				t.Errorf("%+v: %+v", req, e)
			}
		}
		refused(control.CreateRequest{Template: "base", Driver: "vm"}, sandbox.Unavailable, "driver_probing")
		refused(control.CreateRequest{Template: "base", Driver: "old"}, sandbox.FailedPrecondition, "driver_unavailable")
		refused(control.CreateRequest{Template: "base", Driver: "other"}, sandbox.Invalid, "unknown_driver")
		refused(control.CreateRequest{Snapshot: sandbox.NewID(sandbox.KindSnapshot), Driver: "vm"}, sandbox.Invalid, "bad_driver")

		sb, op := w.create(control.CreateRequest{Driver: "fake"})
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
		if got := w.is(sb.ID, sandbox.StateRunning); got.Driver != "fake" || w.node.last().Driver != "fake" {
			t.Errorf("%+v", got)
		}

		// What needs the driver of a snapshot waits while that is probed.
		w.done(sb, sandbox.VerbSuspend)
		start := time.Now()
		w.node.fails("create", sandbox.Errorf(sandbox.Unavailable, sandbox.CodeDriverProbing, "it is probed").WithRetry(5*time.Second))
		_, op, _, err := w.c.Do(w.t.Context(), w.user, sb.ID, sandbox.VerbRestore, control.VerbRequest{}, sandbox.Idempotency{})
		w.must(err)
		time.Sleep(90 * time.Second)
		if now := w.op(op.ID); now.State.Done() || now.Delay == nil || now.Delay.Reason != "it is probed" {
			t.Errorf("after %s it is %s, %+v", time.Since(start), now.State, now.Delay)
		}
		w.node.heals()
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
	})
}
