package drivertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"syscall"
	"time"
)

// packetClause is about what root can send through eth0 by itself. The same kinds,
// and more, are sent from the machine's end of a link in the tests of
// internal/node/netns.
var packetClause = Clause{
	"network-packets",
	"Frames of root's own making (spoofed, fragments, ICMP, UDP, IPv6, ARP, other protocols, to the gateway's own ports) are dropped, and counted by " +
		"their kind, or the guest's kernel refuses to send them.",
	networkPackets,
}

// The addresses of both ends of every machine's link.
var (
	machineMAC, gatewayMAC = []byte{2, 0xc1, 0x0c, 0xe0, 0, 2}, []byte{2, 0xc1, 0x0c, 0xe0, 0, 1}
	machineIP, gatewayIP   = []byte{169, 254, 77, 2}, []byte{169, 254, 77, 1}
	outsideIP              = []byte{198, 51, 100, 7}
)

// hostilePackets are frames, and the counters that tell of them.
var hostilePackets = []struct {
	name, counter string
	frame         []byte
}{
	{"another machine's address", "spoofed", ethernet(machineMAC, 0x0800, ip([]byte{169, 254, 77, 3}, outsideIP, syscall.IPPROTO_UDP, 0, udp(53)))},
	{"the gateway's address", "spoofed", ethernet(machineMAC, 0x0800, ip(gatewayIP, outsideIP, syscall.IPPROTO_TCP, 0, syn(443)))},
	{"another MAC", "spoofed", ethernet([]byte{2, 0, 0, 0, 0, 9}, 0x0800, ip(machineIP, outsideIP, syscall.IPPROTO_UDP, 0, udp(53)))},
	{"UDP", "udp", ethernet(machineMAC, 0x0800, ip(machineIP, outsideIP, syscall.IPPROTO_UDP, 0, udp(443)))},
	{"a ping", "icmp", ethernet(machineMAC, 0x0800, ip(machineIP, outsideIP, syscall.IPPROTO_ICMP, 0, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}))},
	{"a first fragment", "fragment", ethernet(machineMAC, 0x0800, ip(machineIP, outsideIP, syscall.IPPROTO_TCP, 0x2000, syn(443)))},
	{"a later fragment", "fragment", ethernet(machineMAC, 0x0800, ip(machineIP, outsideIP, syscall.IPPROTO_UDP, 1, udp(53)))},
	{"a router's advertisement", "ipv6", ethernet(machineMAC, 0x86dd, append([]byte{0x60, 0, 0, 0, 0, 8, 58, 255}, make([]byte, 40)...))},
	{"an ARP answer", "arp", ethernet(machineMAC, 0x0806, append(append([]byte{0, 1, 8, 0, 6, 4, 0, 2}, machineMAC...), make([]byte, 14)...))},
	{"the proxy's own port", "gateway_port", ethernet(machineMAC, 0x0800, ip(machineIP, gatewayIP, syscall.IPPROTO_TCP, 0, syn(15001)))},
	{"the resolver's own port", "gateway_port", ethernet(machineMAC, 0x0800, ip(machineIP, gatewayIP, syscall.IPPROTO_UDP, 0, udp(15053)))},
	{"GRE", "other", ethernet(machineMAC, 0x0800, ip(machineIP, outsideIP, 47, 0, make([]byte, 8)))},
	{"a VLAN", "other", ethernet(machineMAC, 0x8100, make([]byte, 46))},
}

func networkPackets(b *bench) {
	if b.h.NoInterface {
		return
	}
	x := b.box()
	g, shut := x.gateway()
	defer shut()
	for _, p := range hostilePackets {
		before := x.counter(p.counter)
		said := x.root("frame", hex.EncodeToString(p.frame))
		if strings.HasPrefix(said, "refused") {
			if b.d.Traits().OwnKernel {
				b.Errorf("%s: a kernel of the machine's own %s", p.name, said)
			}
			continue
		}
		b.want("what became of "+p.name, said, "sent")
		for end := time.Now().Add(b.patience()); x.counter(p.counter) == before; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				b.Errorf("%s: the counter %q stays %d", p.name, p.counter, before)
				break
			}
		}
	}
	// And nothing of it came to the sockets: the next thing there is an honest one.
	g.connection(g.proxy, "198.51.100.7:443")
	_ = g.udp.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if n, from, err := g.udp.ReadFrom(make([]byte, 100)); err == nil {
		b.Errorf("the resolver got %d bytes from %v", n, from)
	}
}

// counter is one of the counters of what a machine's network drops.
func (x *box) counter(name string) uint64 {
	x.b.Helper()
	all, err := x.b.h.Networks.Counters(context.WithoutCancel(x.b.ctx), x.m.ID())
	if err != nil {
		x.b.Fatalf("read the network's counters: %v", err)
	}
	n, ok := all[name]
	if !ok {
		x.b.Fatalf("%s", fmt.Sprintf("there is no counter %q in %v", name, all))
	}
	return n
}

func ethernet(from []byte, kind uint16, payload []byte) []byte {
	return bytes.Join([][]byte{gatewayMAC, from, binary.BigEndian.AppendUint16(nil, kind), payload}, nil)
}

// ip is a packet of IPv4 without options; flags are those of fragments.
func ip(from, to []byte, protocol byte, flags uint16, payload []byte) []byte {
	h := []byte{0x45, 0, 0, byte(20 + len(payload)), 0, 7, byte(flags >> 8), byte(flags), 64, protocol, 0, 0}
	h = append(append(h, from...), to...)
	var sum uint32
	for i := 0; i < len(h); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(h[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum))
	return append(h, payload...)
}

func udp(to uint16) []byte {
	return []byte{0x9c, 0x40, byte(to >> 8), byte(to), 0, 12, 0, 0, 'o', 'u', 't', '!'}
}

func syn(to uint16) []byte {
	return []byte{0x9c, 0x40, byte(to >> 8), byte(to), 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0}
}
