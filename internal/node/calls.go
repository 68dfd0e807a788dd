package node

import (
	"context"
	"errors"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// call is the one call that is under way for a sandbox.
type call struct {
	generation int64
	yields     bool // to any other call, since nobody asked for it
	cancel     context.CancelCauseFunc
	done       chan struct{}
}

// errSuperseded is why a call was cancelled for another one.
var errSuperseded = errors.New("another operation on this sandbox has begun")

// fence is the newest generation seen of a sandbox, and when.
type fence struct {
	generation int64
	at         time.Time
}

// fenceKept is how long the fence of a sandbox without a machine is kept: longer
// than any call that was made before it was raised can be on its way.
const fenceKept = time.Hour

// raise raises the fence of a sandbox, and lets go of those that protect nothing
// any more, so that they don't pile up. The node's lock is held.
func (n *Node) raise(id string, generation int64, now time.Time) {
	n.fences[id] = fence{max(n.fences[id].generation, generation), now}
	if now.Sub(n.swept) < fenceKept {
		return
	}
	n.swept = now
	for id, f := range n.fences {
		if now.Sub(f.at) >= fenceKept && n.machines[id] == nil && n.calls[id] == nil {
			delete(n.fences, id)
		}
	}
}

// enter fences and serialises the calls for one sandbox: a generation older
// than the newest seen is refused, and a newer one cancels the call under way
// and waits for it to take itself back. No call begins before recovery is over,
// which would take a machine in the making for a left-over.
func (n *Node) enter(ctx context.Context, id string, generation int64) (context.Context, func(), error) {
	return n.enterAs(ctx, id, &call{generation: generation})
}

// enterYielding is enter for a call that gives way: it does not wait for others
// of its generation, and they cancel it.
func (n *Node) enterYielding(ctx context.Context, id string, generation int64) (context.Context, func(), error) {
	return n.enterAs(ctx, id, &call{generation: generation, yields: true})
}

func (n *Node) enterAs(ctx context.Context, id string, c *call) (context.Context, func(), error) {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return nil, nil, sandbox.Errorf(sandbox.Invalid, "bad_id", "%q is not a sandbox id", id)
	}
	if err := n.settled(ctx); err != nil {
		return nil, nil, err
	}
	for {
		n.mu.Lock()
		if c.generation < n.fences[id].generation && !failpoint.Skip(failpoint.SkipFence) {
			n.mu.Unlock()
			return nil, nil, sandbox.Errorf(sandbox.Conflict, "stale_generation", "a newer operation on this sandbox has begun")
		}
		n.raise(id, c.generation, time.Now())
		other := n.calls[id]
		if other == nil {
			cctx, leave := n.admit(ctx, id, c)
			n.mu.Unlock()
			return cctx, leave, nil
		}
		if c.yields && other.generation == c.generation {
			n.mu.Unlock()
			return nil, nil, superseded()
		}
		if other.generation < c.generation || other.yields {
			other.cancel(errSuperseded)
		}
		n.mu.Unlock()
		select {
		case <-other.done:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

// admit makes c the call under way for a sandbox. The node's lock is held.
func (n *Node) admit(ctx context.Context, id string, c *call) (context.Context, func()) {
	ctx, c.cancel = context.WithCancelCause(ctx)
	c.done = make(chan struct{})
	n.calls[id] = c
	return ctx, func() { n.leave(id, c) }
}

func (n *Node) leave(id string, c *call) {
	c.cancel(nil)
	n.mu.Lock()
	delete(n.calls, id)
	n.mu.Unlock()
	close(c.done)
}

func superseded() error {
	return sandbox.Errorf(sandbox.Unavailable, "superseded", "%w", errSuperseded)
}

// settled waits until what an earlier process left is adopted or undone. A node
// that stops before that answers nobody: it would not know what there is.
func (n *Node) settled(ctx context.Context) error {
	select {
	case <-n.adopted:
		return nil
	default:
	}
	select {
	case <-n.adopted:
		return nil
	case <-n.ctx.Done():
		return sandbox.Errorf(sandbox.Unavailable, "node_stops", "the daemon stops before it has taken up its machines").
			WithHint("try again when it has been started again")
	case <-ctx.Done():
		return ctx.Err()
	}
}
