package node

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
)

// barrierTimeout bounds the wait for what the guest keeps of its sessions'
// output: 16 MiB at most.
const barrierTimeout = 30 * time.Second

// SnapshotMachine implements sandbox.Snapshots.
func (n *Node) SnapshotMachine(ctx context.Context, req sandbox.SnapshotRequest) (sandbox.SnapshotStatus, error) {
	ctx, leave, err := n.enter(ctx, req.Sandbox, req.Generation)
	if err != nil {
		return sandbox.SnapshotStatus{}, err
	}
	defer leave()
	if st, err := n.taken(ctx, req); err != nil || st != nil {
		return orZero(st), err
	}
	if st, err := n.salvage(ctx, req); err != nil || st != nil {
		return orZero(st), err
	}
	m, err := n.running(ctx, req.Sandbox)
	if err != nil {
		return sandbox.SnapshotStatus{}, err
	}
	if req.Hold {
		defer n.depart(m)()
	}
	st, err := n.take(ctx, m, req)
	return orZero(st), err
}

func orZero(st *sandbox.SnapshotStatus) sandbox.SnapshotStatus {
	if st == nil {
		return sandbox.SnapshotStatus{}
	}
	return *st
}

// taken returns the snapshot asked for where an earlier call has taken it, nil
// where it is yet to be taken. One that is there and can't be used is nobody's
// yet, since no call has answered it: it is taken again.
func (n *Node) taken(ctx context.Context, req sandbox.SnapshotRequest) (*sandbox.SnapshotStatus, error) {
	if req.Kind != sandbox.SnapshotMemory && req.Kind != sandbox.SnapshotDisk {
		return nil, sandbox.Errorf(sandbox.Invalid, "bad_kind", "there is no %q snapshot", req.Kind)
	}
	man, err := n.snapshots.Verify(ctx, req.Snapshot)
	if sandbox.IsClass(err, sandbox.FailedPrecondition) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if man.Sandbox != req.Sandbox || man.Kind != req.Kind {
		return nil, sandbox.Errorf(sandbox.Conflict, "snapshot_exists", "the snapshot %s is another one", req.Snapshot)
	}
	st := man.Status()
	return &st, nil
}

// take takes a snapshot of a machine that is there. On an error nothing of it
// is left and the machine is as before, but for sessions that Grace has ended.
func (n *Node) take(ctx context.Context, m *machine, req sandbox.SnapshotRequest) (*sandbox.SnapshotStatus, error) {
	var draft *snapshot.Draft
	man := n.describe(m, req)
	steps := append([]step{{
		name: "begin the snapshot",
		do: func(context.Context) (err error) {
			draft, err = n.snapshots.Begin(req.Snapshot)
			return err
		},
		undo: func(context.Context) error {
			if draft == nil {
				return nil
			}
			return draft.Discard()
		},
	}}, n.settleSteps(m, req)...)
	steps = append(steps, step{
		name: "take the image",
		do: func(ctx context.Context) (err error) {
			// Everything that has an offset is asked for where nothing moves it any
			// more: the link is cut, or nothing lives on in the image.
			if req.Kind == sandbox.SnapshotMemory {
				if man.Sessions, err = n.o.Recorder.Living(ctx, m.id); err != nil {
					return err
				}
			}
			man.TakenAt = time.Now().UTC()
			img, err := m.driver.Snapshot(ctx, draft.Dir(), req.Kind)
			if err != nil {
				return snapshot.DiskError(err)
			}
			failpoint.Hit("node.snapshot.taken")
			n.describeImage(&man, m, img)
			if !req.Hold {
				n.join(m)
			}
			return nil
		},
	})
	var st sandbox.SnapshotStatus
	steps = append(steps, step{
		name: "make it durable",
		do: func(ctx context.Context) error {
			done, err := draft.Commit(ctx, man)
			if err != nil {
				return err
			}
			st = done.Status()
			return nil
		},
	})
	if err := n.perform(ctx, "snapshot", m.id, steps); err != nil {
		return nil, verbError(m, err)
	}
	return &st, nil
}

// settleSteps bring the machine to where its image can be taken: what the guest
// has said is in the logs, and for a memory snapshot nothing is connected.
func (n *Node) settleSteps(m *machine, req sandbox.SnapshotRequest) []step {
	memory, moves := req.Kind == sandbox.SnapshotMemory, !m.wish.Paused
	var steps []step
	if moves && req.Grace > 0 {
		steps = append(steps, step{
			name: "ask the sessions to end",
			do: func(ctx context.Context) error {
				return n.o.Recorder.Terminate(ctx, m.id, req.Grace)
			},
		})
	}
	if moves && memory && req.Wait > 0 {
		steps = append(steps, step{
			name: "wait for transfers and tunnels",
			do:   func(ctx context.Context) error { return n.awaitExtras(ctx, m, req.Wait) },
		})
	}
	if moves { // a machine that stands still has said nothing since, and what it holds is in the image
		steps = append(steps, step{
			name: "wait for the output",
			do: func(ctx context.Context) error {
				defer failpoint.Hit("node.snapshot.barrier")
				return n.barrier(ctx, m)
			},
		})
	}
	if moves && !memory && n.drivers[m.journal.Driver].Traits().CachesDisk {
		steps = append(steps, step{name: "sync the disk", do: func(ctx context.Context) error { return n.sync(ctx, m) }})
	}
	if memory && moves {
		steps = append(steps, step{
			name: "freeze what runs",
			do:   func(ctx context.Context) error { n.freezeGuest(ctx, m); return ctx.Err() },
		})
	}
	if memory {
		steps = append(steps, step{
			name: "cut the connections",
			do:   func(context.Context) error { n.cut(m); return nil },
			undo: func(context.Context) error { n.join(m); return nil },
		})
		if n.o.Egress != nil {
			steps = append(steps, step{
				// While the guest runs it learns of it; in the image they are ended either way.
				name: "reset the connections through the egress gateway",
				do:   func(ctx context.Context) error { return n.o.Egress.Reset(ctx, m.id) },
			})
		}
	}
	if req.Hold {
		steps = append(steps, step{
			name: "hold the machine",
			do:   func(ctx context.Context) error { return n.hold(ctx, m, req.Snapshot) },
			undo: func(ctx context.Context) error { return n.unhold(ctx, m) },
		})
	}
	return steps
}

// barrier waits until what the guest has said is in the logs. A guest can keep
// it waiting, and so keep itself from being snapshotted, but not its callers.
func (n *Node) barrier(ctx context.Context, m *machine) error {
	bounded, cancel := context.WithTimeout(ctx, barrierTimeout)
	defer cancel()
	err := n.o.Recorder.Barrier(bounded, m.id)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		return sandbox.Errorf(sandbox.Unavailable, "barrier_timeout", "the sandbox's agent did not hand over its output within %s: %w", barrierTimeout, err)
	}
	return err
}

// awaitExtras waits a bounded time for transfers and tunnels to end.
func (n *Node) awaitExtras(ctx context.Context, m *machine, wait time.Duration) error {
	n.mu.Lock()
	l := m.line
	n.mu.Unlock()
	if l == nil {
		return nil
	}
	bounded, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if err := l.WaitExtras(bounded); err != nil {
		return ctx.Err() // the bound is no error: they are cut now
	}
	return nil
}

// describe is the manifest as far as it is known before the image is taken.
func (n *Node) describe(m *machine, req sandbox.SnapshotRequest) snapshot.Manifest {
	j := m.journal
	man := snapshot.Manifest{
		Project: j.Request.Project, Sandbox: m.id, Kind: req.Kind, Resources: j.Request.Resources,
		MaxProcs: j.MaxProcs, Epoch: j.Request.Generation, BootID: j.GuestBoot,
	}
	if req.Kind == sandbox.SnapshotMemory {
		man.Key = j.Key
	}
	return man
}

// describeImage adds what the driver says of what it wrote.
func (n *Node) describeImage(man *snapshot.Manifest, m *machine, img driver.Image) {
	man.Needs, man.Stood = img.Needs, max(0, img.Stood)
	man.Needs.Digest = m.journal.Request.Digest
	if man.Kind == sandbox.SnapshotMemory {
		man.Needs.Guest = m.journal.Guest
	}
}
