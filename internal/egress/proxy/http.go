package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
)

// maxStreams bounds the requests at once on a connection of HTTP/2.
const maxStreams = 100

// receiveBuffer bounds what is held of the bodies on a connection of HTTP/2.
const receiveBuffer = 256 << 10

// guard reads what a sandbox sends before net/http does.
type guard interface {
	feed(b []byte) (reason string)
	passed() *[]byte // what may go on; the reader takes it out
	partial() bool   // a head has begun and isn't whole
	seen() (requests int, last head)
}

// httpConn is a connection that net/http serves: what it reads went through a
// guard.
type httpConn struct {
	net.Conn
	g     *guest
	sni   string // "" without TLS
	guard guard
	one   *guard1 // the guard of HTTP/1

	buf     []byte
	refused string // to be told once all that passed has been read

	mu       sync.Mutex
	deadline time.Time // that the server set
	headEnd  time.Time // for a head that has begun
	heads    int       // that were whole when headEnd was set

	handled atomic.Int64
	once    sync.Once
	done    chan struct{}
}

// serveHTTP serves the requests of a connection, and returns when it is closed.
func (g *guest) serveHTTP(c net.Conn, sni string, h2 bool) {
	hc := &httpConn{Conn: c, g: g, sni: sni, buf: make([]byte, meterStep), done: make(chan struct{})}
	if h2 {
		hc.guard = newGuard2()
	} else {
		hc.one = &guard1{scheme: hc.scheme()}
		hc.guard = hc.one
	}
	if !g.p.feed.serve(hc) {
		return
	}
	<-hc.done
	if n, _ := hc.guard.seen(); int64(n) > hc.handled.Load() && cutOf(g.ctx) == "" {
		rec := hc.newRecord()
		rec.Count = uint64(int64(n) - hc.handled.Load())
		denied(reasonNotServed).apply(&rec)
		g.record(rec, g.p.live.Load())
	}
}

func (c *httpConn) scheme() string {
	if c.sni != "" {
		return "https"
	}
	return "http"
}

func (c *httpConn) newRecord() audit.Record {
	return audit.Record{At: time.Now(), Kind: audit.HTTP, Host: c.sni, Dialled: c.g.dialled, Scheme: c.scheme()}
}

// Read implements net.Conn. A reason to refuse is told only when all that
// passed before has been read.
func (c *httpConn) Read(b []byte) (int, error) {
	for {
		if out := c.guard.passed(); len(*out) > 0 {
			n := copy(b, *out)
			*out = (*out)[n:]
			if len(*out) == 0 {
				*out = nil
			}
			return n, nil
		}
		if c.refused != "" {
			c.refuse(c.refused)
			return 0, io.EOF
		}
		n, err := c.Conn.Read(c.buf)
		if n > 0 {
			c.refused = c.guard.feed(c.buf[:n])
			c.watchHead()
			continue
		}
		if err != nil {
			c.readFailed(err)
			return 0, err
		}
	}
}

// readFailed refuses what came too slowly, or only in part.
func (c *httpConn) readFailed(err error) {
	if !c.guard.partial() {
		return
	}
	c.mu.Lock()
	late := !c.headEnd.IsZero() && !time.Now().Before(c.headEnd)
	c.mu.Unlock()
	switch {
	case cutOf(c.g.ctx) != "":
	case isTimeout(err) && late:
		c.refuse(reasonHeaderTimeout)
	case errors.Is(err, io.EOF):
		c.refuse(reasonTruncated)
	}
}

// refuse makes the record of what the guard refused, and ends the connection.
func (c *httpConn) refuse(reason string) {
	_, h := c.guard.seen()
	rec := c.newRecord()
	rec.Method, rec.Path = h.method, h.path()
	if rec.Host == "" {
		rec.Host = h.host
	}
	if reason == reasonUnknownProtocol {
		rec.Kind, rec.Method, rec.Path, rec.Host = audit.TCP, "", "", c.sni
		if c.sni != "" {
			rec.Kind = audit.TLS
		}
	}
	denied(reason).apply(&rec)
	c.g.record(rec, c.g.p.live.Load())
	abort(c.g.tcp)
}

// watchHead bounds the time of a head from its first byte on. The server's own
// bound begins only when it gets something, which is when the head is whole.
func (c *httpConn) watchHead() {
	c.mu.Lock()
	defer c.mu.Unlock()
	partial := c.guard.partial()
	heads, _ := c.guard.seen()
	switch waits := !c.headEnd.IsZero(); {
	case !partial && !waits, partial && waits && heads == c.heads:
		return
	case partial:
		c.headEnd, c.heads = time.Now().Add(c.g.p.times.head), heads
	default:
		c.headEnd = time.Time{}
	}
	_ = c.setDeadline()
}

func (c *httpConn) setDeadline() error {
	d := c.deadline
	if d.IsZero() || !c.headEnd.IsZero() && c.headEnd.Before(d) {
		d = c.headEnd
	}
	return c.Conn.SetReadDeadline(d)
}

// SetReadDeadline implements net.Conn.
func (c *httpConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	return c.setDeadline()
}

// SetDeadline implements net.Conn.
func (c *httpConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// CloseWrite ends an answer after which the connection is closed: net/http
// then waits a moment, so that a reset for what wasn't read doesn't overtake it.
func (c *httpConn) CloseWrite() error {
	var err error
	if tc, ok := c.Conn.(*tls.Conn); ok {
		err = tc.CloseWrite()
	}
	return errors.Join(err, c.g.tcp.CloseWrite())
}

// Close implements net.Conn.
func (c *httpConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.done) })
	return err
}

// feed is the listener that the HTTP server accepts from.
type feed struct {
	conns chan net.Conn
	end   chan struct{}
	once  sync.Once
}

// serve hands a connection to the server, and tells whether it took it.
func (f *feed) serve(c net.Conn) bool {
	select {
	case f.conns <- c:
		return true
	case <-f.end:
		return false
	}
}

// Accept implements net.Listener.
func (f *feed) Accept() (net.Conn, error) {
	select {
	case c := <-f.conns:
		return c, nil
	case <-f.end:
		return nil, net.ErrClosed
	}
}

func (f *feed) close() { f.once.Do(func() { close(f.end) }) }

// Close implements net.Listener.
func (f *feed) Close() error {
	f.close()
	return nil
}

// Addr implements net.Listener.
func (f *feed) Addr() net.Addr { return &net.TCPAddr{} }

type connKey struct{}

// startHTTP starts the server behind the guards. To it TLS isn't visible:
// HTTP/2 comes by prior knowledge, and only where ALPN chose it.
func (p *Proxy) startHTTP() {
	p.feed = &feed{conns: make(chan net.Conn), end: make(chan struct{})}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	p.http = &http.Server{
		Handler:           http.HandlerFunc(p.handle),
		ReadHeaderTimeout: p.times.head,
		IdleTimeout:       p.times.idle,
		MaxHeaderBytes:    2 * maxHead, // the guards are stricter, and tell
		Protocols:         protocols,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxStreams,
			MaxReadFrameSize:     maxFrame,
			// What the server holds where another end doesn't read: each connection has it.
			MaxReceiveBufferPerConnection: receiveBuffer,
			MaxReceiveBufferPerStream:     receiveBuffer,
			SendPingTimeout:               p.times.idle,
			PingTimeout:                   p.times.head,
			WriteByteTimeout:              p.times.idle,
		},
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ErrorLog:    log.New(io.Discard, "", 0), // a sandbox can make it say anything
	}
	p.wg.Go(func() { _ = p.http.Serve(p.feed) })
}
