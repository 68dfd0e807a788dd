package node

import (
	"context"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
)

// salvage takes the disk snapshot of a machine that has ended by itself, where
// its driver's disks outlive their machines. It holds what the guest had synced
// at the machine's end. A sandbox is brought back from it as from any other; the
// machine's own files stay until then, for the image is only as good as its
// last fsync. It is nil where that is not what is asked for.
func (n *Node) salvage(ctx context.Context, req sandbox.SnapshotRequest) (*sandbox.SnapshotStatus, error) {
	n.mu.Lock()
	m := n.machines[req.Sandbox]
	ended := m != nil && m.journal.End != nil
	n.mu.Unlock()
	if !ended || req.Kind != sandbox.SnapshotDisk || n.complete(m.wish.Held) {
		return nil, nil
	}
	d, ok := n.drivers[m.journal.Driver].(driver.Salvager)
	if !ok {
		return nil, nil
	}
	var draft *snapshot.Draft
	var st sandbox.SnapshotStatus
	man := n.describe(m, req)
	man.TakenAt = m.journal.End.At
	err := n.perform(ctx, "salvage", m.id, []step{
		{
			// Its end may be no more than that nobody answered.
			name: "end what is left of the machine",
			do:   func(ctx context.Context) error { return d.Halt(ctx, m.id) },
		},
		{
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
		},
		{
			name: "take what is left of the disk",
			do: func(ctx context.Context) error {
				img, err := d.Salvage(ctx, m.id, draft.Dir())
				if sandbox.IsClass(err, sandbox.NotFound) {
					return noMachine()
				}
				if err != nil {
					return snapshot.DiskError(err)
				}
				failpoint.Hit("node.salvage.taken")
				n.describeImage(&man, m, img)
				return nil
			},
		},
		{
			name: "make it durable",
			do: func(ctx context.Context) error {
				done, err := draft.Commit(ctx, man)
				if err == nil {
					st = done.Status()
				}
				return err
			},
		},
	})
	if err != nil {
		return nil, err
	}
	return &st, nil
}
