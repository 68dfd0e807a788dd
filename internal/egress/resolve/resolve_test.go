package resolve

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func TestLookup(t *testing.T) {
	chain := []string{"a.example. 5 CNAME b.example.", "b.example. 5 CNAME c.example.", "c.example. 5 A 9.9.9.9"}
	for _, c := range []struct {
		name   string
		lookup string
		h      handler
		want   string // addresses, or a code
	}{
		{"plain", "a.example", zone(0, "a.example. 5 A 9.9.9.9", "a.example. 5 A 8.8.8.8"), "9.9.9.9 8.8.8.8"},
		{"written otherwise", "A.Example.", zone(0, "a.EXAMPLE. 5 A 9.9.9.9"), "9.9.9.9"},
		{"twice the same", "a.example", zone(0, "a.example. 5 A 9.9.9.9", "a.example. 5 A 9.9.9.9"), "9.9.9.9"},
		{"a chain", "a.example", zone(0, chain...), "9.9.9.9"},
		{"a chain out of order", "a.example", zone(0, chain[2], chain[1], chain[0]), "9.9.9.9"},
		{"a chain that ends nowhere", "a.example", zone(0, chain[:2]...), CodeNoName},
		{"a loop", "a.example", zone(0, "a.example. 5 CNAME b.example.", "b.example. 5 CNAME a.example."), CodeNoName},
		{"addresses of others", "a.example", zone(0, "b.example. 5 A 9.9.9.9", "a.example. 5 TXT x"), CodeNoName},
		{"another class", "a.example", zone(0, "a.example. 5 CH A 9.9.9.9"), CodeNoName},
		{"IPv6", "a.example", zone(0, "a.example. 5 AAAA ::1"), CodeNoName},
		{"no such name", "a.example", zone(dns.RcodeNameError), CodeNoName},
		{"one closed", "a.example", zone(0, "a.example. 5 A 10.0.0.1", "a.example. 5 A 9.9.9.9", "a.example. 5 A 127.0.0.1"), "9.9.9.9"},
		{"all closed", "a.example", zone(0, "a.example. 5 A 10.0.0.1", "a.example. 5 A 169.254.169.254"), CodeClosed},
		{"closed behind a chain", "a.example", zone(0, "a.example. 5 CNAME metadata.", "metadata. 5 A 169.254.169.254"), CodeClosed},
		{"broken server", "a.example", zone(dns.RcodeServerFailure), CodeFailed},
		{"refusing server", "a.example", zone(dns.RcodeRefused), CodeFailed},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := resolver(t, nil, serve(t, c.h))
			addrs, err := r.Lookup(t.Context(), c.lookup)
			got := code(err)
			if err == nil {
				got = strings.Trim(fmt.Sprint(addrs), "[]")
			}
			if got != c.want {
				t.Errorf("%q (%v), want %q", got, err, c.want)
			}
		})
	}
}

func TestNamesThatNobodyIsAskedFor(t *testing.T) {
	u := serve(t, zone(0, "localhost. 5 A 9.9.9.9"))
	r := resolver(t, nil, u)
	for _, name := range []string{"localhost", "LOCALHOST.", "a.localhost", "1.2.3.4", "0x7f.1", "", "a..b", "a b", strings.Repeat("a.", 200)} {
		if _, err := r.Lookup(t.Context(), name); code(err) != CodeNoName {
			t.Errorf("%q: %v", name, err)
		}
	}
	if asked := u.asked(); len(asked) > 0 {
		t.Errorf("the server was asked: %v", asked)
	}
	if _, err := resolver(t, nil).Lookup(t.Context(), "a.example"); code(err) != CodeFailed {
		t.Errorf("without servers: %v", err)
	}
}

func TestTheNextServerIsAsked(t *testing.T) {
	bad, good := serve(t, zone(dns.RcodeServerFailure)), serve(t, zone(0, "a.example. 5 A 9.9.9.9"))
	if addrs, err := resolver(t, nil, bad, good).Lookup(t.Context(), "a.example"); err != nil || len(addrs) != 1 {
		t.Errorf("%v, %v", addrs, err)
	}
	once := 0
	flaky := serve(t, func(q *dns.Msg, n string) [][]byte {
		if once++; once == 1 {
			return zone(dns.RcodeServerFailure)(q, n)
		}
		return zone(0, "a.example. 5 A 9.9.9.9")(q, n)
	})
	if addrs, err := resolver(t, nil, flaky).Lookup(t.Context(), "a.example"); err != nil || len(addrs) != 1 {
		t.Errorf("the second time: %v, %v", addrs, err)
	}
}

func TestTruncatedAnswersComeOverTCP(t *testing.T) {
	u := serve(t, func(q *dns.Msg, network string) [][]byte {
		if network == "tcp" {
			return zone(0, "a.example. 5 A 9.9.9.9")(q, network)
		}
		m := new(dns.Msg).SetReply(q)
		m.Truncated = true
		return [][]byte{packed(m)}
	})
	if addrs, err := resolver(t, nil, u).Lookup(t.Context(), "a.example"); err != nil || len(addrs) != 1 {
		t.Errorf("%v, %v", addrs, err)
	}
	if asked := u.asked(); !slices.Equal(asked, []string{"udp a.example.", "tcp a.example."}) {
		t.Errorf("asked %v", asked)
	}
}

func TestLargeAnswers(t *testing.T) {
	u := serve(t, func(q *dns.Msg, network string) [][]byte {
		m := new(dns.Msg).SetReply(q)
		if m.Truncated = network == "udp"; m.Truncated {
			return [][]byte{packed(m)}
		}
		var rrs []string
		for i := range 1000 {
			rrs = append(rrs, fmt.Sprintf("a.example. 5 A 9.9.%d.%d", i/256, i%256))
		}
		return zone(0, rrs...)(q, network)
	})
	if addrs, err := resolver(t, nil, u).Lookup(t.Context(), "a.example"); err != nil || len(addrs) != maxAddrs {
		t.Errorf("%v, %v", addrs, err)
	}
}

// TestStrayAnswers has a server send forgeries before the answer.
func TestStrayAnswers(t *testing.T) {
	u := serve(t, func(q *dns.Msg, network string) [][]byte {
		forge := func(change func(*dns.Msg)) []byte {
			m := new(dns.Msg)
			if err := m.Unpack(zone(0, "a.example. 5 A 6.6.6.6")(q, network)[0]); err != nil {
				panic(err)
			}
			change(m)
			return packed(m)
		}
		return [][]byte{
			{},
			{1},
			forge(func(m *dns.Msg) { m.Id++ }),
			forge(func(m *dns.Msg) { m.Response = false }),
			forge(func(m *dns.Msg) { m.Question = nil }),
			forge(func(m *dns.Msg) { m.Question[0].Name = "b.example." }),
			forge(func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAAAA }),
			forge(func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }),
			zone(0, "a.example. 5 A 9.9.9.9")(q, network)[0],
		}
	})
	addrs, err := resolver(t, nil, u).Lookup(t.Context(), "a.example")
	if err != nil || len(addrs) != 1 || addrs[0] != netip.MustParseAddr("9.9.9.9") {
		t.Errorf("%v, %v", addrs, err)
	}
}

func TestCache(t *testing.T) {
	for _, c := range []struct {
		name string
		h    handler
		kept time.Duration
	}{
		{"TTL 0", zone(0, "a.example. 0 A 9.9.9.9"), time.Second},
		{"TTL 30", zone(0, "a.example. 30 A 9.9.9.9"), 30 * time.Second},
		{"least of the chain", zone(0, "a.example. 7 CNAME b.example.", "b.example. 30 A 9.9.9.9"), 7 * time.Second},
		{"a day", zone(0, "a.example. 86400 A 9.9.9.9"), time.Minute},
		{"closed", zone(0, "a.example. 30 A 10.0.0.1"), 30 * time.Second},
		{"no name", zone(dns.RcodeNameError), 5 * time.Second},
		{"no address", zone(0), 5 * time.Second},
		{"failure", zone(dns.RcodeServerFailure), 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			clk := &clock{now: time.Unix(1e9, 0)}
			u := serve(t, c.h)
			r := resolver(t, clk, u)
			ask := func() int { r.Lookup(t.Context(), "a.example"); return len(u.asked()) }
			first := ask()
			clk.add(c.kept - time.Millisecond)
			if c.kept > 0 && ask() != first {
				t.Error("not kept long enough")
			}
			clk.add(time.Millisecond)
			if ask() == first {
				t.Error("kept too long")
			}
		})
	}
}

func TestTheCacheIsBounded(t *testing.T) {
	clk := &clock{now: time.Unix(1e9, 0)}
	r := resolver(t, clk)
	for i := range 3 * maxCached {
		r.keep(fmt.Sprintf("%d.example", i), answer{until: clk.Now().Add(maxTTL)})
	}
	if n := len(r.cache); n > maxCached {
		t.Errorf("%d names are kept", n)
	}
	if _, ok := r.cached(fmt.Sprintf("%d.example", 3*maxCached-1)); !ok {
		t.Error("the newest is not among them")
	}
}

// TestOneQuestionForMany has the first caller give up while the server thinks.
func TestOneQuestionForMany(t *testing.T) {
	got, release := make(chan struct{}), make(chan struct{})
	u := serve(t, func(q *dns.Msg, network string) [][]byte {
		close(got) // a second question would panic
		<-release
		return zone(0, "a.example. 5 A 9.9.9.9")(q, network)
	})
	r := resolver(t, nil, u)
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error)
	go func() { _, err := r.Lookup(ctx, "a.example"); first <- err }()
	<-got
	cancel()
	if err := <-first; code(err) != CodeFailed {
		t.Errorf("who gave up: %v", err)
	}
	second := make(chan error)
	go func() { _, err := r.Lookup(t.Context(), "a.example"); second <- err }()
	close(release)
	if err := <-second; err != nil {
		t.Errorf("who waited: %v", err)
	}
}

func TestHostServers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	for text, want := range map[string]string{
		"nameserver 1.1.1.1\n": "[1.1.1.1:53]",
		"# a\nsearch x\nnameserver\t::1 # b\nnameserver fe80::1%eth0\nnameserver nonsense\noptions a\nnameserver 2.2.2.2\nnameserver 3.3.3.3": "[[::1]:53 [fe80::1%eth0]:53 2.2.2.2:53]",
		"search x\n": "",
		"":           "",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := HostServers(file)
		if want == "" {
			if code(err) != "no_name_server" {
				t.Errorf("%q: %v, %v", text, got, err)
			}
		} else if err != nil || fmt.Sprint(got) != want {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
	if _, err := HostServers(file + "x"); code(err) != "no_name_server" {
		t.Errorf("no file: %v", err)
	}
}

// FuzzUpstream reads whatever a name server may send.
func FuzzUpstream(f *testing.F) {
	q := new(dns.Msg).SetQuestion("a.example.", dns.TypeA)
	q.Id = 7
	for _, h := range []handler{
		zone(0, "a.example. 5 A 9.9.9.9", "a.example. 5 A 10.0.0.1"),
		zone(0, "a.example. 5 CNAME b.example.", "b.example. 5 CNAME a.example."), zone(dns.RcodeNameError),
	} {
		f.Add(h(q, "")[0])
	}
	r := resolver(f, nil)
	f.Fuzz(func(t *testing.T, b []byte) {
		m := answers(b, q)
		if m == nil {
			return
		}
		a, err := r.read(m, "a.example")
		if err == nil && (len(a.addrs) == 0) != (a.err != nil) {
			t.Errorf("%+v", a)
		}
		for _, addr := range a.addrs {
			if _, closed := r.o.Ranges.Closed(addr); closed || !addr.Is4() {
				t.Errorf("%s got through", addr)
			}
		}
	})
}
