package node

import (
	"context"

	"cloche.dev/cloche/internal/sandbox"
)

// DeleteSnapshot implements sandbox.Snapshots. A machine that was made from it
// has what it still reads open, and goes on.
func (n *Node) DeleteSnapshot(ctx context.Context, id string) error {
	if err := n.settled(ctx); err != nil {
		return err
	}
	n.mu.Lock()
	for _, m := range n.machines { // control may have dropped an image that it could not note
		if m.image.id == id {
			m.image = lastImage{}
		}
	}
	n.mu.Unlock()
	return n.snapshots.Delete(id)
}

// ListSnapshots implements sandbox.Snapshots.
func (n *Node) ListSnapshots(ctx context.Context) ([]string, error) {
	if err := n.settled(ctx); err != nil {
		return nil, err
	}
	return n.snapshots.List()
}

// complete tells whether a snapshot is there. "" is none.
func (n *Node) complete(id string) bool {
	if id == "" {
		return false
	}
	_, err := n.snapshots.Read(id)
	return err == nil
}

var _ sandbox.Snapshots = (*Node)(nil)
