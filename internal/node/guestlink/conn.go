package guestlink

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
)

// What a guest may make us hold, and how long we wait for it. There are no
// pings: a paused guest answers none, and its tunnels are to outlast that. That
// a peer has ended, the connection tells; that it is stuck, the deadline of a call.
const (
	maxMessage   = 2 << 20
	maxSetup     = 384 << 10 // an agent's answer to Setup: 64 hooks with 4 KiB of output each, and some problems
	maxParts     = 4096      // of one message: 1024 sessions, 1000 entries of a directory
	maxHeaders   = 64 << 10
	maxFrame     = 512 << 10
	connWindow   = 4<<20 - 1
	streamWindow = 2 << 20
	writeTimeout = 30 * time.Second
)

// peer is one proven connection: HTTP/2 with the host as its client.
type peer struct {
	net   *watched
	h2    *http.ClientConn
	rpc   guestv1connect.GuestClient
	setup *connect.Client[guestv1.SetupRequest, guestv1.SetupResponse] // rpc's Setup, with a bound of its own
	done  <-chan struct{}                                              // closed when the connection has ended
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
	options := connect.WithClientOptions(connect.WithGRPC(), connect.WithCodec(codec{}), connect.WithReadMaxBytes(maxMessage),
		connect.WithAcceptCompression("gzip", nil, nil))
	p.rpc = guestv1connect.NewGuestClient(p, guestURL, options)
	p.setup = connect.NewClient[guestv1.SetupRequest, guestv1.SetupResponse](p, guestURL+guestv1connect.GuestSetupProcedure,
		options, connect.WithReadMaxBytes(maxSetup))
	return p, nil
}

const guestURL = "http://guest"

// codec is protobuf, where a message that is read has a bounded number of
// parts. An empty part of a list is two bytes of a guest and a hundred of ours.
type codec struct{}

// Name implements connect.Codec.
func (codec) Name() string { return "proto" }

// Marshal implements connect.Codec.
func (c codec) Marshal(m any) ([]byte, error) { return c.MarshalAppend(nil, m) }

// MarshalAppend is what connect calls instead, to use its buffers again.
func (codec) MarshalAppend(dst []byte, m any) ([]byte, error) {
	message, ok := m.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no message", m)
	}
	return proto.MarshalOptions{}.MarshalAppend(dst, message)
}

// Unmarshal implements connect.Codec. No list of the protocol is inside of
// another, so that it is enough to count the outermost fields.
func (codec) Unmarshal(b []byte, m any) error {
	message, ok := m.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no message", m)
	}
	parts := 0
	for rest := b; len(rest) > 0; parts++ {
		_, _, n := protowire.ConsumeField(rest)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if parts >= maxParts {
			return fmt.Errorf("a message of more than %d parts", maxParts)
		}
		rest = rest[n:]
	}
	return proto.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(b, message)
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
