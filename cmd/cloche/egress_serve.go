package main

import (
	"net"
	"net/netip"
	"strings"
)

// settleEgress reads serve's flags about egress.
func (f *serveFlags) settleEgress() error {
	for _, text := range f.open {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return usage("--egress-open takes a CIDR like 10.20.0.0/16, not %q", text)
		}
		f.Egress.Open = append(f.Egress.Open, p)
	}
	for _, text := range f.resolvers {
		if _, _, err := net.SplitHostPort(text); err != nil {
			text = net.JoinHostPort(strings.Trim(text, "[]"), "53")
		}
		a, err := netip.ParseAddrPort(text)
		if err != nil {
			return usage("--egress-resolver takes the address of a DNS server, not %q", text)
		}
		f.Egress.Resolvers = append(f.Egress.Resolvers, a)
	}
	f.Egress.KeyCommand = strings.Fields(f.keyCommand)
	if self := executable(); self != nil {
		f.Egress.Gateway = append(self, egressGateway)
	}
	return nil
}
