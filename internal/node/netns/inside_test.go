package netns

import (
	"context"
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	vishnetns "github.com/vishvananda/netns"

	"cloche.dev/cloche/internal/sandbox"
)

// patience bounds every wait for something that ought to happen soon.
const patience = 20 * time.Second

// wire is one pair, with the gateway's sockets, as its machine sees it.
type wire struct {
	t          *testing.T
	m          *Manager
	id, ns     string
	proxy, dns *net.TCPListener
	udp        *net.UDPConn
}

func newWire(t *testing.T) *wire {
	t.Helper()
	needRoot(t)
	w := &wire{t: t, m: New(Options{Dir: filepath.Join(t.TempDir(), "netns")}), id: sandbox.NewID(sandbox.KindSandbox)}
	var err error
	if w.ns, err = w.m.Create(context.Background(), w.id); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.m.Delete(context.Background(), w.id); err != nil {
			t.Error(err)
		}
	})
	w.proxy, w.dns, w.udp = w.sockets()
	return w
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: network namespaces need root")
	}
}

// sockets are the gateway's, as package net has them.
func (w *wire) sockets() (proxy, dns *net.TCPListener, udp *net.UDPConn) {
	w.t.Helper()
	a, b, c, err := w.m.Sockets(context.Background(), w.id)
	if err != nil {
		w.t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	defer c.Close()
	pl, err := net.FileListener(a)
	if err != nil {
		w.t.Fatal(err)
	}
	dl, err := net.FileListener(b)
	if err != nil {
		w.t.Fatal(err)
	}
	pc, err := net.FilePacketConn(c)
	if err != nil {
		w.t.Fatal(err)
	}
	proxy, dns, udp = pl.(*net.TCPListener), dl.(*net.TCPListener), pc.(*net.UDPConn)
	w.t.Cleanup(func() { proxy.Close(); dns.Close(); udp.Close() })
	return proxy, dns, udp
}

// in does something in a namespace.
func in(path string, do func() error) error {
	return apart(func() error {
		ns, err := vishnetns.GetFromPath(path)
		if err != nil {
			return err
		}
		defer ns.Close()
		if err := vishnetns.Set(ns); err != nil {
			return err
		}
		return do()
	})
}

// dial connects from the machine's namespace, from a port where it isn't 0.
func (w *wire) dial(network, to string, port int) (c net.Conn, err error) {
	d := net.Dialer{Timeout: patience}
	switch {
	case port == 0:
	case network == "tcp4":
		d.LocalAddr = &net.TCPAddr{IP: machineAddr.AsSlice(), Port: port}
		d.Control = func(_, _ string, raw syscall.RawConn) (err error) {
			return raw.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1) })
		}
	}
	err = in(w.ns, func() (err error) {
		c, err = d.DialContext(context.Background(), network, to)
		return err
	})
	return c, err
}

// accept takes one connection and tells where it was to go.
func accept(t *testing.T, l *net.TCPListener) (*net.TCPConn, string) {
	t.Helper()
	_ = l.SetDeadline(time.Now().Add(patience))
	c, err := l.AcceptTCP()
	if err != nil {
		t.Fatalf("accept: %v", err)
	}
	t.Cleanup(func() { c.Close() })
	to, err := originalDst(c)
	if err != nil {
		t.Fatal(err)
	}
	return c, to.String()
}

// originalDst asks for SO_ORIGINAL_DST.
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

func (w *wire) counters() map[string]uint64 {
	w.t.Helper()
	c, err := w.m.Counters(context.Background(), w.id)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// grown waits until a counter has grown by n since before, and asserts that no
// other has.
func (w *wire) grown(before map[string]uint64, counter string, n uint64) {
	w.t.Helper()
	var now map[string]uint64
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if now = w.counters(); now[counter] >= before[counter]+n || time.Now().After(deadline) {
			break
		}
	}
	for name, count := range now {
		want := before[name]
		if name == counter {
			want += n
		}
		if count != want {
			w.t.Errorf("the counter %s is %d, not %d", name, count, want)
		}
	}
	if _, known := now[counter]; !known {
		w.t.Errorf("no counter %s", counter)
	}
}

// packets is a packet socket on the machine's end, which sends what no
// kernel looks at before it is on the link. It is how gVisor sends.
type packets struct{ fd, index int }

func (w *wire) packets() *packets {
	w.t.Helper()
	p := &packets{}
	err := in(w.ns, func() error {
		link, err := net.InterfaceByName(machineLink)
		if err != nil {
			return err
		}
		p.index = link.Index
		p.fd, err = syscall.Socket(syscall.AF_PACKET, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = syscall.Close(p.fd) })
	return p
}

func (p *packets) send(frame []byte) error {
	return syscall.Sendto(p.fd, frame, 0, &syscall.SockaddrLinklayer{Ifindex: p.index, Halen: 6})
}

// frame is an Ethernet frame in the making; edit changes it before it is sent.
type frame struct {
	from, to     net.HardwareAddr
	kind         uint16
	src, dst     netip.Addr
	proto        byte
	fragment     uint16
	options      []byte
	sport, dport uint16
	flags        byte // of TCP
	seq, ack     uint32
	raw          []byte
}

// honest is a frame that gets through: a question for a resolver.
func honest() frame {
	return frame{
		from: machineMAC, to: gatewayMAC, kind: syscall.ETH_P_IP, src: machineAddr, dst: netip.MustParseAddr("198.51.100.7"),
		proto: syscall.IPPROTO_UDP, sport: 40000, dport: 53, seq: 1,
	}
}

func (f frame) bytes() []byte {
	b := append(append([]byte{}, f.to...), f.from...)
	b = binary.BigEndian.AppendUint16(b, f.kind)
	if f.raw != nil {
		return append(b, f.raw...)
	}
	inner := f.transport()
	header := 20 + len(f.options)
	ip := []byte{byte(0x40 | header/4), 0}
	ip = binary.BigEndian.AppendUint16(ip, uint16(header+len(inner)))
	ip = append(ip, 0, 1)
	ip = binary.BigEndian.AppendUint16(ip, f.fragment)
	ip = append(ip, 64, f.proto, 0, 0)
	ip = append(append(ip, f.src.AsSlice()...), f.dst.AsSlice()...)
	ip = append(ip, f.options...)
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	return append(append(b, ip...), inner...)
}

func (f frame) transport() []byte {
	b := binary.BigEndian.AppendUint16(nil, f.sport)
	b = binary.BigEndian.AppendUint16(b, f.dport)
	switch f.proto {
	case syscall.IPPROTO_UDP:
		b = append(b, 0, 14, 0, 0) // no checksum
		return append(b, "hostile"[:6]...)
	case syscall.IPPROTO_TCP:
		b = binary.BigEndian.AppendUint32(b, f.seq)
		b = binary.BigEndian.AppendUint32(b, f.ack)
		b = append(b, 0x50, f.flags, 0xff, 0xff, 0, 0, 0, 0)
		pseudo := append(append(f.src.AsSlice(), f.dst.AsSlice()...), 0, f.proto, 0, byte(len(b)))
		binary.BigEndian.PutUint16(b[16:], checksum(append(pseudo, b...)))
	}
	return b
}

func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// read expects one datagram at the resolver's socket.
func (w *wire) read(want string) *net.UDPAddr {
	w.t.Helper()
	_ = w.udp.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 100)
	n, from, err := w.udp.ReadFromUDP(b)
	if err != nil || string(b[:n]) != want {
		w.t.Fatalf("the resolver got %q, not %q, %v", b[:n], want, err)
	}
	return from
}
