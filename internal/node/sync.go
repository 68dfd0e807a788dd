package node

import (
	"cmp"
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

// defaultSyncWait is what Options.SyncWait is where nothing is said: a guest's
// dirty pages are a fifth of its memory at most.
const defaultSyncWait = time.Minute

// trySyncWait is how long a pause waits for the same.
const trySyncWait = 5 * time.Second

// sync has the guest write to its disk what it keeps in memory, so that a disk
// image holds what was written before it was asked for. A guest can keep it
// waiting, and so keep itself from being snapshotted, but not its callers.
//
// A guest that stands still can't be asked; it was when it was paused (trySync).
// An agent of before there was such a call can't be either; its image holds what
// the guest had synced itself, as after a power loss.
func (n *Node) sync(ctx context.Context, m *machine) error {
	wait := cmp.Or(n.o.SyncWait, defaultSyncWait)
	bounded, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	err := n.askSync(bounded, m)
	var e *sandbox.Error
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded):
		return ctx.Err()
	// The guest is told of the same deadline, and both look at their own clocks:
	// whichever is first, it is one and the same answer.
	case bounded.Err() != nil, errors.As(err, &e) && (e.Code == "sync_timeout" || e.Code == "deadline_exceeded"):
		return sandbox.Errorf(sandbox.Unavailable, "sync_timeout", "the sandbox did not sync its disk within %s: %w", wait, err).
			WithHint("try again; a memory snapshot needs no sync")
	case e != nil && e.Code == "guest_unimplemented":
		n.o.Log.Warn("the sandbox's agent can't sync its disk; the snapshot holds what the sandbox has synced itself", "sandbox", m.id, "err", err)
		return nil
	}
	return err
}

// trySync does the same before the machine is paused, if it can be done soon: the
// disk image that may be taken meanwhile holds what was written until then.
func (n *Node) trySync(ctx context.Context, m *machine) {
	if !n.drivers[m.journal.Driver].Traits().CachesDisk {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, min(trySyncWait, cmp.Or(n.o.SyncWait, defaultSyncWait)))
	defer cancel()
	if err := n.askSync(ctx, m); err != nil {
		n.o.Log.Warn("a sandbox is paused that has not synced its disk", "sandbox", m.id, "err", err)
	}
}

// askSync asks until the agent has answered: one that was replaced meanwhile
// has forgotten that it was asked.
func (n *Node) askSync(ctx context.Context, m *machine) error {
	n.mu.Lock()
	l := m.line
	n.mu.Unlock()
	if l == nil {
		return sandbox.Errorf(sandbox.Unavailable, "guest_unreachable", "the sandbox's agent is not connected")
	}
	for {
		_, changed := l.Generation()
		client, err := l.Client(ctx)
		if err != nil {
			return err
		}
		_, err = client.Sync(ctx, connect.NewRequest(&guestv1.SyncRequest{}))
		err = guestapi.FromRPC(err)
		if e := sandbox.AsError(err); err == nil || e.Code != "guest_unreachable" {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return err
		case <-m.driver.Exited():
			return err
		}
	}
}
