package supervisor

import (
	"bufio"
	"context"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guest/wire"
	"cloche.dev/cloche/internal/sandbox"
)

// maxCalls bounds the agent's requests under way.
const maxCalls = 4 * maxSessions

// link is the connection to one agent.
type link struct {
	s    *Supervisor
	conn *os.File

	wmu sync.Mutex

	mu    sync.Mutex
	calls map[uint64]context.CancelFunc
}

// serve answers an agent until it hangs up or says something malformed, and
// returns when none of its requests is under way any more.
func (s *Supervisor) serve(conn *os.File) {
	l := &link{s: s, conn: conn, calls: map[uint64]context.CancelFunc{}}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	defer conn.Close()
	r := bufio.NewReaderSize(conn, 16<<10)
	for {
		f, err := wire.Read(r)
		if err != nil {
			return
		}
		if f.Op == wire.OpCancel {
			l.cancel(f.ID)
			continue
		}
		cctx, err := l.begin(ctx, f.ID)
		if err != nil {
			l.reply(f.ID, nil, err)
			continue
		}
		wg.Go(func() {
			defer l.cancel(f.ID)
			answer, err := l.do(cctx, f)
			l.reply(f.ID, answer, err)
		})
	}
}

func (l *link) begin(ctx context.Context, id uint64) (context.Context, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.calls[id]; ok || len(l.calls) >= maxCalls {
		return nil, sandbox.Errorf(sandbox.Quota, "too_many_requests", "the supervisor is busy")
	}
	ctx, cancel := context.WithCancel(ctx)
	l.calls[id] = cancel
	return ctx, nil
}

func (l *link) cancel(id uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if cancel := l.calls[id]; cancel != nil {
		cancel()
		delete(l.calls, id)
	}
}

// reply sends an answer. Failing to means that the agent has gone, which the
// reader notices.
func (l *link) reply(id uint64, m wire.Message, err error) {
	op := wire.OpReply
	if err != nil {
		e := sandbox.AsError(err)
		op, m = wire.OpError, &wire.Error{Class: string(e.Class), Code: e.Code, Text: e.Message}
	}
	buf := frames.Get().(*[]byte)
	defer frames.Put(buf)
	*buf = wire.AppendFrame((*buf)[:0], op, id, m)
	l.wmu.Lock()
	defer l.wmu.Unlock()
	_, _ = l.conn.Write(*buf)
}

// frames are buffers for replies, of which those with output are large.
var frames = sync.Pool{New: func() any { return new([]byte) }}

// do carries out one request.
func (l *link) do(ctx context.Context, f wire.Frame) (wire.Message, error) {
	s := l.s
	switch f.Op {
	case wire.OpState:
		s.mu.Lock()
		defer s.mu.Unlock()
		state := s.state
		return &state, nil
	case wire.OpKeep:
		m := new(wire.State)
		if err := decode(f.Body, m); err != nil {
			return nil, err
		}
		return nil, s.keep(m)
	case wire.OpStart:
		m := new(wire.Start)
		if err := decode(f.Body, m); err != nil {
			return nil, err
		}
		return s.start(m)
	case wire.OpSessions:
		return s.list(), nil
	case wire.OpFetch:
		m := new(wire.Fetch)
		ses, err := find(s, f.Body, m, &m.Session)
		if err != nil {
			return nil, err
		}
		return ses.fetch(ctx, m.Offset)
	case wire.OpAck:
		m := new(wire.Ack)
		ses, err := find(s, f.Body, m, &m.Session)
		if err != nil {
			return nil, err
		}
		return nil, s.ack(ses, m)
	}
	return l.doInput(ctx, f)
}

// doInput carries out the requests that reach a session's processes.
func (l *link) doInput(ctx context.Context, f wire.Frame) (wire.Message, error) {
	switch f.Op {
	case wire.OpStdin:
		m := new(wire.Stdin)
		ses, err := find(l.s, f.Body, m, &m.Session)
		if err != nil {
			return nil, err
		}
		if ses.stdin == nil {
			return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_stdin", "session %s was started without stdin", m.Session)
		}
		n, closed, err := ses.stdin.write(ctx, m.Offset, m.Data, m.Close)
		return &wire.StdinDone{Accepted: n, Closed: closed}, err
	case wire.OpSignal:
		m := new(wire.Signal)
		ses, err := find(l.s, f.Body, m, &m.Session)
		if err != nil {
			return nil, err
		}
		return nil, ses.signal(unix.Signal(m.Signal))
	case wire.OpResize:
		m := new(wire.Resize)
		ses, err := find(l.s, f.Body, m, &m.Session)
		if err != nil {
			return nil, err
		}
		return nil, ses.resize(m.Rows, m.Cols)
	}
	return nil, sandbox.Errorf(sandbox.Invalid, "unknown_operation", "the supervisor knows no operation %d", f.Op)
}

func decode(body []byte, m wire.Message) error {
	if err := wire.Unmarshal(body, m); err != nil {
		return sandbox.Errorf(sandbox.Invalid, "malformed", "%w", err)
	}
	return nil
}

// find decodes a request about a session; id points into m.
func find(s *Supervisor, body []byte, m wire.Message, id *string) (*session, error) {
	if err := decode(body, m); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if ses := s.sessions[*id]; ses != nil {
		return ses, nil
	}
	return nil, errUnknownSession(*id)
}

// keep takes what later agents will need, and the limit of processes: root's
// own limit, which is not enforced for root but inherited by everyone.
func (s *Supervisor) keep(m *wire.State) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.MaxProcs != 0 && m.MaxProcs != s.state.MaxProcs && !fault.Is(fault.LimitIgnored) {
		lim := unix.Rlimit{Cur: m.MaxProcs, Max: m.MaxProcs}
		if err := unix.Setrlimit(unix.RLIMIT_NPROC, &lim); err != nil {
			return sandbox.Errorf(sandbox.Internal, "limit_failed", "RLIMIT_NPROC can't be set: %w", err)
		}
	}
	s.state = *m
	return nil
}

func (s *Supervisor) list() *wire.Sessions {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := new(wire.Sessions)
	for _, ses := range s.sessions {
		out.List = append(out.List, ses.info())
	}
	return out
}

func (s *Supervisor) ack(ses *session, m *wire.Ack) error {
	if err := ses.ack(m.Offset); err != nil || !m.Exit {
		return err
	}
	if !ses.free() {
		return sandbox.Errorf(sandbox.FailedPrecondition, "session_running", "session %s has not ended", m.Session)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, m.Session)
	return nil
}
