package session

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/node/session/log"
	"cloche.dev/cloche/internal/sandbox"
)

// Start starts a session's command, once: a session that was started answers
// its state. The caller's ctx does not take a question back that the guest was
// asked.
func (m *Manager) Start(ctx context.Context, ref Ref) (State, error) {
	e, err := m.get(ref)
	if err != nil {
		return State{}, err
	}
	e.op.Lock()
	defer e.op.Unlock()
	e.mu.Lock()
	status := e.status
	e.mu.Unlock()
	switch status {
	case Expired:
		return State{}, expired(ref)
	case Created, Starting:
		if err := m.absent(ref.Sandbox); err != nil {
			return State{}, err
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
		defer cancel()
		if err := m.start(ctx, e); err != nil {
			return State{}, err
		}
	}
	return m.state(e)
}

// absent returns an error when the sandbox's machine has ended, or was let go
// to be restored.
func (m *Manager) absent(sandboxID string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return closedError()
	}
	b := m.boxes[sandboxID]
	switch {
	case b == nil:
	case b.held:
		return sandbox.Errorf(sandbox.FailedPrecondition, "machine_held", "sandbox %s is suspended", sandboxID).
			WithHint("cloche wake %s brings it back", sandboxID)
	case b.end != nil && b.end.Reason == sandbox.EndStopped:
		return sandbox.Errorf(sandbox.FailedPrecondition, "machine_ended", "sandbox %s is stopped", sandboxID).
			WithHint("cloche wake %s starts it again", sandboxID)
	case b.end != nil:
		return sandbox.Errorf(sandbox.FailedPrecondition, "machine_ended", "the machine of sandbox %s has ended: %s", sandboxID, b.end.Reason).
			WithHint("cloche inspect %s tells more", sandboxID)
	}
	return nil
}

// ends tells whether the sandbox's machine has ended.
func (m *Manager) ends(sandboxID string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.boxes[sandboxID]
	return b != nil && b.end != nil
}

// start is called with e.op held, of a session that is Created or Starting.
func (m *Manager) start(ctx context.Context, e *entry) error {
	client, err := m.opt.Guests.Client(ctx, e.ref.Sandbox)
	if err != nil {
		return err
	}
	l, err := m.acquire(e)
	if err != nil {
		return err
	}
	defer m.release(e)
	// Waiting for the agent took time, in which it may have ended or expired.
	e.mu.Lock()
	status := e.status
	e.mu.Unlock()
	switch status {
	case Created, Starting:
	case Expired:
		return expired(e.ref)
	default:
		return nil
	}
	if status == Created {
		if err := m.intend(e, l); err != nil {
			return err
		}
	}
	e.mu.Lock()
	s := e.session
	e.mu.Unlock()
	if s == nil {
		return nil // it ended meanwhile
	}
	answer, err := client.Start(ctx, connect.NewRequest(startRequest(e.guest, s)))
	if err != nil {
		if refused(err) && status == Created {
			e.setStatus(Starting, Created)
		} else if m.ends(e.ref.Sandbox) {
			// MachineEnded may have looked before the intent was there.
			m.lose(e, l, string(sandbox.EndUnknown), "the machine ended while the command was being started")
		}
		return guestapi.FromRPC(err)
	}
	return m.started(e, l, answer.Msg)
}

// intend writes down that the guest is about to be asked.
func (m *Manager) intend(e *entry, l *log.Log) error {
	if !e.setStatus(Created, Starting) {
		return notRunning(e.ref)
	}
	err := l.Append(log.Starting, nil)
	if err == nil {
		err = l.Flush()
	}
	if err != nil {
		e.setStatus(Starting, Created)
		return sandbox.Errorf(sandbox.Unavailable, "log_write_failed", "the log of session %s can't be written: %w", e.ref.Session, err).
			WithHint("free space under the state directory")
	}
	m.markDirty(e)
	return nil
}

// started records the guest's answer and begins to follow.
func (m *Manager) started(e *entry, l *log.Log, answer *guestv1.StartResponse) error {
	s := &Start{PID: answer.GetPid(), At: m.opt.Clock()}
	if at := time.Unix(0, answer.GetStartedUnixNano()); at.After(e.created) && at.Before(s.At) {
		s.At = at
	}
	e.mu.Lock()
	if e.status.Ended() || e.deleted {
		e.mu.Unlock()
		return nil
	}
	first := e.status == Starting || e.status == Created
	e.status, e.start, e.unsaved = Running, s, true
	e.wake()
	e.mu.Unlock()
	m.markDirty(e)
	if first && l.Accepted() == 0 {
		if b, err := json.Marshal(s); err == nil {
			// Only to know the time after a kill within the next second; the
			// guest could be asked again.
			err = errors.Join(l.Append(log.Started, b), l.Flush())
			m.setProblem(e, err)
		}
	}
	return m.startFollower(e)
}

func startRequest(guest string, s *sandbox.Session) *guestv1.StartRequest {
	p := s.Process
	r := &guestv1.StartRequest{
		Session: guest, Args: p.Args, Env: p.Env, Cwd: p.Cwd, User: p.User,
		Stdin: p.Stdin, TimeoutMs: p.Timeout.Milliseconds(),
	}
	if p.Timeout > 0 && r.TimeoutMs == 0 {
		r.TimeoutMs = 1
	}
	if p.TTY != nil {
		r.Tty = windowSize(*p.TTY)
	}
	return r
}

func windowSize(w sandbox.WindowSize) *guestv1.WindowSize {
	side := func(n int) uint32 { return uint32(min(max(n, 0), 1<<16-1)) }
	return &guestv1.WindowSize{Rows: side(w.Rows), Cols: side(w.Cols)}
}

// setStatus moves e from one status to another, if it is in it.
func (e *entry) setStatus(from, to Status) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.status != from || e.deleted {
		return false
	}
	e.status = to
	e.wake()
	return true
}

// Stdin hands data to the command's stdin, where offset is the number of stdin
// bytes before data: what was taken before is not taken again. It answers how
// many were taken in all; fewer than offset+len(data) means that there was no
// room within ctx. closing closes stdin behind data.
func (m *Manager) Stdin(ctx context.Context, ref Ref, offset uint64, data []byte, closing bool) (accepted uint64, err error) {
	if len(data) > maxEvent {
		return 0, sandbox.Errorf(sandbox.Invalid, "stdin_too_large", "at most %d bytes of stdin at once", maxEvent)
	}
	client, guest, err := m.runningGuest(ctx, ref)
	if err != nil {
		return 0, err
	}
	answer, err := client.Stdin(ctx, connect.NewRequest(&guestv1.StdinRequest{Session: guest, Offset: offset, Data: data, Close: closing}))
	if err != nil {
		return 0, guestapi.FromRPC(err)
	}
	return answer.Msg.GetAccepted(), nil
}

// Signal sends a signal to the command's process group.
func (m *Manager) Signal(ctx context.Context, ref Ref, signal int) error {
	if signal < 1 || signal > 64 {
		return sandbox.Errorf(sandbox.Invalid, "bad_signal", "%d is not a signal", signal)
	}
	client, guest, err := m.runningGuest(ctx, ref)
	if err != nil {
		return err
	}
	_, err = client.Signal(ctx, connect.NewRequest(&guestv1.SignalRequest{Session: guest, Signal: int32(signal)}))
	return guestapi.FromRPC(err)
}

// Resize tells the command's terminal its size.
func (m *Manager) Resize(ctx context.Context, ref Ref, size sandbox.WindowSize) error {
	client, guest, err := m.runningGuest(ctx, ref)
	if err != nil {
		return err
	}
	_, err = client.Resize(ctx, connect.NewRequest(&guestv1.ResizeRequest{Session: guest, Size: windowSize(size)}))
	return guestapi.FromRPC(err)
}

// runningGuest finds the guest of a session that runs, and what that calls it.
func (m *Manager) runningGuest(ctx context.Context, ref Ref) (guestv1connect.GuestClient, string, error) {
	e, err := m.get(ref)
	if err != nil {
		return nil, "", err
	}
	e.mu.Lock()
	status := e.status
	e.mu.Unlock()
	switch status {
	case Expired:
		return nil, "", expired(ref)
	case Running:
		if err := m.absent(ref.Sandbox); err != nil {
			return nil, "", err
		}
		client, err := m.opt.Guests.Client(ctx, ref.Sandbox)
		return client, e.guest, err
	}
	return nil, "", notRunning(ref)
}

func notRunning(ref Ref) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "session_not_running", "session %s is not running", ref.Session).
		WithHint("attach to it first; a session that has ended takes no more input")
}

// refused tells whether err is an answer after which the command surely does
// not run.
func refused(err error) bool {
	switch connect.CodeOf(err) {
	case connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodeFailedPrecondition,
		connect.CodePermissionDenied, connect.CodeResourceExhausted, connect.CodeUnimplemented:
		return true
	}
	return false
}
