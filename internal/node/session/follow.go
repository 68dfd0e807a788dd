package session

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/node/session/log"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	maxEvent     = 1 << 20                // a guest may not send more output in one event
	maxOffset    = 1 << 62                // nor say that it has sent more in all
	ackBytes     = 128 << 10              // acknowledged at once
	ackDelay     = 20 * time.Millisecond  // the latest for less
	flushDelay   = time.Millisecond       // between two writes of small output
	callTimeout  = 15 * time.Second       // of one short question to a guest
	drainTimeout = 2 * time.Second        // for what a dead machine had sent
	retryFirst   = 50 * time.Millisecond  // pause after a broken link
	retryLast    = 2 * time.Second        // and the longest one
	stuckRetry   = 250 * time.Millisecond // pause after a failed write
	unknownLimit = 3                      // answers "no such session" until it is believed
	brokenLimit  = 8                      // streams without sense and output until the guest is given up
	maxMessage   = 1 << 10                // of a guest's texts that are kept
)

// follower pulls one session's events. Its goroutines are Manager.follow and
// what that starts and awaits.
type follower struct {
	m      *Manager
	e      *entry
	log    *log.Log
	stop   context.CancelFunc
	done   chan struct{}
	kick   chan struct{} // 1; a new link is there: leave the old one
	filled chan struct{} // 1; something was appended

	mu  sync.Mutex
	cut context.CancelFunc // ends the current attempt
	end *Loss              // why it shall end
	die chan struct{}      // closed with end
}

// startFollower begins to follow a running session, once. Called without e.mu.
func (m *Manager) startFollower(e *entry) error {
	l, err := m.acquire(e)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(m.ctx)
	f := &follower{
		m: m, e: e, log: l, stop: cancel, done: make(chan struct{}),
		kick: make(chan struct{}, 1), filled: make(chan struct{}, 1), die: make(chan struct{}),
	}
	m.mu.Lock()
	e.mu.Lock()
	fit := !m.closed && !e.deleted && !e.held && e.follower == nil && e.status == Running
	if fit {
		e.follower = f
		m.wg.Add(1)
	}
	e.mu.Unlock()
	m.mu.Unlock()
	if !fit {
		cancel()
		m.release(e)
		return nil
	}
	go f.run(ctx)
	return nil
}

// run follows until the session has ended or ctx has.
func (f *follower) run(ctx context.Context) {
	defer f.m.wg.Done()
	defer close(f.done)
	defer f.m.release(f.e)
	defer f.stop()
	var wg sync.WaitGroup
	wg.Go(func() { f.flushes(ctx) })
	defer wg.Wait()
	defer f.stop()
	pause := retryFirst
	var failures tally
	for {
		before := f.log.Accepted()
		ended, err := f.attempt(ctx)
		if ended || ctx.Err() != nil {
			return
		}
		if end := f.ending(); end != nil {
			f.lose(end.Reason, end.Detail)
			return
		}
		if f.log.Accepted() > before {
			pause, failures = retryFirst, tally{}
		}
		if loss := failures.count(err); loss != nil {
			f.lose(loss.Reason, loss.Detail)
			return
		}
		if pause = f.wait(ctx, pause); ctx.Err() != nil {
			return
		}
	}
}

// tally counts failures in a row that a new link does not mend.
type tally struct{ unknown, broken int }

// count takes the error of one attempt and tells when it is enough.
func (t *tally) count(err error) *Loss {
	var known *sandbox.Error
	if err == nil || errors.As(err, &known) {
		return nil // an early end, or no link
	}
	switch connect.CodeOf(err) {
	case connect.CodeNotFound:
		if t.unknown++; t.unknown >= unknownLimit {
			return &Loss{Reason: ReasonUnknown, Detail: "the guest does not know the session"}
		}
	case connect.CodeInvalidArgument, connect.CodeInternal, connect.CodeResourceExhausted, connect.CodeUnimplemented:
		if t.broken++; t.broken >= brokenLimit {
			return &Loss{Reason: ReasonProtocol, Detail: "the guest's answers can't be understood: " + text(err.Error())}
		}
	default:
		*t = tally{}
	}
	return nil
}

// wait pauses between two attempts and tells the next pause.
func (f *follower) wait(ctx context.Context, pause time.Duration) time.Duration {
	t := time.NewTimer(pause)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-f.kick:
		return retryFirst
	case <-f.die:
	case <-t.C:
	}
	return min(2*pause, retryLast)
}

func (f *follower) ending() *Loss {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.end
}

// finish makes the follower end the session as lost once its link has ended,
// unless the exit was still on its way.
func (f *follower) finish(reason, detail string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.end == nil {
		f.end = &Loss{Reason: reason, Detail: detail}
		close(f.die)
	}
}

// relink makes the follower leave its link for a new one.
func (f *follower) relink() {
	select {
	case f.kick <- struct{}{}:
	default:
	}
	f.cutLink()
}

func (f *follower) cutLink() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cut != nil {
		f.cut()
	}
}

// attempt follows over one link from the end of the log on. ended: there is
// nothing more to follow.
func (f *follower) attempt(ctx context.Context) (ended bool, err error) {
	if f.unstick(ctx, f.log.Flush) != nil {
		return false, ctx.Err()
	}
	link, cancel := context.WithCancel(ctx)
	defer cancel()
	f.mu.Lock()
	f.cut = cancel
	f.mu.Unlock()

	client, err := f.client(link)
	if err != nil {
		return false, err
	}
	// Before Follow, which answers with the first event only: a guest whose
	// buffer is full of what an earlier link took has none until it hears so.
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { f.acks(link, client) })
	stream, err := client.Follow(link, connect.NewRequest(&guestv1.FollowRequest{
		Session: f.e.guest, Offset: f.log.Accepted(),
	}))
	if err != nil {
		return false, err
	}
	defer stream.Close() //nolint:errcheck // its end is told by Err
	for stream.Receive() {
		exit, err := f.take(link, stream.Msg())
		var broken *protocolError
		switch {
		case errors.As(err, &broken):
			f.lose(ReasonProtocol, broken.text)
			return true, nil
		case err != nil:
			return false, err
		case exit != nil:
			return f.exit(ctx, client, exit), nil
		}
	}
	return false, stream.Err()
}

func (f *follower) client(ctx context.Context) (guestv1connect.GuestClient, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return f.m.opt.Guests.Client(ctx, f.e.ref.Sandbox)
}

// protocolError is what a guest did against the protocol.
type protocolError struct{ text string }

func (p *protocolError) Error() string { return p.text }

// take checks one event and appends what is new in it.
func (f *follower) take(ctx context.Context, ev *guestv1.Event) (*guestv1.Exit, error) {
	at := f.log.Accepted()
	if ev.GetOffset() > at {
		return nil, &protocolError{"the guest left output out"}
	}
	var t log.Type
	var data []byte
	switch v := ev.GetEvent().(type) {
	case *guestv1.Event_Stdout:
		t, data = log.Stdout, v.Stdout
	case *guestv1.Event_Stderr:
		t, data = log.Stderr, v.Stderr
	case *guestv1.Event_Exit:
		if ev.GetOffset() != at {
			return nil, &protocolError{"the guest told the exit before output that it had sent"}
		}
		return v.Exit, nil
	default:
		return nil, nil // an event of a later version
	}
	if len(data) > maxEvent {
		return nil, &protocolError{"the guest sent an event that is too large"}
	}
	known := at - ev.GetOffset()
	if known >= uint64(len(data)) {
		return nil, nil
	}
	err := f.log.Append(t, data[known:])
	if err == nil {
		f.m.recorded.Add(uint64(len(data) - int(known)))
	}
	f.m.markDirty(f.e)
	if err != nil {
		return nil, f.unstick(ctx, f.log.Flush)
	}
	select {
	case f.filled <- struct{}{}:
	default:
	}
	return nil, nil
}

// unstick repeats a write until it succeeds or ctx ends. Meanwhile nothing is
// received, so that the guest's buffer fills and the command waits.
func (f *follower) unstick(ctx context.Context, write func() error) error {
	for {
		err := write()
		f.m.setProblem(f.e, err)
		if err == nil {
			return nil
		}
		t := time.NewTimer(stuckRetry)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		}
	}
}

// flushes writes small output out: at once after a pause, and at most once in
// flushDelay while it keeps coming. A failure is repeated by the sync loop and
// by the next output.
func (f *follower) flushes(ctx context.Context) {
	t := time.NewTimer(flushDelay)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.filled:
		}
		f.m.markDirty(f.e)
		pause := flushDelay
		if err := f.log.Flush(); err != nil {
			f.m.setProblem(f.e, err)
			pause = stuckRetry
			f.again()
		} else {
			f.m.setProblem(f.e, nil)
		}
		t.Reset(pause)
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (f *follower) again() {
	select {
	case f.filled <- struct{}{}:
	default:
	}
}

// acks tells the guest what was written.
func (f *follower) acks(ctx context.Context, client guestv1connect.GuestClient) {
	var acked uint64
	t := time.NewTimer(0)
	defer t.Stop()
	for {
		changed := f.log.Changed()
		written := f.log.Written()
		if written == acked {
			select {
			case <-ctx.Done():
				return
			case <-changed:
				continue
			}
		}
		t.Reset(ackDelay)
		for due := false; !due && written-acked < ackBytes; {
			select {
			case <-ctx.Done():
				return
			case <-t.C:
				due = true
			case <-changed:
				changed = f.log.Changed()
			}
			written = f.log.Written()
		}
		failpoint.Hit("session.append.written")
		if ack(ctx, client, f.e.guest, written, false) == nil {
			acked = written
			continue
		}
		t.Reset(stuckRetry)
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

func ack(ctx context.Context, client guestv1connect.GuestClient, session string, offset uint64, exit bool) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := client.Ack(ctx, connect.NewRequest(&guestv1.AckRequest{Session: session, Offset: offset, Exit: exit}))
	return err
}

// exit records the exit for good, tells readers, then the guest. False when
// ctx ended before it was recorded: the guest still has it.
func (f *follower) exit(ctx context.Context, client guestv1connect.GuestClient, g *guestv1.Exit) bool {
	x := &Exit{
		Code: int(min(max(g.GetCode(), 0), 255)), Signal: int(min(max(g.GetSignal(), 0), 64)),
		Reason: "exited", Message: text(g.GetMessage()), At: f.m.opt.Clock(),
	}
	switch r := g.GetReason(); r {
	case "signaled", "timeout", "start_failed":
		x.Reason = r
	}
	if !f.e.active() {
		return true
	}
	b, err := json.Marshal(x)
	if err == nil {
		err = f.log.Append(log.Exit, b)
	}
	if err != nil {
		return false // closed under us: the guest still has it
	}
	if f.unstick(ctx, f.log.Sync) != nil {
		return false
	}
	failpoint.Hit("session.exit.synced")
	f.m.ended(f.e, f.log.Written(), Exited, x, nil)
	if err := ack(ctx, client, f.e.guest, f.log.Written(), true); err != nil {
		f.m.opt.Log.Debug("an exit could not be acknowledged; the next hello does it", "session", f.e.ref.Session, "error", err)
	}
	return true
}

// lose ends the session without an exit.
func (f *follower) lose(reason, detail string) {
	if f.e.active() {
		f.m.lose(f.e, f.log, reason, detail)
	}
}

// text makes a guest's text fit to be kept and shown.
func text(s string) string {
	if len(s) > maxMessage {
		s = s[:maxMessage]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
