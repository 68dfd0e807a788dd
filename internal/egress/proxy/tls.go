package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"slices"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/policy"
)

// maxHello bounds what is kept of a ClientHello to be sent on as it was: a
// handshake message of at most 64 KiB in its records.
const maxHello = 80 << 10

const (
	alpnH2    = "h2"
	alpnHTTP1 = "http/1.1"
)

// extensions by which a client hides the name that it means.
const (
	extensionECH     = 0xfe0d
	extensionOldESNI = 0xffce
)

// errHello stops a handshake that isn't ours to finish.
var errHello = errors.New("the handshake stops here")

// hello is a connection whose ClientHello is being read. Nothing is written,
// alerts neither, until it is decided that the gateway is the other end.
type hello struct {
	net.Conn
	tcp  *net.TCPConn
	open bool   // what is written goes out, and what is read isn't kept
	read []byte // what was read so far
}

// Read implements net.Conn.
func (h *hello) Read(b []byte) (int, error) {
	n, err := h.Conn.Read(b)
	if !h.open {
		if len(h.read)+n > maxHello {
			return 0, errHello
		}
		h.read = append(h.read, b[:n]...)
	}
	return n, err
}

// Write implements net.Conn.
func (h *hello) Write(b []byte) (int, error) {
	if !h.open {
		return len(b), nil
	}
	return h.Conn.Write(b)
}

// Close implements net.Conn. It is called when the handshake takes too long.
func (h *hello) Close() error {
	if h.open {
		return h.Conn.Close()
	}
	abort(h.tcp)
	return nil
}

// choice is what was decided about a ClientHello.
type choice struct {
	host     string
	decision policy.Decision
	refusal  *refusal
	config   *tls.Config // of a connection that is terminated
}

// serveTLS reads the ClientHello, and terminates the connection, passes it
// through, or refuses it.
func (g *guest) serveTLS(live *Live, c net.Conn) {
	h := &hello{Conn: c, tcp: g.tcp}
	ch := choice{refusal: denied(reasonBadHello)}
	conn := tls.Server(h, &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			ch = g.choose(live, info)
			if ch.config == nil {
				return nil, errHello
			}
			h.open, h.read = true, nil
			return ch.config, nil
		},
	})
	ctx, cancel := context.WithTimeout(g.ctx, g.p.times.handshake)
	err := conn.HandshakeContext(ctx)
	cancel()
	if ch.refusal != nil && ch.refusal.reason == reasonBadHello && errors.Is(err, context.DeadlineExceeded) {
		ch.refusal = denied(reasonHeaderTimeout)
	}
	switch {
	case cutOf(g.ctx) != "":
		g.refuse(live, audit.TLS, ch.host, cutVerdict(cutOf(g.ctx)))
	case ch.refusal != nil:
		g.refuse(live, audit.TLS, ch.host, ch.refusal)
	case ch.config == nil:
		g.passThrough(live, ch, h.read)
	case err != nil: // the client doesn't trust the authority, or gave up
		g.refuse(live, audit.TLS, ch.host, &refusal{verdict: audit.Failed, reason: reasonTLSHandshake, rule: ch.decision.Rule})
	default:
		done := g.p.track(&flow{cut: g.cut, complies: func(live *Live) bool {
			if live.Policy == nil {
				return false
			}
			d := live.Policy.TLS(ch.host, g.dialled.Port())
			return d.Allow && !d.Passthrough
		}}, live)
		defer done()
		g.serveHTTP(conn, ch.host, conn.ConnectionState().NegotiatedProtocol == alpnH2)
	}
}

// choose decides a ClientHello.
func (g *guest) choose(live *Live, info *tls.ClientHelloInfo) choice {
	no := func(host string, r *refusal) choice { return choice{host: host, refusal: r} }
	if info.ServerName == "" {
		return no("", denied(reasonNoSNI))
	}
	host, err := policy.CanonicalHost(info.ServerName)
	if err != nil {
		return no(info.ServerName, denied(reasonBadSNI))
	}
	d := live.Policy.TLS(host, g.dialled.Port())
	switch {
	case !d.Allow:
		return no(host, deniedBy(d))
	case d.Passthrough && (slices.Contains(info.Extensions, extensionECH) || slices.Contains(info.Extensions, extensionOldESNI)):
		// It may name another site of that server, and nobody here could tell. Where
		// TLS ends here the name in clear is the one that counts, and browsers send
		// the extension filled with noise.
		return no(host, denied(reasonECH))
	case d.Passthrough:
		return choice{host: host, decision: d}
	case live.Authority == nil:
		return no(host, denied(reasonNoAuthority))
	case len(info.SupportedVersions) > 0 && slices.Max(supported(info.SupportedVersions)) < tls.VersionTLS12:
		return no(host, denied(reasonTLSVersion))
	case len(info.SupportedProtos) > 0 && !slices.Contains(info.SupportedProtos, alpnH2) && !slices.Contains(info.SupportedProtos, alpnHTTP1):
		return no(host, denied(reasonALPN))
	}
	leaf, err := live.Authority.Leaf(host)
	if err != nil {
		return no(host, refusalOf(err, reasonNoAuthority))
	}
	return choice{host: host, decision: d, config: &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{*leaf},
		NextProtos:   []string{alpnH2, alpnHTTP1},
		// A ticket would bring a session back without its name being looked at.
		SessionTicketsDisabled: true,
	}}
}

// supported are the versions that aren't grease (RFC 8701).
func supported(versions []uint16) []uint16 {
	known := []uint16{0}
	for _, v := range versions {
		if v <= tls.VersionTLS13 {
			known = append(known, v)
		}
	}
	return known
}

// passThrough joins the sandbox with the server that the gateway itself finds
// under the name of the ClientHello, which it sends on as it was.
func (g *guest) passThrough(live *Live, ch choice, hello []byte) {
	rec := audit.Record{
		At: g.at, Kind: audit.TLS, Verdict: audit.Allowed, Scheme: "https", Host: ch.host, Dialled: g.dialled,
		WouldDeny: ch.decision.WouldDeny, Rule: ch.decision.Rule, Reason: ch.decision.Reason,
	}
	addrs, d, r := g.p.addresses(g.ctx, live, policy.Request{Scheme: "https", Host: ch.host, Port: g.dialled.Port()})
	if r != nil {
		r.apply(&rec)
		g.record(rec, live)
		abort(g.tcp)
		return
	}
	rec.WouldDeny, rec.Rule, rec.Reason = d.WouldDeny, d.Rule, d.Reason
	done := g.p.track(&flow{cut: g.cut, complies: func(live *Live) bool {
		if live.Policy == nil {
			return false
		}
		t := live.Policy.TLS(ch.host, g.dialled.Port())
		d := passes(live.Policy, policy.Request{Scheme: "https", Host: ch.host, Port: g.dialled.Port()}, addrs)
		return t.Allow && t.Passthrough && d
	}}, live)
	defer done()
	g.join(live, rec, hello, addrs)
}

// passes tells whether a policy allows a request to each of addrs.
func passes(pol *policy.Policy, q policy.Request, addrs []netip.Addr) bool {
	for _, a := range addrs {
		q.Addr = a
		if !pol.Request(q).Allow {
			return false
		}
	}
	return true
}

// addresses finds the addresses of a request's host and returns those that one
// and the same rule allows, with its decision. A name that the policy never
// allows is not asked about: a question, too, carries something out.
func (p *Proxy) addresses(ctx context.Context, live *Live, q policy.Request) ([]netip.Addr, policy.Decision, *refusal) {
	if d := live.Policy.Name(q.Host); !d.Allow {
		return nil, d, deniedBy(d)
	}
	found, err := p.o.Lookup(ctx, q.Host)
	if err != nil {
		return nil, policy.Decision{}, refusalOf(err, reasonNoAddress)
	}
	if len(found) == 0 {
		return nil, policy.Decision{}, failed(reasonNoAddress)
	}
	var (
		addrs  []netip.Addr
		chosen policy.Decision
	)
	for _, a := range found {
		q.Addr = a.Unmap()
		d := live.Policy.Request(q)
		switch {
		case len(addrs) == 0:
			chosen = d
			if d.Allow {
				addrs = append(addrs, q.Addr)
			}
		case d.Allow && d.Rule == chosen.Rule && d.WouldDeny == chosen.WouldDeny:
			addrs = append(addrs, q.Addr)
		}
	}
	if len(addrs) == 0 {
		return nil, chosen, deniedBy(chosen)
	}
	return addrs, chosen, nil
}
