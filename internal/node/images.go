package node

import (
	"context"

	"cloche.dev/cloche/internal/sandbox"
)

// pin keeps a snapshot's files while m may use them: a driver may map them, and
// a deletion of the snapshot must not take them from under its machine.
func (n *Node) pin(m *machine, id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m.pinned = id
	n.pins[id]++
}

// unpin lets go of what m has pinned; the last one removes the files of a
// snapshot that was deleted meanwhile.
func (n *Node) unpin(m *machine) {
	n.mu.Lock()
	id := m.pinned
	m.pinned = ""
	last := false
	if id != "" {
		if n.pins[id]--; n.pins[id] == 0 {
			delete(n.pins, id)
			last = true
		}
	}
	n.mu.Unlock()
	if last {
		n.collectRetired(id)
	}
}

// collectRetired removes the files of snapshots that are deleted and that no
// machine uses any more: of all of them, or of one.
func (n *Node) collectRetired(only string) {
	ids, err := n.snapshots.Retired()
	if err != nil {
		n.o.Log.Error("list deleted snapshots", "err", err)
	}
	for _, id := range ids {
		if only != "" && id != only || n.isPinned(id) {
			continue
		}
		if err := n.snapshots.Delete(id); err != nil {
			n.o.Log.Error("remove the files of a deleted snapshot", "snapshot", id, "err", err)
		}
	}
}

func (n *Node) isPinned(id string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pins[id] > 0
}

// DeleteSnapshot implements sandbox.Snapshots. Files that a machine still uses
// go with that machine's end; the snapshot itself is gone at once.
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
	if !n.isPinned(id) {
		return n.snapshots.Delete(id)
	}
	if err := n.snapshots.Retire(id); err != nil {
		return err
	}
	n.collectRetired(id) // unless it was let go of meanwhile
	return nil
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
