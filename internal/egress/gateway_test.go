package egress

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/egress/ca"
	"cloche.dev/cloche/internal/egress/gatewayrpc"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a gateway that runs in the test's own process.
type rig struct {
	t *testing.T
	g *gateway
	c *gatewayrpc.Client
}

func newRig(t *testing.T) *rig {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	g := newGateway("b", slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- g.serve(ctx, l) }()
	c, err := gatewayrpc.Dial(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return &rig{t: t, g: g, c: c}
}

func (r *rig) ask(q gatewayrpc.Request, files ...*os.File) (gatewayrpc.Answer, error) {
	return r.c.Call(context.Background(), q, files...)
}

func (r *rig) must(q gatewayrpc.Request, files ...*os.File) gatewayrpc.Answer {
	r.t.Helper()
	a, err := r.ask(q, files...)
	if err != nil {
		r.t.Fatalf("%s: %v", q.Op, err)
	}
	return a
}

// sockets are three of loopback's, and how to reach them.
func (r *rig) sockets() (files []*os.File, proxy, dns string) {
	r.t.Helper()
	for range 2 {
		l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			r.t.Fatal(err)
		}
		f, err := l.File()
		if err != nil {
			r.t.Fatal(err)
		}
		if proxy == "" {
			proxy = l.Addr().String()
		}
		_ = l.Close()
		files = append(files, f)
	}
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		r.t.Fatal(err)
	}
	f, err := c.File()
	if err != nil {
		r.t.Fatal(err)
	}
	dns = c.LocalAddr().String()
	_ = c.Close()
	files = append(files, f)
	r.t.Cleanup(func() {
		for _, f := range files {
			_ = f.Close()
		}
	})
	return files, proxy, dns
}

// rcode asks a sandbox's resolver. A name that may be asked for fails, since
// the rig has no name server.
func (r *rig) rcode(at, name string) string {
	r.t.Helper()
	m, err := dns.Exchange(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA), at)
	if err != nil {
		r.t.Fatal(err)
	}
	return dns.RcodeToString[m.Rcode]
}

func hosts(id string, revision int64, names ...string) *sandbox.EgressAssignment {
	return &sandbox.EgressAssignment{
		Sandbox: id, Project: "prj", Revision: revision,
		Profile: sandbox.EgressProfile{Name: "p", Version: revision, Default: sandbox.EgressDeny, Rules: []sandbox.EgressRule{
			{Action: sandbox.EgressAllow, Hosts: names},
		}},
	}
}

func code(err error) string {
	var e *sandbox.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

func TestAssignments(t *testing.T) {
	r := newRig(t)
	files, proxyAt, dnsAt := r.sockets()
	if _, err := r.ask(gatewayrpc.Request{Op: gatewayrpc.OpAttach, Assignment: hosts("a", 1, "x.test")}, files...); code(err) != "egress_draining" {
		t.Errorf("before it was configured: %v", err)
	}
	config := &gatewayrpc.Config{Build: "b", Resolvers: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}}
	if a := r.must(gatewayrpc.Request{Op: gatewayrpc.OpHello, Config: config}); a.Welcome == nil || a.Welcome.Build != "b" {
		t.Errorf("welcome %+v", a.Welcome)
	}
	for name, q := range map[string]gatewayrpc.Request{
		"no sockets": {Op: gatewayrpc.OpAttach, Assignment: hosts("a", 1)}, "no assignment": {Op: gatewayrpc.OpSet}, "unknown": {Op: "x"},
	} {
		if _, err := r.ask(q); code(err) != "bad_request" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := r.ask(gatewayrpc.Request{Op: gatewayrpc.OpAttach, Assignment: hosts("a", 1)}, files[2], files[0], files[1]); err == nil {
		t.Error("sockets in another order were taken")
	}
	if a := r.must(gatewayrpc.Request{Op: gatewayrpc.OpAttach, Assignment: hosts("a", 5, "x.test")}, files...); !a.Attached {
		t.Error("it is not attached")
	}
	authority, err := ca.Generate("t")
	if err != nil {
		t.Fatal(err)
	}
	type state struct{ x, y string }
	const may, mayNot = "SERVFAIL", "REFUSED"
	broken := hosts("a", 8, "y.test")
	broken.Profile.Rules[0].Hosts = []string{"127.1"}
	badCA := hosts("a", 9, "y.test")
	badCA.CA = sandbox.Authority{Cert: []byte("x")}
	withCA := hosts("a", 10, "x.test")
	withCA.CA = authority
	for _, step := range []struct {
		name string
		set  *sandbox.EgressAssignment
		fail bool
		want state
	}{
		{"as attached", nil, false, state{may, mayNot}},
		{"an older one", hosts("a", 4, "y.test"), false, state{may, mayNot}},
		{"a newer one", hosts("a", 7, "y.test"), false, state{mayNot, may}},
		{"another sandbox's", hosts("b", 8, "x.test"), false, state{mayNot, may}},
		{"one that is malformed", broken, true, state{mayNot, mayNot}},
		{"one with a bad authority", badCA, true, state{mayNot, mayNot}},
		{"one with an authority", withCA, false, state{may, mayNot}},
		{"the same", withCA, false, state{may, mayNot}},
	} {
		if step.set != nil {
			if _, err := r.ask(gatewayrpc.Request{Op: gatewayrpc.OpSet, Assignment: step.set}); (err != nil) != step.fail {
				t.Errorf("%s: %v", step.name, err)
			}
		}
		if got := (state{r.rcode(dnsAt, "x.test"), r.rcode(dnsAt, "y.test")}); got != step.want {
			t.Errorf("%s: %v, want %v", step.name, got, step.want)
		}
	}
	list := r.must(gatewayrpc.Request{Op: gatewayrpc.OpList}).Sandboxes
	if len(list) != 1 || list[0].Revision != 10 || string(list[0].CA) != string(authority.Cert) || list[0].Yielded {
		t.Errorf("list %+v", list)
	}
	b := r.must(gatewayrpc.Request{Op: gatewayrpc.OpAudit}).Batch
	if b == nil || len(b.Records) == 0 || b.Records[0].Sandbox != "a" || b.Records[0].Project != "prj" || b.Records[0].Profile != "p" {
		t.Errorf("audit %+v", b)
	}
	r.must(gatewayrpc.Request{Op: gatewayrpc.OpReset, Sandbox: "a"})
	r.must(gatewayrpc.Request{Op: gatewayrpc.OpDetach, Sandbox: "a"})
	for _, f := range files {
		_ = f.Close()
	}
	if c, err := net.Dial("tcp4", proxyAt); err == nil {
		_ = c.Close()
		t.Error("a detached sandbox's proxy listens")
	}
	if s := r.must(gatewayrpc.Request{Op: gatewayrpc.OpStats}).Stats; s.Sandboxes != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestADrainedGatewayEnds(t *testing.T) {
	r := newRig(t)
	r.must(gatewayrpc.Request{Op: gatewayrpc.OpHello, Config: &gatewayrpc.Config{Resolvers: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}}})
	files, _, _ := r.sockets()
	r.must(gatewayrpc.Request{Op: gatewayrpc.OpAttach, Assignment: hosts("a", 1, "x.test")}, files...)
	r.must(gatewayrpc.Request{Op: gatewayrpc.OpDrain})
	more, _, _ := r.sockets()
	if _, err := r.ask(gatewayrpc.Request{Op: gatewayrpc.OpAttach, Assignment: hosts("b", 1, "x.test")}, more...); code(err) != "egress_draining" {
		t.Errorf("attach: %v", err)
	}
	r.must(gatewayrpc.Request{Op: gatewayrpc.OpYield, Sandbox: "a"}) // it has no connection: it goes by itself, and the process after it
	for {
		if _, err := r.ask(gatewayrpc.Request{Op: gatewayrpc.OpAudit, Wait: time.Minute.Milliseconds()}); gatewayrpc.Gone(err) {
			return
		}
	}
}

func TestOwnAddressesAreClosed(t *testing.T) {
	own, err := sys.OwnAddresses()
	if err != nil || len(own) == 0 {
		t.Fatalf("%v (%v)", own, err)
	}
	for _, p := range own {
		if !p.IsSingleIP() || p.Addr().Zone() != "" {
			t.Errorf("%s is not one address", p)
		}
	}
	g := newGateway("b", slog.New(slog.DiscardHandler))
	if err := g.configure(&gatewayrpc.Config{}); err != nil {
		t.Fatal(err)
	}
	before := g.host.dialer.now.Load()
	g.lookAround()
	if g.host.dialer.now.Load() != before {
		t.Error("nothing has changed, and the dialer is another one")
	}
	g.host.own = nil
	g.lookAround()
	if g.host.dialer.now.Load() == before {
		t.Error("the host's addresses have changed, and the dialer is the same")
	}
	if err := newGateway("b", g.log).configure(&gatewayrpc.Config{Roots: []byte("x")}); code(err) != "bad_roots" {
		t.Errorf("bad roots: %v", err)
	}
}

func TestTheLogIsBounded(t *testing.T) {
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "log"), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := &bounded{file: f}
	line := make([]byte, 64<<10)
	for range 3 * maxLog / len(line) {
		if _, err := b.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	if st, err := f.Stat(); err != nil || st.Size() > maxLog || st.Size() == 0 {
		t.Errorf("%d bytes (%v)", st.Size(), err)
	}
}

// A request is the daemon's, and yet nothing in it may end the process.
func FuzzRequests(f *testing.F) {
	for _, q := range []gatewayrpc.Request{
		{Op: gatewayrpc.OpHello, Config: &gatewayrpc.Config{Build: "b", Own: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}},
		{Op: gatewayrpc.OpSet, Assignment: hosts("a", 2, "*.x.test")},
		{Op: gatewayrpc.OpSet, Assignment: hosts("a", 1, "")},
		{Op: gatewayrpc.OpList},
		{Op: gatewayrpc.OpStats},
		{Op: gatewayrpc.OpReset, Sandbox: "a"},
		{Op: gatewayrpc.OpAudit, Ack: 1},
	} {
		data, err := json.Marshal(q)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	f.Fuzz(func(_ *testing.T, data []byte) {
		var q gatewayrpc.Request
		if json.Unmarshal(data, &q) != nil {
			return
		}
		g := newGateway("b", slog.New(slog.DiscardHandler))
		_ = g.configure(&gatewayrpc.Config{})
		if q.Assignment != nil {
			_, _, _ = g.compile(q.Assignment, nil)
		}
		g.answer(ended, q, nil)
		g.end()
	})
}
