package dataplane

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
)

// heartbeat is how often a stream that has nothing to say says so.
const heartbeat = 15 * time.Second

// past is a context that has ended: with it a reader answers what is there
// and waits for nothing.
var past = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// encoder writes events in one form of the stream. Output goes through output
// without being copied into a StreamEvent first.
type encoder interface {
	output(kind api.StreamEventType, offset uint64, data []byte) error
	event(ev api.StreamEvent, next uint64) error
}

// follow streams a session's log from offset on until it ends or the client
// goes away.
func (p *Plane) follow(w http.ResponseWriter, r *http.Request, ref session.Ref, offset uint64, form string) {
	reader, err := p.o.Recorder.Reader(ref, offset)
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	defer p.close(reader)
	w.Header().Set("Content-Type", form)
	w.Header().Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	buf := bufio.NewWriterSize(w, 64<<10)
	var enc encoder = &sse{w: buf}
	if form == octets {
		enc = &frames{w: buf}
	}
	flush := func() error {
		if err := buf.Flush(); err != nil {
			return err
		}
		return http.NewResponseController(w).Flush()
	}
	// A write that fails means that the client is gone, which the access log
	// says; there is nobody to tell.
	_ = p.pump(r.Context(), reader, enc, offset, flush)
}

// pump moves events from reader to enc. It flushes whenever the log has no
// more, so that a burst costs few writes and nothing waits.
func (p *Plane) pump(ctx context.Context, reader Events, enc encoder, offset uint64, flush func() error) error {
	if err := flush(); err != nil {
		return err
	}
	for {
		ev, err := reader.Next(past) //nolint:contextcheck // an ended context asks for what is there
		if errors.Is(err, context.Canceled) {
			if err := flush(); err != nil {
				return err
			}
			wait, cancel := context.WithTimeout(ctx, p.heartbeat)
			ev, err = reader.Next(wait)
			cancel()
		}
		switch {
		case errors.Is(err, io.EOF):
			return flush()
		case ctx.Err() != nil:
			err = p.tell(enc, offset, errStopping)
		case errors.Is(err, context.DeadlineExceeded):
			err = enc.event(api.StreamEvent{Type: api.EventHeartbeat, Offset: int64(offset)}, offset)
			if err == nil {
				continue
			}
		case err != nil:
			err = p.tell(enc, offset, err)
		default:
			offset = ev.Next()
			if err = encode(enc, ev); err == nil {
				continue
			}
		}
		return errors.Join(err, flush())
	}
}

// errStopping is told to streams that are cut because the daemon goes down; to
// a client that went away itself nothing can be told.
var errStopping = sandbox.Errorf(sandbox.Unavailable, "stream_cut", "the stream was cut").
	WithHint("attach again with the last offset")

func (p *Plane) tell(enc encoder, offset uint64, err error) error {
	body := rest.Body(err)
	return enc.event(api.StreamEvent{Type: api.EventError, Offset: int64(offset), Reason: body.Code, Error: body}, offset)
}

func encode(enc encoder, ev session.Event) error {
	switch ev.Kind {
	case session.KindStdout:
		return enc.output(api.EventStdout, ev.Offset, ev.Data)
	case session.KindStderr:
		return enc.output(api.EventStderr, ev.Offset, ev.Data)
	default:
		return enc.event(eventOf(ev), ev.Next())
	}
}

// eventOf is an event that is not output as the API shows it.
func eventOf(ev session.Event) api.StreamEvent {
	out := api.StreamEvent{Offset: int64(ev.Offset)}
	switch ev.Kind {
	case session.KindStarted:
		out.Type, out.At = api.EventStarted, ev.Start.At
	case session.KindExit:
		out.Type, out.Exit, out.At = api.EventExit, exitOf(ev.Exit), ev.Exit.At
	case session.KindGap:
		out.Type, out.To, out.Reason = api.EventGap, int64(ev.To), "log_quota"
	case session.KindLost:
		out.Type = api.EventLost
		if ev.Loss != nil {
			out.Reason, out.At = ev.Loss.Reason, ev.Loss.At
		}
	}
	return out
}
