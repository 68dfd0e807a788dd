package proxy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
)

// guest is one connection that a sandbox made. What it dialled says which
// rules apply, and never where anything goes once names decide.
type guest struct {
	p       *Proxy
	tcp     *net.TCPConn
	at      time.Time
	dialled netip.AddrPort
	ctx     context.Context // ends with the connection; its cause is a cutError where it was cut
	end     context.CancelCauseFunc

	mu      sync.Mutex
	refused bool
}

// serve decides one connection and stays until it is over.
func (p *Proxy) serve(ctx context.Context, c *net.TCPConn) {
	ctx, end := context.WithCancelCause(ctx)
	g := &guest{p: p, tcp: c, at: time.Now(), ctx: ctx, end: end}
	defer end(nil)
	defer func() { _ = c.Close() }()
	live := p.live.Load()

	p.mu.Lock()
	p.guests[g] = struct{}{}
	open := len(p.guests)
	p.mu.Unlock()
	p.total.Add(1)
	defer func() {
		p.mu.Lock()
		delete(p.guests, g)
		p.mu.Unlock()
	}()
	// Whatever ends the context ends the connection: reads and writes of it
	// return, with a reset.
	stop := context.AfterFunc(ctx, func() { abort(c) })
	defer stop()
	dialled, err := p.o.Original(c)
	local, _ := c.LocalAddr().(*net.TCPAddr)
	switch {
	case err != nil || !dialled.IsValid():
		g.refuse(live, audit.TCP, "", denied(reasonNoDestination))
		return
	case local != nil && local.AddrPort() == dialled:
		g.dialled = dialled
		g.refuse(live, audit.TCP, "", denied(reasonGatewayPort))
		return
	}
	g.dialled = netip.AddrPortFrom(dialled.Addr().Unmap(), dialled.Port())
	switch {
	case live.Policy == nil:
		g.refuse(live, audit.TCP, "", denied(reasonNoPolicy))
	case p.meter.spent():
		g.refuse(live, audit.TCP, "", denied(reasonBytesLimit))
	case p.meter.full(open):
		g.refuse(live, audit.TCP, "", denied(reasonTooMany))
	default:
		g.decide(live)
	}
}

// decide asks the policy about the address that was dialled.
func (g *guest) decide(live *Live) {
	d, inspect := live.Policy.Address(g.dialled)
	switch {
	case inspect:
		done := g.p.track(&flow{complies: g.inspects, cut: g.cut}, live)
		defer done()
		g.inspect(live)
	case d.Allow:
		g.spliceAddress(live, d)
	default:
		g.refuse(live, audit.TCP, "", deniedBy(d))
	}
}

// inspects tells whether a connection that is looked into may go on: each of
// its requests is decided anyway.
func (g *guest) inspects(live *Live) bool {
	if live.Policy == nil {
		return false
	}
	d, inspect := live.Policy.Address(g.dialled)
	return inspect || d.Allow
}

// inspect finds out what a connection speaks.
func (g *guest) inspect(live *Live) {
	first, refused := g.firstByte()
	switch {
	case refused != nil:
		g.refuse(live, audit.TCP, "", refused)
	case first[0] == recordHandshake:
		g.serveTLS(live, &prefixed{Conn: metered{g}, prefix: first})
	case isTokenByte(first[0]):
		g.serveHTTP(&prefixed{Conn: metered{g}, prefix: first}, "", false)
	default:
		g.refuse(live, audit.TCP, "", denied(reasonUnknownProtocol))
	}
}

// recordHandshake is the first byte of a TLS connection.
const recordHandshake = 0x16

// firstByte waits for the first byte. Who lets the other end speak first
// can't be understood here.
func (g *guest) firstByte() ([]byte, *refusal) {
	_ = g.tcp.SetReadDeadline(time.Now().Add(g.p.times.firstByte))
	b := make([]byte, 1)
	if _, err := (metered{g}).Read(b); err != nil {
		if reason := cutOf(g.ctx); reason != "" {
			return nil, cutVerdict(reason)
		}
		return nil, denied(reasonNoRequest)
	}
	_ = g.tcp.SetReadDeadline(time.Time{})
	return b, nil
}

// refuse ends a connection by a reset, and makes the one record of it.
func (g *guest) refuse(live *Live, kind audit.Kind, host string, r *refusal) {
	rec := audit.Record{At: g.at, Kind: kind, Host: host, Dialled: g.dialled, Scheme: "tcp"}
	if kind == audit.TLS {
		rec.Scheme = "https"
	}
	r.apply(&rec)
	g.record(rec, live)
	abort(g.tcp)
}

// record makes the record of a connection as a whole, which has one at most.
func (g *guest) record(rec audit.Record, live *Live) {
	g.mu.Lock()
	again := g.refused
	g.refused = true
	g.mu.Unlock()
	if !again {
		g.p.emit(rec, live)
	}
}

// cut ends a connection that was allowed.
func (g *guest) cut(reason string) {
	g.end(cutError{reason})
	abort(g.tcp)
}

// abort closes a connection by a reset, and drops what wasn't sent yet.
func abort(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// prefixed gives back what was read from a connection already.
type prefixed struct {
	net.Conn
	prefix []byte
}

func (p *prefixed) Read(b []byte) (int, error) {
	if len(p.prefix) > 0 {
		n := copy(b, p.prefix)
		p.prefix = p.prefix[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}

// isTimeout tells whether a deadline ended a read or write.
func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}
