package egress

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/gatewayrpc"
)

const (
	pumpWait  = 20 * time.Second // for records, at each question
	pumpPause = time.Second      // after a failure
)

// pump moves what a gateway records into the audit until ctx ends. The gateway
// tells again what was not acknowledged, so that nothing is lost by the end of
// a daemon, and a little may be there twice.
func (m *Manager) pump(ctx context.Context, g *gateway) {
	for ctx.Err() == nil {
		c, err := gatewayrpc.Dial(ctx, m.path(g.name, socketSuffix))
		if err == nil {
			err = m.drain(ctx, c)
			c.Close()
		}
		if err != nil && ctx.Err() == nil {
			m.o.Log.Debug("take the egress gateway's records", "err", err)
		}
		select {
		case <-time.After(pumpPause):
		case <-ctx.Done():
		}
	}
}

func (m *Manager) drain(ctx context.Context, c *gatewayrpc.Client) error {
	var ack uint64
	for {
		a, err := c.Call(ctx, gatewayrpc.Request{Op: gatewayrpc.OpAudit, Ack: ack, Wait: pumpWait.Milliseconds()})
		if err != nil {
			return err
		}
		if a.Batch == nil {
			continue
		}
		if err := m.audit.Append(a.Batch.Records...); err != nil {
			m.o.Log.Error("write the egress audit; its records wait in the gateway", "err", err)
			return err
		}
		ack = a.Batch.Seq
	}
}

// countAll looks at what the kernel dropped of every attached sandbox.
func (m *Manager) countAll(ctx context.Context) {
	m.mu.Lock()
	var boxes []*box
	for _, b := range m.boxes {
		if b.on != nil {
			boxes = append(boxes, b)
		}
	}
	m.mu.Unlock()
	for _, b := range boxes {
		if ctx.Err() != nil {
			return
		}
		m.count(ctx, b)
	}
}

// count records what the kernel has dropped of a sandbox since the last look:
// one record for each counter that has grown, however many packets that were.
// The first look at a sandbox that an earlier daemon attached tells nothing.
func (m *Manager) count(ctx context.Context, b *box) {
	m.counting.Lock()
	defer m.counting.Unlock()
	ctx, cancel := context.WithTimeout(ctx, countEvery)
	defer cancel()
	now, err := m.o.Networks.Counters(ctx, b.id)
	if err != nil {
		m.o.Log.Debug("read a sandbox's counters", "sandbox", b.id, "err", err)
		return
	}
	m.mu.Lock()
	if b.on == nil {
		m.mu.Unlock()
		return
	}
	before := b.counts
	b.counts = now
	r := audit.Record{At: m.now(), Sandbox: b.id, Kind: audit.Packet, Verdict: audit.Denied}
	r.Project, r.Profile, r.Version = b.listed.Project, b.listed.Profile, b.listed.Version
	if a := b.assignment; a != nil {
		r.Project, r.Profile, r.Version = a.Project, a.Profile.Name, a.Profile.Version
	}
	m.mu.Unlock()
	if before == nil {
		return
	}
	var records []audit.Record
	for name, n := range now {
		if n == before[name] {
			continue
		}
		r.Reason, r.Count = "packet:"+name, n
		if was := before[name]; n > was { // else it counts from 0 again
			r.Count = n - was
		}
		records = append(records, r)
	}
	if err := m.audit.Append(records...); err != nil {
		m.o.Log.Error("write the egress audit", "err", err)
	}
}
