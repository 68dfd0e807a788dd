package netns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	vishnetns "github.com/vishvananda/netns"

	"cloche.dev/cloche/internal/sandbox"
)

// Whatever a machine dials arrives at the gateway, which learns what it was.
func TestRedirect(t *testing.T) {
	w := newWire(t)
	for _, to := range []string{"198.51.100.7:443", "169.254.169.254:80", "169.254.77.1:80", "10.1.2.3:22", "203.0.113.9:15053"} {
		c, err := w.dial("tcp4", to, 0)
		if err != nil {
			t.Fatalf("dial %s: %v", to, err)
		}
		defer c.Close()
		s, was := accept(t, w.proxy)
		if was != to {
			t.Errorf("what was dialled is %s, not %s", was, to)
		}
		if from := s.RemoteAddr().String(); from != c.LocalAddr().String() {
			t.Errorf("it comes from %s, not %s", from, c.LocalAddr())
		}
		exchange(t, c, s)
	}
	for _, to := range []string{"198.51.100.7:53", "169.254.77.1:53"} {
		c, err := w.dial("tcp4", to, 0)
		if err != nil {
			t.Fatalf("dial %s: %v", to, err)
		}
		defer c.Close()
		s, was := accept(t, w.dns)
		if was != to {
			t.Errorf("what was dialled is %s, not %s", was, to)
		}
		exchange(t, c, s)
	}
	for _, to := range []string{"198.51.100.7:53", "169.254.77.1:53"} {
		c, err := w.dial("udp4", to, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte("question")); err != nil {
			t.Fatal(err)
		}
		if _, err := w.udp.WriteToUDP([]byte("answer"), w.read("question")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if n, err := c.Read(b); err != nil || string(b[:n]) != "answer" { // c is connected: only to's answer gets in
			t.Errorf("the answer from %s is %q, %v", to, b[:n], err)
		}
	}
	for name, n := range w.counters() {
		if n != 0 {
			t.Errorf("%s: %d packets were dropped", name, n)
		}
	}
}

func exchange(t *testing.T, a, b net.Conn) {
	t.Helper()
	for range 2 {
		if _, err := a.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		_ = b.SetReadDeadline(time.Now().Add(patience))
		got := make([]byte, 100)
		if n, err := b.Read(got); err != nil || string(got[:n]) != "hello" {
			t.Fatalf("it got %q, %v", got[:n], err)
		}
		a, b = b, a
	}
}

// One port of the machine's serves connections to several servers, which at
// the gateway would all be one and the same.
func TestOneSourcePort(t *testing.T) {
	w := newWire(t)
	for _, to := range []string{"198.51.100.1:443", "198.51.100.2:443", "198.51.100.2:8443"} {
		c, err := w.dial("tcp4", to, 41000)
		if err != nil {
			t.Fatalf("dial %s: %v", to, err)
		}
		defer c.Close()
		s, was := accept(t, w.proxy)
		if was != to {
			t.Errorf("what was dialled is %s, not %s", was, to)
		}
		exchange(t, c, s)
	}
}

// A second gateway takes over from a first without a connection refused.
func TestTakeOver(t *testing.T) {
	w := newWire(t)
	old, err := w.dial("tcp4", "198.51.100.7:443", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	kept, _ := accept(t, w.proxy)
	next, _, _ := w.sockets()
	w.proxy.Close()
	for range 20 {
		c, err := w.dial("tcp4", "198.51.100.8:443", 0)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		accept(t, next)
	}
	exchange(t, old, kept) // goes on with the first
	next.Close()
	if c, err := w.dial("tcp4", "198.51.100.8:443", 0); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("without any gateway a dial gives %v, %v", c, err)
	}
}

// hostile are packets that a machine must not send, and what counts them.
var hostile = func() []hostilePacket {
	gw, neighbour := gatewayAddr, netip.MustParseAddr("169.254.77.3")
	tcp := func(f *frame) { f.proto, f.dport, f.flags = syscall.IPPROTO_TCP, 443, 2 }
	return []hostilePacket{
		{"spoofed-question", Spoofed, func(f *frame) { f.src = neighbour }},
		{"spoofed-syn", Spoofed, func(f *frame) { tcp(f); f.src = netip.MustParseAddr("127.0.0.1") }},
		{"spoofed-as-gateway", Spoofed, func(f *frame) { tcp(f); f.src = gw }},
		{"spoofed-mac", Spoofed, func(f *frame) { f.from = net.HardwareAddr{2, 0, 0, 0, 0, 9} }},
		{"dhcp", Spoofed, func(f *frame) {
			f.src, f.dst, f.dport = netip.IPv4Unspecified(), netip.MustParseAddr("255.255.255.255"), 67
		}},
		{"quic", UDP, func(f *frame) { f.dport = 443 }},
		{"udp-to-gateway", UDP, func(f *frame) { f.dst, f.dport = gw, 1900 }},
		{"mdns", UDP, func(f *frame) { f.dst, f.dport = netip.MustParseAddr("224.0.0.251"), 5353 }},
		{"ping", ICMP, func(f *frame) { f.proto, f.sport, f.dport = syscall.IPPROTO_ICMP, 0x0800, 0xf7ff }},
		{"ping-gateway", ICMP, func(f *frame) { f.proto, f.dst, f.sport, f.dport = syscall.IPPROTO_ICMP, gw, 0x0800, 0xf7ff }},
		{"fragment-first", Fragment, func(f *frame) { f.fragment = 0x2000 }},
		{"fragment-later", Fragment, func(f *frame) { f.fragment = 1 }},
		{"fragment-tcp", Fragment, func(f *frame) { tcp(f); f.fragment = 0x2000 }},
		{"router-advertisement", IPv6, func(f *frame) { f.kind, f.raw = syscall.ETH_P_IPV6, make([]byte, 60) }},
		{"ipv6-question", IPv6, func(f *frame) {
			f.kind, f.raw = syscall.ETH_P_IPV6, append([]byte{0x60, 0, 0, 0, 0, 8, 17, 64}, make([]byte, 40)...)
		}},
		{"arp-request", ARP, func(f *frame) { f.kind, f.raw = syscall.ETH_P_ARP, arp(1, machineAddr, gw) }},
		{"arp-gratuitous", ARP, func(f *frame) { f.kind, f.raw = syscall.ETH_P_ARP, arp(2, gw, gw) }},
		{"proxy-port", GatewayPort, func(f *frame) { tcp(f); f.dst, f.dport = gw, proxyPort }},
		{"dns-port-tcp", GatewayPort, func(f *frame) { tcp(f); f.dst, f.dport = gw, dnsPort }},
		{"dns-port-udp", GatewayPort, func(f *frame) { f.dst, f.dport = gw, dnsPort }},
		{"ack-of-nothing", Invalid, func(f *frame) { tcp(f); f.flags = 0x10 }},
		{"syn-fin", Invalid, func(f *frame) { tcp(f); f.flags = 3 }},
		{"gre", Other, func(f *frame) { f.proto = 47 }},
		{"sctp", Other, func(f *frame) { f.proto = syscall.IPPROTO_SCTP }},
		{"ip-in-ip", Other, func(f *frame) { f.proto = syscall.IPPROTO_IPIP }},
		{"source-route", Other, func(f *frame) { tcp(f); f.options = []byte{131, 7, 4, 10, 0, 0, 1, 0} }},
		{"broadcast", Other, func(f *frame) { f.to = net.HardwareAddr{255, 255, 255, 255, 255, 255} }},
		{"vlan", Other, func(f *frame) { f.kind, f.raw = 0x8100, append([]byte{0, 5}, honest().bytes()[12:]...) }},
		{"vlan-0", Other, func(f *frame) { f.kind, f.raw = 0x8100, append([]byte{0, 0}, honest().bytes()[12:]...) }},
		{"mpls", Other, func(f *frame) { f.kind, f.raw = 0x8847, make([]byte, 60) }},
	}
}()

type hostilePacket struct {
	name, counter string
	edit          func(*frame)
}

// A connection that this gateway's namespace knows nothing of, as a restored
// machine may have one, ends with a reset.
func TestStale(t *testing.T) {
	w := newWire(t)
	c, err := w.dial("tcp4", "198.51.100.7:443", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, _ := accept(t, w.proxy)
	exchange(t, c, s)
	err = in(w.m.gateway(w.id), func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("hello?")); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("it ended with %v", err)
	}
	w.grown(map[string]uint64{}, Invalid, 1)
}

// Every packet that a machine must not send is dropped and counted under its
// name, and none reaches a socket.
func TestHostilePackets(t *testing.T) {
	w := newWire(t)
	p := w.packets()
	for _, tt := range hostile {
		t.Run(tt.name, func(t *testing.T) {
			w.t = t
			f, before := honest(), w.counters()
			tt.edit(&f)
			for range 3 {
				if err := p.send(f.bytes()); err != nil {
					t.Fatal(err)
				}
			}
			w.grown(before, tt.counter, 3)
		})
	}
	w.t = t
	// What comes after it all is the first that anybody sees: the honest frame
	// from the same packet socket, and a connection.
	if err := p.send(honest().bytes()); err != nil {
		t.Fatal(err)
	}
	w.read("hostil")
	c, err := w.dial("tcp4", "198.51.100.7:443", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if s, _ := accept(t, w.proxy); s.RemoteAddr().String() != c.LocalAddr().String() {
		t.Errorf("a connection came from %v", s.RemoteAddr())
	}
	for _, l := range []*net.TCPListener{w.proxy, w.dns} {
		_ = l.SetDeadline(time.Unix(1, 0))
		if c, err := l.Accept(); err == nil {
			t.Errorf("a connection came from %v", c.RemoteAddr())
		}
	}
	_ = w.udp.SetReadDeadline(time.Unix(1, 0))
	if n, from, err := w.udp.ReadFrom(make([]byte, 100)); err == nil {
		t.Errorf("%d bytes came from %v", n, from)
	}
}

// arp is an ARP packet for Ethernet and IPv4.
func arp(op byte, sender, target netip.Addr) []byte {
	b := append([]byte{0, 1, 8, 0, 6, 4, 0, op}, machineMAC...)
	b = append(append(b, sender.AsSlice()...), make([]byte, 6)...)
	return append(append(b, target.AsSlice()...), make([]byte, 18)...)
}

// A machine makes the kernel remember so much and no more, and what it has
// open already goes on.
func TestTooMany(t *testing.T) {
	w := newWire(t)
	c, err := w.dial("tcp4", "198.51.100.7:443", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, _ := accept(t, w.proxy)
	before, p, f := w.counters(), w.packets(), honest()
	for i := range maxTracked + 10 {
		f.sport = 20000 + uint16(i)
		if err := p.send(f.bytes()); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(patience); w.counters()[TooMany] == before[TooMany]; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("nothing was dropped: %v", w.counters())
		}
	}
	if n := w.counters()[TooMany]; n > 11 {
		t.Errorf("%d were dropped of 10 too many", n)
	}
	exchange(t, c, s)
}

// Nothing in the gateway's namespace speaks first, and nothing there forwards
// or has IPv6, whatever the host does.
func TestGatewayIsShut(t *testing.T) {
	w := newWire(t)
	err := in(w.m.gateway(w.id), func() error {
		c, err := net.Dial("udp4", "169.254.77.2:9")
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.Write([]byte("x")); !errors.Is(err, syscall.EPERM) {
			t.Errorf("a datagram from there: %v", err)
		}
		for name, want := range map[string]string{"ipv4/ip_forward": "0\n", "ipv6/conf/gw0/disable_ipv6": "1\n", "ipv4/conf/gw0/forwarding": "0\n"} {
			if got, err := os.ReadFile(filepath.Join("/proc/sys/net", name)); err != nil || string(got) != want {
				t.Errorf("%s is %q, %v", name, got, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	w.grown(map[string]uint64{}, Other, 1)
}

// What a sandbox without a pair gets is an error that says so.
func TestNoNetwork(t *testing.T) {
	needRoot(t)
	ctx := context.Background()
	m := New(Options{Dir: t.TempDir()})
	id := sandbox.NewID(sandbox.KindSandbox)
	refused := func(when string) {
		t.Helper()
		var e *sandbox.Error
		if _, _, _, err := m.Sockets(ctx, id); !errors.As(err, &e) || e.Class != sandbox.FailedPrecondition || e.Code != "no_network" {
			t.Errorf("Sockets %s: %v", when, err)
		}
		if _, err := m.Counters(ctx, id); !errors.As(err, &e) || e.Code != "no_network" {
			t.Errorf("Counters %s: %v", when, err)
		}
	}
	refused("of nothing")
	err := apart(func() error { // as earlier releases had it
		ns, err := vishnetns.New()
		if err != nil {
			return err
		}
		defer ns.Close()
		return name(int(ns), m.path(id))
	})
	if err != nil {
		t.Fatal(err)
	}
	refused("of a namespace without a gateway's")
	if ids, err := m.List(ctx); err != nil || len(ids) != 1 {
		t.Errorf("List = %v, %v", ids, err)
	}
	if err := m.Delete(ctx, id); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(m.gateway(id), nil, 0o400); err != nil {
		t.Fatal(err)
	}
	refused("of a name without a namespace")
	if ids, err := m.List(ctx); err != nil || len(ids) != 1 || ids[0] != id {
		t.Errorf("List = %v, %v", ids, err)
	}
	if err := m.Delete(ctx, id); err != nil {
		t.Error(err)
	}
	if _, _, _, err := m.Sockets(ctx, "../x"); !sandbox.IsClass(err, sandbox.Invalid) {
		t.Errorf("Sockets of no id: %v", err)
	}
}

// What is addressed to the gateway's own ports stays out even if nothing looked
// at the packets before.
func TestSecondLine(t *testing.T) {
	w := newWire(t)
	err := in(w.m.gateway(w.id), func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		c.DelTable(tables()[0])
		return c.Flush()
	})
	if err != nil {
		t.Fatal(err)
	}
	p, f, before := w.packets(), honest(), w.counters()
	f.proto, f.dst, f.dport, f.flags = syscall.IPPROTO_TCP, gatewayAddr, proxyPort, 2
	for range 3 {
		if err := p.send(f.bytes()); err != nil {
			t.Fatal(err)
		}
	}
	w.grown(before, GatewayPort, 3)
	f = honest() // which would be forwarded
	f.dport = 4000
	if err := p.send(f.bytes()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.dial("tcp4", "198.51.100.7:443", 0); err != nil {
		t.Fatal(err)
	}
	if s, was := accept(t, w.proxy); was != "198.51.100.7:443" {
		t.Errorf("a connection to %s from %s", was, s.RemoteAddr())
	}
}
