package node

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
)

// freezeTimeout bounds the guest's answer to Freeze. Its agent gives up earlier.
const freezeTimeout = 10 * time.Second

// errNotFrozen is what is made of an agent's answer that it could not do it; why
// is in the guest's own log.
var errNotFrozen = errors.New("the agent says that not everything stands still")

// freezeGuest has a guest with a kernel of its own hold its users' processes
// still until it is set up anew, in this machine and in every one that is made
// of its image: none of them runs with the old state of the kernel's generator. A
// guest that can't, since it is an older one or is being kept from it, is
// snapshotted all the same, and that is logged.
func (n *Node) freezeGuest(ctx context.Context, m *machine) {
	n.mu.Lock()
	l := m.line
	n.mu.Unlock()
	if l == nil || !n.drivers[m.journal.Driver].Traits().OwnKernel {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	c, err := l.Client(ctx)
	if err == nil {
		err = freeze(ctx, c, false)
	}
	if err != nil {
		n.o.Log.Warn("what runs in a sandbox is not frozen", "sandbox", m.id, "err", err)
	}
}

// thawGuest lets them go on in a machine that was paused and has kept its
// connection. A new one brings a setup, which does the same.
func (n *Node) thawGuest(ctx context.Context, m *machine) {
	n.mu.Lock()
	l := m.line
	n.mu.Unlock()
	if l == nil || !l.Live() || !n.drivers[m.journal.Driver].Traits().OwnKernel {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	c, err := l.Client(ctx)
	if err == nil {
		err = freeze(ctx, c, true)
	}
	if err != nil {
		n.o.Log.Warn("what runs in a sandbox goes on late", "sandbox", m.id, "err", err)
	}
}

func freeze(ctx context.Context, c guestv1connect.GuestClient, thaw bool) error {
	answer, err := c.Freeze(ctx, connect.NewRequest(&guestv1.FreezeRequest{Thaw: thaw}))
	switch {
	case thaw && connect.CodeOf(err) == connect.CodeUnimplemented:
		return nil // then nothing was ever frozen
	case err == nil && !thaw && !answer.Msg.GetFrozen():
		return errNotFrozen
	}
	return err
}
