package node

import (
	"context"

	"cloche.dev/cloche/internal/sandbox"
)

// call is the one call that is under way for a sandbox.
type call struct {
	generation int64
	cancel     context.CancelFunc
	done       chan struct{}
}

// enter fences and serialises the calls for one sandbox: a generation older
// than the newest seen is refused, and a newer one cancels the call under way
// and waits for it to take itself back. No call begins before recovery is over,
// which would take a machine in the making for a left-over.
func (n *Node) enter(ctx context.Context, id string, generation int64) (context.Context, func(), error) {
	if err := n.settled(ctx); err != nil {
		return nil, nil, err
	}
	for {
		n.mu.Lock()
		if generation < n.fences[id] {
			n.mu.Unlock()
			return nil, nil, sandbox.Errorf(sandbox.Conflict, "stale_generation", "a newer operation on this sandbox has begun")
		}
		n.fences[id] = generation
		other := n.calls[id]
		if other == nil {
			cctx, cancel := context.WithCancel(ctx)
			c := &call{generation: generation, cancel: cancel, done: make(chan struct{})}
			n.calls[id] = c
			n.mu.Unlock()
			return cctx, func() { n.leave(id, c) }, nil
		}
		if other.generation < generation {
			other.cancel()
		}
		n.mu.Unlock()
		select {
		case <-other.done:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}

func (n *Node) leave(id string, c *call) {
	c.cancel()
	n.mu.Lock()
	delete(n.calls, id)
	n.mu.Unlock()
	close(c.done)
}

// settled waits until what an earlier process left is adopted or undone.
func (n *Node) settled(ctx context.Context) error {
	select {
	case <-n.adopted:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
