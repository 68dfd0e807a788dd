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
	within() bool    // what was refused is of a request that has passed
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

	// Each request that passed has one record: its exchange's, or where none
	// began before the connection was over that of the rest.
	running sync.Cond // on mu
	begun   int
	ended   int
	sealed  bool
	broke   string // why the guard ended the connection within a request
	told    bool   // a request's record says so

	once sync.Once
	done chan struct{}
}

// serveHTTP serves the requests of a connection, and returns when it is closed.
func (g *guest) serveHTTP(c net.Conn, sni string, h2 bool) {
	hc := &httpConn{Conn: c, g: g, sni: sni, buf: make([]byte, meterStep), done: make(chan struct{})}
	hc.running.L = &hc.mu
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
	rest, broke := hc.seal()
	if broke == "" && (rest == 0 || cutOf(g.ctx) != "") {
		return
	}
	rec := hc.newRecord()
	if broke != "" {
		hc.describe(&rec)
		denied(broke).apply(&rec)
	} else {
		rec.Count = uint64(rest)
		denied(reasonNotServed).apply(&rec)
	}
	g.record(rec, g.p.live.Load())
}

// begin counts a request that begins, and returns its number; 0 is that the
// connection is over and its record made.
func (c *httpConn) begin() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sealed {
		return 0
	}
	c.begun++
	return c.begun
}

// finish is called when a request that began has its reason, "" for none.
func (c *httpConn) finish(reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended++
	c.told = c.told || c.broke != "" && reason == c.broke
	c.running.Broadcast()
}

// seal waits for what runs on a connection that is closed, and returns how many
// requests never began, and what no record has told of yet.
func (c *httpConn) seal() (rest int, broke string) {
	n, _ := c.guard.seen()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sealed = true
	for c.ended < c.begun {
		c.running.Wait()
	}
	if !c.told {
		broke = c.broke
	}
	return n - c.begun, broke
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

// refuse ends the connection for what the guard refused, and makes the record
// of it: where it is within a request, the record is the request's.
func (c *httpConn) refuse(reason string) {
	if c.guard.within() {
		c.mu.Lock()
		c.broke = reason
		c.mu.Unlock()
		c.g.cut(reason)
		return
	}
	rec := c.newRecord()
	c.describe(&rec)
	if reason == reasonUnknownProtocol {
		rec.Kind, rec.Method, rec.Path, rec.Host = audit.TCP, "", "", c.sni
		if c.sni != "" {
			rec.Kind = audit.TLS
		}
	}
	denied(reason).apply(&rec)
	c.g.record(rec, c.g.p.live.Load())
	c.g.cut(reasonReset) // what else runs on it
}

// describe puts into a record what is known of the last request.
func (c *httpConn) describe(rec *audit.Record) {
	_, h := c.guard.seen()
	rec.Method, rec.Path = h.method, h.path()
	if rec.Host == "" {
		rec.Host = h.host
	}
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
		now := time.Now()
		c.headEnd, c.heads = now.Add(c.g.p.times.head), heads
		if c.deadline.After(now) && c.deadline.Before(c.headEnd) {
			c.headEnd = c.deadline // the server's, set a moment before: what it ends is late, too
		}
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
