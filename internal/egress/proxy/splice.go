package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/policy"
)

// spliceStep is how much the kernel moves before bytes are counted and the
// limits are looked at again.
const spliceStep = 1 << 20

// spliceAddress connects to what was dialled, which the policy allows by its
// address, and joins both connections.
func (g *guest) spliceAddress(live *Live, d policy.Decision) {
	rec := audit.Record{
		At: g.at, Kind: audit.TCP, Verdict: audit.Allowed, Scheme: "tcp", Dialled: g.dialled,
		WouldDeny: d.WouldDeny, Rule: d.Rule, Reason: d.Reason,
	}
	done := g.p.track(&flow{cut: g.cut, complies: func(live *Live) bool {
		if live.Policy == nil {
			return false
		}
		d, inspect := live.Policy.Address(g.dialled)
		return d.Allow && !inspect
	}}, live)
	defer done()
	g.join(live, rec, nil, []netip.Addr{g.dialled.Addr()})
}

// join connects to one of addrs, sends what was read already, and copies both
// ways until both ends have ended. It makes the one record of the connection.
func (g *guest) join(live *Live, rec audit.Record, prefix []byte, addrs []netip.Addr) {
	up, err := g.p.o.Dialer.Dial(g.ctx, addrs, g.dialled.Port())
	if err != nil {
		r := refusalOf(err, reasonUpstreamFailed)
		if reason := cutOf(g.ctx); reason != "" {
			r = cutVerdict(reason)
		}
		r.apply(&rec)
		g.record(rec, live)
		abort(g.tcp)
		return
	}
	defer func() { _ = up.Close() }()
	stop := context.AfterFunc(g.ctx, func() { abort(up) })
	defer stop()
	rec.Upstream = remote(up)

	var sent, received atomic.Int64
	if len(prefix) > 0 {
		_, err = up.Write(prefix) // it was charged when it was read
		sent.Add(int64(len(prefix)))
	}
	if err == nil {
		var wg sync.WaitGroup
		wg.Go(func() { g.oneWay(up, g.tcp, up, &sent, &g.p.meter.sent) })
		g.oneWay(g.tcp, up, up, &received, &g.p.meter.received)
		wg.Wait()
	}
	rec.Sent, rec.Received = sent.Load(), received.Load()
	if reason := cutOf(g.ctx); reason != "" {
		cutVerdict(reason).apply(&rec)
	}
	g.record(rec, live)
}

// oneWay copies from src to dst until src ends, and tells dst so. An error
// resets both ends, as it would have reached them without a gateway between.
func (g *guest) oneWay(dst, src, up *net.TCPConn, n, counter *atomic.Int64) {
	for {
		moved, err := g.step(dst, src, counter)
		n.Add(moved)
		switch {
		case errors.Is(err, io.EOF):
			_ = dst.CloseWrite()
			return
		case err != nil:
			abort(g.tcp)
			abort(up)
			return
		}
	}
}

// step moves some bytes: by splice(2) where they need only be counted, through
// a buffer where each has to be paid for before it goes on.
func (g *guest) step(dst, src *net.TCPConn, counter *atomic.Int64) (int64, error) {
	m := &g.p.meter
	if m.unlimited() {
		moved, err := dst.ReadFrom(&io.LimitedReader{R: src, N: spliceStep})
		m.count(moved, counter)
		if err == nil && moved < spliceStep {
			err = io.EOF
		}
		return moved, err
	}
	buf := buffers.Get()
	defer buffers.Put(buf)
	n, err := src.Read(buf)
	if n == 0 {
		return 0, err
	}
	if err := g.charge(n, counter); err != nil {
		return 0, err
	}
	written, err := dst.Write(buf[:n])
	return int64(written), err
}

// remote is the address at the other end of a connection.
func remote(c net.Conn) netip.AddrPort {
	a, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := a.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// bufferPool lends buffers of meterStep.
type bufferPool struct{ pool sync.Pool }

var buffers bufferPool

// Get returns a buffer.
func (b *bufferPool) Get() []byte {
	if buf, ok := b.pool.Get().(*[meterStep]byte); ok {
		return buf[:]
	}
	return make([]byte, meterStep)
}

// Put takes a buffer of Get back.
func (b *bufferPool) Put(buf []byte) {
	if len(buf) == meterStep {
		b.pool.Put((*[meterStep]byte)(buf))
	}
}
