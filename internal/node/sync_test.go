package node

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// newCachingRig is a rig whose guests keep what they write until they sync.
func newCachingRig(t *testing.T, wait time.Duration) (*rig, string) {
	r := newRig(t)
	r.d.caches = true
	r.more = func(o *Options) { o.SyncWait = wait }
	r.restart()
	req := request(1)
	r.create(req)
	r.write(req.Sandbox, "/a")
	return r, req.Sandbox
}

// holds makes a machine from a disk snapshot and compares what is on its disk.
func (r *rig) holds(snapshot string, want ...string) {
	r.t.Helper()
	req := from(request(1), 1, snapshot, sandbox.SnapshotDisk, false)
	r.create(req)
	if got := r.d.machine(req.Sandbox).onDisk(); !slices.Equal(got, want) {
		r.t.Errorf("a machine of the snapshot holds %v, not %v", got, want)
	}
}

func TestADiskSnapshotHoldsWhatTheGuestWrote(t *testing.T) {
	r, id := newCachingRig(t, 0)
	one := r.snapshot(snap(id, 1, sandbox.SnapshotDisk))
	r.holds(one.Snapshot, "/a")
	r.write(id, "/b")
	two, err := r.n.CheckpointMachine(background, snap(id, 1, sandbox.SnapshotDisk))
	r.must(err)
	r.holds(two.Snapshot, "/a", "/b")
	r.write(id, "/c")
	r.snapshot(snap(id, 1, sandbox.SnapshotMemory))
	if n := r.d.machine(id).syncs; n != 2 {
		t.Errorf("%d syncs after two disk snapshots and one of the memory", n)
	}
	// One that stands still was asked before.
	r.must(r.n.PauseMachine(background, id, 2))
	r.holds(r.snapshot(snap(id, 2, sandbox.SnapshotDisk)).Snapshot, "/a", "/b", "/c")
	r.must(r.n.ResumeMachine(background, id, 2))
	r.write(id, "/d")
	r.d.syncs(func(context.Context) error { return errors.New("input/output error") })
	r.must(r.n.PauseMachine(background, id, 2)) // nothing keeps it from that
	r.holds(r.snapshot(snap(id, 2, sandbox.SnapshotDisk)).Snapshot, "/a", "/b", "/c")
	r.d.syncs(nil)
	r.must(r.n.ResumeMachine(background, id, 2))
	three := sandbox.NewID(sandbox.KindSnapshot)
	r.must(leave(r.n, id, three, sandbox.SnapshotDisk, sandbox.EndStopped))
	r.holds(three, "/a", "/b", "/c", "/d")
}

// TestASyncThatNeverEnds has the guest, or the host, be the first to look at the
// clock: the answer is the same.
func TestASyncThatNeverEnds(t *testing.T) {
	over := make(chan struct{})
	defer close(over)
	for name, sync := range map[string]func(context.Context) error{
		"the guest is silent":      func(context.Context) error { <-over; return nil },
		"the guest gives up":       func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"the guest gives up early": func(context.Context) error { return context.DeadlineExceeded },
		"the guest says so": func(ctx context.Context) error {
			<-ctx.Done()
			return sandbox.Errorf(sandbox.Unavailable, "sync_timeout", "late")
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, id := newCachingRig(t, 100*time.Millisecond)
			r.d.syncs(sync)
			_, err := r.n.SnapshotMachine(background, snap(id, 1, sandbox.SnapshotDisk))
			if !sandbox.IsClass(err, sandbox.Unavailable) || code(err) != "sync_timeout" {
				t.Errorf("SnapshotMachine = %v", err)
			}
			if err := leave(r.n, id, sandbox.NewID(sandbox.KindSnapshot), sandbox.SnapshotDisk, sandbox.EndStopped); code(err) != "sync_timeout" {
				t.Errorf("a stop = %v", err)
			}
			ctx, cancel := context.WithTimeout(background, 20*time.Millisecond)
			defer cancel()
			if _, err := r.n.SnapshotMachine(ctx, snap(id, 3, sandbox.SnapshotDisk)); name != "the guest gives up early" && code(err) != "sync_timeout" {
				t.Errorf("with a caller in a hurry: %v", err)
			}
			if files := r.files(); len(files) > 0 || r.d.machine(id).isPaused() {
				t.Errorf("files %v, paused %v", files, r.d.machine(id).isPaused())
			}
			r.d.syncs(nil)
			r.n.o.SyncWait = time.Minute // a slow host may need more than before
			r.snapshot(snap(id, 3, sandbox.SnapshotDisk))
		})
	}
}

func TestASyncThatCantBe(t *testing.T) {
	t.Run("an agent of before", func(t *testing.T) {
		r := newRig(t)
		r.d.caches, r.d.old = true, true
		req := request(1)
		r.create(req)
		r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotDisk))
	})
	t.Run("a disk that fails", func(t *testing.T) {
		r, id := newCachingRig(t, 0)
		r.d.syncs(func(context.Context) error { return errors.New("input/output error") })
		if _, err := r.n.SnapshotMachine(background, snap(id, 1, sandbox.SnapshotDisk)); code(err) != "guest_failed" {
			t.Errorf("SnapshotMachine = %v", err)
		}
	})
	t.Run("a caller that goes", func(t *testing.T) {
		r, id := newCachingRig(t, 0)
		ctx, cancel := context.WithCancel(background)
		r.d.syncs(func(ctx context.Context) error { cancel(); <-ctx.Done(); return ctx.Err() })
		if _, err := r.n.SnapshotMachine(ctx, snap(id, 1, sandbox.SnapshotDisk)); !errors.Is(err, context.Canceled) {
			t.Errorf("SnapshotMachine = %v", err)
		}
	})
}
