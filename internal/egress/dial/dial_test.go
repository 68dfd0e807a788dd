package dial

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// listen takes connections on one of the loopback's addresses and drops them.
func listen(t *testing.T, addr string) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp4", addr)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return netip.MustParseAddrPort(l.Addr().String())
}

// unused returns a port that nothing listens on at 127.0.0.1.
func unused(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

func loopback(t *testing.T) *policy.Ranges {
	return policy.RangesForTest(t, netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"))
}

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func code(err error) string {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return ""
	}
	return e.Code
}

func TestDial(t *testing.T) {
	t.Setenv("HTTPS_PROXY", "http://127.0.0.1:1")
	t.Setenv("ALL_PROXY", "socks5://127.0.0.1:1")
	at := listen(t, "127.0.0.1:0")
	for _, c := range []struct {
		name  string
		addrs []netip.Addr
		tried []string
	}{
		{"one", addrs("127.0.0.1"), []string{"127.0.0.1"}},
		{"mapped", addrs("::ffff:127.0.0.1"), []string{"127.0.0.1"}},
		{"closed ones before it", addrs("10.0.0.1", "169.254.169.254", "::1", "127.0.0.1"), []string{"127.0.0.1"}},
		{"a dead one before it", addrs("127.0.0.9", "127.0.0.1"), []string{"127.0.0.9", "127.0.0.1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := New(loopback(t), time.Minute)
			var tried []string
			d.checked = func(a netip.AddrPort) { tried = append(tried, a.Addr().String()) }
			conn, err := d.Dial(t.Context(), c.addrs, at.Port())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if got := conn.RemoteAddr().String(); got != at.String() {
				t.Errorf("connected to %s", got)
			}
			if !slices.Equal(tried, c.tried) {
				t.Errorf("tried %v, want %v", tried, c.tried)
			}
		})
	}
}

func TestDialFails(t *testing.T) {
	at := listen(t, "127.0.0.1:0")
	strict, err := policy.NewRanges(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	many := make([]netip.Addr, 100)
	for i := range many {
		many[i] = netip.MustParseAddr("127.0.0.9")
	}
	for _, c := range []struct {
		name    string
		ctx     context.Context
		ranges  *policy.Ranges
		timeout time.Duration
		addrs   []netip.Addr
		port    uint16
		code    string
		tried   int
	}{
		{"closed", t.Context(), strict, time.Minute, addrs("127.0.0.1", "::ffff:127.0.0.1", "0.0.0.0", "169.254.169.254"), at.Port(), CodeClosed, 0},
		{"IPv6", t.Context(), loopback(t), time.Minute, addrs("::1"), at.Port(), CodeClosed, 0},
		{"no address", t.Context(), strict, time.Minute, nil, at.Port(), CodeFailed, 0},
		{"an invalid address", t.Context(), strict, time.Minute, []netip.Addr{{}}, at.Port(), CodeClosed, 0},
		{"port 0", t.Context(), loopback(t), time.Minute, addrs("127.0.0.1"), 0, CodeFailed, 0},
		{"refused", t.Context(), loopback(t), time.Minute, addrs("127.0.0.1"), unused(t), CodeRefused, 1},
		{"many refused", t.Context(), loopback(t), time.Minute, many, at.Port(), CodeRefused, maxAddrs},
		{"out of time", t.Context(), loopback(t), time.Nanosecond, addrs("127.0.0.1"), at.Port(), CodeTimeout, 0},
		{"given up", ended, loopback(t), time.Minute, addrs("127.0.0.1"), at.Port(), CodeFailed, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := New(c.ranges, c.timeout)
			tried := 0
			d.checked = func(netip.AddrPort) { tried++ }
			conn, err := d.Dial(c.ctx, c.addrs, c.port)
			if err == nil {
				conn.Close()
			}
			if got := code(err); got != c.code {
				t.Errorf("code %q, want %q: %v", got, c.code, err)
			}
			if tried != c.tried {
				t.Errorf("%d addresses got to the hook, want %d", tried, c.tried)
			}
		})
	}
}

// TestTheHookHasTheLastWord calls it with what the kernel must never get.
func TestTheHookHasTheLastWord(t *testing.T) {
	strict, err := policy.NewRanges(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := netip.MustParseAddrPort("93.184.216.34:443")
	for _, c := range []struct {
		want             netip.AddrPort
		network, address string
		ok               bool
	}{
		{want, "tcp4", "93.184.216.34:443", true},
		{want, "tcp4", "93.184.216.35:443", false},
		{want, "tcp4", "93.184.216.34:80", false},
		{want, "tcp6", "[::ffff:93.184.216.34]:443", false},
		{want, "udp4", "93.184.216.34:443", false},
		{want, "tcp4", "example.com:443", false},
		{netip.MustParseAddrPort("10.0.0.1:443"), "tcp4", "10.0.0.1:443", false},
	} {
		if err := New(strict, 0).control(c.want, c.network, c.address); (err == nil) != c.ok || err != nil && code(err) != CodeClosed {
			t.Errorf("%s %s where %s is wanted: %v", c.network, c.address, c.want, err)
		}
	}
}

// TestNotOurselves connects to an address of this host that the ranges don't
// know of: one that came up after they were made.
func TestNotOurselves(t *testing.T) {
	own, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range own {
		p, err := netip.ParsePrefix(a.String())
		if err != nil || !p.Addr().Is4() || p.Addr().IsLoopback() {
			continue
		}
		at := listen(t, netip.AddrPortFrom(p.Addr(), 0).String())
		conn, err := New(policy.RangesForTest(t, p), time.Minute).Dial(t.Context(), []netip.Addr{p.Addr()}, at.Port())
		if err == nil {
			conn.Close()
		}
		if code(err) != CodeClosed {
			t.Errorf("%s: %v", p.Addr(), err)
		}
		return
	}
	t.Skip("this host has no IPv4 address but the loopback's")
}
