package node

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

// lastImage is the newest checkpoint of a machine since this process runs it.
//
// Nothing can have changed on the disk since a checkpoint when nothing could
// write both then and now and nothing has begun in between. What could write
// is: a session's process (none runs), what such a process left behind (the
// guest counts no others), and a call of ours that may change files (none is
// under way; the calls that may are counted, and the beginning of a session is
// one of them). What the agent itself writes it writes again at each hello. So
// the answer is exact for an honest guest. One that lies about its processes
// spares itself checkpoints, and loses its own disk back to the last one that
// was taken; nobody else's.
//
// A restart of the daemon forgets it, so that one checkpoint too many is taken
// then, and never one too few.
type lastImage struct {
	id      string
	changes int64 // as counted when it was taken
	quiet   bool  // nothing could write then
}

// othersTimeout bounds the question for the guest's processes.
const othersTimeout = 5 * time.Second

// CheckpointMachine implements sandbox.Snapshots.
func (n *Node) CheckpointMachine(ctx context.Context, req sandbox.SnapshotRequest) (sandbox.SnapshotStatus, error) {
	var none sandbox.SnapshotStatus
	if req.Kind != sandbox.SnapshotDisk || req.Hold || req.Grace != 0 {
		return none, sandbox.Errorf(sandbox.Invalid, "bad_kind", "a checkpoint is a disk snapshot after which the machine goes on")
	}
	ctx, leave, err := n.enterYielding(ctx, req.Sandbox, req.Generation)
	if err != nil {
		return none, err
	}
	defer leave()
	st, err := n.checkpoint(ctx, req)
	if err != nil && errors.Is(context.Cause(ctx), errSuperseded) {
		return none, superseded()
	}
	return orZero(st), err
}

func (n *Node) checkpoint(ctx context.Context, req sandbox.SnapshotRequest) (*sandbox.SnapshotStatus, error) {
	if st, err := n.taken(ctx, req); err != nil || st != nil {
		return st, err
	}
	if m := n.known(req.Sandbox); m != nil && n.complete(m.wish.Held) {
		return nil, superseded() // it is about to be released
	}
	if st, err := n.salvage(ctx, req); err != nil || st != nil {
		return st, err
	}
	m, err := n.running(ctx, req.Sandbox)
	if err != nil {
		return nil, err
	}
	if m.wish.Paused {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "paused", "the sandbox is paused, and changes nothing")
	}
	now := lastImage{id: req.Snapshot, quiet: n.quiet(ctx, m)}
	n.mu.Lock()
	last := m.image
	now.changes = m.changes
	now.quiet = now.quiet && m.changing == 0
	n.mu.Unlock()
	if last.quiet && now.quiet && last.changes == now.changes && n.complete(last.id) {
		return &sandbox.SnapshotStatus{Snapshot: req.Snapshot, Sandbox: req.Sandbox, Kind: req.Kind, Unchanged: true}, nil
	}
	st, err := n.take(ctx, m, req)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	m.image = now // counted before it was taken: what came since shows
	n.mu.Unlock()
	return st, nil
}

// quiet tells whether nothing in the guest can write, as far as it says.
func (n *Node) quiet(ctx context.Context, m *machine) bool {
	n.mu.Lock()
	l := m.line
	n.mu.Unlock()
	if l == nil || n.o.Recorder.Active(m.id) > 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, othersTimeout)
	defer cancel()
	client, err := l.Client(ctx)
	if err != nil {
		return false
	}
	answer, err := client.Sessions(ctx, connect.NewRequest(&guestv1.SessionsRequest{}))
	if err != nil || answer.Msg.GetOthers() > 0 {
		return false
	}
	for _, s := range answer.Msg.GetSessions() {
		if !s.GetExited() {
			return false
		}
	}
	return true
}
