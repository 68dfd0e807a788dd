package egress

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/ca"
	"cloche.dev/cloche/internal/egress/gatewayrpc"
	"cloche.dev/cloche/internal/egress/inject"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/egress/proxy"
	"cloche.dev/cloche/internal/egress/resolve"
	"cloche.dev/cloche/internal/sandbox"
)

// tenant is one sandbox that is attached.
type tenant struct {
	g       *gateway
	id      string
	proxy   *proxy.Proxy
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	sockets []io.Closer
	yielded atomic.Bool
	live    atomic.Pointer[live]

	mu sync.Mutex // one change of live at a time
}

// live is what is in force of an assignment.
type live struct {
	project, profile  string
	version, revision int64
	policy            *policy.Policy
	ca                sandbox.Authority
	authority         *ca.Authority // nil without a ca
}

// compile makes an assignment ready to be put in force. What can't be compiled
// is an error, and what is returned beside it denies everything.
func (g *gateway) compile(a *sandbox.EgressAssignment, before *live) (*live, proxy.Live, error) {
	now := &live{
		project: a.Project, profile: a.Profile.Name, version: a.Profile.Version, revision: a.Revision,
		policy: new(policy.Policy), // which denies everything
	}
	profile := a.Profile
	if l := &profile.Limits; g.connections < sandbox.MaxEgressConnections && (l.Connections == 0 || l.Connections > g.connections) {
		l.Connections = g.connections
	}
	p, err := policy.Compile(profile)
	if err != nil {
		return now, proxy.Live{Policy: now.policy}, err
	}
	switch {
	case len(a.CA.Cert) == 0:
	case before != nil && before.authority != nil && bytes.Equal(before.ca.Cert, a.CA.Cert) && bytes.Equal(before.ca.Key, a.CA.Key):
		now.ca, now.authority = before.ca, before.authority // with the leaves that it has signed
	default:
		if now.authority, err = ca.New(a.CA); err != nil {
			return now, proxy.Live{Policy: now.policy}, err
		}
		now.ca = a.CA
	}
	now.policy = p
	return now, proxy.Live{Policy: p, Injector: inject.New(a.Secrets, time.Now), Authority: now.authority}, nil
}

// attach takes up a sandbox with its sockets, in place of those that it has. An
// assignment that can't be put in force is an error of a sandbox that is
// attached, with everything denied.
func (g *gateway) attach(a *sandbox.EgressAssignment, files []*os.File) (attached bool, err error) {
	if a == nil || a.Sandbox == "" || len(files) != gatewayrpc.Sockets {
		return false, badRequest("to attach a sandbox without an assignment or its sockets")
	}
	g.mu.Lock()
	h, draining := g.host, !g.draining.IsZero()
	g.mu.Unlock()
	if h == nil || draining {
		return false, sandbox.Errorf(sandbox.Unavailable, "egress_draining", "the egress gateway takes up no sandbox")
	}
	g.detach(a.Sandbox)
	s, err := open(files)
	if err != nil {
		return false, err
	}
	now, forProxy, err := g.compile(a, nil)
	t := &tenant{g: g, id: a.Sandbox, sockets: []io.Closer{s.proxy, s.dnsTCP, s.dnsUDP}}
	t.live.Store(now)
	ctx, cancel := context.WithCancel(context.Background())
	t.cancel = cancel
	log := g.log.With("sandbox", t.id)
	t.proxy = proxy.New(proxy.Options{
		Live: forProxy, Lookup: h.resolver.Lookup, Dialer: &h.dialer, Roots: h.roots, Audit: t.audit, Log: log,
	})
	names := resolve.NewServer(resolve.ServerOptions{
		Resolver: h.resolver, Policy: func() *policy.Policy { return t.live.Load().policy }, Audit: t.audit,
	})
	run := func(what string, serve func() error) {
		t.wg.Go(func() {
			if err := serve(); err != nil && ctx.Err() == nil && !t.yielded.Load() && !errors.Is(err, net.ErrClosed) {
				log.Error("a sandbox's listener failed", "listener", what, "err", err)
			}
		})
	}
	run("proxy", func() error { return t.proxy.Serve(ctx, s.proxy) })
	run("dns over tcp", func() error { return names.ServeTCP(ctx, s.dnsTCP) })
	run("dns over udp", func() error { return names.ServeUDP(ctx, s.dnsUDP) })
	g.mu.Lock()
	g.tenants[t.id] = t
	g.mu.Unlock()
	return true, err
}

// sockets are a sandbox's three, in the order in which they come.
type sockets struct {
	proxy, dnsTCP *net.TCPListener
	dnsUDP        *net.UDPConn
}

func open(files []*os.File) (s sockets, err error) {
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	for i, into := range []**net.TCPListener{&s.proxy, &s.dnsTCP} {
		l, err := net.FileListener(files[i])
		if err != nil {
			return s, err
		}
		tcp, ok := l.(*net.TCPListener)
		if !ok {
			_ = l.Close()
			return s, badRequest("to listen on a socket that is not TCP")
		}
		*into = tcp
	}
	c, err := net.FilePacketConn(files[2])
	if err != nil {
		return s, err
	}
	udp, ok := c.(*net.UDPConn)
	if !ok {
		_ = c.Close()
		return s, badRequest("to answer on a socket that is not UDP")
	}
	s.dnsUDP = udp
	return s, nil
}

func (s *sockets) close() {
	for _, l := range []*net.TCPListener{s.proxy, s.dnsTCP} {
		if l != nil {
			_ = l.Close()
		}
	}
	if s.dnsUDP != nil {
		_ = s.dnsUDP.Close()
	}
}

// set puts an assignment in force, unless it is an older one. One that can't be
// put in force denies everything, and the error says why.
func (t *tenant) set(a *sandbox.EgressAssignment) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	before := t.live.Load()
	if a.Revision < before.revision {
		return nil
	}
	now, forProxy, err := t.g.compile(a, before)
	t.live.Store(now) // the resolver's at once
	t.proxy.Update(forProxy)
	return err
}

// yield closes the sandbox's listeners, so that another gateway can have them.
func (t *tenant) yield() {
	if t.yielded.Swap(true) {
		return
	}
	for _, s := range t.sockets {
		_ = s.Close()
	}
}

// detach closes everything of a sandbox and forgets it.
func (g *gateway) detach(id string) {
	g.mu.Lock()
	t := g.tenants[id]
	delete(g.tenants, id)
	g.mu.Unlock()
	if t == nil {
		return
	}
	t.yield()
	t.cancel()
	t.proxy.Reset()
	closed := make(chan struct{})
	g.wg.Go(func() {
		defer close(closed)
		t.close()
	})
	select {
	case <-closed:
	case <-time.After(closeWait): // its connections are cut; other sandboxes don't wait for the rest
		g.log.Warn("a sandbox's proxy takes long to close", "sandbox", id)
	}
}

// closeWait is how long detach waits for what runs for a sandbox to end.
const closeWait = 2 * time.Second

// close ends what runs for a sandbox, and keeps what it counted.
func (t *tenant) close() {
	if err := t.proxy.Close(); err != nil {
		t.g.log.Warn("close a sandbox's proxy", "sandbox", t.id, "err", err)
	}
	t.wg.Wait()
	s := t.proxy.Stats()
	t.g.mu.Lock()
	defer t.g.mu.Unlock()
	t.g.gone.total += s.Total
	t.g.gone.sent += s.Sent
	t.g.gone.received += s.Received
}

// audit completes a record with whose it is.
func (t *tenant) audit(r audit.Record) {
	l := t.live.Load()
	r.Sandbox, r.Project = t.id, l.project
	if r.Profile == "" {
		r.Profile, r.Version = l.profile, l.version
	}
	t.g.audit.add(r)
}
