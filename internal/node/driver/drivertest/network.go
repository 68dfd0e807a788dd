package drivertest

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

var networkClauses = []Clause{
	{"network-interfaces", "A machine has its loopback and eth0, which look the same in every machine, and no other interface that is up.", networkInterfaces},
	{"network-closed", "Without a gateway neither the host's loopback services nor its addresses nor anything beyond can be reached.", networkClosed},
	{"networks-apart", "What one machine serves on its loopback or on eth0 another can't reach.", func(b *bench) {
		one, two := b.box(), b.box()
		one.background(as("user", "echo", "0.0.0.0:7000"), "ready")
		targets := []string{"127.0.0.1:7000"}
		if !b.h.NoInterface {
			targets = append(targets, strings.TrimSuffix(machineAddr, "/30")+":7000") // which is its own, where nobody listens
		}
		b.want("a dial from the other", two.root(append([]string{"dial"}, targets...)...), "done\n")
	}},
	{"network-gateway", "Whatever a machine dials reaches its gateway, which learns the address; so do questions to any resolver, and no other datagram.", func(b *bench) {
		if x := b.box(); !b.h.NoInterface {
			x.reachesGateway()
			x.reachesGateway() // a second gateway, as after the first one's end
		}
	}},
	packetClause,
	{"network-images", "A machine's network works after a memory snapshot, and in machines made from a memory or a disk image, each with its own gateway.", func(b *bench) {
		if b.h.NoInterface {
			return
		}
		x := b.box()
		x.reachesGateway()
		images := []driver.Image{x.snapshot(sandbox.SnapshotMemory), x.snapshot(sandbox.SnapshotDisk)}
		x.reachesGateway()
		for _, image := range images {
			y := x.restore(image, nil)
			y.reachesGateway()
			x.reachesGateway()
			b.want("the interfaces", y.root("interfaces"), x.root("interfaces"))
		}
	}},
}

// machineAddr is every machine's.
const machineAddr = "169.254.77.2/30"

func networkInterfaces(b *bench) {
	x := b.box()
	want := []string{"eth0 false true 1500 02:c1:0c:e0:00:02 " + machineAddr}
	if b.h.NoInterface {
		want = nil
	}
	for l := range strings.Lines(x.root("interfaces")) {
		f := strings.Fields(l)
		if len(f) > 2 && f[2] == "true" && f[1] == "false" && !slices.Contains(want, strings.TrimSpace(l)) {
			b.Errorf("an interface is up: %q", l)
		}
	}
	said := x.root("interfaces")
	for _, line := range want {
		b.has("the list of interfaces", said, line)
	}
	if !strings.Contains(said, "lo true true ") {
		b.Errorf("the loopback is not up: %q", said)
	}
	x.background(as("user", "echo", "127.0.0.1:7000"), "ready")
	b.want("a dial over loopback", x.user("dial", "127.0.0.1:7000"), "reached 127.0.0.1:7000\ndone\n")
}

func networkClosed(b *bench) {
	tcp, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		b.Fatalf("%v", err)
	}
	defer tcp.Close()
	_, port, _ := net.SplitHostPort(tcp.Addr().String())
	udp, err := net.ListenPacket("udp", "0.0.0.0:"+port)
	if err != nil {
		b.Fatalf("%v", err)
	}
	defer udp.Close()
	targets := []string{"127.0.0.1:" + port, "169.254.169.254:80"}
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		b.Fatalf("%v", err)
	}
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil {
			targets = append(targets, net.JoinHostPort(n.IP.String(), port))
		}
	}
	own, err := b.h.Files.onHost(append([]string{"dial"}, targets[0])...)
	if err != nil || !strings.Contains(string(own), "reached") {
		b.Fatalf("the host can't reach its own service: %q, %v", own, err)
	}
	x := b.box()
	b.want("what was reached", x.root(append([]string{"dial"}, targets...)...), "done\n")
	x.root(append([]string{"udp"}, targets...)...)
	_ = udp.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	if n, from, err := udp.ReadFrom(make([]byte, 100)); err == nil {
		b.Errorf("the host got a datagram of %d bytes from %v", n, from)
	}
}

// gateway is the other end of a machine's network.
type gateway struct {
	x          *box
	proxy, dns net.Listener
	udp        net.PacketConn
}

func (x *box) gateway() (g *gateway, shut func()) {
	x.b.Helper()
	proxy, dns, udp, err := x.b.h.Networks.Sockets(x.b.ctx, x.m.ID())
	if err != nil {
		x.b.Fatalf("open the gateway's sockets: %v", err)
	}
	g = &gateway{x: x}
	shut = func() {
		for _, c := range []interface{ Close() error }{g.proxy, g.dns, g.udp} {
			if c != nil {
				_ = c.Close()
			}
		}
	}
	defer proxy.Close()
	defer dns.Close()
	defer udp.Close()
	if g.proxy, err = net.FileListener(proxy); err == nil {
		if g.dns, err = net.FileListener(dns); err == nil {
			g.udp, err = net.FilePacketConn(udp)
		}
	}
	if err != nil {
		x.b.Fatalf("open the gateway's sockets: %v", err)
	}
	return g, shut
}

// reachesGateway asserts what network-gateway says.
func (x *box) reachesGateway() {
	b := x.b
	b.Helper()
	g, shut := x.gateway()
	defer shut()
	for _, to := range []string{"198.51.100.7:443", "169.254.169.254:80", "10.0.0.1:22"} {
		g.connection(g.proxy, to)
	}
	g.connection(g.dns, "198.51.100.7:53")
	x.root("udp", "198.51.100.7:443", "169.254.77.1:15053", "198.51.100.7:123") // none of which gets anywhere
	for _, to := range []string{"198.51.100.7:53", "169.254.77.1:53"} {
		session, r := x.start(as("user", "ask", to)), new(result)
		_ = g.udp.SetDeadline(time.Now().Add(b.patience()))
		got := make([]byte, 100)
		n, from, err := g.udp.ReadFrom(got)
		if err != nil || string(got[:n]) != "hello" {
			b.Fatalf("a question to %s: %q, %v", to, got[:n], err)
		}
		if _, err := g.udp.WriteTo([]byte("welcome"), from); err != nil {
			b.Fatalf("answer: %v", err)
		}
		x.follow(session, r, nil)
		b.want("the answer of "+to, r.out.String(), "welcome")
	}
}

// connection has the machine connect to an address, which must arrive at l.
func (g *gateway) connection(l net.Listener, to string) {
	b := g.x.b
	b.Helper()
	session, r := g.x.start(as("user", "say", to)), new(result)
	tcp := l.(*net.TCPListener)
	_ = tcp.SetDeadline(time.Now().Add(b.patience()))
	c, err := tcp.AcceptTCP()
	if err != nil {
		b.Fatalf("a connection to %s does not arrive: %v", to, err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(b.patience()))
	if was, err := originalDst(c); err != nil || was.String() != to {
		b.Errorf("it was to %v, not %s: %v", was, to, err)
	}
	got := make([]byte, 100)
	if n, err := c.Read(got); err != nil || string(got[:n]) != "hello" {
		b.Errorf("it brought %q, %v", got[:n], err)
	}
	if _, err := c.Write([]byte("welcome")); err != nil {
		b.Errorf("answer: %v", err)
	}
	c.Close()
	g.x.follow(session, r, nil)
	b.want("the answer of "+to, r.out.String(), "welcome")
}

// originalDst asks the kernel where a connection was to go (SO_ORIGINAL_DST).
func originalDst(c *net.TCPConn) (to netip.AddrPort, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return to, err
	}
	cerr := raw.Control(func(fd uintptr) {
		var m *syscall.IPv6Mreq // large enough for a struct sockaddr_in
		if m, err = syscall.GetsockoptIPv6Mreq(int(fd), syscall.IPPROTO_IP, 80); err == nil {
			to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(m.Multiaddr[4:8])), binary.BigEndian.Uint16(m.Multiaddr[2:]))
		}
	})
	if cerr != nil {
		return to, cerr
	}
	return to, err
}
