package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/ca"
	"cloche.dev/cloche/internal/egress/inject"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
)

// world is a proxy, and what stands in for everything around it: servers on
// loopback that the dialer finds under made-up addresses.
type world struct {
	t       testing.TB
	p       *Proxy
	l       *net.TCPListener
	roots   *x509.CertPool // that the sandbox trusts: the project's authority
	servers *ca.Authority  // of the stand-in servers
	trusted *x509.CertPool // their roots

	mu       sync.Mutex
	names    map[string][]netip.Addr
	behind   map[netip.AddrPort]string // the real address of a server
	lookups  []string
	dials    []netip.AddrPort
	records  chan audit.Record
	original sync.Map // remote address → chan netip.AddrPort
}

func newWorld(t testing.TB, profile sandbox.EgressProfile, secrets ...sandbox.SecretValue) *world {
	t.Helper()
	w := &world{t: t, names: map[string][]netip.Addr{}, behind: map[netip.AddrPort]string{}, records: make(chan audit.Record, 4096)}
	w.servers, w.trusted = authority(t)
	project, roots := authority(t)
	w.roots = roots
	w.p = New(Options{
		Live:   Live{Policy: compile(t, profile), Injector: inject.New(secrets, nil), Authority: project},
		Lookup: w.lookup, Dialer: w, Roots: w.trusted,
		Audit:    func(r audit.Record) { w.records <- r },
		Original: w.originalOf,
	})
	var err error
	if w.l, err = net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}); err != nil {
		t.Fatal(err)
	}
	return w
}

// start serves; times may be changed before.
func (w *world) start() *world {
	served := make(chan error, 1)
	go func() { served <- w.p.Serve(context.Background(), w.l) }()
	w.t.Cleanup(func() {
		if err := w.p.Close(); err != nil {
			w.t.Errorf("Close: %v", err)
		}
		if err := <-served; err != nil {
			w.t.Errorf("Serve: %v", err)
		}
		if s := w.p.Stats(); s.Open != 0 {
			w.t.Errorf("%d connections are left", s.Open)
		}
		w.p.mu.Lock()
		defer w.p.mu.Unlock()
		if len(w.p.flows) != 0 {
			w.t.Errorf("%d flows are left", len(w.p.flows))
		}
	})
	return w
}

func authority(t testing.TB) (*ca.Authority, *x509.CertPool) {
	t.Helper()
	pair, err := ca.Generate("test")
	if err != nil {
		t.Fatal(err)
	}
	a, err := ca.New(pair)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pair.Cert)
	return a, pool
}

func compile(t testing.TB, p sandbox.EgressProfile) *policy.Policy {
	t.Helper()
	p.Name, p.Version = "test", 7
	if p.Default == "" {
		p.Default = sandbox.EgressDeny
	}
	pol, err := policy.Compile(p)
	if err != nil {
		t.Fatal(err)
	}
	return pol
}

func (w *world) lookup(_ context.Context, name string) ([]netip.Addr, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lookups = append(w.lookups, name)
	if a, ok := w.names[name]; ok {
		return a, nil
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "dns_no_name", "no %s", name)
}

// Dial implements Dialer.
func (w *world) Dial(ctx context.Context, addrs []netip.Addr, port uint16) (*net.TCPConn, error) {
	for _, a := range addrs {
		to := netip.AddrPortFrom(a, port)
		w.mu.Lock()
		w.dials = append(w.dials, to)
		real, ok := w.behind[to]
		w.mu.Unlock()
		if a.IsPrivate() {
			return nil, sandbox.Errorf(sandbox.Denied, "closed_range", "%s", a)
		}
		if !ok {
			continue
		}
		c, err := new(net.Dialer).DialContext(ctx, "tcp4", real)
		if err != nil {
			return nil, err
		}
		return c.(*net.TCPConn), nil
	}
	return nil, sandbox.Errorf(sandbox.Unavailable, "upstream_refused", "nobody there")
}

func (w *world) dialled() []netip.AddrPort {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]netip.AddrPort(nil), w.dials...)
}

func (w *world) asked() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.lookups...)
}

func (w *world) slot(addr string) chan netip.AddrPort {
	v, _ := w.original.LoadOrStore(addr, make(chan netip.AddrPort, 1))
	return v.(chan netip.AddrPort)
}

func (w *world) originalOf(c *net.TCPConn) (netip.AddrPort, error) {
	return <-w.slot(c.RemoteAddr().String()), nil
}

// dial connects as the sandbox does, to whatever to is.
func (w *world) dial(to string) net.Conn {
	w.t.Helper()
	c, err := net.Dial("tcp4", w.l.Addr().String())
	if err != nil {
		w.t.Fatal(err)
	}
	w.slot(c.LocalAddr().String()) <- netip.MustParseAddrPort(to)
	_ = c.SetDeadline(time.Now().Add(20 * time.Second)) // a test that hangs fails
	w.t.Cleanup(func() { c.Close() })
	return c
}

// tls is dial with a handshake.
func (w *world) tls(to, sni string, protos ...string) *tls.Conn {
	w.t.Helper()
	c := tls.Client(w.dial(to), &tls.Config{ServerName: sni, RootCAs: w.roots, NextProtos: protos})
	if err := c.Handshake(); err != nil {
		w.t.Fatalf("handshake with %s: %v", sni, err)
	}
	return c
}

// client is an HTTP client of the sandbox, whose every connection goes to.
func (w *world) client(to string, h2 bool) *http.Client {
	tr := &http.Transport{
		DialContext:        func(context.Context, string, string) (net.Conn, error) { return w.dial(to), nil },
		TLSClientConfig:    &tls.Config{RootCAs: w.roots},
		ForceAttemptHTTP2:  h2,
		DisableCompression: true,
	}
	if !h2 {
		tr.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
	}
	w.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// server puts a stand-in behind an address and names it.
func (w *world) server(addr, name string, tlsToo bool, h http.HandlerFunc) *httptest.Server {
	s := httptest.NewUnstartedServer(h)
	s.EnableHTTP2 = true
	if tlsToo {
		s.TLS = &tls.Config{GetCertificate: func(i *tls.ClientHelloInfo) (*tls.Certificate, error) { return w.servers.Leaf(i.ServerName) }}
		s.StartTLS()
	} else {
		s.Start()
	}
	w.t.Cleanup(s.Close)
	w.put(addr, name, s.Listener.Addr().String())
	return s
}

func (w *world) put(addr, name, real string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	at := netip.MustParseAddrPort(addr)
	w.behind[at] = real
	if name != "" {
		w.names[name] = append(w.names[name], at.Addr())
	}
}

// listen puts a plain TCP server behind an address.
func (w *world) listen(addr, name string, serve func(net.Conn)) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { l.Close() })
	w.put(addr, name, l.Addr().String())
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c)
			}()
		}
	}()
}

// record waits for the next record.
func (w *world) record() audit.Record {
	w.t.Helper()
	select {
	case r := <-w.records:
		if r.Profile != "" && (r.Profile != "test" || r.Version != 7) {
			w.t.Errorf("the record is of %q version %d", r.Profile, r.Version)
		}
		return r
	case <-time.After(20 * time.Second):
		w.t.Fatal("there is no record")
		return audit.Record{}
	}
}

// none checks that no record is left over; the proxy has been closed or all
// that could make one is done.
func (w *world) none() {
	w.t.Helper()
	select {
	case r := <-w.records:
		w.t.Errorf("one record too many: %+v", r)
	default:
	}
}

// gone waits until a connection ends by a reset.
func gone(t testing.TB, c net.Conn) {
	t.Helper()
	_, err := io.Copy(io.Discard, c)
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended by %v, want a reset", err)
	}
}

// refusedBody reads the gateway's own answer.
func refusedBody(t testing.TB, resp *http.Response) (code, reason string) {
	t.Helper()
	defer resp.Body.Close()
	var b struct{ Code, Reason string }
	if err := json.NewDecoder(resp.Body).Decode(&b); err != nil {
		t.Errorf("the refusal's body: %v", err)
	}
	return b.Code, b.Reason
}

// answerOf reads one answer to a request that was written by hand.
func answerOf(t testing.TB, r *bufio.Reader, method string) *http.Response {
	t.Helper()
	resp, err := http.ReadResponse(r, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	return resp
}

func hosts(action sandbox.EgressAction, names ...string) sandbox.EgressRule {
	return sandbox.EgressRule{Action: action, Hosts: names}
}

func rules(r ...sandbox.EgressRule) sandbox.EgressProfile { return sandbox.EgressProfile{Rules: r} }

func lines(s ...string) string { return strings.Join(s, "\r\n") + "\r\n\r\n" }
