package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"cloche.dev/cloche/api"
)

// StreamOptions say what of a session's log to stream.
type StreamOptions struct {
	// Offset is the number of output bytes to leave out.
	Offset int64
	// Interrupted is called when the stream breaks and is being taken up
	// again, at most once until Resumed is called.
	Interrupted func(error)
	// Resumed is called when output can come again.
	Resumed func()
}

// Stream is a session's log from an offset on. When its connection breaks,
// Next connects again and goes on at the byte after the last one that it
// returned: none is lost and none comes twice. That its sandbox is paused or
// suspended does not end it: the daemon keeps it open, and it goes on when the
// sandbox does. A Stream belongs to one goroutine.
type Stream struct {
	s       *Session
	method  string
	offset  int64 // of the next byte to return
	started bool  // the start has been told
	ended   bool

	body   io.ReadCloser
	r      *bufio.Reader
	cancel context.CancelFunc
	buf    []byte

	out outage
}

// silence is after how long without a frame a connection counts as dead; the
// daemon sends a heartbeat every 15 s.
const silence = 50 * time.Second

// Attach starts the session's command, where it has not been started, and
// streams its log.
func (s *Session) Attach(o StreamOptions) *Stream {
	return s.stream(http.MethodPost, o)
}

// Follow streams the session's log and starts nothing.
func (s *Session) Follow(o StreamOptions) *Stream {
	return s.stream(http.MethodGet, o)
}

func (s *Session) stream(method string, o StreamOptions) *Stream {
	return &Stream{
		s: s, method: method, offset: o.Offset,
		out: outage{window: s.c.reconnect, interrupted: o.Interrupted, resumed: o.Resumed},
	}
}

// Offset is the number of output bytes before what Next returns next.
func (st *Stream) Offset() int64 { return st.offset }

// Next returns the next event: started (once), stdout, stderr, gap, exit or
// lost. After exit and lost it returns io.EOF. The event's Data is good until
// the next call. ctx bounds the whole call, reconnecting included.
func (st *Stream) Next(ctx context.Context) (api.StreamEvent, error) {
	for !st.ended {
		if st.body == nil {
			if err := st.connect(ctx); err != nil {
				if err := st.out.wait(ctx, err); err != nil {
					return api.StreamEvent{}, err
				}
				continue
			}
		}
		e, err := st.read(ctx)
		if err == nil {
			var tell bool
			if e, tell, err = st.take(e); tell {
				return e, nil
			}
		}
		if err != nil {
			st.drop()
			if err := st.out.wait(ctx, err); err != nil {
				return api.StreamEvent{}, err
			}
		}
	}
	st.drop()
	return api.StreamEvent{}, io.EOF
}

// Close drops the connection. The command runs on.
func (st *Stream) Close() {
	st.ended = true
	st.drop()
}

func (st *Stream) drop() {
	if st.body != nil {
		st.cancel()
		_ = st.body.Close()
		st.body, st.r = nil, nil
	}
}

// connect opens the stream at the offset. The connection outlives the call of
// Next that opened it, so that ctx only guards the opening.
func (st *Stream) connect(ctx context.Context) error {
	whole, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	resp, err := st.s.c.sendOnce(whole, call{ //nolint:bodyclose // drop closes it
		method: st.method, path: st.s.path("/attach"), token: st.s.Token,
		query:  query("offset", strconv.FormatInt(st.offset, 10)),
		header: accept("application/octet-stream"),
	})
	if err != nil {
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	st.body, st.cancel, st.r = resp.Body, cancel, bufio.NewReaderSize(resp.Body, 128<<10)
	return nil
}

// read reads one frame, bounded by ctx and by silence.
func (st *Stream) read(ctx context.Context) (api.StreamEvent, error) {
	if st.r.Buffered() < frameHead { // else it is most likely here already
		stop := context.AfterFunc(ctx, st.cancel)
		defer stop()
		watch := time.AfterFunc(silence, st.cancel)
		defer watch.Stop()
	}
	e, buf, err := readFrame(st.r, st.buf)
	st.buf = buf
	switch {
	case err == nil:
		return e, nil
	case ctx.Err() != nil:
		return e, context.Cause(ctx)
	case errors.Is(err, errFrame):
		return e, &Error{Class: api.ClassInternal, Code: CodeBadAnswer, Message: err.Error(), Hint: "check the URL, and any proxy between"}
	}
	return e, &Error{Class: api.ClassUnavailable, Code: CodeUnreachable, Message: "the stream was cut", Retryable: true, cause: err}
}

// take fits a frame to the offset and tells whether it is the caller's.
func (st *Stream) take(e api.StreamEvent) (api.StreamEvent, bool, error) {
	if e.Type == api.EventError {
		err := FromBody(e.Error)
		if e.Error == nil {
			err = &Error{Class: api.ClassUnavailable, Code: CodeUnreachable, Message: "the stream was cut: " + e.Reason, Retryable: true}
		}
		return e, false, err
	}
	st.out.over()
	switch e.Type {
	case api.EventStdout, api.EventStderr:
		if e.Offset > st.offset {
			return e, false, fmt.Errorf("the stream jumped from offset %d to %d without saying so", st.offset, e.Offset)
		}
		if old := st.offset - e.Offset; old > 0 { // seen before the break
			if old >= int64(len(e.Data)) {
				return e, false, nil
			}
			e.Data, e.Offset = e.Data[old:], st.offset
		}
		st.offset += int64(len(e.Data))
		return e, len(e.Data) > 0, nil
	case api.EventGap:
		if e.To <= st.offset {
			return e, false, nil
		}
		e.Offset = max(e.Offset, st.offset)
		st.offset = e.To
		return e, true, nil
	case api.EventStarted:
		tell := !st.started
		st.started = true
		return e, tell, nil
	case api.EventExit, api.EventLost:
		st.ended = true
		return e, true, nil
	}
	return e, false, nil // heartbeat
}

// Copy runs the stream to its end: output goes to the writers, gap (which may
// be nil) is called for ranges that the log no longer has. It returns how the
// command ended; nil where the log ends without that being known, with an
// Error that says why.
func (st *Stream) Copy(ctx context.Context, stdout, stderr io.Writer, gap func(api.StreamEvent)) (*api.Exit, error) {
	defer st.Close()
	for {
		e, err := st.Next(ctx)
		if err != nil {
			return nil, err
		}
		switch e.Type {
		case api.EventStdout:
			_, err = stdout.Write(e.Data)
		case api.EventStderr:
			_, err = stderr.Write(e.Data)
		case api.EventGap:
			if gap != nil {
				gap(e)
			}
		case api.EventExit:
			return e.Exit, nil
		case api.EventLost:
			return nil, Lost(e)
		}
		if err != nil {
			return nil, err
		}
	}
}

// Lost makes an Error of a lost event.
func Lost(e api.StreamEvent) *Error {
	reason := e.Reason
	if reason == "" {
		reason = "the machine ended"
	}
	return &Error{
		Class: api.ClassUnavailable, Code: "session_lost",
		Message: fmt.Sprintf("the command's end is not known: %s", reason),
		Hint:    "`cloche inspect` of the sandbox tells why it ended",
	}
}
