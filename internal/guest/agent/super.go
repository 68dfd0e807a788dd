package agent

import (
	"bufio"
	"context"
	"net"
	"sync"

	"cloche.dev/cloche/internal/guest/wire"
	"cloche.dev/cloche/internal/sandbox"
)

// super is the agent's end of the link to the supervisor.
type super struct {
	conn net.Conn
	wmu  sync.Mutex

	mu      sync.Mutex
	next    uint64
	pending map[uint64]chan wire.Frame
	gone    chan struct{} // closed when the supervisor has hung up
}

func newSuper(conn net.Conn) *super {
	return &super{conn: conn, pending: map[uint64]chan wire.Frame{}, gone: make(chan struct{})}
}

// run hands replies to those who wait for them, until the supervisor hangs up.
func (s *super) run() error {
	defer close(s.gone)
	r := bufio.NewReaderSize(s.conn, 16<<10)
	for {
		f, err := wire.Read(r)
		if err != nil {
			return err
		}
		s.mu.Lock()
		c := s.pending[f.ID]
		delete(s.pending, f.ID)
		s.mu.Unlock()
		if c != nil {
			c <- f // has room for the one reply
		}
	}
}

// call makes one request and waits for its reply.
func (s *super) call(ctx context.Context, op wire.Op, req, resp wire.Message) error {
	c := make(chan wire.Frame, 1)
	s.mu.Lock()
	s.next++
	id := s.next
	s.pending[id] = c
	s.mu.Unlock()
	frame := wire.AppendFrame(nil, op, id, req)
	if len(frame) > wire.MaxFrame {
		return s.forget(id, sandbox.Errorf(sandbox.Invalid, "too_large", "the request has %d bytes", len(frame)))
	}
	if err := s.write(frame); err != nil {
		return s.forget(id, err)
	}
	select {
	case f := <-c:
		return answer(f, resp)
	case <-ctx.Done():
		_ = s.write(wire.AppendFrame(nil, wire.OpCancel, id, nil)) // nothing more to do if it has gone
		return s.forget(id, ctx.Err())
	case <-s.gone:
		return s.forget(id, sandbox.Errorf(sandbox.Unavailable, "supervisor_gone", "the supervisor hung up"))
	}
}

func answer(f wire.Frame, resp wire.Message) error {
	if f.Op == wire.OpError {
		e := new(wire.Error)
		if err := wire.Unmarshal(f.Body, e); err != nil {
			return err
		}
		return sandbox.Errorf(sandbox.Class(e.Class), e.Code, "%s", e.Text)
	}
	return wire.Unmarshal(f.Body, resp)
}

func (s *super) forget(id uint64, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pending, id)
	return err
}

func (s *super) write(frame []byte) error {
	s.wmu.Lock()
	defer s.wmu.Unlock()
	_, err := s.conn.Write(frame)
	return err
}
