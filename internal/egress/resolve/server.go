package resolve

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/policy"
)

const (
	maxQuestion    = 4 << 10 // bytes of a packet from a sandbox
	maxPending     = 32      // questions of one sandbox that are being answered
	maxConnections = 16      // of one sandbox, over TCP
	maxPerConn     = 256     // questions on one connection
	idle           = 10 * time.Second
	perSecond      = 50
	burst          = 200
)

// ServerOptions are a Server's.
type ServerOptions struct {
	Resolver *Resolver
	Policy   func() *policy.Policy // the one in force; nil answers nothing
	Audit    func(audit.Record)    // who asks is filled in behind it; a question's type stands in Method
}

// Server answers the questions of one sandbox.
type Server struct {
	o     ServerOptions
	now   func() time.Time
	limit *rate.Limiter
	news  novelty
	slots chan struct{}
	conns chan struct{}

	mu       sync.Mutex
	dropped  uint64 // questions over the limit that no record has told of yet
	nextTold time.Time
}

// NewServer returns a server.
func NewServer(o ServerOptions) *Server {
	return &Server{
		o: o, now: time.Now, limit: rate.NewLimiter(perSecond, burst),
		slots: make(chan struct{}, maxPending), conns: make(chan struct{}, maxConnections),
	}
}

// ServeUDP answers packets until ctx ends or c fails, and closes c. It returns
// when the last answer is out; nil where ctx ended.
func (s *Server) ServeUDP(ctx context.Context, c net.PacketConn) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { c.Close() }) //nolint:errcheck // nothing is lost with it
	defer stop()
	defer c.Close() //nolint:errcheck // as above
	buf := make([]byte, maxQuestion)
	for {
		n, from, err := c.ReadFrom(buf)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		select {
		case s.slots <- struct{}{}:
		default:
			s.overLimit() // a flood is not worth an answer
			continue
		}
		packet := append([]byte(nil), buf[:n]...)
		wg.Go(func() {
			defer func() { <-s.slots }()
			if out := s.handle(ctx, packet, true); out != nil {
				c.WriteTo(out, from) //nolint:errcheck // the sandbox asks again
			}
		})
	}
}

// ServeTCP answers connections until ctx ends or l fails, and closes l. It
// returns when the last connection is closed; nil where ctx ended.
func (s *Server) ServeTCP(ctx context.Context, l net.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return nil
		}
		if err != nil {
			if !passes(err) {
				return err
			}
			select { // out of descriptors, say: others give some back
			case <-time.After(10 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		select {
		case s.conns <- struct{}{}:
			wg.Go(func() {
				defer func() { <-s.conns }()
				s.serveConn(ctx, c)
			})
		default:
			s.overLimit()
			c.Close()
		}
	}
}

// passes tells whether an accept that failed says nothing about the next one.
func passes(err error) bool {
	var temporary interface{ Temporary() bool }
	return !errors.Is(err, net.ErrClosed) && errors.As(err, &temporary) && temporary.Temporary()
}

func (s *Server) serveConn(ctx context.Context, c net.Conn) {
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	buf := make([]byte, maxQuestion)
	for range maxPerConn {
		// One deadline for a whole message, so that a trickle doesn't hold it.
		if c.SetDeadline(time.Now().Add(idle)) != nil {
			return
		}
		var size [2]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(size[:]))
		if n > len(buf) {
			return
		}
		if _, err := io.ReadFull(c, buf[:n]); err != nil {
			return
		}
		out := s.handle(ctx, buf[:n], false)
		if out == nil || c.SetDeadline(time.Now().Add(idle)) != nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...)); err != nil {
			return
		}
	}
}

// overLimit counts a question that is not answered. One record a second tells
// how many there were.
func (s *Server) overLimit() {
	now := s.now()
	s.mu.Lock()
	s.dropped++
	n := s.dropped
	if now.Before(s.nextTold) {
		s.mu.Unlock()
		return
	}
	s.dropped, s.nextTold = 0, now.Add(time.Second)
	s.mu.Unlock()
	s.o.Audit(audit.Record{At: now, Kind: audit.DNS, Verdict: audit.Denied, Reason: ReasonRate, Count: n})
}

// told records one question.
func (s *Server) told(began time.Time, v audit.Verdict, d policy.Decision, host, qtype string, addr netip.Addr) {
	r := audit.Record{
		At: began, Kind: audit.DNS, Verdict: v, WouldDeny: d.WouldDeny, Rule: d.Rule, Reason: d.Reason,
		Host: host[:min(len(host), audit.MaxText)], Method: qtype, Duration: s.now().Sub(began),
	}
	if addr.IsValid() {
		r.Upstream = netip.AddrPortFrom(addr, 0) // the first address that it was told
	}
	s.o.Audit(r)
}
