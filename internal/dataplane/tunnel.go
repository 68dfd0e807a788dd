package dataplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"

	"connectrpc.com/connect"
	"github.com/coder/websocket"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	maxTunnelMessage = 1 << 20   // bytes of one message from a client
	tunnelPiece      = 256 << 10 // bytes of one message to the guest
)

// tunnelStream is the guest's end of a tunnel.
type tunnelStream = connect.BidiStreamForClient[guestv1.TunnelRequest, guestv1.Chunk]

// OpenTunnel joins a WebSocket to a TCP connection inside the sandbox.
func (p *Plane) OpenTunnel(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, port int) {
	err := upgradable(w, r)
	if err == nil {
		err = p.awake(r.Context(), sandboxID)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	ctx, t, err := p.bulk(r.Context(), sandboxID)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	defer t.done()
	stream := t.client.Tunnel(ctx)
	defer func() {
		// The context alone does not end a stream whose sender waits for us.
		t.cancel()
		_, _ = stream.CloseRequest(), stream.CloseResponse()
	}()
	if err := dial(t, stream, port); err != nil {
		rest.Fail(w, r, err)
		return
	}
	conn, err := accept(w, r, maxTunnelMessage)
	if err != nil {
		return
	}
	defer func() { _ = conn.CloseNow() }()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer t.cancel()
	var busy atomic.Bool
	wg.Go(func() { pings(ctx, conn, pingEvery, &busy) })
	wg.Go(func() {
		if errors.Is(tunnelUp(ctx, conn, stream, &busy), errPeer) {
			// A guest that ended the stream says why to tunnelDown; here it has
			// not, and tunnelDown waits for it.
			t.cancel()
			_ = stream.CloseRequest()
		}
	})
	switch err := tunnelDown(ctx, conn, stream); {
	case err == nil:
		_ = conn.Close(websocket.StatusNormalClosure, "")
	case !errors.Is(err, errPeer):
		_ = conn.Close(websocket.StatusInternalError, reason(guestapi.FromRPC(err)))
	}
}

// dial connects inside and waits for the answer: an empty chunk.
func dial(t *transfer, stream *tunnelStream, port int) error {
	err := stream.Send(&guestv1.TunnelRequest{Address: fmt.Sprintf("127.0.0.1:%d", port)})
	if err == nil || errors.Is(err, io.EOF) {
		t.watch(func() { _, err = stream.Receive() })
	}
	if errors.Is(err, io.EOF) {
		return guestFault("it ended a tunnel that it had not begun")
	}
	err = guestapi.FromRPC(err)
	if sandbox.IsClass(err, sandbox.FailedPrecondition) {
		return sandbox.Errorf(sandbox.FailedPrecondition, "port_closed", "nothing listens on port %d in the sandbox", port).
			WithHint("start what shall listen there, on 127.0.0.1 or all addresses")
	}
	return err
}

// errPeer marks an error of the client's side: it is gone and needs no answer.
var errPeer = errors.New("the client is gone")

// tunnelUp carries what the client sends into the sandbox until it has no
// more to send.
func tunnelUp(ctx context.Context, conn *websocket.Conn, stream *tunnelStream, busy *atomic.Bool) error {
	for open := true; ; {
		kind, data, err := conn.Read(ctx)
		if err != nil {
			return fmt.Errorf("%w: %w", errPeer, err)
		}
		if kind == websocket.MessageText {
			c, err := parseControl(data)
			if err != nil || c.Type != "close_write" || !open {
				_ = conn.Close(websocket.StatusPolicyViolation, "a tunnel takes one text message: close_write")
				return errPeer
			}
			// The connection is read on, for pongs and for its end.
			open = false
			if err := stream.Send(&guestv1.TunnelRequest{CloseWrite: true}); err != nil {
				return err
			}
			if err := stream.CloseRequest(); err != nil {
				return err
			}
			continue
		}
		busy.Store(true)
		for len(data) > 0 && open {
			n := min(len(data), tunnelPiece)
			if err := stream.Send(&guestv1.TunnelRequest{Data: data[:n]}); err != nil {
				return err
			}
			data = data[n:]
		}
		busy.Store(false)
	}
}

// tunnelDown carries what comes out of the sandbox to the client until both
// directions have ended. An empty chunk says that the far end sends no more.
func tunnelDown(ctx context.Context, conn *websocket.Conn, stream *tunnelStream) error {
	for {
		chunk, err := stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		data := chunk.GetData()
		if len(data) == 0 {
			err = sendJSON(ctx, conn, control{Type: "close_write"})
		}
		for len(data) > 0 && err == nil {
			n := min(len(data), maxTunnelMessage)
			err = send(ctx, conn, websocket.MessageBinary, data[:n])
			data = data[n:]
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errPeer, err)
		}
	}
}
