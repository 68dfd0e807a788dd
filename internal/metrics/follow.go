package metrics

import (
	"context"
	"encoding/json"
	"math"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	followEvery = 2 * time.Second
	eventsPage  = 500
)

// follower reads the store's events from the daemon's start on.
type follower struct {
	m      *Metrics
	cursor int64
	// open are the operations that were told of and had not ended, by sandbox.
	// One that a delete supersedes is named by no further event, so all of a
	// sandbox's are looked at when something happens to it.
	open map[string]map[string]bool
	// stirred are the sandboxes whose operations are to be looked at.
	stirred map[string]bool
}

func newFollower(m *Metrics) *follower {
	return &follower{m: m, cursor: -1, open: map[string]map[string]bool{}, stirred: map[string]bool{}}
}

// change is what is read of an event's data; each type fills its own part.
type change struct {
	From      string                  `json:"from"`
	To        string                  `json:"to"`
	End       *sandbox.End            `json:"end"`
	Kind      sandbox.SnapshotKind    `json:"kind"`
	Purpose   sandbox.SnapshotPurpose `json:"purpose"`
	SizeBytes int64                   `json:"size_bytes"`
}

// follow counts until ctx ends.
func (m *Metrics) follow(ctx context.Context) error {
	f := newFollower(m)
	for t := time.NewTicker(followEvery); ; {
		if err := f.catchUp(ctx); err != nil && ctx.Err() == nil {
			m.unread.WithLabelValues("events").Inc()
			m.o.Log.WarnContext(ctx, "metrics can't follow the store; trying again", "error", err)
		}
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-t.C:
		}
	}
}

// catchUp counts what has happened since it was called last. The first time it
// only finds out where the events end.
func (f *follower) catchUp(ctx context.Context) (err error) {
	if f.cursor < 0 {
		f.cursor, err = last(ctx, f.m.o.Store)
		return err
	}
	for {
		events, err := f.m.o.Store.Events(ctx, "", f.cursor, eventsPage)
		if err != nil {
			return err
		}
		for _, e := range events {
			f.event(e)
			f.cursor = e.Seq
			f.stirred[e.Sandbox] = true
		}
		for box := range f.stirred {
			if err := f.look(ctx, box); err != nil {
				return err
			}
			delete(f.stirred, box)
		}
		if len(events) < eventsPage {
			return nil
		}
	}
}

// last finds the sequence of the newest event, 0 for none. There is no call for
// it, but there being an event after N ends at one N.
func last(ctx context.Context, s Store) (int64, error) {
	some := func(after int64) (bool, error) {
		list, err := s.Events(ctx, "", after, 1)
		return len(list) > 0, err
	}
	low, high := int64(0), int64(1)
	for high < math.MaxInt64/2 {
		more, err := some(high)
		if err != nil {
			return -1, err
		}
		if !more {
			break
		}
		low, high = high, 2*high
	}
	for low < high {
		middle := low + (high-low)/2
		more, err := some(middle)
		if err != nil {
			return -1, err
		}
		if more {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low, nil
}

// event counts what an event itself tells.
func (f *follower) event(e sandbox.Event) {
	if e.Operation != "" {
		if f.open[e.Sandbox] == nil {
			f.open[e.Sandbox] = map[string]bool{}
		}
		f.open[e.Sandbox][e.Operation] = true
	}
	var c change
	if e.Data == nil || json.Unmarshal(e.Data, &c) != nil {
		return
	}
	switch e.Type {
	case "sandbox.state":
		if c.End != nil && ended(sandbox.State(c.From), sandbox.State(c.To)) {
			f.m.ends.WithLabelValues(f.m.ended.of(string(c.End.Reason))).Inc()
		}
	case "snapshot.state":
		if c.To == string(sandbox.SnapshotReady) {
			f.m.sizes.WithLabelValues(string(c.Kind), string(c.Purpose)).Observe(float64(c.SizeBytes))
		}
	}
}

// ended tells whether a sandbox that went so lost a machine. Those that had
// none before carry the end of the one before that.
func ended(from, to sandbox.State) bool {
	switch from {
	case sandbox.StateFailed, sandbox.StateStarting, sandbox.StateRestoring, sandbox.StateRolling:
		return false
	}
	return to == sandbox.StateFailed
}

// look counts those of a sandbox's operations that have ended.
func (f *follower) look(ctx context.Context, box string) error {
	for id := range f.open[box] {
		op, err := f.m.o.Store.Operation(ctx, "", id)
		switch {
		case sandbox.IsClass(err, sandbox.NotFound): // pruned
		case err != nil:
			return err
		case !op.State.Done():
			continue
		default:
			f.m.operation(op)
		}
		delete(f.open[box], id)
	}
	if len(f.open[box]) == 0 {
		delete(f.open, box)
	}
	return nil
}
