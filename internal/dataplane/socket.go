package dataplane

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

// The bounds of WebSockets.
const (
	socketProtocol = "cloche.v1"
	socketWrite    = 2 * time.Minute  // how long a peer may leave one message waiting
	pingEvery      = 30 * time.Second // so that a peer that vanished is noticed
	maxReason      = 120              // bytes; the protocol's own bound is 123
)

// upgradable refuses a request that is no WebSocket handshake.
func upgradable(w http.ResponseWriter, r *http.Request) error {
	if strings.EqualFold(r.Header.Get("Upgrade"), "websocket") && r.ProtoMajor == 1 {
		return nil
	}
	w.Header().Set("Upgrade", "websocket")
	e := sandbox.Errorf(sandbox.Invalid, "upgrade_required", "this call is a WebSocket")
	return rest.WithStatus(http.StatusUpgradeRequired, e.WithHint("connect with a WebSocket client, over HTTP/1.1"))
}

// accept upgrades r. The library has answered where that fails (a browser of
// another origin, a malformed handshake). Compression is off: what goes over is
// not ours, and it would cost memory per connection.
func accept(w http.ResponseWriter, r *http.Request, readLimit int64) (*websocket.Conn, error) {
	conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{
		Subprotocols: []string{socketProtocol}, CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		return nil, err
	}
	conn.SetReadLimit(readLimit)
	return conn, nil
}

// send writes one message within its bound.
func send(ctx context.Context, conn *websocket.Conn, kind websocket.MessageType, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, socketWrite)
	defer cancel()
	return conn.Write(ctx, kind, data)
}

func sendJSON(ctx context.Context, conn *websocket.Conn, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return send(ctx, conn, websocket.MessageText, b)
}

// pings until ctx ends; a peer that doesn't answer ends the connection. Its
// answers are read with its messages, so that while what it sent before waits
// to be handed on (busy) only a ping that can't be sent ends it.
func pings(ctx context.Context, conn *websocket.Conn, every time.Duration, busy *atomic.Bool) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		one, cancel := context.WithTimeout(ctx, every)
		waits := busy.Load()
		err := conn.Ping(one)
		cancel()
		if (waits || busy.Load()) && errors.Is(err, context.DeadlineExceeded) {
			continue
		}
		if err != nil {
			_ = conn.CloseNow() // its reader and writer say that it is gone
			return
		}
	}
}

// reason is err in the few bytes that a close message has.
func reason(err error) string {
	e := sandbox.AsError(err)
	s := e.Code + ": " + rest.Body(e).Message
	if len(s) > maxReason {
		s = strings.ToValidUTF8(s[:maxReason], "")
	}
	return s
}

// control is a text message that is no event.
type control struct {
	Type string `json:"type"`
	Rows int    `json:"rows,omitempty"`
	Cols int    `json:"cols,omitempty"`
}

func parseControl(data []byte) (control, error) {
	var c control
	if err := json.Unmarshal(data, &c); err != nil {
		return c, sandbox.Errorf(sandbox.Invalid, "bad_message", "a text message is not JSON of the form that this call takes")
	}
	return c, nil
}
