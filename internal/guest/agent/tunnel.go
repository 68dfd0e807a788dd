package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

const tunnelDial = 10 * time.Second

// Tunnel implements the service. The address is host:port or unix:PATH, as
// seen inside. The tunnel ends when both directions have, or either fails.
func (a *Agent) Tunnel(ctx context.Context, stream *connect.BidiStream[guestv1.TunnelRequest, guestv1.Chunk]) error {
	first, err := stream.Receive()
	if err != nil {
		return err
	}
	conn, err := dialInside(ctx, first.GetAddress())
	if err != nil {
		return err
	}
	defer conn.Close()
	// An empty chunk tells the host that the far end has answered.
	if err := stream.Send(&guestv1.Chunk{}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	up := make(chan error, 1)
	go func() { // ends when the host closes its side or the RPC ends
		err := pushUp(stream, conn, first)
		if err != nil {
			cancel()
		}
		up <- err
	}()
	if err := sendAll(ctx, conn, stream.Send); err != nil {
		cancel()
		return tunnelCut(err)
	}
	// The far end will send no more, but may still read: an empty chunk tells.
	if err := stream.Send(&guestv1.Chunk{}); err != nil {
		cancel()
		return tunnelCut(err)
	}
	select {
	case err = <-up:
	case <-ctx.Done():
		err = ctx.Err()
	}
	return tunnelCut(err)
}

func tunnelCut(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return nil
	}
	return sandbox.Errorf(sandbox.Unavailable, "tunnel_cut", "the connection inside was cut: %w", err)
}

func dialInside(ctx context.Context, address string) (net.Conn, error) {
	network := "tcp"
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, address = "unix", path
	} else if _, port, err := net.SplitHostPort(address); err != nil || port == "" {
		return nil, sandbox.Errorf(sandbox.Invalid, "bad_address", "%.200q is neither host:port nor unix:PATH", address)
	}
	d := net.Dialer{Timeout: tunnelDial}
	conn, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "connect_failed", "nothing answers there inside the sandbox: %w", err)
	}
	return conn, nil
}

// pushUp copies what the host sends until it closes its side.
func pushUp(stream *connect.BidiStream[guestv1.TunnelRequest, guestv1.Chunk], conn net.Conn, m *guestv1.TunnelRequest) error {
	for {
		if len(m.GetData()) > 0 {
			if _, err := conn.Write(m.GetData()); err != nil {
				return err
			}
		}
		if m.GetCloseWrite() {
			return closeWrite(conn)
		}
		var err error
		if m, err = stream.Receive(); errors.Is(err, io.EOF) {
			return closeWrite(conn)
		} else if err != nil {
			return err
		}
	}
}

func closeWrite(conn net.Conn) error {
	if c, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = c.CloseWrite() // fails where the far end has gone: its own end tells
	}
	return nil
}
