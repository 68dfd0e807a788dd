package node

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
)

// freezeTimeout bounds the guest's answer to Freeze.
const freezeTimeout = 10 * time.Second

// freezeGuest has the guest hold its users' processes still until it is set up anew,
// in this machine and in every one that is made of the image: none of them runs
// with the old state of the kernel's generator. A guest that can't, since it is
// an older one or is being kept from it, is snapshotted all the same.
func (n *Node) freezeGuest(ctx context.Context, m *machine) {
	n.mu.Lock()
	l := m.line
	n.mu.Unlock()
	if l == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	c, err := l.Client(ctx)
	if err == nil {
		_, err = c.Freeze(ctx, connect.NewRequest(new(guestv1.FreezeRequest)))
	}
	if err != nil {
		n.o.Log.Warn("what runs in a sandbox is not frozen for its snapshot", "sandbox", m.id, "err", err)
	}
}
