// Package proxy is the gateway's transparent proxy: everything that a sandbox
// sends over TCP comes to it, and it decides, by the sandbox's policy, what
// becomes of it. One Proxy serves one sandbox.
//
// What holds: nothing that a sandbox says chooses an address, a name that the
// sandbox asked for is resolved here; every request on a connection is decided
// by itself; what is understood in two ways is refused, and what goes out is
// written anew from what was decided; each refusal leaves exactly one record
// with a reason; whatever is missing (a policy, an authority, a secret) means
// no. The gateway process makes a Proxy for each sandbox and hands it the
// listener that was opened in the sandbox's gateway namespace.
package proxy

import (
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/ca"
	"cloche.dev/cloche/internal/egress/inject"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Live is what can change while connections run.
type Live struct {
	Policy    *policy.Policy // nil: everything is refused
	Injector  *inject.Injector
	Authority *ca.Authority // nil: no TLS connection is terminated
}

// Dialer connects to the first address that answers. It judges each address
// itself (package dial).
type Dialer interface {
	Dial(ctx context.Context, addrs []netip.Addr, port uint16) (*net.TCPConn, error)
}

// Options are a Proxy's.
type Options struct {
	Live   Live
	Lookup func(ctx context.Context, name string) ([]netip.Addr, error)
	Dialer Dialer
	Roots  *x509.CertPool // that upstream servers are verified by; nil: the host's
	// Audit gets each record; Sandbox and Project are its callee's to fill in.
	Audit    func(audit.Record)
	Original func(*net.TCPConn) (netip.AddrPort, error) // nil: SO_ORIGINAL_DST
	Log      *slog.Logger
}

// Stats are counters of a Proxy. Bytes are those on the sandbox's side.
type Stats struct {
	Open     int   `json:"open"`
	Total    int64 `json:"total"`
	Sent     int64 `json:"sent"`
	Received int64 `json:"received"`
}

// times are the bounds of time; tests have shorter ones.
type times struct {
	firstByte, head, handshake, idle time.Duration
}

// Proxy serves the connections of one sandbox.
type Proxy struct {
	o      Options
	log    *slog.Logger
	times  times
	live   atomic.Pointer[Live]
	meter  meter
	total  atomic.Int64
	active atomic.Int64 // requests

	up   *upstreams
	http *http.Server
	feed *feed

	ctx context.Context // ends with Close
	end context.CancelFunc

	mu     sync.Mutex
	guests map[*guest]struct{}
	flows  map[*flow]struct{}
	wg     sync.WaitGroup
}

// New returns a proxy, which serves nothing yet.
func New(o Options) *Proxy {
	if o.Original == nil {
		o.Original = sys.OriginalDst
	}
	if o.Audit == nil {
		o.Audit = func(audit.Record) {}
	}
	log := o.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	p := &Proxy{
		o: o, log: log,
		times:  times{firstByte: 5 * time.Second, head: 10 * time.Second, handshake: 10 * time.Second, idle: 5 * time.Minute},
		guests: map[*guest]struct{}{}, flows: map[*flow]struct{}{},
	}
	p.ctx, p.end = context.WithCancel(context.Background())
	live := o.Live
	p.live.Store(&live)
	p.meter.set(limitsOf(&live))
	p.up = newUpstreams(o.Dialer, o.Roots)
	p.startHTTP()
	return p
}

// Serve accepts connections until ctx ends, the listener fails or the proxy
// is closed. It returns when none of its connections is left.
func (p *Proxy) Serve(ctx context.Context, l *net.TCPListener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		c, err := l.AcceptTCP()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if !errors.Is(err, net.ErrClosed) && wait(ctx, acceptPause) {
				p.log.Warn("egress: accepting a connection", "error", err)
				continue // descriptors ran out, or the peer was quicker
			}
			return err
		}
		wg.Go(func() { p.serve(ctx, c) })
	}
}

// acceptPause keeps a failing accept from spinning.
const acceptPause = 20 * time.Millisecond

// wait waits for d, and tells whether ctx still lives.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// Update is in force for whatever begins after it. What runs and doesn't
// comply with it is cut before Update returns.
func (p *Proxy) Update(live Live) {
	p.live.Store(&live)
	p.meter.set(limitsOf(&live))
	p.mu.Lock()
	var stale []*flow
	for f := range p.flows {
		if !f.complies(&live) {
			stale = append(stale, f)
		}
	}
	p.mu.Unlock()
	for _, f := range stale {
		f.cut(reasonPolicyChanged)
	}
	p.up.closeIdle()
}

// Reset cuts every connection; new ones are served.
func (p *Proxy) Reset() {
	p.mu.Lock()
	guests := make([]*guest, 0, len(p.guests))
	for g := range p.guests {
		guests = append(guests, g)
	}
	p.mu.Unlock()
	for _, g := range guests {
		g.cut(reasonReset)
	}
	p.up.cutAll()
}

// Stats returns the counters.
func (p *Proxy) Stats() Stats {
	p.mu.Lock()
	open := len(p.guests)
	p.mu.Unlock()
	return Stats{Open: open, Total: p.total.Load(), Sent: p.meter.sent.Load(), Received: p.meter.received.Load()}
}

// Close cuts every connection, serves no more, and waits for what it started.
func (p *Proxy) Close() error {
	p.end()
	p.Reset()
	err := p.http.Close()
	p.feed.close()
	p.wg.Wait()
	p.up.closeIdle()
	return err
}

// flow is something that was allowed and runs: it is asked again whenever the
// policy changes.
type flow struct {
	complies func(*Live) bool
	cut      func(reason string)
}

// track registers a flow that was decided by live, until the returned function
// is called. A change in between is not missed: it is asked again here.
func (p *Proxy) track(f *flow, live *Live) (done func()) {
	p.mu.Lock()
	p.flows[f] = struct{}{}
	p.mu.Unlock()
	if now := p.live.Load(); now != live && !f.complies(now) {
		f.cut(reasonPolicyChanged)
	}
	return func() {
		p.mu.Lock()
		delete(p.flows, f)
		p.mu.Unlock()
	}
}

func limitsOf(l *Live) sandbox.EgressLimits {
	if l.Policy == nil {
		return sandbox.EgressLimits{}
	}
	return l.Policy.Profile().Limits
}
