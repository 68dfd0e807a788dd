package egress

import (
	"context"
	"crypto/x509"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"cloche.dev/cloche/internal/egress/dial"
	"cloche.dev/cloche/internal/egress/gatewayrpc"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/egress/resolve"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

const (
	tickEvery   = time.Second
	ownEvery    = 5                // ticks between looks at the host's own addresses
	idleAfter   = 5 * time.Second  // without a daemon and a sandbox
	orphanAfter = 10 * time.Minute // the same, with records that no daemon has taken
	drainAfter  = time.Hour        // when a drained gateway ends, whatever still runs
	dialTimeout = 10 * time.Second
	askTimeout  = 5 * time.Second
	maxWait     = 30 * time.Second // for audit records
)

// gateway is all that the process knows.
type gateway struct {
	build       string
	process     sys.Process
	log         *slog.Logger
	hostRoots   *x509.CertPool   // for a Config without any
	hostServers []netip.AddrPort // likewise
	connections int              // that one sandbox may have at most
	audit       *queue
	quit        context.CancelFunc
	wg          sync.WaitGroup

	mu       sync.Mutex
	host     *host // nil before the first hello
	tenants  map[string]*tenant
	daemons  int // connections
	used     time.Time
	draining time.Time // when that began; zero: it doesn't
	gone     struct{ total, sent, received int64 }
}

// host is what all sandboxes share, made of the Config.
type host struct {
	config   gatewayrpc.Config
	roots    *x509.CertPool
	own      []netip.Prefix // as it was looked up last
	dialer   dialer
	resolver *resolve.Resolver
}

// dialer is a dial.Dialer that can be replaced: the host's own addresses, which
// are closed, change.
type dialer struct{ now atomic.Pointer[dial.Dialer] }

// Dial implements proxy.Dialer.
func (d *dialer) Dial(ctx context.Context, addrs []netip.Addr, port uint16) (*net.TCPConn, error) {
	return d.now.Load().Dial(ctx, addrs, port)
}

func newGateway(build string, log *slog.Logger) *gateway {
	return &gateway{
		build: build, log: log, connections: sandbox.MaxEgressConnections, audit: newQueue(time.Now),
		tenants: map[string]*tenant{}, used: time.Now(), quit: func() {},
	}
}

// configure takes the first Config that it is told. A daemon that wants another
// one starts another gateway.
func (g *gateway) configure(c *gatewayrpc.Config) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.host != nil || c == nil {
		return nil
	}
	h := &host{config: *c, roots: g.hostRoots}
	if len(c.Roots) > 0 {
		h.roots = x509.NewCertPool()
		if !h.roots.AppendCertsFromPEM(c.Roots) {
			return sandbox.Errorf(sandbox.Invalid, "bad_roots", "the root certificates that upstream servers are verified by hold none")
		}
	}
	servers := c.Resolvers
	if len(servers) == 0 {
		servers = g.hostServers
	}
	own, err := sys.OwnAddresses()
	if err != nil {
		return err
	}
	ranges, err := h.close(own)
	if err != nil {
		return err
	}
	h.resolver = resolve.New(resolve.Options{Servers: servers, Ranges: ranges, Timeout: askTimeout})
	g.host = h
	return nil
}

// close makes a dialer to which the host's own addresses are closed.
func (h *host) close(own []netip.Prefix) (*policy.Ranges, error) {
	ranges, err := policy.NewRanges(h.config.Open, slices.Concat(h.config.Own, own))
	if err != nil {
		return nil, err
	}
	h.own = own
	h.dialer.now.Store(dial.New(ranges, dialTimeout))
	return ranges, nil
}

// lookAround closes addresses that the host has got since.
func (g *gateway) lookAround() {
	own, err := sys.OwnAddresses()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.host == nil || err == nil && slices.Equal(own, g.host.own) {
		return
	}
	if err == nil {
		_, err = g.host.close(own)
	}
	if err != nil {
		g.log.Error("look at the host's own addresses", "err", err)
	}
}

// tick does what is due each second, until ctx ends.
func (g *gateway) tick(ctx context.Context) {
	t := time.NewTicker(tickEvery)
	defer t.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		g.audit.tell()
		if n%ownEvery == 0 {
			g.lookAround()
		}
		g.sweep()
		g.retire()
	}
}

// sweep forgets sandboxes that were yielded and have no connection left.
func (g *gateway) sweep() {
	g.mu.Lock()
	var over []string
	for id, t := range g.tenants {
		if t.yielded.Load() && t.proxy.Stats().Open == 0 {
			over = append(over, id)
		}
	}
	g.mu.Unlock()
	for _, id := range over {
		g.detach(id)
	}
}

// retire ends a process that nobody needs any more.
func (g *gateway) retire() {
	g.mu.Lock()
	defer g.mu.Unlock()
	drained := !g.draining.IsZero() && (len(g.tenants) == 0 && g.audit.empty() || time.Since(g.draining) > drainAfter)
	alone := g.daemons == 0 && len(g.tenants) == 0
	idle := alone && time.Since(g.used) > idleAfter && g.audit.empty() || alone && time.Since(g.used) > orphanAfter
	if drained || idle {
		g.quit()
	}
}

// connected counts a connection of a daemon until the returned function is called.
func (g *gateway) connected() (done func()) {
	count := func(by int) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.daemons += by
		g.used = time.Now()
	}
	count(1)
	return func() { count(-1) }
}

// end detaches every sandbox.
func (g *gateway) end() {
	g.mu.Lock()
	var ids []string
	for id := range g.tenants {
		ids = append(ids, id)
	}
	g.mu.Unlock()
	for _, id := range ids {
		g.detach(id)
	}
}

// answer does what a daemon asks for.
func (g *gateway) answer(ctx context.Context, r gatewayrpc.Request, files []*os.File) gatewayrpc.Answer {
	var a gatewayrpc.Answer
	var err error
	switch r.Op {
	case gatewayrpc.OpHello:
		err = g.configure(r.Config)
		a.Welcome = &gatewayrpc.Welcome{Protocol: gatewayrpc.Protocol, Build: g.build, Process: g.process}
	case gatewayrpc.OpAttach:
		a.Attached, err = g.attach(r.Assignment, files)
	case gatewayrpc.OpSet:
		if r.Assignment == nil {
			err = badRequest("without an assignment")
		} else if t := g.tenant(r.Assignment.Sandbox); t != nil {
			err = t.set(r.Assignment)
		}
	case gatewayrpc.OpReset:
		if t := g.tenant(r.Sandbox); t != nil {
			t.proxy.Reset()
		}
	case gatewayrpc.OpYield:
		if t := g.tenant(r.Sandbox); t != nil {
			t.yield()
		}
	case gatewayrpc.OpDetach:
		g.detach(r.Sandbox)
	case gatewayrpc.OpList:
		a.Sandboxes = g.list()
	case gatewayrpc.OpStats:
		a.Stats = g.stats()
	case gatewayrpc.OpDrain:
		g.mu.Lock()
		if g.draining.IsZero() {
			g.draining = time.Now()
		}
		g.mu.Unlock()
	case gatewayrpc.OpAudit:
		a.Batch = g.audit.take(ctx, r.Ack, min(maxWait, time.Duration(max(0, r.Wait))*time.Millisecond))
	default:
		err = badRequest("to do what it does not know: " + string(r.Op))
	}
	a.Error = sandbox.AsError(err)
	return a
}

func badRequest(what string) error {
	return sandbox.Errorf(sandbox.Invalid, "bad_request", "the egress gateway was asked %s", what)
}

func (g *gateway) tenant(id string) *tenant {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.tenants[id]
}

func (g *gateway) list() []gatewayrpc.Sandbox {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := make([]gatewayrpc.Sandbox, 0, len(g.tenants))
	for _, t := range g.tenants {
		l := t.live.Load()
		all = append(all, gatewayrpc.Sandbox{
			Sandbox: t.id, Project: l.project, Profile: l.profile, Version: l.version, Revision: l.revision, CA: l.ca.Cert,
			Yielded: t.yielded.Load(),
		})
	}
	return all
}

func (g *gateway) stats() *gatewayrpc.Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &gatewayrpc.Stats{
		Sandboxes: len(g.tenants), Total: g.gone.total, Sent: g.gone.sent, Received: g.gone.received, Lost: g.audit.losses(),
	}
	for _, t := range g.tenants {
		p := t.proxy.Stats()
		s.Open += int64(p.Open)
		s.Total += p.Total
		s.Sent += p.Sent
		s.Received += p.Received
	}
	return s
}
