package agent

import (
	"context"
	"net"
	"sync"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
)

// oneListener is a listener whose only connection is one that was dialled. It
// ends when that connection is closed.
type oneListener struct {
	conn net.Conn
	next chan net.Conn
	done chan struct{}
	once sync.Once
}

func newOneListener(conn net.Conn) *oneListener {
	l := &oneListener{conn: conn, next: make(chan net.Conn, 1), done: make(chan struct{})}
	l.next <- &oneConn{Conn: conn, l: l}
	return l
}

// Accept implements net.Listener.
func (l *oneListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.next:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *oneListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

// Addr implements net.Listener.
func (l *oneListener) Addr() net.Addr { return l.conn.LocalAddr() }

type oneConn struct {
	net.Conn
	l *oneListener
}

// Close implements net.Conn.
func (c *oneConn) Close() error {
	_ = c.l.Close()
	return c.Conn.Close()
}

// rpcErrors turns the errors of handlers into RPC errors with our codes.
type rpcErrors struct{}

// WrapUnary implements connect.Interceptor.
func (rpcErrors) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, req)
		return resp, guestapi.ToRPC(err)
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (rpcErrors) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (rpcErrors) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return guestapi.ToRPC(next(ctx, conn))
	}
}
