package resolve

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// upstream is a name server on the loopback. Its handler gives the packets
// that answer a question.
type upstream struct {
	addr netip.AddrPort
	mu   sync.Mutex
	seen []string // "udp example.com." of each question
}

func (u *upstream) asked() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return append([]string(nil), u.seen...)
}

type handler func(q *dns.Msg, network string) [][]byte

// serve starts a name server whose UDP and TCP have the same port.
func serve(t *testing.T, h handler) *upstream {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.ListenPacket("udp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	u := &upstream{addr: netip.MustParseAddrPort(l.Addr().String())}
	var wg sync.WaitGroup
	t.Cleanup(func() { l.Close(); c.Close(); wg.Wait() })
	wg.Go(func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			for _, out := range u.answer(buf[:n], "udp", h) {
				c.WriteTo(out, from)
			}
		}
	})
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			var size [2]byte
			if _, err := io.ReadFull(conn, size[:]); err == nil {
				buf := make([]byte, binary.BigEndian.Uint16(size[:]))
				io.ReadFull(conn, buf)
				for _, out := range u.answer(buf, "tcp", h) {
					conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...))
				}
			}
			conn.Close()
		}
	})
	return u
}

func (u *upstream) answer(packet []byte, network string, h handler) [][]byte {
	q := new(dns.Msg)
	if q.Unpack(packet) != nil || len(q.Question) != 1 {
		return nil
	}
	u.mu.Lock()
	u.seen = append(u.seen, network+" "+q.Question[0].Name)
	u.mu.Unlock()
	return h(q, network)
}

func packed(m *dns.Msg) []byte {
	out, err := m.Pack()
	if err != nil {
		panic(err)
	}
	return out
}

// zone answers with records in zone-file notation; the code of a name without any is given.
func zone(rcode int, records ...string) handler {
	return func(q *dns.Msg, _ string) [][]byte {
		m := new(dns.Msg).SetReply(q)
		m.Rcode = rcode
		for _, r := range records {
			rr, err := dns.NewRR(r)
			if err != nil {
				panic(err)
			}
			m.Answer = append(m.Answer, rr)
		}
		return [][]byte{packed(m)}
	}
}

// clock is a time that only tests move.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time { c.mu.Lock(); defer c.mu.Unlock(); return c.now }

func (c *clock) add(d time.Duration) { c.mu.Lock(); defer c.mu.Unlock(); c.now = c.now.Add(d) }

func resolver(t testing.TB, c *clock, servers ...*upstream) *Resolver {
	t.Helper()
	ranges, err := policy.NewRanges(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Ranges: ranges, Timeout: time.Minute}
	for _, u := range servers {
		o.Servers = append(o.Servers, u.addr)
	}
	r := New(o)
	if c != nil {
		r.now = c.Now
	}
	return r
}

func code(err error) string {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return ""
	}
	return e.Code
}
