package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"cloche.dev/cloche/api"
)

// EventPage returns events behind `after` (nil: from now on), oldest first, at
// most limit. Where there is none it waits so long for one. The answer says where
// the next page begins.
func (c *Client) EventPage(ctx context.Context, after *int64, limit int, wait time.Duration) (l api.EventList, err error) {
	q := query("limit", strconv.Itoa(limit))
	if after != nil {
		q.Set("after", strconv.FormatInt(*after, 10))
	}
	if wait > 0 {
		q.Set("wait_seconds", strconv.Itoa(int(wait/time.Second)))
	}
	err = c.do(ctx, call{method: http.MethodGet, path: "/v1/events", query: q, header: accept("application/json")}, &l)
	return l, err
}

// EventOptions say which events to stream.
type EventOptions struct {
	// After is the sequence behind which to begin; 0 is the oldest that is
	// kept, nil what happens from the first call of Next on.
	After *int64
	// Interrupted and Resumed are as of StreamOptions.
	Interrupted func(error)
	Resumed     func()
}

// Happening is what an EventStream tells: an event, or a gap where events were
// asked for that are no longer kept.
type Happening struct {
	Event *api.Event
	Gap   *api.EventsGap
}

// EventStream is what changes, in order. When its connection breaks, Next
// connects again and goes on behind the last event that it returned. It belongs
// to one goroutine.
type EventStream struct {
	c     *Client
	after *int64
	out   outage

	body   io.ReadCloser
	lines  *bufio.Scanner
	cancel context.CancelFunc
}

// maxEventLine bounds one line of a stream of events.
const maxEventLine = 4 << 20

// Events streams what changes. It connects at the first Next.
func (c *Client) Events(o EventOptions) *EventStream {
	return &EventStream{c: c, after: o.After, out: outage{window: c.reconnect, interrupted: o.Interrupted, resumed: o.Resumed}}
}

// Close drops the connection.
func (s *EventStream) Close() {
	if s.body != nil {
		s.cancel()
		_ = s.body.Close()
		s.body = nil
	}
}

// Next returns the next event or gap. ctx bounds the whole call, reconnecting
// included.
func (s *EventStream) Next(ctx context.Context) (Happening, error) {
	for {
		h, err := s.next(ctx)
		if err == nil {
			return h, nil
		}
		s.Close()
		if err := s.out.wait(ctx, err); err != nil {
			return Happening{}, err
		}
	}
}

func (s *EventStream) next(ctx context.Context) (Happening, error) {
	if s.body == nil {
		if err := s.connect(ctx); err != nil {
			return Happening{}, err
		}
	}
	for {
		kind, data, err := s.block(ctx)
		if err != nil {
			return Happening{}, err
		}
		h, err := s.take(kind, data)
		if err != nil || h != (Happening{}) {
			return h, err
		}
	}
}

// connect opens the stream. Where it begins from now on, now is asked for first,
// so that a connection that breaks before the first event loses none.
func (s *EventStream) connect(ctx context.Context) error {
	if s.after == nil {
		l, err := s.c.EventPage(ctx, nil, 1, 0)
		if err != nil {
			return err
		}
		s.after = &l.NextAfter
	}
	whole, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	resp, err := s.c.sendOnce(whole, call{ //nolint:bodyclose // Close closes it
		method: http.MethodGet, path: "/v1/events", query: query("after", strconv.FormatInt(*s.after, 10)), header: accept("text/event-stream"),
	})
	if err != nil {
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return err
	}
	s.body, s.cancel, s.lines = resp.Body, cancel, bufio.NewScanner(resp.Body)
	s.lines.Buffer(make([]byte, 0, 64<<10), maxEventLine)
	return nil
}

// block reads one event of the stream; a comment has no kind. It is bounded by
// ctx and by silence.
func (s *EventStream) block(ctx context.Context) (kind string, data []byte, err error) {
	stop := context.AfterFunc(ctx, s.cancel)
	defer stop()
	watch := time.AfterFunc(silence, s.cancel)
	defer watch.Stop()
	for s.lines.Scan() {
		line := s.lines.Bytes()
		if len(line) == 0 {
			return kind, data, nil
		}
		field, value, _ := bytes.Cut(line, []byte(": "))
		switch string(field) {
		case "event":
			kind = string(value)
		case "retry":
			kind = "retry" // the head of the stream, which proves no health
		case "data":
			data = append(data, value...)
		}
	}
	err = s.lines.Err()
	switch {
	case ctx.Err() != nil:
		return "", nil, context.Cause(ctx)
	case errors.Is(err, bufio.ErrTooLong):
		return "", nil, badEvent(err)
	}
	return "", nil, &Error{Class: api.ClassUnavailable, Code: CodeUnreachable, Message: "the stream was cut", Retryable: true, cause: err}
}

// take makes of a block what Next returns; nothing of what is not the caller's.
func (s *EventStream) take(kind string, data []byte) (h Happening, err error) {
	if kind != "error" && kind != "retry" {
		s.out.over()
	}
	switch kind {
	case "change":
		h.Event = &api.Event{}
		if err := json.Unmarshal(data, h.Event); err != nil {
			return Happening{}, badEvent(err)
		}
		if h.Event.Seq <= *s.after { // told before the break
			return Happening{}, nil
		}
		s.after = &h.Event.Seq
	case "gap":
		h.Gap = &api.EventsGap{}
		if err := json.Unmarshal(data, h.Gap); err != nil {
			return Happening{}, badEvent(err)
		}
		before := h.Gap.Oldest - 1
		s.after = &before
	case "error":
		var body api.ErrorBody
		if err := json.Unmarshal(data, &body); err != nil {
			return Happening{}, badEvent(err)
		}
		return Happening{}, FromBody(&body)
	}
	return h, nil
}

func badEvent(err error) error {
	return &Error{
		Class: api.ClassInternal, Code: CodeBadAnswer, cause: err, Message: fmt.Sprintf("the stream of events can't be understood: %v", err),
		Hint: "check the URL, and any proxy between",
	}
}
