package policy

import (
	"net/netip"
	"slices"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// schemes is a set of schemes; the empty set is every scheme.
type schemes uint8

const (
	schemeHTTP schemes = 1 << iota
	schemeHTTPS
	schemeTCP // and so everything that runs over it
)

func (s schemes) has(one schemes) bool { return s == 0 || s&(one|schemeTCP) != 0 }

// schemeOf returns the scheme of a request, or 0.
func schemeOf(s string) schemes {
	switch s {
	case "http":
		return schemeHTTP
	case "https":
		return schemeHTTPS
	}
	return 0
}

type portRange struct{ first, last uint16 }

// hostPattern is an exact name, ".suffix" for what is below it, or "" for any.
type hostPattern string

func (h hostPattern) matches(host string) bool {
	switch {
	case h == "":
		return true
	case h[0] == '.':
		return len(host) > len(h) && strings.HasSuffix(host, string(h))
	}
	return host == string(h)
}

// rule is a compiled rule. An empty list matches everything.
type rule struct {
	name        string
	action      sandbox.EgressAction
	hosts       []hostPattern
	prefixes    []netip.Prefix
	ports       []portRange
	schemes     schemes
	methods     []string
	paths       []pathPattern
	passthrough bool
	inject      []sandbox.Injection
}

// looksAtRequests tells whether a connection's name and address aren't enough.
func (r *rule) looksAtRequests() bool { return len(r.methods)+len(r.paths) > 0 }

// byAddress tells whether the rule decides a connection by what was dialled.
func (r *rule) byAddress() bool {
	return len(r.hosts) == 0 && r.schemes.has(schemeTCP) && !r.looksAtRequests()
}

// unconditional tells whether the rule decides whatever goes to its hosts.
func (r *rule) unconditional() bool {
	return len(r.ports) == 0 && r.schemes.has(schemeHTTP) && r.schemes.has(schemeHTTPS) && !r.looksAtRequests() &&
		(len(r.prefixes) == 0 || slices.ContainsFunc(r.prefixes, func(p netip.Prefix) bool { return p.Bits() == 0 }))
}

func (r *rule) matchesHost(host string) bool {
	return len(r.hosts) == 0 || slices.ContainsFunc(r.hosts, func(h hostPattern) bool { return h.matches(host) })
}

func (r *rule) matchesPort(port uint16) bool {
	return len(r.ports) == 0 || slices.ContainsFunc(r.ports, func(p portRange) bool { return p.first <= port && port <= p.last })
}

// matchesAddr takes an address that nobody knows for one that a rule denies.
func (r *rule) matchesAddr(a netip.Addr) bool {
	if len(r.prefixes) == 0 {
		return true
	}
	if !a.IsValid() {
		return r.action == sandbox.EgressDeny
	}
	a = a.Unmap()
	return slices.ContainsFunc(r.prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// matchesPath takes a path that servers may read in several ways for one that
// a rule denies if one of them is, and for one that a rule allows if all are.
func (r *rule) matchesPath(path []reading) bool {
	if len(r.paths) == 0 {
		return true
	}
	deny := r.action == sandbox.EgressDeny
	for _, way := range path {
		if slices.ContainsFunc(r.paths, func(p pathPattern) bool { return p.matches(way) }) == deny {
			return deny
		}
	}
	return !deny
}
