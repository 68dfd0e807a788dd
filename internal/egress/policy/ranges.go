package policy

import (
	"net/netip"
	"slices"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

// block is a range of addresses that is closed, and why.
type block struct {
	prefix netip.Prefix
	reason string
	opens  bool // the operator may open prefixes in it
}

const closedPrefix = "closed_range:"

func b(prefix, reason string, opens bool) block {
	return block{netip.MustParsePrefix(prefix), closedPrefix + reason, opens}
}

// never are addresses that nothing opens. Services that hand out a host's
// credentials come first, so that they are called by their name.
var never = []block{
	b("169.254.169.254/32", "metadata", false), // most clouds
	b("169.254.170.2/32", "metadata", false),   // credentials of container tasks
	b("169.254.170.23/32", "metadata", false),
	b("100.100.100.200/32", "metadata", false),
	b("192.0.0.192/32", "metadata", false),
	b("168.63.129.16/32", "metadata", false), // public, but a cloud's own host
	b("fd00:ec2::/64", "metadata", false),
	b("fd20:ce::254/128", "metadata", false),
	b("0.0.0.0/8", "this_network", false), // Linux takes 0.0.0.0 for the host itself
	b("127.0.0.0/8", "loopback", false),
	b("169.254.0.0/16", "link_local", false),
	b("224.0.0.0/4", "multicast", false),
	b("255.255.255.255/32", "broadcast", false),
	b("240.0.0.0/4", "reserved", false),
	b("::/128", "unspecified", false),
	b("::1/128", "loopback", false),
	b("fe80::/10", "link_local", false),
	b("ff00::/8", "multicast", false),
}

// special are the other blocks of IANA's special-purpose registries.
var special = []block{
	b("10.0.0.0/8", "private", true),
	b("172.16.0.0/12", "private", true),
	b("192.168.0.0/16", "private", true),
	b("100.64.0.0/10", "cgnat", true),
	b("198.18.0.0/15", "benchmarking", true),
	b("192.0.0.0/24", "special", false),
	b("192.0.2.0/24", "documentation", true),
	b("198.51.100.0/24", "documentation", true),
	b("203.0.113.0/24", "documentation", true),
	b("192.88.99.0/24", "6to4", false),
	b("192.31.196.0/24", "special", false),
	b("192.52.193.0/24", "special", false),
	b("192.175.48.0/24", "special", false),
	b("fc00::/7", "private", true),
	b("fec0::/10", "private", false), // site-local of old
	b("::/96", "mapped", false),      // IPv4-compatible
	b("64:ff9b::/96", "nat64", false),
	b("64:ff9b:1::/48", "nat64", false),
	b("2002::/16", "6to4", false),
	b("2001::/32", "teredo", false),
	b("2001:db8::/32", "documentation", false),
	b("3fff::/20", "documentation", false),
	b("2001::/23", "special", false),
	b("2620:4f:8000::/48", "special", false),
}

// global6 is all that IANA has given out of IPv6.
var global6 = netip.MustParsePrefix("2000::/3")

// Ranges knows which addresses are closed, whatever a profile says. It is
// immutable.
type Ranges struct {
	open, own []netip.Prefix
	test      []netip.Prefix
}

// NewRanges returns the closed ranges. Prefixes of private addresses may be
// opened; own are the host's addresses and the ranges that are its own, which
// stay closed even so.
func NewRanges(open, own []netip.Prefix) (*Ranges, error) {
	for _, p := range open {
		if !p.IsValid() || p != p.Masked() || !openable(p) {
			return nil, sandbox.Errorf(sandbox.Invalid, "egress_open_refused", "%s can't be opened for egress", p).
				WithHint("open prefixes inside 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, 100.64.0.0/10, 198.18.0.0/15, fc00::/7 or a documentation block, without bits behind their length")
		}
	}
	for _, p := range own {
		if !p.IsValid() {
			return nil, sandbox.Errorf(sandbox.Invalid, "egress_own_malformed", "one of the host's own prefixes is not valid")
		}
	}
	r := &Ranges{open: slices.Clone(open)}
	for _, p := range own { // unmapped, so that they compare
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		r.own = append(r.own, p)
	}
	return r, nil
}

func openable(p netip.Prefix) bool {
	return slices.ContainsFunc(special, func(s block) bool {
		return s.opens && s.prefix.Contains(p.Addr()) && p.Bits() >= s.prefix.Bits()
	})
}

// RangesForTest returns ranges in which prefixes are open that NewRanges never
// opens, such as the loopback that tests' servers listen on.
func RangesForTest(_ testing.TB, open ...netip.Prefix) *Ranges { return &Ranges{test: open} }

// Closed tells whether and why an address is closed.
func (r *Ranges) Closed(a netip.Addr) (reason string, closed bool) {
	if !a.IsValid() || a.Zone() != "" {
		return closedPrefix + "invalid", true
	}
	a = a.Unmap()
	if contains(r.test, a) {
		return "", false
	}
	if reason, closed = find(never, a); closed {
		return reason, true
	}
	if contains(r.own, a) {
		return closedPrefix + "host", true
	}
	if v4, ok := embedded(a); ok {
		if reason, closed = r.Closed(v4); closed {
			return reason, true
		}
	}
	if reason, closed = find(special, a); closed {
		return reason, !contains(r.open, a)
	}
	if a.Is6() && !global6.Contains(a) {
		return closedPrefix + "reserved", true
	}
	return "", false
}

func contains(list []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(a) })
}

func find(list []block, a netip.Addr) (string, bool) {
	for _, s := range list {
		if s.prefix.Contains(a) {
			return s.reason, true
		}
	}
	return "", false
}

// embedded returns the IPv4 address that a translator would take from an IPv6
// one. (What is mapped is unmapped already.)
func embedded(a netip.Addr) (netip.Addr, bool) {
	if !a.Is6() {
		return a, false
	}
	w := a.As16()
	at := 12 // the last 32 bits: NAT64, IPv4-compatible
	switch {
	case w[0] == 0x20 && w[1] == 0x02: // 6to4
		at = 2
	case w[0] == 0x20 && w[1] == 0x01 && w[2] == 0 && w[3] == 0: // Teredo: the client's, inverted
		for i := range 4 {
			w[12+i] ^= 0xff
		}
	case w[0] != 0 || w[1] != 0x64 || w[2] != 0xff || w[3] != 0x9b:
		if [12]byte(w[:12]) != [12]byte{} {
			return a, false
		}
	}
	return netip.AddrFrom4([4]byte(w[at : at+4])), true
}
