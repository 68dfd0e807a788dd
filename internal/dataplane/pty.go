package dataplane

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
)

const maxPtyInput = 64 << 10 // bytes of one message of input

// OpenPty joins a WebSocket to a session. It starts nothing.
func (p *Plane) OpenPty(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, sessionID api.SessionParam, params api.OpenPtyParams) {
	ref, err := p.readable(r, sandboxID, sessionID)
	if err == nil {
		err = upgradable(w, r)
	}
	var reader Events
	if err == nil {
		reader, err = p.o.Recorder.Reader(ref, uint64(params.Offset))
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	defer p.close(reader)
	if !p.over(ref) {
		defer p.o.Identities.Hold(sandboxID)()
	}
	conn, err := accept(w, r, maxPtyInput)
	if err != nil {
		return
	}
	defer func() { _ = conn.CloseNow() }()
	ctx, cancel := context.WithCancel(r.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var busy atomic.Bool
	wg.Go(func() { pings(ctx, conn, pingEvery, &busy) })
	wg.Go(func() {
		defer cancel() // a client that is gone, or errs, ends the output too
		p.ptyInput(ctx, conn, ref, &busy)
	})
	p.ptyOutput(ctx, conn, reader, uint64(params.Offset))
}

// ptyOutput sends the log until it ends.
func (p *Plane) ptyOutput(ctx context.Context, conn *websocket.Conn, reader Events, offset uint64) {
	for {
		ev, err := reader.Next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			_ = conn.Close(websocket.StatusNormalClosure, "")
			return
		case ctx.Err() != nil:
			_ = conn.Close(websocket.StatusGoingAway, reason(errStopping))
			return
		case err != nil:
			body := rest.Body(err)
			_ = sendJSON(ctx, conn, api.StreamEvent{Type: api.EventError, Offset: int64(offset), Reason: body.Code, Error: body})
			_ = conn.Close(websocket.StatusInternalError, reason(err))
			return
		}
		offset = ev.Next()
		if ev.Kind == session.KindStdout || ev.Kind == session.KindStderr {
			err = send(ctx, conn, websocket.MessageBinary, ev.Data)
		} else {
			err = sendJSON(ctx, conn, eventOf(ev))
		}
		if err != nil {
			return
		}
	}
}

// ptyInput hands on what the client sends until it goes away.
func (p *Plane) ptyInput(ctx context.Context, conn *websocket.Conn, ref session.Ref, busy *atomic.Bool) {
	i, done := p.inputs.use(ref)
	defer done()
	for {
		kind, data, err := conn.Read(ctx)
		if err != nil {
			return
		}
		busy.Store(true)
		if kind == websocket.MessageBinary {
			err = p.append(ctx, ref, i, data, false)
		} else {
			err = p.ptyControl(ctx, ref, i, data)
		}
		busy.Store(false)
		switch {
		case err == nil, sandbox.IsClass(err, sandbox.FailedPrecondition) && !retryable(err):
			// Input that comes too early or too late goes nowhere, as on a
			// terminal; the output says what became of the command.
		case sandbox.IsClass(err, sandbox.Invalid):
			_ = conn.Close(websocket.StatusPolicyViolation, reason(err))
			return
		default:
			_ = conn.Close(websocket.StatusTryAgainLater, reason(err))
			return
		}
	}
}

func retryable(err error) bool { return sandbox.AsError(err).Retryable }

func (p *Plane) ptyControl(ctx context.Context, ref session.Ref, i *input, data []byte) error {
	c, err := parseControl(data)
	if err != nil {
		return err
	}
	switch c.Type {
	case "close_stdin":
		return p.append(ctx, ref, i, nil, true)
	case "resize":
		if c.Rows < 1 || c.Cols < 1 || c.Rows > maxTerminal || c.Cols > maxTerminal {
			return sandbox.Errorf(sandbox.Invalid, "bad_message", "rows and cols lie between 1 and %d", maxTerminal)
		}
		bounded, cancel := context.WithTimeout(ctx, callTimeout)
		defer cancel()
		return p.o.Recorder.Resize(bounded, ref, sandbox.WindowSize{Rows: c.Rows, Cols: c.Cols})
	}
	return sandbox.Errorf(sandbox.Invalid, "bad_message", "there is no message of this type")
}

const maxTerminal = 4096 // rows or columns, as in the contract

// append writes input behind what is there and waits for room as long as the
// client is there, which is how a terminal pushes back. Opening a terminal is a
// GET and wakes nothing, but writing to it may.
func (p *Plane) append(ctx context.Context, ref session.Ref, i *input, data []byte, closing bool) error {
	for {
		if err := p.stand(ctx, ref.Sandbox); err != nil {
			return err
		}
		_, left, err := p.write(ctx, ref, i, nil, data, closing)
		if err != nil || left == 0 || ctx.Err() != nil {
			return err
		}
		data = data[len(data)-left:]
	}
}

// standEvery is how often a terminal's input waits for looks at a sandbox that
// stands still.
const standEvery = time.Second

// stand waits while the sandbox is paused or suspended: what is typed then
// arrives when it goes on, unless it wakes it.
func (p *Plane) stand(ctx context.Context, sandboxID string) error {
	for {
		sb, err := p.access(ctx, sandboxID)
		if err != nil || !slices.Contains(standing, sb.State) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(standEvery):
		}
	}
}
