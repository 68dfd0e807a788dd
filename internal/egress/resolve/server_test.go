package resolve

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
)

const profile = `{"default":"deny","rules":[{"name":"a","action":"allow","hosts":["a.example","*.w.example","*.co.uk"]}]}`

// records keeps what a server told.
type records struct {
	mu   sync.Mutex
	list []audit.Record
}

func (r *records) add(a audit.Record) { r.mu.Lock(); defer r.mu.Unlock(); r.list = append(r.list, a) }

func (r *records) take() []audit.Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.list
	r.list = nil
	return out
}

func server(t testing.TB, clk *clock, r *Resolver, text string) (*Server, *records) {
	t.Helper()
	var p sandbox.EgressProfile
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatal(err)
	}
	c, err := policy.Compile(p)
	if err != nil {
		t.Fatal(err)
	}
	told := &records{}
	s := NewServer(ServerOptions{Resolver: r, Policy: func() *policy.Policy { return c }, Audit: told.add})
	if clk != nil {
		s.now = clk.Now
	}
	return s, told
}

func question(name string, qtype uint16) *dns.Msg {
	q := new(dns.Msg).SetQuestion(name, qtype)
	q.Id = 4711
	return q
}

func reply(t *testing.T, out []byte) *dns.Msg {
	t.Helper()
	m := new(dns.Msg)
	if err := m.Unpack(out); err != nil {
		t.Fatalf("no answer: %v", err)
	}
	return m
}

func TestAnswers(t *testing.T) {
	good := zone(0, "a.example. 9 CNAME c.example.", "c.example. 5 A 9.9.9.9", "c.example. 5 A 10.0.0.1")
	for _, c := range []struct {
		name  string
		qtype uint16
		h     handler
		rcode int
		addrs int
		// of the record; no verdict is no record
		verdict audit.Verdict
		reason  string
		asks    int
	}{
		{"a.example.", dns.TypeA, good, dns.RcodeSuccess, 1, audit.Allowed, "", 1},
		{"A.exAmple.", dns.TypeA, good, dns.RcodeSuccess, 1, audit.Allowed, "", 1},
		{"x.y.w.example.", dns.TypeA, zone(0, "x.y.w.example. 5 A 9.9.9.9"), dns.RcodeSuccess, 1, audit.Allowed, "", 1},
		{"a.example.", dns.TypeAAAA, good, dns.RcodeSuccess, 0, "", "", 0},
		{"a.example.", dns.TypeHTTPS, good, dns.RcodeSuccess, 0, "", "", 0},
		{"a.example.", dns.TypeSVCB, good, dns.RcodeSuccess, 0, "", "", 0},
		{"a.example.", dns.TypeTXT, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"a.example.", dns.TypeMX, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"a.example.", dns.TypeSRV, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"a.example.", dns.TypeNULL, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"a.example.", dns.TypeANY, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"a.example.", dns.TypeCNAME, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"a.example.", dns.TypeAXFR, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"a.example.", 65280, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"4.3.2.1.in-addr.arpa.", dns.TypePTR, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"b.example.", dns.TypeA, good, dns.RcodeRefused, 0, audit.Denied, ReasonName, 0},
		{"b.example.", dns.TypeAAAA, good, dns.RcodeRefused, 0, audit.Denied, ReasonName, 0},
		{"b.example.", dns.TypeTXT, good, dns.RcodeRefused, 0, audit.Denied, ReasonType, 0},
		{"w.example.", dns.TypeA, good, dns.RcodeRefused, 0, audit.Denied, ReasonName, 0},
		{"x.a.example.", dns.TypeA, good, dns.RcodeRefused, 0, audit.Denied, ReasonName, 0},
		{".", dns.TypeA, good, dns.RcodeRefused, 0, audit.Denied, ReasonName, 0},
		{`a\.example.w.example.`, dns.TypeA, good, dns.RcodeRefused, 0, audit.Denied, ReasonName, 0},
		{`\000.w.example.`, dns.TypeA, good, dns.RcodeRefused, 0, audit.Denied, ReasonName, 0},
		{strings.Repeat("a.", 11) + "w.example.", dns.TypeA, good, dns.RcodeRefused, 0, audit.Denied, ReasonLong, 0},
		{strings.Repeat(strings.Repeat("a", 60)+".", 3) + "w.example.", dns.TypeA, good, dns.RcodeRefused, 0, audit.Denied, ReasonLong, 0},
		{"a.example.", dns.TypeA, zone(dns.RcodeNameError), dns.RcodeNameError, 0, audit.Failed, CodeNoName, 1},
		{"a.example.", dns.TypeA, zone(0), dns.RcodeSuccess, 0, audit.Failed, CodeNoName, 1},
		{"a.example.", dns.TypeA, zone(dns.RcodeServerFailure), dns.RcodeServerFailure, 0, audit.Failed, CodeFailed, 2},
		{"a.example.", dns.TypeA, zone(0, "a.example. 5 A 169.254.169.254"), dns.RcodeRefused, 0, audit.Denied, CodeClosed, 1},
	} {
		t.Run(fmt.Sprintf("%.30s/%s/%s", c.name, dns.Type(c.qtype), c.reason), func(t *testing.T) {
			u := serve(t, c.h)
			s, told := server(t, nil, resolver(t, nil, u), profile)
			m := reply(t, s.handle(t.Context(), packed(question(c.name, c.qtype)), true))
			if m.Id != 4711 || !m.Response || len(m.Question) != 1 || m.Question[0].Name != c.name {
				t.Errorf("answers something else: %v", m)
			}
			if m.Rcode != c.rcode || len(m.Answer) != c.addrs || len(m.Ns)+len(m.Extra) != 0 {
				t.Errorf("answer: %v", m)
			}
			for _, rr := range m.Answer {
				if a, ok := rr.(*dns.A); !ok || a.Hdr.Name != c.name || a.A.String() != "9.9.9.9" || a.Hdr.Ttl < 1 || a.Hdr.Ttl > 5 {
					t.Errorf("answer: %v", rr)
				}
			}
			if asked := u.asked(); len(asked) != c.asks {
				t.Errorf("asked upstream: %v", asked)
			}
			list := told.take()
			if c.verdict == "" && len(list) == 0 {
				return
			}
			if len(list) != 1 || list[0].Verdict != c.verdict || list[0].Reason != c.reason || list[0].Kind != audit.DNS || list[0].Method != dns.Type(c.qtype).String() || list[0].Host == "" {
				t.Errorf("records: %+v", list)
			}
		})
	}
}

func TestWhatIsNoQuestion(t *testing.T) {
	s, told := server(t, nil, resolver(t, nil), profile)
	change := func(f func(*dns.Msg)) []byte { q := question("a.example.", dns.TypeA); f(q); return packed(q) }
	for name, c := range map[string]struct {
		packet []byte
		rcode  int // -1 is no answer
		reason string
	}{
		"empty":       {nil, -1, ""},
		"short":       {make([]byte, 11), -1, ""},
		"an answer":   {change(func(q *dns.Msg) { q.Response = true }), -1, ""},
		"no question": {make([]byte, 12), dns.RcodeFormatError, ReasonBroken},
		"two":         {change(func(q *dns.Msg) { q.Question = append(q.Question, q.Question[0]) }), dns.RcodeFormatError, ReasonBroken},
		"cut":         {packed(question("a.example.", dns.TypeA))[:20], dns.RcodeFormatError, ReasonBroken},
		"with answers": {change(func(q *dns.Msg) {
			q.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: "a.example.", Rrtype: dns.TypeA, Class: 1}, A: net.IPv4zero}}
		}), dns.RcodeFormatError, ReasonBroken},
		"notify":             {change(func(q *dns.Msg) { q.Opcode = dns.OpcodeNotify }), dns.RcodeNotImplemented, ReasonOpcode},
		"update":             {change(func(q *dns.Msg) { q.Opcode = dns.OpcodeUpdate; q.Question = nil }), dns.RcodeNotImplemented, ReasonOpcode},
		"another class":      {change(func(q *dns.Msg) { q.Question[0].Qclass = dns.ClassCHAOS }), dns.RcodeRefused, ReasonType},
		"a loop of pointers": {append(make([]byte, 5), 1, 0, 0, 0, 0, 0, 0, 0xc0, 12, 0, 1, 0, 1), dns.RcodeFormatError, ReasonBroken},
	} {
		out := s.handle(t.Context(), c.packet, true)
		list := told.take()
		if c.rcode < 0 {
			if out != nil || len(list) > 0 {
				t.Errorf("%s: answered %x, told %+v", name, out, list)
			}
			continue
		}
		if m := reply(t, out); m.Rcode != c.rcode || len(m.Answer) > 0 {
			t.Errorf("%s: %v", name, m)
		}
		if len(list) != 1 || list[0].Verdict != audit.Denied || list[0].Reason != c.reason {
			t.Errorf("%s: told %+v", name, list)
		}
	}
	s.o.Policy = func() *policy.Policy { return nil }
	if m := reply(t, s.handle(t.Context(), packed(question("a.example.", dns.TypeA)), true)); m.Rcode != dns.RcodeRefused {
		t.Errorf("without a policy: %v", m)
	}
}

func TestDryRunResolves(t *testing.T) {
	u := serve(t, zone(0, "b.example. 5 A 9.9.9.9"))
	s, told := server(t, nil, resolver(t, nil, u), `{"default":"deny","dry_run":true}`)
	m := reply(t, s.handle(t.Context(), packed(question("b.example.", dns.TypeA)), true))
	list := told.take()
	if len(m.Answer) != 1 || len(list) != 1 || list[0].Verdict != audit.Allowed || !list[0].WouldDeny || list[0].Rule != "default" {
		t.Errorf("%v, %+v", m, list)
	}
	m = reply(t, s.handle(t.Context(), packed(question("b.example.", dns.TypeTXT)), true))
	if list := told.take(); m.Rcode != dns.RcodeRefused || list[0].WouldDeny {
		t.Errorf("%v, %+v", m, list)
	}
}

func TestRate(t *testing.T) {
	clk := &clock{now: time.Unix(1e9, 0)}
	s, told := server(t, clk, resolver(t, clk), profile)
	ask := func(n int) (answered int) {
		for range n {
			if s.handle(t.Context(), packed(question("b.example.", dns.TypeA)), true) != nil {
				answered++
			}
		}
		return answered
	}
	if n := ask(burst + 50); n != burst {
		t.Errorf("%d of a burst were answered", n)
	}
	clk.add(time.Second)
	if n := ask(perSecond + 10); n != perSecond {
		t.Errorf("%d in the second after it", n)
	}
	var over uint64
	lines := 0
	for _, r := range told.take() {
		if r.Reason == ReasonRate {
			over, lines = over+r.Count, lines+1
		}
	}
	if over != 51 || lines != 2 { // nine more wait for the next second
		t.Errorf("%d records tell of %d", lines, over)
	}
}

func TestTunnel(t *testing.T) {
	now := time.Unix(1e9, 0)
	var n novelty
	for i := range newNames {
		if reason := n.tunnel(fmt.Sprintf("%d.x%d.evil.example", i, i), now); reason != "" {
			t.Fatalf("name %d: %s", i, reason)
		}
	}
	for name, want := range map[string]string{
		"more.evil.example":   ReasonTunnel,
		"a.b.c.evil.example":  ReasonTunnel,
		"0.x0.evil.example":   "", // not new
		"evil.example":        "", // nothing is said in it
		"more.other.example":  "",
		"more.evil.example.x": "",
	} {
		if got := n.tunnel(name, now); got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	if reason := n.tunnel("more.evil.example", now.Add(window)); reason != "" {
		t.Errorf("a minute later: %s", reason)
	}
}

func TestRegistered(t *testing.T) {
	for name, want := range map[string]string{
		"a.b.example.com":            "example.com",
		"example.com":                "example.com",
		"com":                        "com",
		"a.b.example.co.uk":          "example.co.uk",
		"bucket.s3.amazonaws.com":    "amazonaws.com",
		"a.b.someone.github.io":      "github.io",
		"x.someone.duckdns.org":      "duckdns.org",
		"a.b.internal-tld-of-nobody": "b.internal-tld-of-nobody",
		"internal-tld-of-nobody":     "internal-tld-of-nobody",
		"a.b.c.kawasaki.jp":          "b.c.kawasaki.jp",
		"a.city.kawasaki.jp":         "city.kawasaki.jp",
	} {
		if got := registered(name); got != want {
			t.Errorf("registered(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestEDNSSize(t *testing.T) {
	var rrs []string
	for i := range maxAddrs {
		rrs = append(rrs, fmt.Sprintf("a.example. 5 A 9.9.9.%d", i))
	}
	u := serve(t, zone(0, rrs...))
	s, _ := server(t, nil, resolver(t, nil, u), profile)
	for _, size := range []uint16{0, 100, 512, 1232, 65535} {
		q := question("a.example.", dns.TypeA)
		if size > 0 {
			q.SetEdns0(size, true)
		}
		out := s.handle(t.Context(), packed(q), true)
		m := reply(t, out)
		if len(out) > 1232 || size < 512 && len(out) > 512 || (m.IsEdns0() != nil) != (size > 0) || len(m.Answer) != maxAddrs {
			t.Errorf("EDNS %d: %d bytes: %v", size, len(out), m)
		}
	}
}

// running starts both kinds of server on the loopback and waits for their end.
func running(t *testing.T, s *Server) string {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.ListenPacket("udp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- s.ServeUDP(ctx, c) }()
	go func() { ended <- s.ServeTCP(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		for range 2 {
			if err := <-ended; err != nil {
				t.Errorf("the server ended with %v", err)
			}
		}
	})
	return l.Addr().String()
}

func TestServe(t *testing.T) {
	u := serve(t, zone(0, "a.example. 5 A 9.9.9.9"))
	s, _ := server(t, nil, resolver(t, nil, u), profile)
	addr := running(t, s)
	for _, network := range []string{"udp", "tcp"} {
		c := &dns.Client{Net: network, Timeout: time.Minute}
		m, _, err := c.ExchangeContext(t.Context(), question("a.example.", dns.TypeA), addr)
		if err != nil || len(m.Answer) != 1 {
			t.Errorf("%s: %v, %v", network, m, err)
		}
	}
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	q := packed(question("b.example.", dns.TypeA))
	framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(q))), q...)
	conn.Write(append(append([]byte(nil), framed...), framed...)) // two at once
	for range 2 {
		var size [2]byte
		if _, err := io.ReadFull(conn, size[:]); err != nil {
			t.Fatal(err)
		}
		out := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(conn, out); err != nil || reply(t, out).Rcode != dns.RcodeRefused {
			t.Fatalf("%x, %v", out, err)
		}
	}
	conn.Write([]byte{0xff, 0xff}) // a message that is too long for a question
	if n, err := conn.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Error("the connection goes on")
	}
}

// TestManyConnections holds as many as there may be; one more is closed.
func TestManyConnections(t *testing.T) {
	s, told := server(t, nil, resolver(t, nil), profile)
	addr := running(t, s)
	c := &dns.Client{Net: "tcp", Timeout: time.Minute}
	for range maxConnections {
		conn, err := c.DialContext(t.Context(), addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, _, err := c.ExchangeWithConnContext(t.Context(), question("b.example.", dns.TypeA), conn); err != nil {
			t.Fatal(err)
		}
	}
	told.take()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Read(make([]byte, 1)); err == nil {
		t.Error("one more is served")
	}
	if list := told.take(); len(list) != 1 || list[0].Reason != ReasonRate {
		t.Errorf("told %+v", list)
	}
}

// FuzzHandle feeds a server whatever a sandbox may send.
func FuzzHandle(f *testing.F) {
	edns := question("a.example.", dns.TypeA)
	edns.SetEdns0(4096, true)
	for _, q := range []*dns.Msg{question("a.example.", dns.TypeA), question(`x\000.w.example.`, dns.TypeAAAA), question(".", dns.TypeANY), edns} {
		f.Add(packed(q), true)
		f.Add(packed(q), false)
	}
	clk := &clock{now: time.Unix(1e9, 0)}
	s, told := server(f, clk, resolver(f, clk), profile) // there is nobody to ask
	f.Fuzz(func(t *testing.T, packet []byte, udp bool) {
		clk.add(time.Second)
		out := s.handle(t.Context(), packet, udp)
		for _, r := range told.take() {
			if r.Verdict == audit.Allowed || len(r.Host) > audit.MaxText || strings.ContainsFunc(r.Host, func(c rune) bool { return c < ' ' || c > '~' }) {
				t.Errorf("told %+v", r)
			}
		}
		if out == nil {
			return
		}
		m := reply(t, out)
		if len(out) > maxUDPAnswer && udp || !m.Response || m.Id != binary.BigEndian.Uint16(packet) || len(m.Answer) > 0 {
			t.Errorf("%x gives %v", packet, m)
		}
	})
}
