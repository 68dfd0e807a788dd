package session

import (
	"context"
	"io"

	"cloche.dev/cloche/internal/node/session/log"
	"cloche.dev/cloche/internal/sandbox"
)

// Reader follows one session's log with a cursor of its own. It reads from the
// log's files and holds one record; it may be as slow as it likes. Not for
// concurrent use.
type Reader struct {
	m       *Manager
	e       *entry
	log     *log.Log
	r       *log.Reader
	started bool // the started event was delivered, or is not wanted
	ended   bool // the last event was delivered
	closed  bool
}

// Reader returns a reader that begins at an offset: 0, or the Next of an event
// that was read before. From 0 on the first event is started.
func (m *Manager) Reader(ref Ref, offset uint64) (*Reader, error) {
	e, err := m.get(ref)
	if err != nil {
		return nil, err
	}
	l, err := m.acquire(e)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	end := l.Written()
	if e.status.Ended() {
		end = e.end
	}
	e.mu.Unlock()
	if offset > end {
		m.release(e)
		return nil, sandbox.Errorf(sandbox.Invalid, "offset_out_of_range", "session %s has %d bytes of output, not %d", ref.Session, end, offset).
			WithHint("read from an offset that an event had")
	}
	return &Reader{m: m, e: e, log: l, r: l.NewReader(offset), started: offset > 0}, nil
}

// Next returns the next event, waiting for it until ctx ends; after that it
// may be called again. After exit or lost it returns io.EOF. Reading a session
// that is not started waits for its start, and fails when it expires.
func (r *Reader) Next(ctx context.Context) (Event, error) {
	if r.closed || r.ended {
		return Event{}, io.EOF
	}
	for {
		more := r.log.Changed()
		s, err := r.look()
		if err != nil {
			return Event{}, err
		}
		if !r.started && s.start != nil {
			r.started = true
			return Event{Kind: KindStarted, Start: s.start}, nil
		}
		if s.status != Created && s.status != Starting {
			ev, ok, err := r.record()
			if ok || err != nil {
				return ev, err
			}
		}
		if s.status.Ended() && r.r.Offset() >= s.end {
			r.ended = true
			return s.last, nil
		}
		select {
		case <-ctx.Done():
			return Event{}, ctx.Err()
		case <-more:
		case <-s.moved:
		}
	}
}

// standing is what a reader needs of the session at one instant.
type standing struct {
	status Status
	start  *Start
	end    uint64
	last   Event
	moved  <-chan struct{}
}

func (r *Reader) look() (standing, error) {
	e := r.e
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.deleted {
		return standing{}, e.gone()
	}
	s := standing{status: e.status, start: e.start, end: e.end, moved: e.watch()}
	if !s.status.Ended() {
		return s, nil
	}
	if s.status == Expired {
		return standing{}, expired(e.ref)
	}
	exit, loss := e.exit, e.loss
	if e.session == nil { // at rest
		doc, err := readMeta(e.dir)
		if err != nil {
			return standing{}, sandbox.Errorf(sandbox.Internal, "session_unreadable", "read session %s: %w", e.ref.Session, err)
		}
		s.start, exit, loss = doc.Start, doc.Exit, doc.Loss
	}
	s.last = Event{Kind: KindLost, Offset: e.end, Loss: loss}
	if exit != nil {
		s.last = Event{Kind: KindExit, Offset: e.end, Exit: exit}
	}
	return s, nil
}

// record returns what the log has next.
func (r *Reader) record() (Event, bool, error) {
	rec, ok, err := r.r.Next()
	if err != nil {
		return Event{}, false, sandbox.Errorf(sandbox.Internal, "log_unreadable", "read the log of session %s: %w", r.e.ref.Session, err)
	}
	if !ok {
		return Event{}, false, nil
	}
	ev := Event{Offset: rec.Offset, Data: rec.Data}
	switch rec.Type {
	case log.Gap:
		ev.Kind, ev.To = KindGap, rec.To
	case log.Stderr:
		ev.Kind = KindStderr
	default:
		ev.Kind = KindStdout
	}
	return ev, true, nil
}

// Close releases the reader.
func (r *Reader) Close() error {
	if r.closed {
		return nil
	}
	r.closed = true
	err := r.r.Close()
	r.m.release(r.e)
	return err
}
