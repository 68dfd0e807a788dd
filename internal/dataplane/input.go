package dataplane

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"syscall"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	maxStdin   = 16 << 20 // bytes of one stdin call
	stdinPiece = 64 << 10
	stdinWait  = 30 * time.Second // how long a piece waits for room
)

// inputs keeps, while somebody writes to a session's stdin, how much of it was
// taken: writers that append take turns, and none has to know an offset.
type inputs struct {
	mu   sync.Mutex
	open map[session.Ref]*input
}

type input struct {
	turn  sync.Mutex
	known bool // accepted is known
	at    uint64
	users int
}

// use returns ref's input and a function to call when it is no longer needed.
func (in *inputs) use(ref session.Ref) (*input, func()) {
	in.mu.Lock()
	defer in.mu.Unlock()
	i := in.open[ref]
	if i == nil {
		i = &input{}
		in.open[ref] = i
	}
	i.users++
	return i, func() {
		in.mu.Lock()
		defer in.mu.Unlock()
		if i.users--; i.users == 0 {
			delete(in.open, ref)
		}
	}
}

// write hands data to ref's stdin at offset (nil: behind what is there), piece
// by piece, and closes it behind data where closing is set. It returns how much
// was taken in all, and how much of data is left because the command read
// nothing for a while.
func (p *Plane) write(ctx context.Context, ref session.Ref, i *input, offset *uint64, data []byte, closing bool) (taken uint64, left int, err error) {
	i.turn.Lock()
	defer i.turn.Unlock()
	if !i.known {
		if i.at, err = p.o.Recorder.Stdin(ctx, ref, 0, nil, false); err != nil {
			return 0, len(data), err
		}
		i.known = true
	}
	if offset != nil {
		if *offset > i.at {
			return i.at, len(data), sandbox.Errorf(sandbox.FailedPrecondition, "stdin_gap",
				"%d bytes of input have been taken, so none can go to offset %d", i.at, *offset).WithHint("go on from offset %d", i.at)
		}
		data = data[min(uint64(len(data)), i.at-*offset):] // the rest was taken before
	}
	for len(data) > 0 || closing {
		piece := data[:min(len(data), stdinPiece)]
		last := len(piece) == len(data)
		taken, err := p.piece(ctx, ref, i.at, piece, closing && last)
		if err == nil && (taken < i.at || taken > i.at+uint64(len(piece))) {
			err = guestFault("it took another number of input bytes than it got")
		}
		if err != nil {
			i.known = false
			return i.at, len(data), err
		}
		n := taken - i.at
		i.at, data = taken, data[n:]
		if last && len(data) == 0 || n == 0 {
			break
		}
	}
	return i.at, len(data), nil
}

// piece hands over one piece. That there was no room in time is no error: then
// nothing more was taken.
func (p *Plane) piece(ctx context.Context, ref session.Ref, at uint64, data []byte, closing bool) (uint64, error) {
	bounded, cancel := context.WithTimeout(ctx, stdinWait)
	defer cancel()
	taken, err := p.o.Recorder.Stdin(bounded, ref, at, data, closing)
	if err == nil || ctx.Err() != nil || bounded.Err() == nil {
		return taken, err
	}
	again, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return p.o.Recorder.Stdin(again, ref, 0, nil, false)
}

// WriteStdin writes to a session's stdin.
func (p *Plane) WriteStdin(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, sessionID api.SessionParam, params api.WriteStdinParams) {
	ref, err := p.live(r, sandboxID, sessionID)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	i, done := p.inputs.use(ref)
	defer done()
	body := rest.Upload(w, r, maxStdin, uploadWait)
	var offset *uint64
	if params.Offset != nil {
		at := uint64(*params.Offset)
		offset = &at
	}
	buf := make([]byte, stdinPiece)
	for {
		n, err := io.ReadAtLeast(body, buf, len(buf))
		ended := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !ended {
			rest.Fail(w, r, err)
			return
		}
		closing := ended && params.Close
		accepted, left, err := p.write(r.Context(), ref, i, offset, buf[:n], closing)
		if err != nil {
			rest.Fail(w, r, err)
			return
		}
		if ended || left > 0 {
			rest.JSON(w, r, http.StatusOK, api.StdinState{Accepted: int64(accepted), Closed: closing && left == 0})
			return
		}
		if offset != nil {
			*offset += uint64(n)
		}
	}
}

// signals are the signals that can be sent, by name.
var signals = map[api.SignalName]syscall.Signal{
	api.SIGHUP: syscall.SIGHUP, api.SIGINT: syscall.SIGINT, api.SIGQUIT: syscall.SIGQUIT, api.SIGABRT: syscall.SIGABRT, api.SIGKILL: syscall.SIGKILL,
	api.SIGUSR1: syscall.SIGUSR1, api.SIGUSR2: syscall.SIGUSR2, api.SIGPIPE: syscall.SIGPIPE, api.SIGALRM: syscall.SIGALRM, api.SIGTERM: syscall.SIGTERM,
	api.SIGCONT: syscall.SIGCONT, api.SIGSTOP: syscall.SIGSTOP, api.SIGTSTP: syscall.SIGTSTP, api.SIGTTIN: syscall.SIGTTIN, api.SIGTTOU: syscall.SIGTTOU,
	api.SIGURG: syscall.SIGURG, api.SIGWINCH: syscall.SIGWINCH,
}

// SignalSession sends a signal to a session's process group.
func (p *Plane) SignalSession(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, sessionID api.SessionParam) {
	var body api.SignalRequest
	p.command(w, r, sandboxID, sessionID, &body, func(ctx context.Context, ref session.Ref) error {
		return p.o.Recorder.Signal(ctx, ref, int(signals[body.Signal]))
	})
}

// ResizeSession resizes a session's terminal.
func (p *Plane) ResizeSession(w http.ResponseWriter, r *http.Request, sandboxID api.SandboxParam, sessionID api.SessionParam) {
	var body api.WindowSize
	p.command(w, r, sandboxID, sessionID, &body, func(ctx context.Context, ref session.Ref) error {
		return p.o.Recorder.Resize(ctx, ref, sandbox.WindowSize{Rows: body.Rows, Cols: body.Cols})
	})
}

// command decodes a small body and does what it asks of a live session.
func (p *Plane) command(w http.ResponseWriter, r *http.Request, sandboxID, sessionID string, body any, do func(context.Context, session.Ref) error) {
	_, err := rest.Decode(w, r, body)
	var ref session.Ref
	if err == nil {
		ref, err = p.live(r, sandboxID, sessionID)
	}
	if err == nil {
		ctx, cancel := context.WithTimeout(r.Context(), callTimeout)
		defer cancel()
		err = do(ctx, ref)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	rest.NoContent(w)
}
