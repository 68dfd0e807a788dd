// Package internet stands in for the world outside: a network namespace of its
// own, joined to the host by a veth, with a name server, and with whatever
// listeners a test opens in it. Nothing in it is an address of the host, so
// that the gateway's closed ranges hold as they do in the field; the range is
// private, so that it takes --egress-open to reach it.
package internet

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"cloche.dev/cloche/internal/egress/ca"
)

// World is one stand-in. Its addresses are Prefix.1 (the host's end), Prefix.2
// (the name server) and any other below Prefix/24 that a test asks for.
type World struct {
	tb     testing.TB
	ns     netns.NsHandle
	link   string
	net    int // third octet of the addresses
	roots  *ca.Authority
	pem    []byte
	mu     sync.Mutex
	names  map[string][]netip.Addr
	ttl    map[string]uint32
	asked  map[string]int
	rotate map[string]int // how often such a name was asked for
	hosted map[netip.Addr]bool
}

// numbers keeps the worlds of one process apart; the process id those of several.
var numbers atomic.Int32

// New makes a world that is gone when the test ends. It needs root.
func New(tb testing.TB) *World {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("SKIP: needs root, since it makes a network namespace")
	}
	w := &World{
		tb: tb, net: (os.Getpid()*7 + int(numbers.Add(1))) % 250, names: map[string][]netip.Addr{}, ttl: map[string]uint32{},
		asked: map[string]int{}, rotate: map[string]int{}, hosted: map[netip.Addr]bool{},
	}
	w.link = fmt.Sprintf("clow%d", w.net)
	authority, err := ca.Generate("the stand-in internet")
	if err != nil {
		tb.Fatal(err)
	}
	if w.roots, err = ca.New(authority); err != nil {
		tb.Fatal(err)
	}
	w.pem = authority.Cert
	w.join()
	w.host(w.Addr(2))
	w.serveDNS()
	return w
}

// Link is the name of the host's end.
func (w *World) Link() string { return w.link }

// Open is what --egress-open must name.
func (w *World) Open() string { return fmt.Sprintf("10.213.%d.0/24", w.net) }

// Resolver is what --egress-resolver must name.
func (w *World) Resolver() string { return net.JoinHostPort(w.Addr(2).String(), "53") }

// RootsFile writes the authority of the world's certificates, for --egress-roots.
func (w *World) RootsFile() string {
	w.tb.Helper()
	file := filepath.Join(w.tb.TempDir(), "roots.pem")
	if err := os.WriteFile(file, w.pem, 0o600); err != nil {
		w.tb.Fatal(err)
	}
	return file
}

// Flags are serve's flags that make a daemon live in this world.
func (w *World) Flags() []string {
	return []string{"--egress-open", w.Open(), "--egress-resolver", w.Resolver(), "--egress-roots", w.RootsFile()}
}

// Addr is one address of the world.
func (w *World) Addr(last byte) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 213, byte(w.net), last})
}

// Host is the host's own address in the world's network: a neighbour that is
// never opened.
func (w *World) Host() netip.Addr { return w.Addr(1) }

// Name makes the name server answer a name with these addresses, whatever they
// are, with this time to live.
func (w *World) Name(name string, ttl uint32, addrs ...netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.names[dns.Fqdn(name)], w.ttl[dns.Fqdn(name)] = addrs, ttl
}

// Rotate makes the name server answer a name with one of these addresses at a
// time, each time with the next, to be used once.
func (w *World) Rotate(name string, addrs ...netip.Addr) {
	w.Name(name, 0, addrs...)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rotate[dns.Fqdn(name)] = 0
}

// Asked tells how often the name server was asked for a name or one below it.
func (w *World) Asked(name string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for asked, times := range w.asked {
		if dns.IsSubDomain(dns.Fqdn(name), asked) {
			n += times
		}
	}
	return n
}

// AskedWith tells how often the name server was asked for names that hold text.
func (w *World) AskedWith(text string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for asked, times := range w.asked {
		if strings.Contains(asked, text) {
			n += times
		}
	}
	return n
}

// Listen opens a listener in the world. Port 0 is any.
func (w *World) Listen(addr netip.Addr, port int) net.Listener {
	w.tb.Helper()
	w.host(addr)
	var l net.Listener
	w.inside(func() (err error) {
		l, err = net.Listen("tcp4", net.JoinHostPort(addr.String(), strconv.Itoa(port)))
		return err
	})
	w.tb.Cleanup(func() { _ = l.Close() })
	return l
}

// ListenUDP opens a datagram socket in the world.
func (w *World) ListenUDP(addr netip.Addr, port int) net.PacketConn {
	w.tb.Helper()
	w.host(addr)
	var c net.PacketConn
	w.inside(func() (err error) {
		c, err = net.ListenPacket("udp4", net.JoinHostPort(addr.String(), strconv.Itoa(port)))
		return err
	})
	w.tb.Cleanup(func() { _ = c.Close() })
	return c
}

// Site serves h at addr on ports 80 and 443, there for any name with a
// certificate that the world's authority signed, over HTTP/1.1 and HTTP/2.
func (w *World) Site(addr netip.Addr, h http.Handler) {
	w.tb.Helper()
	plain := &http.Server{Handler: h}
	secure := &http.Server{Handler: h, TLSConfig: &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			return w.roots.Leaf(hello.ServerName)
		},
	}}
	l80, l443 := w.Listen(addr, 80), w.Listen(addr, 443)
	go func() { _ = plain.Serve(l80) }()
	go func() { _ = secure.ServeTLS(l443, "", "") }()
	w.tb.Cleanup(func() { _ = plain.Close(); _ = secure.Close() })
}

// Leaf is a certificate for a name, of the world's authority.
func (w *World) Leaf(name string) *tls.Certificate {
	w.tb.Helper()
	leaf, err := w.roots.Leaf(name)
	if err != nil {
		w.tb.Fatal(err)
	}
	return leaf
}

// join makes the namespace and its link.
func (w *World) join() {
	w.tb.Helper()
	on(w.tb, nil, func() (err error) {
		w.ns, err = netns.New()
		return err
	})
	w.tb.Cleanup(func() {
		if link, err := netlink.LinkByName(w.link); err == nil {
			_ = netlink.LinkDel(link)
		}
		_ = w.ns.Close()
	})
	must := func(err error) {
		w.tb.Helper()
		if err != nil {
			w.tb.Fatalf("make a stand-in internet: %v", err)
		}
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = w.link
	must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "world", PeerNamespace: netlink.NsFd(int(w.ns))}))
	link, err := netlink.LinkByName(w.link)
	must(err)
	must(netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: w.Addr(1).AsSlice(), Mask: net.CIDRMask(24, 32)}}))
	must(netlink.LinkSetUp(link))
	w.inside(func() error {
		for _, name := range []string{"lo", "world"} {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetUp(link); err != nil {
				return err
			}
		}
		return nil
	})
}

// host gives the world's end an address, once.
func (w *World) host(addr netip.Addr) {
	w.tb.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hosted[addr] {
		return
	}
	w.hosted[addr] = true
	w.inside(func() error {
		link, err := netlink.LinkByName("world")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(24, 32)}})
	})
}

// inside runs f on a thread that is in the world's namespace.
func (w *World) inside(f func() error) {
	w.tb.Helper()
	on(w.tb, &w.ns, f)
}

// on runs f on a thread of its own, in ns if that is not nil. The thread ends
// with f, whatever namespace f has put it in.
func on(tb testing.TB, ns *netns.NsHandle, f func() error) {
	tb.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked
		if ns != nil {
			if err := netns.Set(*ns); err != nil {
				done <- err
				return
			}
		}
		done <- f()
	}()
	if err := <-done; err != nil {
		tb.Fatalf("in the stand-in internet: %v", err)
	}
}

func (w *World) serveDNS() {
	w.tb.Helper()
	l := w.Listen(w.Addr(2), 53)
	c := w.ListenUDP(w.Addr(2), 53)
	for _, s := range []*dns.Server{{Listener: l, Handler: dns.HandlerFunc(w.answer)}, {PacketConn: c, Handler: dns.HandlerFunc(w.answer)}} {
		started := make(chan struct{})
		s.NotifyStartedFunc = func() { close(started) }
		go func() { _ = s.ActivateAndServe() }()
		<-started
		w.tb.Cleanup(func() { _ = s.ShutdownContext(context.Background()) })
	}
}

func (w *World) answer(rw dns.ResponseWriter, r *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(r)
	q := r.Question[0]
	w.mu.Lock()
	w.asked[dns.CanonicalName(q.Name)]++
	addrs, ok := w.names[dns.CanonicalName(q.Name)]
	ttl := w.ttl[dns.CanonicalName(q.Name)]
	if turn, ok := w.rotate[dns.CanonicalName(q.Name)]; ok && q.Qtype == dns.TypeA {
		w.rotate[dns.CanonicalName(q.Name)]++
		addrs = addrs[turn%len(addrs):][:1]
	}
	w.mu.Unlock()
	switch {
	case !ok:
		m.Rcode = dns.RcodeNameError
	case q.Qtype == dns.TypeA:
		for _, a := range addrs {
			m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl}, A: a.AsSlice()})
		}
	}
	_ = rw.WriteMsg(m)
}
