// Package resolve is the only DNS that sandboxes have: a resolver that asks the
// host's own name servers, and a server per sandbox that answers only for names
// that its profile could let something go to.
//
// Invariants: what a sandbox believes about names is never taken over, the
// proxy asks the same Resolver again for whatever it connects to; an answer
// holds IPv4 addresses that are not in closed ranges, and nothing else; a name
// that isn't allowed causes no question to anybody. Memory, questions in flight
// and time are bounded for all kinds of packets. The gateway process has one
// Resolver, and one Server for each sandbox.
package resolve

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
)

// The codes of Lookup's errors.
const (
	CodeClosed = "closed_range" // every address of the name is closed
	CodeNoName = "dns_no_name"  // there is no such name, or it has no IPv4 address
	CodeFailed = "dns_failed"
)

const (
	minTTL      = time.Second
	maxTTL      = time.Minute
	negativeTTL = 5 * time.Second
	maxCached   = 4096
	maxInFlight = 1024
	maxAddrs    = 16
	maxChain    = 16 // of CNAMEs
	maxServers  = 3
)

// Options are a Resolver's.
type Options struct {
	Servers []netip.AddrPort // asked in turn; HostServers has the host's
	Ranges  *policy.Ranges
	Timeout time.Duration // of one Lookup; 5 s where it is 0
}

// Resolver resolves names for the gateway. It is safe for concurrent use.
type Resolver struct {
	o      Options
	now    func() time.Time
	flight singleflight.Group
	slots  chan struct{}

	mu    sync.Mutex
	cache map[string]answer
}

// answer is what one question came to.
type answer struct {
	addrs []netip.Addr
	until time.Time
	// Without addresses it says why:
	err    *sandbox.Error
	exists bool // the name is there, if only for other types
}

// New returns a resolver.
func New(o Options) *Resolver {
	if o.Timeout <= 0 {
		o.Timeout = 5 * time.Second
	}
	return &Resolver{o: o, now: time.Now, slots: make(chan struct{}, maxInFlight), cache: map[string]answer{}}
}

// HostServers reads the name servers of a resolv.conf.
func HostServers(path string) ([]netip.AddrPort, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_name_server", "read the host's name servers: %w", err).
			WithHint("name the servers to the daemon")
	}
	var servers []netip.AddrPort
	for s := bufio.NewScanner(bytes.NewReader(text)); s.Scan() && len(servers) < maxServers; {
		f := strings.Fields(s.Text())
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil {
			servers = append(servers, netip.AddrPortFrom(a, 53))
		}
	}
	if len(servers) == 0 {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_name_server", "%s names no name server", path).
			WithHint("name the servers to the daemon")
	}
	return servers, nil
}

// Lookup returns the open IPv4 addresses of a name.
func (r *Resolver) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	a, err := r.lookup(ctx, name)
	if err != nil {
		return nil, err
	}
	if a.err != nil {
		return nil, a.err
	}
	return append([]netip.Addr(nil), a.addrs...), nil
}

// lookup has an error of its own only where nobody could tell.
func (r *Resolver) lookup(ctx context.Context, name string) (answer, error) {
	name, err := policy.CanonicalHost(name)
	if err != nil || name == "localhost" || strings.HasSuffix(name, ".localhost") {
		return answer{err: noName(name), until: r.now().Add(negativeTTL)}, nil
	}
	if a, ok := r.cached(name); ok {
		return a, nil
	}
	// Whoever asked first may give up; the question goes on for the others.
	done := r.flight.DoChan(name, func() (any, error) {
		if a, ok := r.cached(name); ok {
			return a, nil
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.o.Timeout)
		defer cancel()
		select {
		case r.slots <- struct{}{}:
			defer func() { <-r.slots }()
		case <-ctx.Done():
			return answer{}, failed(ctx.Err())
		}
		a, err := r.ask(ctx, name)
		if err != nil {
			return answer{}, failed(err)
		}
		r.keep(name, a)
		return a, nil
	})
	select {
	case res := <-done:
		if res.Err != nil {
			return answer{}, res.Err
		}
		return res.Val.(answer), nil
	case <-ctx.Done():
		return answer{}, failed(ctx.Err())
	}
}

func noName(name string) *sandbox.Error {
	return sandbox.Errorf(sandbox.NotFound, CodeNoName, "%q has no IPv4 address", name)
}

func failed(err error) *sandbox.Error {
	return sandbox.Errorf(sandbox.Unavailable, CodeFailed, "the name could not be resolved: %w", err)
}

func (r *Resolver) cached(name string) (answer, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a, ok := r.cache[name]
	if ok && !r.now().Before(a.until) {
		delete(r.cache, name)
		return answer{}, false
	}
	return a, ok
}

// keep makes room by forgetting what is stale, and then whatever comes.
func (r *Resolver) keep(name string, a answer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.cache) >= maxCached {
		now := r.now()
		for n, old := range r.cache {
			if !now.Before(old.until) {
				delete(r.cache, n)
			}
		}
		for n := range r.cache {
			if len(r.cache) < maxCached-maxCached/8 {
				break
			}
			delete(r.cache, n)
		}
	}
	r.cache[name] = a
}

// ask asks the servers in turn, twice.
func (r *Resolver) ask(ctx context.Context, name string) (answer, error) {
	err := errors.New("there is no name server")
	tries := 2 * len(r.o.Servers)
	for i := range tries {
		var a answer
		try, cancel := context.WithTimeout(ctx, r.o.Timeout/time.Duration(tries))
		a, err = r.askOne(try, r.o.Servers[i%len(r.o.Servers)], name)
		cancel()
		if err == nil || ctx.Err() != nil {
			return a, err
		}
	}
	return answer{}, err
}
