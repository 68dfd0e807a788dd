package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/coder/websocket"

	"cloche.dev/cloche/api"
)

// maxMessage bounds one message of a tunnel, in either direction.
const maxMessage = 1 << 20

// Tunnel opens a TCP connection to a port inside a sandbox, over a WebSocket.
// A tunnel does not outlast the daemon. When nothing listens on the port the
// first Read says so, by an Error of code CodePortClosed.
func (c *Client) Tunnel(ctx context.Context, sandbox string, port int) (net.Conn, error) {
	h := http.Header{}
	c.authorize(h, "")
	u := c.base.String() + sandboxPath(sandbox) + "/ports/" + strconv.Itoa(port) + "/tunnel"
	ws, resp, err := websocket.Dial(ctx, u, &websocket.DialOptions{HTTPClient: c.http, HTTPHeader: h})
	if err != nil {
		if resp != nil && resp.StatusCode/100 != 2 && resp.StatusCode != http.StatusSwitchingProtocols {
			return nil, problemOf(resp)
		}
		return nil, c.unreachable(ctx, err)
	}
	ws.SetReadLimit(maxMessage)
	return &tunnel{ws: ws, remote: tunnelAddr(fmt.Sprintf("%s:%d", sandbox, port)), port: port}, nil
}

// tunnel is the net.Conn over a WebSocket. As with any WebSocket, a deadline
// that passes during a call breaks the connection.
type tunnel struct {
	ws          *websocket.Conn
	remote      tunnelAddr
	port        int
	read, write deadline

	reading sync.Mutex
	message io.Reader // what is left of the message being read
	eof     bool      // the other side has ended its direction

	writing sync.Mutex
	shut    bool // this side has
}

type tunnelAddr string

func (tunnelAddr) Network() string  { return "cloche" }
func (a tunnelAddr) String() string { return string(a) }

// Read reads what the port sent. Its end is io.EOF.
func (t *tunnel) Read(p []byte) (int, error) {
	t.reading.Lock()
	defer t.reading.Unlock()
	ctx := t.read.context()
	for {
		if t.eof {
			return 0, io.EOF
		}
		if t.message != nil {
			n, err := t.message.Read(p)
			if errors.Is(err, io.EOF) {
				t.message, err = nil, nil
			}
			if n > 0 || err != nil || len(p) == 0 {
				return n, t.fault(ctx, err)
			}
			continue
		}
		kind, r, err := t.ws.Reader(ctx)
		if err != nil {
			return 0, t.fault(ctx, err)
		}
		if kind == websocket.MessageBinary {
			t.message = r
			continue
		}
		var m struct {
			Type string `json:"type"`
		}
		if err := json.NewDecoder(io.LimitReader(r, 4096)).Decode(&m); err != nil {
			return 0, err
		}
		t.eof = m.Type == "close_write"
		_, _ = io.Copy(io.Discard, r)
	}
}

// fault translates an error of the WebSocket.
func (t *tunnel) fault(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	switch websocket.CloseStatus(err) {
	case websocket.StatusNormalClosure:
		return io.EOF
	case websocket.StatusTryAgainLater:
		return &Error{
			Class: api.ClassUnavailable, Code: CodePortClosed, Retryable: true, cause: err,
			Message: fmt.Sprintf("nothing listens on port %d in the sandbox", t.port),
		}
	}
	return err
}

// Write sends p to the port.
func (t *tunnel) Write(p []byte) (int, error) {
	t.writing.Lock()
	defer t.writing.Unlock()
	if t.shut {
		return 0, net.ErrClosed
	}
	ctx := t.write.context()
	sent := 0
	for sent < len(p) {
		part := p[sent:min(len(p), sent+maxMessage)]
		if err := t.ws.Write(ctx, websocket.MessageBinary, part); err != nil {
			return sent, t.fault(ctx, err)
		}
		sent += len(part)
	}
	return sent, nil
}

// CloseWrite ends this side's direction; the other goes on.
func (t *tunnel) CloseWrite() error {
	t.writing.Lock()
	defer t.writing.Unlock()
	if t.shut {
		return nil
	}
	t.shut = true
	ctx := t.write.context()
	return t.fault(ctx, t.ws.Write(ctx, websocket.MessageText, []byte(`{"type":"close_write"}`)))
}

// Close ends both directions.
func (t *tunnel) Close() error {
	_ = t.ws.Close(websocket.StatusNormalClosure, "")
	return nil
}

func (t *tunnel) LocalAddr() net.Addr  { return tunnelAddr("local") }
func (t *tunnel) RemoteAddr() net.Addr { return t.remote }

func (t *tunnel) SetDeadline(at time.Time) error {
	t.read.set(at)
	t.write.set(at)
	return nil
}

func (t *tunnel) SetReadDeadline(at time.Time) error {
	t.read.set(at)
	return nil
}

func (t *tunnel) SetWriteDeadline(at time.Time) error {
	t.write.set(at)
	return nil
}

// deadline ends the calls in one direction, those under way too.
type deadline struct {
	mu    sync.Mutex
	ctx   context.Context
	end   context.CancelCauseFunc
	timer *time.Timer
}

// context returns what a call shall be bounded by.
func (d *deadline) context() context.Context {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fresh()
	return d.ctx
}

func (d *deadline) fresh() {
	if d.ctx == nil || d.ctx.Err() != nil && d.timer == nil {
		d.ctx, d.end = context.WithCancelCause(context.Background())
	}
}

// set moves the deadline; the zero time is none.
func (d *deadline) set(at time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.fresh()
	if !at.IsZero() {
		end := d.end
		d.timer = time.AfterFunc(time.Until(at), func() { end(os.ErrDeadlineExceeded) })
	}
}
