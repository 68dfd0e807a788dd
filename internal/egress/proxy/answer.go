package proxy

import (
	"bufio"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
)

// forward sends a decided request on, and the answer back. ReverseProxy
// removes what is meant for one connection only, in both directions, and does
// interim answers, trailers and the switch to a WebSocket; everything that is
// decided happens in the exchange.
func (p *Proxy) forward(x *exchange) {
	rp := &httputil.ReverseProxy{
		Rewrite:        func(pr *httputil.ProxyRequest) { x.outgoing(pr.Out) },
		Transport:      roundTripper(x.send),
		ModifyResponse: x.received,
		ErrorHandler:   func(_ http.ResponseWriter, _ *http.Request, err error) { x.failed(err) },
		FlushInterval:  -1, // as it comes
		BufferPool:     &buffers,
		ErrorLog:       log.New(io.Discard, "", 0),
	}
	rp.ServeHTTP(x.w, x.in.WithContext(x.ctx))
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// answer is what a sandbox gets. It counts, and bounds how long a sandbox may
// leave it unread.
type answer struct {
	http.ResponseWriter
	x     *exchange
	rc    *http.ResponseController
	began bool // the head was sent
	own   bool // it is the gateway's, not the server's
}

// Unwrap is for http.ResponseController.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

func (a *answer) patience() {
	a.x.deadline(a.rc.SetWriteDeadline, time.Now().Add(a.x.p.times.idle))
}

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(status int) {
	a.patience()
	if status >= 200 {
		a.began = true
		a.x.set(func(rec *audit.Record) { rec.Status = status })
	}
	a.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (a *answer) Write(b []byte) (int, error) {
	a.patience()
	n, err := a.ResponseWriter.Write(b)
	if !a.own {
		a.x.set(func(rec *audit.Record) { rec.Received += int64(n) })
	}
	return n, err
}

// Hijack implements http.Hijacker: the connection becomes a WebSocket. From
// here on it is not read as HTTP.
func (a *answer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	one := a.x.c.one
	if one == nil || !one.last.upgrade {
		return nil, nil, http.ErrNotSupported
	}
	one.raw.Store(true)
	c, rw, err := a.rc.Hijack()
	if err != nil {
		return nil, nil, err
	}
	a.began = true
	a.x.set(func(rec *audit.Record) { rec.Status = http.StatusSwitchingProtocols })
	return &socket{c, a.x}, rw, nil
}

// socket is the sandbox's end of a WebSocket, with its bytes counted.
type socket struct {
	net.Conn
	x *exchange
}

// Read implements net.Conn.
func (s *socket) Read(b []byte) (int, error) {
	n, err := s.Conn.Read(b)
	s.x.set(func(rec *audit.Record) { rec.Sent += int64(n) })
	return n, err
}

// Write implements net.Conn.
func (s *socket) Write(b []byte) (int, error) {
	n, err := s.Conn.Write(b)
	s.x.set(func(rec *audit.Record) { rec.Received += int64(n) })
	return n, err
}
