package drivertest

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

// sessionTimeout bounds one session.
const sessionTimeout = 40 * time.Second

// result is a session's log so far.
type result struct {
	out, err bytes.Buffer
	offset   uint64
	exit     *guestv1.Exit
}

func (x *box) client() guestv1connect.GuestClient {
	x.b.Helper()
	return x.reach(x.b.ctx)
}

// start starts a session and returns its id.
func (x *box) start(m *guestv1.StartRequest) string {
	x.b.Helper()
	m.Session = sandbox.NewID(sandbox.KindSession)
	ctx, cancel := x.b.within(x.b.patience())
	defer cancel()
	if _, err := x.client().Start(ctx, connect.NewRequest(m)); err != nil {
		x.b.Fatalf("start %v: %v", m.GetArgs(), err)
	}
	return m.GetSession()
}

// as makes the request to run the image's program as a user.
func as(user string, args ...string) *guestv1.StartRequest {
	return &guestv1.StartRequest{User: user, Args: append([]string{insidePath}, args...)}
}

// do runs a request to its end.
func (x *box) do(m *guestv1.StartRequest) *result {
	x.b.Helper()
	r := new(result)
	x.follow(x.start(m), r, nil)
	return r
}

// root runs the image's program as root and returns its output; it must succeed.
func (x *box) root(args ...string) string { x.b.Helper(); return x.must(as("root", args...)) }

// user does the same as a user without rights.
func (x *box) user(args ...string) string { x.b.Helper(); return x.must(as("user", args...)) }

func (x *box) must(m *guestv1.StartRequest) string {
	x.b.Helper()
	r := x.do(m)
	if r.exit.GetCode() != 0 {
		x.b.Fatalf("%v ended with %v: %q %q", m.GetArgs()[1:], r.exit, r.out.String(), r.err.String())
	}
	return r.out.String()
}

// background starts a request and waits until its output holds a word.
func (x *box) background(m *guestv1.StartRequest, word string) (session string, r *result) {
	x.b.Helper()
	session, r = x.start(m), new(result)
	x.follow(session, r, func() bool { return strings.Contains(r.out.String(), word) })
	if r.exit != nil {
		x.b.Fatalf("%v ended early: %v, %q", m.GetArgs(), r.exit, r.out.String())
	}
	return session, r
}

// follow follows a session to its exit or until enough, over as many
// connections as it takes, acknowledging as it goes.
func (x *box) follow(session string, r *result, enough func() bool) {
	x.b.Helper()
	ctx, cancel := x.b.within(x.b.h.slowly(sessionTimeout))
	defer cancel()
	exited := x.m.Exited()
	go func() { // ends with ctx, if not before
		select {
		case <-exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	for r.exit == nil && (enough == nil || !enough()) {
		err := followOnce(ctx, x.reach(ctx), session, r, enough)
		if err == nil || r.exit != nil {
			continue
		}
		if code := connect.CodeOf(err); ctx.Err() != nil || code == connect.CodeNotFound || code == connect.CodeInvalidArgument {
			x.b.Fatalf("follow at %d (%q, %q): %v; the machine's end: %+v", r.offset, ends(r.out.Bytes()), ends(r.err.Bytes()), err, x.m.End())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// reach waits for the agent.
func (x *box) reach(ctx context.Context) guestv1connect.GuestClient {
	x.b.Helper()
	ctx, cancel := context.WithTimeout(ctx, x.b.patience())
	defer cancel()
	c, err := x.link.Client(ctx)
	if err != nil {
		x.b.Fatalf("the agent is gone: %v; the machine's end: %+v", err, x.m.End())
	}
	return c
}

func ends(b []byte) []byte { return b[max(0, len(b)-200):] }

func followOnce(ctx context.Context, c guestv1connect.GuestClient, session string, r *result, enough func() bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Follow(ctx, connect.NewRequest(&guestv1.FollowRequest{Session: session, Offset: r.offset}))
	if err != nil {
		return err
	}
	defer s.Close()
	acked := r.offset
	for s.Receive() {
		ev := s.Msg()
		if ev.GetOffset() != r.offset {
			return connect.NewError(connect.CodeInvalidArgument, errOffset(ev.GetOffset()))
		}
		r.out.Write(ev.GetStdout())
		r.err.Write(ev.GetStderr())
		r.offset += uint64(len(ev.GetStdout()) + len(ev.GetStderr()))
		r.exit = ev.GetExit()
		if r.offset-acked >= 256<<10 || r.exit != nil {
			ack := &guestv1.AckRequest{Session: session, Offset: r.offset, Exit: r.exit != nil}
			if _, err := c.Ack(ctx, connect.NewRequest(ack)); err != nil {
				return err
			}
			acked = r.offset
		}
		if enough != nil && enough() {
			return nil
		}
	}
	return s.Err()
}

type errOffset uint64

// Error implements error.
func (errOffset) Error() string { return "an event has the wrong offset" }

// feed gives a session its whole stdin.
func (x *box) feed(session string, data []byte) {
	x.b.Helper()
	ctx, cancel := x.b.within(x.b.h.slowly(sessionTimeout))
	defer cancel()
	c, offset := x.client(), uint64(0)
	for closed := false; !closed; {
		piece := data[offset:min(len(data), int(offset)+100_000)]
		last := int(offset)+len(piece) == len(data)
		resp, err := c.Stdin(ctx, connect.NewRequest(&guestv1.StdinRequest{Session: session, Offset: offset, Data: piece, Close: last}))
		if err != nil {
			x.b.Fatalf("stdin at %d: %v", offset, err)
		}
		offset, closed = resp.Msg.GetAccepted(), resp.Msg.GetClosed()
	}
}

func (x *box) signal(session string, sig int) {
	x.b.Helper()
	if _, err := x.client().Signal(x.b.ctx, connect.NewRequest(&guestv1.SignalRequest{Session: session, Signal: int32(sig)})); err != nil {
		x.b.Fatalf("signal: %v", err)
	}
}

// want asserts one output.
func (b *bench) want(what, got, want string) {
	b.Helper()
	if got != want {
		b.Errorf("%s is %q, not %q", what, got, want)
	}
}

// has asserts that a text of lines holds one line.
func (b *bench) has(what, text, line string) {
	b.Helper()
	if !slices.Contains(strings.Split(text, "\n"), line) {
		b.Errorf("%s has no line %q: %q", what, line, text)
	}
}
