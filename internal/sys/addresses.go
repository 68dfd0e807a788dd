package sys

import (
	"net"
	"net/netip"
	"slices"
)

// OwnAddresses are the addresses that the host has now, each as a prefix of its
// full length, sorted.
func OwnAddresses() ([]netip.Prefix, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var own []netip.Prefix
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok {
				ip = ip.Unmap()
				own = append(own, netip.PrefixFrom(ip, ip.BitLen()))
			}
		}
	}
	slices.SortFunc(own, netip.Prefix.Compare)
	return slices.Compact(own), nil
}
