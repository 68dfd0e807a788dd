package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	eventStream  = "text/event-stream"
	defaultLimit = 100 // the contract's default of limit
	eventBatch   = 256 // events that a stream fetches at once
)

// pace is how often a stream of events does what it does on its own.
type pace struct {
	look    time.Duration // for events, and whether the key is still good
	comment time.Duration // where there was nothing to tell
}

var usualPace = pace{look: 5 * time.Second, comment: 15 * time.Second}

// ListEvents answers what changed, as a stream or as a list.
func (a *API) ListEvents(w http.ResponseWriter, r *http.Request, params api.ListEventsParams) {
	form, err := rest.Negotiate(r, eventStream, "application/json")
	var after int64
	if err == nil {
		after, err = a.position(r.Context(), params)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	if form == eventStream {
		a.streamEvents(w, r, after)
		return
	}
	limit := params.Limit
	if limit == 0 {
		limit = defaultLimit
	}
	rows, err := a.o.Control.Events(r.Context(), callerOf(r), after, limit, time.Duration(params.WaitSeconds)*time.Second)
	list := api.EventList{Items: make([]api.Event, 0, len(rows)), NextAfter: after}
	if err == nil {
		list.Gap, _, err = a.missed(r.Context(), after)
	}
	if err != nil {
		rest.Fail(w, r, err)
		return
	}
	if list.Gap != nil {
		list.NextAfter = list.Gap.Oldest - 1
	}
	for _, e := range rows {
		list.Items = append(list.Items, showEvent(e))
		list.NextAfter = e.Seq
	}
	rest.JSON(w, r, http.StatusOK, list)
}

// position is the sequence behind which the caller wants to begin.
func (a *API) position(ctx context.Context, params api.ListEventsParams) (int64, error) {
	switch {
	case params.LastEventID != "":
		n, err := strconv.ParseInt(params.LastEventID, 10, 64)
		if err != nil {
			return 0, sandbox.Errorf(sandbox.Invalid, "invalid_parameter", "Last-Event-ID is no sequence of an event")
		}
		return n, nil
	case params.After != nil:
		return *params.After, nil
	}
	return a.newest(ctx)
}

// newest is the sequence of the last event, 0 where there is none. Sequences
// belong to no project, so that they are looked at as Cloche itself; they only
// grow, so that the last is found by doubling and halving.
func (a *API) newest(ctx context.Context) (last int64, err error) {
	const widest = int64(1) << 40
	for step, growing := int64(1), true; step > 0; {
		list, err := a.o.Control.Events(ctx, sandbox.System, last+step-1, 1, 0)
		switch {
		case err != nil:
			return 0, err
		case len(list) > 0:
			last = list[0].Seq
			growing = growing && step < widest
		default:
			growing = false
		}
		if growing {
			step *= 2
		} else if len(list) == 0 {
			step /= 2
		}
	}
	return last, nil
}

// missed is what is no longer kept of the events behind after; known is false
// where there are no events to tell by. 0 asks for the oldest, so that nothing
// is missed then.
func (a *API) missed(ctx context.Context, after int64) (gap *api.EventsGap, known bool, err error) {
	if after == 0 {
		return nil, true, nil
	}
	list, err := a.o.Control.Events(ctx, sandbox.System, 0, 1, 0)
	if err != nil || len(list) == 0 {
		return nil, false, err
	}
	if oldest := list[0].Seq; oldest > after+1 {
		return &api.EventsGap{After: after, Oldest: oldest}, true, nil
	}
	return nil, true, nil
}

func showEvent(e sandbox.Event) api.Event {
	return api.Event{
		Seq: e.Seq, Project: e.Project, At: e.At.UTC(), Type: e.Type, Sandbox: e.Sandbox, Operation: e.Operation, Data: e.Data,
	}
}

// errStreamCut is told to streams that end because the daemon goes down; to a
// client that went away itself nothing can be told.
var errStreamCut = sandbox.Errorf(sandbox.Unavailable, "stream_cut", "the stream was cut").
	WithHint("ask again with the last id")

// eventWriter writes server-sent events.
type eventWriter struct {
	w     http.ResponseWriter
	buf   bytes.Buffer
	wrote time.Time
}

func (s *eventWriter) add(kind string, id int64, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	fmt.Fprintf(&s.buf, "event: %s\nid: %d\ndata: %s\n\n", kind, id, data)
	return nil
}

// flush sends what was added; each write has its deadline.
func (s *eventWriter) flush() error {
	s.wrote = time.Now()
	_, err := s.w.Write(s.buf.Bytes())
	s.buf.Reset()
	if err != nil {
		return err
	}
	return http.NewResponseController(s.w).Flush()
}

// streamEvents sends events from behind after until the client goes away, the
// key is revoked or the daemon stops.
func (a *API) streamEvents(w http.ResponseWriter, r *http.Request, after int64) {
	w.Header().Set("Content-Type", eventStream)
	w.Header().Set("X-Accel-Buffering", "no")
	w.WriteHeader(http.StatusOK)
	s := &eventWriter{w: w}
	s.buf.WriteString("retry: 1000\n\n")
	if s.flush() != nil {
		return
	}
	ctx, token, checked := r.Context(), rest.Bearer(r), false
	for {
		var gap *api.EventsGap
		rows, err := a.o.Control.Events(ctx, callerOf(r), after, eventBatch, a.pace.look)
		if err == nil {
			// What happened after the key was revoked is not for its owner.
			_, err = a.o.Keys.Verify(ctx, token)
		}
		if err == nil && !checked {
			gap, checked, err = a.missed(ctx, after)
		}
		if err == nil {
			after, err = s.tell(after, gap, rows, a.pace.comment)
			if err != nil {
				return // the client is gone, which the access log says
			}
			continue
		}
		if ctx.Err() != nil {
			err = errStreamCut
		}
		if s.add("error", after, rest.Body(err)) == nil {
			_ = s.flush()
		}
		return
	}
}

// tell writes what there is to tell, or a comment where there has been nothing
// for a while.
func (s *eventWriter) tell(after int64, gap *api.EventsGap, rows []sandbox.Event, comment time.Duration) (int64, error) {
	if gap != nil {
		after = gap.Oldest - 1
		if err := s.add("gap", after, gap); err != nil {
			return after, err
		}
	}
	for _, e := range rows {
		after = e.Seq
		if err := s.add("change", after, showEvent(e)); err != nil {
			return after, err
		}
	}
	if s.buf.Len() == 0 {
		if time.Since(s.wrote) < comment {
			return after, nil
		}
		s.buf.WriteString(": nothing happened\n\n")
	}
	return after, s.flush()
}
