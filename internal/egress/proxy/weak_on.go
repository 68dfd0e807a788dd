//go:build clocheweak

package proxy

import (
	"net/netip"
	"slices"
	"strings"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/egress/weak"
	"cloche.dev/cloche/internal/sandbox"
)

// decideWeakly lets a connection go where some allowed host has its address,
// whatever is said on it.
func (g *guest) decideWeakly(live *Live) bool {
	if !weak.Is(weak.Address) {
		return false
	}
	for _, r := range live.Policy.Profile().Rules {
		if r.Action != sandbox.EgressAllow {
			continue
		}
		for _, host := range r.Hosts {
			if strings.Contains(host, "*") {
				continue
			}
			if found, err := g.p.o.Lookup(g.ctx, host); err == nil && slices.Contains(found, g.dialled.Addr()) {
				g.spliceAddress(live, policy.Decision{Allow: true, Rule: r.Name})
				return true
			}
		}
	}
	g.refuse(live, audit.TCP, "", denied(policy.ReasonDefault))
	return true
}

// decideWeakly lets every request of a connection but the first go where it was
// dialled.
func (x *exchange) decideWeakly(host string) bool {
	path, err := policy.CanonicalPath(x.in.URL.EscapedPath())
	if !weak.Is(weak.First) || x.nth == 1 || err != nil {
		return false
	}
	g := x.c.g
	x.rec.Path = path
	x.query = policy.Request{Scheme: x.c.scheme(), Host: host, Port: g.dialled.Port(), Method: x.in.Method, Path: path}
	x.decision = policy.Decision{Allow: true}
	x.plan = &plan{scheme: x.c.scheme(), host: host, port: g.dialled.Port(), addrs: []netip.Addr{g.dialled.Addr()}}
	return true
}
