package guestlink

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
)

// What a guest may make us hold, and how long we wait for it. There are no
// pings: a paused guest answers none, and its tunnels are to outlast that. That
// a peer has ended, the connection tells; that it is stuck, the deadline of a call.
const (
	maxMessage   = 2 << 20
	maxHeaders   = 64 << 10
	maxFrame     = 512 << 10
	connWindow   = 4<<20 - 1
	streamWindow = 2 << 20
	writeTimeout = 30 * time.Second
)

// peer is one proven connection: HTTP/2 with the host as its client.
type peer struct {
	net  *watched
	h2   *http.ClientConn
	rpc  guestv1connect.GuestClient
	done <-chan struct{} // closed when the connection has ended
}

// newPeer starts HTTP/2 on conn, which it owns from now on.
func newPeer(ctx context.Context, conn net.Conn) (*peer, error) {
	w := &watched{Conn: conn, done: make(chan struct{})}
	used := false
	t := &http.Transport{
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			if used {
				return nil, errors.New("a guest's connection can't be dialled again")
			}
			used = true
			return w, nil
		},
		Protocols:              new(http.Protocols),
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeaders,
		HTTP2: &http.HTTP2Config{
			MaxReadFrameSize: maxFrame, MaxReceiveBufferPerConnection: connWindow, MaxReceiveBufferPerStream: streamWindow,
			WriteByteTimeout: writeTimeout, StrictMaxConcurrentRequests: true,
		},
	}
	t.Protocols.SetUnencryptedHTTP2(true)
	h2, err := t.NewClientConn(ctx, "http", "guest:80")
	if err != nil {
		_ = w.Close()
		return nil, err
	}
	p := &peer{net: w, h2: h2, done: w.done}
	p.rpc = guestv1connect.NewGuestClient(p, "http://guest", connect.WithGRPC(), connect.WithReadMaxBytes(maxMessage),
		connect.WithAcceptCompression("gzip", nil, nil))
	return p, nil
}

// Do implements connect.HTTPClient. There are no redirects and no cookies.
func (p *peer) Do(req *http.Request) (*http.Response, error) { return p.h2.RoundTrip(req) }

// Close ends the connection and everything on it.
func (p *peer) Close() error {
	_ = p.h2.Close()
	return p.net.Close()
}

// watched is a connection that tells when it has ended.
type watched struct {
	net.Conn
	once sync.Once
	done chan struct{}
}

// Read implements net.Conn. HTTP/2 reads all the time, so every end is noticed here.
func (w *watched) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if err != nil {
		w.ended()
	}
	return n, err
}

// Close implements net.Conn.
func (w *watched) Close() error {
	w.ended()
	return w.Conn.Close()
}

func (w *watched) ended() { w.once.Do(func() { close(w.done) }) }
