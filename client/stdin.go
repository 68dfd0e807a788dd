package client

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"cloche.dev/cloche/api"
)

// Stdin writes to a command's standard input. Each byte has an offset, so that
// what is sent again after a broken connection is not written twice. It must
// be the only writer of its session, and belongs to one goroutine.
type Stdin struct {
	s      *Session
	ctx    context.Context
	offset int64
}

// maxStdin is how much one request carries.
const maxStdin = 1 << 20

// Stdin returns the writer for a command that has been started and has read
// `offset` bytes of input so far. ctx bounds all of its calls.
func (s *Session) Stdin(ctx context.Context, offset int64) *Stdin {
	return &Stdin{s: s, ctx: ctx, offset: offset}
}

// Offset is the number of input bytes that have been taken.
func (w *Stdin) Offset() int64 { return w.offset }

// Write sends p, as fast as the command takes it. It outlasts a daemon that
// goes away, as Options.Reconnect says, and a sandbox that is paused or
// suspended, until the context ends.
func (w *Stdin) Write(p []byte) (int, error) {
	sent := 0
	for sent < len(p) {
		n, err := w.post(p[sent:min(len(p), sent+maxStdin)], false)
		sent += n
		if err != nil {
			return sent, err
		}
	}
	return sent, nil
}

// Close closes the command's standard input.
func (w *Stdin) Close() error {
	_, err := w.post(nil, true)
	return err
}

// post sends one request, and again while the sandbox stands still, for as long
// as ctx lasts: a command that is suspended is not lost.
func (w *Stdin) post(p []byte, end bool) (int, error) {
	for attempt := 0; ; attempt++ {
		n, err := w.postOnce(p, end)
		if !notRunning(err) {
			return n, err
		}
		if info, gone := w.s.Get(w.ctx); gone != nil || info.State != api.SessionRunning {
			return n, err
		}
		if sleep(w.ctx, backoff(attempt)) != nil {
			return n, context.Cause(w.ctx)
		}
	}
}

// notRunning tells whether err is that the sandbox does not run now.
func notRunning(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Class == api.ClassFailedPrecondition && (e.Code == codeNotRunning || e.Code == codeHeld)
}

// postOnce sends one request and returns how much of p has been taken: less
// than all of it, even nothing, where the command does not read.
func (w *Stdin) postOnce(p []byte, end bool) (int, error) {
	q := url.Values{"offset": {strconv.FormatInt(w.offset, 10)}}
	if end {
		q.Set("close", "true")
	}
	k := call{method: http.MethodPost, path: w.s.path("/stdin"), token: w.s.Token, query: q, window: w.s.c.reconnect}
	if len(p) > 0 {
		k.raw, k.kind = p, "application/octet-stream"
	}
	var st api.StdinState
	if err := w.s.c.do(w.ctx, k, &st); err != nil {
		return 0, err
	}
	n := st.Accepted - w.offset
	if n < 0 || n > int64(len(p)) {
		return 0, &Error{Class: api.ClassConflict, Code: CodeStdinTaken, Message: "somebody else writes to the same standard input"}
	}
	w.offset = st.Accepted
	if st.Closed && n < int64(len(p)) {
		return int(n), io.ErrClosedPipe
	}
	return int(n), nil
}
