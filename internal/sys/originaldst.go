package sys

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// OriginalDst returns the address that the peer of a connection dialled
// before netfilter redirected it (IPv4).
func OriginalDst(c *net.TCPConn) (netip.AddrPort, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	var (
		// A sockaddr_in of 16 bytes; this is the one call that returns as many.
		answer  *unix.IPv6Mreq
		callErr error
	)
	if err := raw.Control(func(fd uintptr) {
		answer, callErr = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST)
	}); err != nil {
		return netip.AddrPort{}, err
	}
	if callErr != nil {
		return netip.AddrPort{}, callErr
	}
	b := answer.Multiaddr
	if binary.NativeEndian.Uint16(b[:2]) != unix.AF_INET {
		return netip.AddrPort{}, unix.EAFNOSUPPORT
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4])), nil
}
