package agent

import (
	"context"
	"net"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

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

// dialVsock dials the host of a virtual machine. The net package knows no
// vsock, so the connection is a file.
func dialVsock(ctx context.Context, cid, port uint32) (net.Conn, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	if d, ok := ctx.Deadline(); ok {
		tv := unix.NsecToTimeval(max(time.Until(d), time.Millisecond).Nanoseconds())
		_ = unix.SetsockoptTimeval(fd, unix.AF_VSOCK, unix.SO_VM_SOCKETS_CONNECT_TIMEOUT, &tv) // else the kernel's own
	}
	if err := unix.Connect(fd, &unix.SockaddrVM{CID: cid, Port: port}); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("connect", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	return &fileConn{File: os.NewFile(uintptr(fd), "vsock"), addr: vsockAddr{}}, nil
}

// fileConn is a connection whose file the runtime's poller serves.
type fileConn struct {
	*os.File
	addr net.Addr
}

// LocalAddr implements net.Conn.
func (c *fileConn) LocalAddr() net.Addr { return c.addr }

// RemoteAddr implements net.Conn.
func (c *fileConn) RemoteAddr() net.Addr { return c.addr }

type vsockAddr struct{}

func (vsockAddr) Network() string { return "vsock" }
func (vsockAddr) String() string  { return "vsock" }

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
