package netns

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"cloche.dev/cloche/internal/sandbox"
)

// protocols are those of IP that have a name here.
var protocols = map[byte]string{
	syscall.IPPROTO_ICMP: "icmp", syscall.IPPROTO_IGMP: "igmp", syscall.IPPROTO_IPIP: "ipip", syscall.IPPROTO_TCP: "tcp", syscall.IPPROTO_UDP: "udp",
	syscall.IPPROTO_IPV6: "ipv6", syscall.IPPROTO_GRE: "gre", syscall.IPPROTO_ESP: "esp", syscall.IPPROTO_AH: "ah",
	syscall.IPPROTO_ICMPV6: "icmpv6", syscall.IPPROTO_SCTP: "sctp", syscall.IPPROTO_UDPLITE: "udplite",
}

// ported are those whose header begins with a source and a destination port.
var ported = []byte{syscall.IPPROTO_TCP, syscall.IPPROTO_UDP, syscall.IPPROTO_SCTP, syscall.IPPROTO_UDPLITE}

// dropped reads the beginning of a packet, whose EtherType is kind. Nothing in
// it is to be trusted: what isn't there, or makes no sense, is left out.
func dropped(kind uint16, b []byte) sandbox.DroppedPacket {
	switch {
	case kind == syscall.ETH_P_IP && len(b) >= 20 && b[0]>>4 == 4 && b[0]&15 >= 5:
		d := packet(b[9], b[12:16], b[16:20], int(binary.BigEndian.Uint16(b[2:])), b)
		if binary.BigEndian.Uint16(b[6:])&0x1fff == 0 { // else it begins amid another packet
			addPorts(&d, b[9], b[min(len(b), int(b[0]&15)*4):])
		}
		return d
	case kind == syscall.ETH_P_IPV6 && len(b) >= 40 && b[0]>>4 == 6:
		d := packet(b[6], b[8:24], b[24:40], 40+int(binary.BigEndian.Uint16(b[4:])), b)
		addPorts(&d, b[6], b[40:])
		return d
	case kind == syscall.ETH_P_ARP:
		d := sandbox.DroppedPacket{Protocol: "arp", Length: len(b)}
		if len(b) >= 28 && b[4] == 6 && b[5] == 4 { // hardware addresses of six bytes, others of four
			d.From, d.To = address(b[14:18]), address(b[24:28])
		}
		return d
	case kind == syscall.ETH_P_IP || kind == syscall.ETH_P_IPV6:
		return sandbox.DroppedPacket{Protocol: "malformed", Length: len(b)}
	}
	return sandbox.DroppedPacket{Protocol: fmt.Sprintf("ether-%04x", kind), Length: len(b)}
}

// packet is what an IP header says. It is as long as it says it is, but no
// shorter than what is there.
func packet(proto byte, from, to []byte, length int, b []byte) sandbox.DroppedPacket {
	name := protocols[proto]
	if name == "" {
		name = fmt.Sprintf("ip-%d", proto)
	}
	return sandbox.DroppedPacket{Protocol: name, From: address(from), To: address(to), Length: max(length, len(b))}
}

func address(b []byte) netip.AddrPort {
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a, 0)
}

func addPorts(d *sandbox.DroppedPacket, proto byte, b []byte) {
	if len(b) < 4 || !slices.Contains(ported, proto) {
		return
	}
	d.From = netip.AddrPortFrom(d.From.Addr(), binary.BigEndian.Uint16(b))
	d.To = netip.AddrPortFrom(d.To.Addr(), binary.BigEndian.Uint16(b[2:]))
}
