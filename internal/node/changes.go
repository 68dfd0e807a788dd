package node

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// changes numbers what happens to machines, so that an observer can ask for
// what is new. The numbers start at the time of this process's start: a cursor
// of an earlier process lies below them and gets everything.
type changes struct {
	base, seq int64
	wake      chan struct{}
}

func newChanges() changes {
	t := time.Now().UnixNano()
	return changes{base: t, seq: t, wake: make(chan struct{})}
}

// touch notes that m changed. The node's lock is held.
func (n *Node) touch(m *machine) {
	n.changes.seq++
	m.seq = n.changes.seq
	close(n.changes.wake)
	n.changes.wake = make(chan struct{})
}

// Observe implements sandbox.Node.
func (n *Node) Observe(ctx context.Context, cursor int64) (sandbox.NodeChanges, error) {
	if err := n.settled(ctx); err != nil {
		if cursor != 0 && ctx.Err() != nil {
			err = nil
		}
		return sandbox.NodeChanges{Cursor: cursor}, err // else it would say that there are no machines
	}
	for {
		answer, wake := n.since(cursor)
		if cursor < n.changes.base || len(answer.Machines) > 0 {
			return answer, nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return sandbox.NodeChanges{Cursor: cursor}, nil
		}
	}
}

func (n *Node) since(cursor int64) (sandbox.NodeChanges, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	answer := sandbox.NodeChanges{Cursor: n.changes.seq}
	for _, m := range n.machines {
		if m.seq > cursor {
			answer.Machines = append(answer.Machines, n.status(m))
		}
	}
	return answer, n.changes.wake
}
