package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
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
	feed
	after *int64
}

// Events streams what changes. It connects at the first Next.
func (c *Client) Events(o EventOptions) *EventStream {
	return &EventStream{feed: newFeed(c, "/v1/events", o.Interrupted, o.Resumed), after: o.After}
}

// Next returns the next event or gap. ctx bounds the whole call, reconnecting
// included.
func (s *EventStream) Next(ctx context.Context) (h Happening, err error) {
	err = s.next(ctx, s.begin, func(kind string, data []byte) (bool, error) {
		h, err = s.take(kind, data)
		return h != (Happening{}), err
	})
	if err != nil {
		return Happening{}, err
	}
	return h, nil
}

// begin says where the stream begins. Where that is now, now is asked for first,
// so that a connection that breaks before the first event loses none.
func (s *EventStream) begin(ctx context.Context) (url.Values, error) {
	if s.after == nil {
		l, err := s.c.EventPage(ctx, nil, 1, 0)
		if err != nil {
			return nil, err
		}
		s.after = &l.NextAfter
	}
	return query("after", strconv.FormatInt(*s.after, 10)), nil
}

// take makes of a block what Next returns; nothing of what is not the caller's.
func (s *EventStream) take(kind string, data []byte) (h Happening, err error) {
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
	}
	return h, nil
}
