package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	vishnetns "github.com/vishvananda/netns"

	"cloche.dev/cloche/internal/sandbox"
)

// Where the gateway's sockets listen in its namespace. No packet that a
// machine sends there gets through: only connections that were redirected do.
const (
	proxyPort = 15001
	dnsPort   = 15053
)

// backlog is as deep as the kernel allows (net.core.somaxconn).
const backlog = 1 << 12

// soReusePort is SO_REUSEPORT, which package syscall doesn't have.
const soReusePort = 15

// inGateway does something in the gateway's namespace of a sandbox.
func (m *Manager) inGateway(id string, do func() error) error {
	if err := valid(id); err != nil {
		return err
	}
	ns, err := vishnetns.GetFromPath(m.gateway(id))
	if errors.Is(err, fs.ErrNotExist) {
		return noNetwork(id)
	}
	if err != nil {
		return fmt.Errorf("open the gateway's namespace of %s: %w", id, err)
	}
	defer ns.Close() //nolint:errcheck // nothing was written to it
	return apart(func() error {
		if err := vishnetns.Set(ns); errors.Is(err, syscall.EINVAL) {
			return noNetwork(id) // a file without its mount: the host has been started anew
		} else if err != nil {
			return fmt.Errorf("enter the gateway's namespace of %s: %w", id, err)
		}
		return do()
	})
}

func noNetwork(id string) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "no_network", "the machine of %s has no network", id).
		WithHint("it was made by a release without egress; stop and start the sandbox to give it one")
}

// Sockets opens the three sockets of a sandbox's gateway: the proxy's and the
// resolver's listeners and the resolver's UDP socket, none of them blocking.
// Those that an earlier call opened go on beside them for as long as anybody
// has them, so that one gateway can take over from another without a gap;
// connections go to either meanwhile.
func (m *Manager) Sockets(_ context.Context, id string) (proxy, dnsTCP, dnsUDP *os.File, err error) {
	err = m.inGateway(id, func() (err error) {
		if proxy, err = listen(proxyPort); err != nil {
			return err
		}
		if dnsTCP, err = listen(dnsPort); err == nil {
			dnsUDP, err = open(syscall.SOCK_DGRAM, dnsPort)
		}
		return err
	})
	if err != nil {
		for _, f := range []*os.File{proxy, dnsTCP, dnsUDP} {
			if f != nil {
				f.Close()
			}
		}
		return nil, nil, nil, fmt.Errorf("open the gateway's sockets of %s: %w", id, err)
	}
	return proxy, dnsTCP, dnsUDP, nil
}

func listen(port int) (*os.File, error) {
	f, err := open(syscall.SOCK_STREAM, port)
	if err != nil {
		return nil, err
	}
	if err := syscall.Listen(int(f.Fd()), backlog); err != nil {
		f.Close()
		return nil, os.NewSyscallError("listen", err)
	}
	return f, nil
}

// open makes a socket by hand: package net would take what it once found out
// about this namespace's addresses for true of the host's, and hand it to the
// poller.
func open(kind, port int) (_ *os.File, err error) {
	fd, err := syscall.Socket(syscall.AF_INET, kind|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	defer func() {
		if err != nil {
			_ = syscall.Close(fd)
		}
	}()
	for _, option := range []int{syscall.SO_REUSEADDR, soReusePort} {
		if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, option, 1); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: gatewayAddr.As4()}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	return os.NewFile(uintptr(fd), fmt.Sprintf("%s:%d", gatewayAddr, port)), nil
}
