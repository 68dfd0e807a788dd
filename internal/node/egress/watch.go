package egress

import (
	"context"
	"errors"

	"cloche.dev/cloche/internal/sandbox"
)

// watch has the kernel tell of the packets that it drops of an attached
// sandbox, where nothing does so yet. The caller has the sandbox's turn.
func (m *Manager) watch(ctx context.Context, b *box) {
	m.mu.Lock()
	idle := b.on == nil || b.unwatch != nil || m.deaf || m.stopped
	m.mu.Unlock()
	if idle {
		return
	}
	stop, err := m.o.Networks.Drops(ctx, b.id, func(d sandbox.DroppedPacket) { m.dropped(b, d) })
	var e *sandbox.Error
	if errors.As(err, &e) && e.Code == "no_nflog" {
		m.mu.Lock()
		first := !m.deaf
		m.deaf = true
		m.mu.Unlock()
		if first {
			m.o.Log.Warn("the egress audit has numbers of dropped packets only, not each", "err", err)
		}
		return
	}
	if err != nil {
		m.o.Log.Debug("have the kernel tell of dropped packets", "sandbox", b.id, "err", err)
		return // heal tries again
	}
	m.mu.Lock()
	gone := m.stopped || b.on == nil && !b.wanted
	if !gone {
		b.unwatch = stop
	}
	m.mu.Unlock()
	if gone {
		stop()
	}
}

// unwatched takes away what tells of dropped packets, and returns what ends it,
// to be called without the lock, which is held now.
func (b *box) unwatched() (stop func()) {
	stop = b.unwatch
	b.unwatch = nil
	if stop == nil {
		return func() {}
	}
	return stop
}

func all(stops []func()) {
	for _, stop := range stops {
		stop()
	}
}

// dropped records one packet.
func (m *Manager) dropped(b *box, d sandbox.DroppedPacket) {
	m.mu.Lock()
	if b.single == nil {
		b.single = map[string]uint64{}
	}
	b.single[d.Reason]++
	r := m.packet(b)
	m.mu.Unlock()
	r.Reason, r.Count, r.Dialled, r.Scheme, r.Sent = reason(d.Reason), 1, d.To, d.Protocol, int64(d.Length)
	if err := m.audit.Append(r); err != nil {
		m.o.Log.Error("write the egress audit", "err", err)
	}
}

// leftOut tells, at a look at which a counter has grown, how many packets the
// record of this look is about. The lock is held.
func (b *box) leftOut(name string, grown uint64) uint64 {
	single, old := b.single[name], b.untold[name]
	if old+grown == 0 {
		return 0
	}
	// Those told of one by one since the last look were found then, or are now.
	found := min(single, old)
	old -= found
	single -= found
	found = min(single, grown)
	grown -= found
	single -= found
	if b.unwatch == nil { // nothing will tell of them
		old, grown = old+grown, 0
	}
	if b.single != nil {
		b.single[name] = single
	}
	if b.untold == nil {
		b.untold = map[string]uint64{}
	}
	b.untold[name] = grown
	return old
}
