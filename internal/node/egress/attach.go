package egress

import (
	"context"
	"os"
	"slices"
	"sync"

	"cloche.dev/cloche/internal/egress/gatewayrpc"
	"cloche.dev/cloche/internal/sandbox"
)

// none is what a sandbox has until its assignment comes.
func none(id string) *sandbox.EgressAssignment {
	return &sandbox.EgressAssignment{Sandbox: id, Profile: sandbox.EgressProfile{Name: sandbox.PresetNone, Default: sandbox.EgressDeny}}
}

// bring tells a gateway what it is to have of a sandbox. The caller has the
// sandbox's turn.
func (m *Manager) bring(ctx context.Context, g *gateway, b *box) error {
	m.mu.Lock()
	if m.current != g {
		m.mu.Unlock()
		return errOther
	}
	a, on, told, wanted := b.assignment, b.on == g, b.told, b.wanted
	old := slices.Clone(m.old)
	held := slices.ContainsFunc(old, func(o *gateway) bool { return o.has[b.id] })
	m.mu.Unlock()
	if a != nil {
		for _, o := range old { // what still runs there has to comply too
			if _, err := m.call(ctx, o, gatewayrpc.Request{Op: gatewayrpc.OpSet, Assignment: a}); err != nil && !gatewayrpc.Gone(err) {
				m.o.Log.Warn("tell an egress gateway of before", "sandbox", b.id, "err", err)
			}
		}
	}
	switch {
	case on && (a == nil || told == a), !on && !wanted:
		return nil
	case on:
		_, err := m.call(ctx, g, gatewayrpc.Request{Op: gatewayrpc.OpSet, Assignment: a})
		if !gatewayrpc.Gone(err) {
			m.mu.Lock()
			b.told = a // also where it was refused: it won't be taken the next time
			m.mu.Unlock()
		}
		return err
	case a == nil && held:
		return nil // it keeps what it has there until its assignment comes
	}
	return m.attach(ctx, g, b, a, old)
}

// attach hands a sandbox's sockets to a gateway. Those of before let go of
// theirs then; both may listen for a moment, so that nothing is refused between.
func (m *Manager) attach(ctx context.Context, g *gateway, b *box, a *sandbox.EgressAssignment, old []*gateway) error {
	proxy, tcp, udp, err := m.o.Networks.Sockets(ctx, b.id)
	if err != nil {
		return err
	}
	files := []*os.File{proxy, tcp, udp}
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	now := a
	if now == nil {
		now = none(b.id)
	}
	answer, err := m.call(ctx, g, gatewayrpc.Request{Op: gatewayrpc.OpAttach, Assignment: now}, files...)
	if gatewayrpc.Gone(err) || err != nil && !answer.Attached {
		return err
	}
	for _, o := range old {
		if _, err := m.call(ctx, o, gatewayrpc.Request{Op: gatewayrpc.OpYield, Sandbox: b.id}); err != nil && !gatewayrpc.Gone(err) {
			m.o.Log.Warn("take a sandbox from an egress gateway of before", "sandbox", b.id, "err", err)
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range old {
		delete(o.has, b.id)
	}
	if m.current != g {
		return errOther
	}
	b.on, b.told = g, a
	if b.counts == nil {
		b.counts = map[string]uint64{}
	}
	return err
}

// heal brings to the gateway what could not be brought before, for every
// sandbox for which that is so.
func (m *Manager) heal(ctx context.Context) {
	m.mu.Lock()
	var ids []string
	if m.current != nil {
		for id, b := range m.boxes {
			if b.wanted && b.on != m.current || b.on == m.current && b.assignment != nil && b.told != b.assignment {
				ids = append(ids, id)
			}
		}
	}
	m.mu.Unlock()
	var wg sync.WaitGroup
	limit := make(chan struct{}, workers)
	for _, id := range ids {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			b, unlock, err := m.lock(ctx, id)
			if err != nil {
				return
			}
			defer unlock()
			if err := m.ensure(ctx, b); err != nil && ctx.Err() == nil {
				m.o.Log.Warn("attach a sandbox to the egress gateway", "sandbox", id, "err", err)
			}
		})
	}
	wg.Wait()
}
