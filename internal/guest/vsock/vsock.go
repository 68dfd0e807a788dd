// Package vsock dials the host of a virtual machine. The net package knows no
// such addresses, so a connection is a file that the runtime's poller serves.
//
// A dial is never blocking: the kernel gives up a blocking one when a signal
// comes, and the Go runtime sends itself signals all the time.
//
// internal/guest/agent and internal/guest/boot call it.
package vsock

import (
	"context"
	"errors"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Host is the CID under which every guest reaches its host.
const Host = unix.VMADDR_CID_HOST

// kernelPatience is longer than any ctx here lives: ctx ends a dial, and not
// the kernel after its two seconds, which a busy host may need.
const kernelPatience = 5 * time.Minute

// Dial connects to a port of a machine. When ctx ends, its error is returned.
func Dial(ctx context.Context, cid, port uint32) (net.Conn, error) {
	fd, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	tv := unix.NsecToTimeval(kernelPatience.Nanoseconds())
	_ = unix.SetsockoptTimeval(fd, unix.AF_VSOCK, unix.SO_VM_SOCKETS_CONNECT_TIMEOUT, &tv) // else its own
	c := &conn{File: os.NewFile(uintptr(fd), "vsock")}
	if err := c.connect(ctx, &unix.SockaddrVM{CID: cid, Port: port}); err != nil {
		_ = c.Close()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, os.NewSyscallError("connect", err)
	}
	return c, nil
}

type conn struct{ *os.File }

// connect starts connecting and waits until the socket is connected or says
// why not.
func (c *conn) connect(ctx context.Context, to unix.Sockaddr) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	begun, failed := false, error(nil)
	err = raw.Write(func(fd uintptr) (done bool) {
		if !begun {
			begun = true
			failed = unix.Connect(int(fd), to)
			return !errors.Is(failed, unix.EINPROGRESS)
		}
		done, failed = connected(int(fd))
		return done
	})
	if err == nil {
		err = failed
	}
	if err == nil && !stop() {
		err = ctx.Err()
	}
	return err
}

// connected asks a socket that is connecting.
func connected(fd int) (done bool, err error) {
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return true, err
	}
	if n != 0 {
		return true, unix.Errno(n)
	}
	_, err = unix.Getpeername(fd)
	if errors.Is(err, unix.ENOTCONN) {
		return false, nil // woken for another reason
	}
	return true, err
}

// CloseWrite tells the peer that nothing more will come.
func (c *conn) CloseWrite() error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_WR) })
	return errors.Join(cerr, os.NewSyscallError("shutdown", err))
}

// LocalAddr implements net.Conn.
func (c *conn) LocalAddr() net.Addr { return addr{} }

// RemoteAddr implements net.Conn.
func (c *conn) RemoteAddr() net.Addr { return addr{} }

type addr struct{}

func (addr) Network() string { return "vsock" }
func (addr) String() string  { return "vsock" }
