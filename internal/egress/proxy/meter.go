package proxy

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"cloche.dev/cloche/internal/sandbox"
)

// meterStep is how much is read, charged and written at a time where a limit
// is set; minBurst is the least that a limited sandbox may send at once.
const (
	meterStep = 32 << 10
	minBurst  = 64 << 10
)

var errBytesLimit = errors.New("the sandbox's bytes are used up")

// meter counts a sandbox's bytes and holds them to the profile's limits.
type meter struct {
	sent, received atomic.Int64

	mu     sync.Mutex
	limits sandbox.EgressLimits
	rate   *rate.Limiter // nil: no bound
	free   bool          // neither a rate nor a sum is bounded
	used   int64         // towards limits.Bytes: what was let through since the proxy began
}

// set changes the limits. What was used stays used.
func (m *meter) set(l sandbox.EgressLimits) {
	if l.Connections <= 0 || l.Connections > sandbox.MaxEgressConnections {
		l.Connections = sandbox.MaxEgressConnections
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.BytesPerSecond <= 0 {
		m.rate = nil
	} else if m.rate == nil || m.limits.BytesPerSecond != l.BytesPerSecond {
		m.rate = rate.NewLimiter(rate.Limit(l.BytesPerSecond), int(max(minBurst, min(l.BytesPerSecond/4, 1<<30))))
	}
	m.limits = l
	m.free = l.BytesPerSecond <= 0 && l.Bytes <= 0
}

// unlimited tells whether bytes need only be counted.
func (m *meter) unlimited() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.free
}

// full tells whether one more connection beside open others is too many.
func (m *meter) full(open int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return open > m.limits.Connections
}

// spent tells whether the sum of bytes is used up.
func (m *meter) spent() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.limits.Bytes > 0 && m.used >= m.limits.Bytes
}

// count counts bytes that have gone through already.
func (m *meter) count(n int64, dir *atomic.Int64) {
	dir.Add(n)
	m.mu.Lock()
	m.used += n
	m.mu.Unlock()
}

// take charges n bytes, at most meterStep, before they go on: it waits for the
// rate, and refuses what would exceed the sum.
func (m *meter) take(ctx context.Context, n int, dir *atomic.Int64) error {
	m.mu.Lock()
	if m.limits.Bytes > 0 && m.used+int64(n) > m.limits.Bytes {
		m.used = m.limits.Bytes
		m.mu.Unlock()
		return errBytesLimit
	}
	m.used += int64(n)
	limiter := m.rate
	m.mu.Unlock()
	dir.Add(int64(n))
	if limiter == nil {
		return nil
	}
	return limiter.WaitN(ctx, n)
}

// metered is the sandbox's end of a connection, with every byte charged. It
// hides what net.TCPConn can besides, so that nothing goes around it.
type metered struct {
	g *guest
}

func (c metered) Read(b []byte) (int, error) {
	n, err := c.g.tcp.Read(b[:min(len(b), meterStep)])
	if n > 0 {
		if e := c.g.charge(n, &c.g.p.meter.sent); e != nil {
			return 0, e
		}
	}
	return n, err
}

func (c metered) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		part := b[done:min(len(b), done+meterStep)]
		if err := c.g.charge(len(part), &c.g.p.meter.received); err != nil {
			return done, err
		}
		n, err := c.g.tcp.Write(part)
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

func (c metered) Close() error                       { return c.g.tcp.Close() }
func (c metered) LocalAddr() net.Addr                { return c.g.tcp.LocalAddr() }
func (c metered) RemoteAddr() net.Addr               { return c.g.tcp.RemoteAddr() }
func (c metered) SetDeadline(t time.Time) error      { return c.g.tcp.SetDeadline(t) }
func (c metered) SetReadDeadline(t time.Time) error  { return c.g.tcp.SetReadDeadline(t) }
func (c metered) SetWriteDeadline(t time.Time) error { return c.g.tcp.SetWriteDeadline(t) }

// charge takes n bytes, and cuts the connection where they are too many.
func (g *guest) charge(n int, dir *atomic.Int64) error {
	err := g.p.meter.take(g.ctx, n, dir)
	if errors.Is(err, errBytesLimit) {
		g.cut(reasonBytesLimit)
	}
	return err
}
