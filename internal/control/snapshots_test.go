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

var purposes = []sandbox.SnapshotPurpose{
	sandbox.PurposeNamed, sandbox.PurposeSuspend, sandbox.PurposeStop, sandbox.PurposeFork, sandbox.PurposeCheckpoint,
}

// snaps are a sandbox's snapshots, newest first, whatever their state.
func (w *world) snaps(id string) []sandbox.Snapshot {
	w.t.Helper()
	list, _, err := w.store.Snapshots(w.t.Context(), "", sandbox.SnapshotFilter{Sandbox: id, Purposes: purposes}, sandbox.Page{Limit: 100})
	w.must(err)
	return list
}

// TestRequestsToTheNode: what each verb asks of it.
func TestRequestsToTheNode(t *testing.T) {
	bubble(t, func(w *world) {
		ctx, none := w.t.Context(), sandbox.Idempotency{}
		sb := w.with(still)
		ask := func(verb sandbox.Verb, req control.VerbRequest) sandbox.Operation {
			time.Sleep(time.Millisecond)
			_, op, _, err := w.c.Do(ctx, w.user, sb.ID, verb, req, none)
			w.must(err)
			w.wants(w.ended(op), sandbox.OpSucceeded, "")
			return op
		}
		lastTaken := func() sandbox.SnapshotRequest { all := w.node.asked(); return all[len(all)-1] }

		op := ask(sandbox.VerbStop, control.VerbRequest{Grace: 5 * time.Second})
		want := sandbox.SnapshotRequest{Sandbox: sb.ID, Generation: 2, Snapshot: op.Snapshot, Kind: sandbox.SnapshotDisk, Hold: true, Grace: 5 * time.Second}
		if got := lastTaken(); got != want {
			t.Errorf("stop: %+v, want %+v", got, want)
		}
		ask(sandbox.VerbStart, control.VerbRequest{})
		if got := w.node.last(); got.Generation != 3 || *got.Source != (sandbox.Source{Snapshot: op.Snapshot, Kind: sandbox.SnapshotDisk}) {
			t.Errorf("start: %+v of %+v", got, got.Source)
		}
		op = ask(sandbox.VerbSuspend, control.VerbRequest{})
		want = sandbox.SnapshotRequest{Sandbox: sb.ID, Generation: 4, Snapshot: op.Snapshot, Kind: sandbox.SnapshotMemory, Hold: true}
		if got := lastTaken(); got != want {
			t.Errorf("suspend: %+v, want %+v", got, want)
		}
		if end := w.node.released[sb.ID]; end.Reason != sandbox.EndSuspended {
			t.Errorf("released with %+v", end)
		}
		ask(sandbox.VerbRestore, control.VerbRequest{})
		if got := w.node.last(); *got.Source != (sandbox.Source{Snapshot: op.Snapshot, Kind: sandbox.SnapshotMemory, Continue: true}) {
			t.Errorf("restore of %+v", got.Source)
		}
		if got := w.settled(sb.ID, sandbox.StateRunning); got.Image != op.Snapshot || got.Epoch != 5 || got.Generation != 5 {
			t.Errorf("a restored row: %+v", got)
		}
		ask(sandbox.VerbPause, control.VerbRequest{})
		ask(sandbox.VerbStop, control.VerbRequest{Grace: time.Minute})
		if got := lastTaken(); got.Grace != 0 {
			t.Error("a paused machine's sessions can't use a grace")
		}
	})
}

func TestNamedSnapshots(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		sb := w.with(still)
		idem := sandbox.Idempotency{Key: "snap"}
		req := control.SnapshotRequest{Name: "first", Kind: sandbox.SnapshotDisk}
		first, op, replayed, err := w.c.TakeSnapshot(ctx, w.user, sb.ID, req, idem)
		if err != nil || replayed || first.State != sandbox.SnapshotCreating || first.ID != op.Snapshot {
			t.Fatalf("%+v %v %v", first, replayed, err)
		}
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
		again, _, replayed, err := w.c.TakeSnapshot(ctx, w.user, sb.ID, req, idem)
		if err != nil || !replayed || again.ID != first.ID || again.State != sandbox.SnapshotReady {
			t.Errorf("again: %+v %v %v", again, replayed, err)
		}
		time.Sleep(time.Second)
		second, op, _, err := w.c.TakeSnapshot(ctx, w.user, sb.ID, control.SnapshotRequest{Wait: time.Second}, sandbox.Idempotency{})
		w.must(err)
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
		second, err = w.c.Snapshot(ctx, w.reader, second.ID)
		if err != nil || second.Parent != first.ID || second.Kind != sandbox.SnapshotMemory || second.SizeBytes == 0 || second.TakenAt == nil {
			t.Errorf("%+v %v", second, err)
		}
		if got := w.settled(sb.ID, sandbox.StateRunning); got.Base != second.ID || got.Image != second.ID {
			t.Errorf("%+v", got)
		}
		_, op, _, err = w.c.Rollback(ctx, w.user, sb.ID, first.ID, sandbox.Idempotency{})
		w.must(err)
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
		if got := w.node.last(); *got.Source != (sandbox.Source{Snapshot: first.ID, Kind: sandbox.SnapshotDisk, Replace: true}) {
			t.Errorf("rollback to %+v", got.Source)
		}
		if got := w.settled(sb.ID, sandbox.StateRunning); got.Base != first.ID || got.Image != first.ID || got.Epoch != op.Generation {
			t.Errorf("%+v", got)
		}
		if _, err := w.c.DeleteSnapshot(ctx, w.user, first.ID); sandbox.AsError(err) == nil || sandbox.AsError(err).Code != "snapshot_in_use" {
			t.Errorf("delete of an image: %v", err)
		}
		gone, err := w.c.DeleteSnapshot(ctx, w.user, second.ID)
		if err != nil || gone.State != sandbox.SnapshotDeleting {
			t.Errorf("%+v %v", gone, err)
		}
		synctest.Wait()
		if _, err := w.c.Snapshot(ctx, w.user, second.ID); !sandbox.IsClass(err, sandbox.NotFound) {
			t.Errorf("deleted: %v", err)
		}
		w.ended(w.del(sb.ID))
		time.Sleep(time.Minute)
		list, _, err := w.c.Snapshots(ctx, w.user, sandbox.SnapshotFilter{}, sandbox.Page{})
		if err != nil || len(list) != 1 || list[0].ID != first.ID {
			t.Errorf("a named snapshot outlives its sandbox: %+v %v", list, err)
		}
		w.onlyRooted()
	})
}

func TestCreateFromSnapshot(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		sb, op := w.create(control.CreateRequest{Policy: still, Resources: sandbox.Resources{MemoryMiB: 512}})
		w.ended(op)
		op = w.done(sb, sandbox.VerbSnapshot)
		w.ended(w.del(sb.ID))
		ses := sandbox.Session{ID: sandbox.NewID(sandbox.KindSession), Parent: sandbox.NewID(sandbox.KindSession), ParentOffset: 7}
		w.node.set(func(n *fakeNode) { n.sessions = []sandbox.Session{ses} })
		child, created, _, err := w.c.CreateSandbox(ctx, w.user, control.CreateRequest{Snapshot: op.Snapshot}, sandbox.Idempotency{})
		w.must(err)
		w.wants(w.ended(created), sandbox.OpSucceeded, "")
		got := w.settled(child.ID, sandbox.StateRunning)
		if got.Image != op.Snapshot || got.Base != op.Snapshot || got.Source != op.Snapshot || got.Resources.MemoryMiB != 512 || got.Digest != digestA {
			t.Errorf("%+v", got)
		}
		if src := w.node.last().Source; *src != (sandbox.Source{Snapshot: op.Snapshot, Kind: sandbox.SnapshotMemory}) {
			t.Errorf("made of %+v", src)
		}
		in, err := w.c.Session(ctx, w.user, child.ID, ses.ID)
		if err != nil || in.Parent != ses.Parent || in.ParentOffset != 7 || in.Generation != 1 || in.Key != w.user.KeyID {
			t.Errorf("the session that goes on: %+v %v", in, err)
		}
		for code, req := range map[string]control.CreateRequest{
			"bad_source":         {Snapshot: op.Snapshot, Template: "base"},
			"bad_resources":      {Snapshot: op.Snapshot, Resources: sandbox.DefaultResources},
			"snapshot_not_found": {Snapshot: "nonsense"},
		} {
			if _, _, _, err := w.c.CreateSandbox(ctx, w.user, req, sandbox.Idempotency{}); sandbox.AsError(err) == nil || sandbox.AsError(err).Code != code {
				t.Errorf("%+v: %v, want %s", req, err, code)
			}
		}
	})
}

func TestFork(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		sb := w.with(still)
		gate := make(chan struct{})
		w.node.set(func(n *fakeNode) {
			n.before = func(ctx context.Context, call, _ string) error {
				if call == "snapshot" {
					select {
					case <-gate:
					case <-ctx.Done():
					}
				}
				return ctx.Err()
			}
		})
		idem := sandbox.Idempotency{Key: "fork"}
		req := control.ForkRequest{Count: 3, Labels: map[string]string{"a": "b"}}
		children, op, _, err := w.c.Fork(ctx, w.user, sb.ID, req, idem)
		if err != nil || len(children) != 3 {
			t.Fatalf("%d children, %v", len(children), err)
		}
		synctest.Wait()
		for _, ch := range children {
			w.is(ch.Sandbox.ID, sandbox.StateCreating)
			if got := w.op(ch.Operation.ID); got.Delay == nil || !strings.Contains(got.Delay.Reason, "snapshot") {
				t.Errorf("a child is not delayed: %+v", got)
			}
		}
		w.stop() // in the middle, with everybody waiting
		close(gate)
		w.start()
		start := time.Now()
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
		for _, ch := range children {
			w.wants(w.ended(ch.Operation), sandbox.OpSucceeded, "")
			got := w.settled(ch.Sandbox.ID, sandbox.StateRunning)
			if got.Parent != sb.ID || got.Source != op.Snapshot || got.Image != op.Snapshot || got.Base != "" || got.Labels["a"] != "b" || got.Epoch != 1 {
				t.Errorf("a child: %+v", got)
			}
		}
		if d := time.Since(start); d != 0 {
			t.Errorf("the children waited %s more", d)
		}
		again, _, replayed, err := w.c.Fork(ctx, w.user, sb.ID, req, idem)
		if err != nil || !replayed || len(again) != 3 || again[0].Sandbox.ID != children[0].Sandbox.ID || again[0].Operation.ID != children[0].Operation.ID {
			t.Errorf("again: %+v %v %v", again, replayed, err)
		}
		w.settled(sb.ID, sandbox.StateRunning)
		// The snapshot stays until nobody needs it.
		for _, ch := range children {
			w.ended(w.del(ch.Sandbox.ID))
		}
		w.ended(w.del(sb.ID))
		time.Sleep(time.Minute)
		if left := w.node.snapshots(); len(left) != 0 {
			t.Errorf("%q are left", left)
		}
		for _, bad := range []control.ForkRequest{{}, {Count: 21}, {Count: 1, Wait: -1}, {Count: 1, Env: map[string]string{"=": ""}}} {
			if _, _, _, err := w.c.Fork(ctx, w.user, sb.ID, bad, sandbox.Idempotency{}); !sandbox.IsClass(err, sandbox.Invalid) {
				t.Errorf("%+v: %v", bad, err)
			}
		}
	})
}

// TestForkFails: the children fail with it, at once, whether the snapshot
// failed or its sandbox was deleted.
func TestForkFails(t *testing.T) {
	bubble(t, func(w *world) {
		for _, how := range []string{"fails", "deleted"} {
			sb := w.with(still)
			if how == "fails" {
				w.node.fails("snapshot", errBroken)
			} else {
				w.node.blocks("snapshot")
			}
			children, op, _, err := w.c.Fork(w.t.Context(), w.user, sb.ID, control.ForkRequest{Count: 2}, sandbox.Idempotency{})
			w.must(err)
			if how == "deleted" {
				time.Sleep(time.Second)
				w.ended(w.del(sb.ID))
			}
			w.ended(op)
			for _, ch := range children {
				w.wants(w.ended(ch.Operation), sandbox.OpFailed, "snapshot_failed")
				w.settled(ch.Sandbox.ID, sandbox.StateFailed)
			}
			w.node.heals()
		}
		time.Sleep(time.Minute)
		w.onlyRooted()
	})
}

// TestImagesReplaceOneAnother: what is no image any more goes.
func TestImagesReplaceOneAnother(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(still)
		for range 3 {
			w.done(sb, sandbox.VerbSuspend)
			w.done(sb, sandbox.VerbRestore)
			w.done(sb, sandbox.VerbStop)
			w.done(sb, sandbox.VerbStart)
		}
		time.Sleep(time.Minute)
		if files := w.node.snapshots(); len(files) != 1 || files[0] != w.settled(sb.ID, sandbox.StateRunning).Image {
			t.Errorf("the node keeps %q", files)
		}
		w.onlyRooted()
	})
}

// TestReaperTriesAgain: files that can't be removed keep their row.
func TestReaperTriesAgain(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(still)
		w.done(sb, sandbox.VerbSuspend)
		w.node.fails("delete snapshot", errBusy)
		w.ended(w.del(sb.ID))
		time.Sleep(time.Minute)
		if list := w.snaps(sb.ID); len(list) != 1 || list[0].State != sandbox.SnapshotDeleting {
			t.Errorf("%+v", list)
		}
		w.stop()
		w.node.heals()
		w.start()
		time.Sleep(time.Minute)
		if len(w.snaps(sb.ID)) != 0 || len(w.node.snapshots()) != 0 {
			t.Errorf("%+v %q are left", w.snaps(sb.ID), w.node.snapshots())
		}
	})
}

// TestFilesWithoutARow are collected by the census, and those of a snapshot
// that is being taken are not.
func TestFilesWithoutARow(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.with(still)
		w.node.set(func(n *fakeNode) {
			n.snaps["snp_stranger"] = sandbox.SnapshotStatus{Snapshot: "snp_stranger"}
			n.lost["snapshot"] = true
		})
		op, err := w.do(sb, sandbox.VerbSnapshot)
		w.must(err)
		time.Sleep(6 * time.Minute)
		if files := w.node.snapshots(); len(files) != 1 || files[0] != op.Snapshot {
			t.Errorf("the node keeps %q", files)
		}
		w.stop()
		w.node.heals()
		w.start()
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
	})
}
