package dataplane

import (
	"context"
	"net/http"
	"slices"
	"time"

	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
)

// Calls that need the machine fall into three sorts. A plain GET of a log or of
// a session needs none, touches nothing and wakes nothing. A GET of files
// touches (running) but does not wake. Everything else touches, and wakes where
// the sandbox's policy says so (awake); what lasts holds the sandbox for as long.

// running makes sure that a sandbox of the request's caller runs, and touches
// it.
func (p *Plane) running(ctx context.Context, sandboxID string) error {
	sb, err := p.o.Identities.Get(ctx, callerOf(ctx), sandboxID)
	if err != nil {
		return err
	}
	return p.touched(sb)
}

func (p *Plane) touched(sb sandbox.Sandbox) error {
	if sb.State.Serves() {
		p.o.Identities.Touch(sb.ID)
		return nil
	}
	return notRunning(sb)
}

// awake is running for a call that may wake the sandbox. It waits for that.
func (p *Plane) awake(ctx context.Context, sandboxID string) error {
	sb, err := p.access(ctx, sandboxID)
	if err != nil {
		return err
	}
	return p.touched(sb)
}

// access wakes a sandbox that does not run, where its policy says so, and
// returns it as it is then.
func (p *Plane) access(ctx context.Context, sandboxID string) (sandbox.Sandbox, error) {
	sb, err := p.o.Identities.Get(ctx, callerOf(ctx), sandboxID)
	if err != nil || sb.State.Serves() {
		return sb, err
	}
	if err := p.o.Identities.Access(ctx, sb.Project, sandboxID); err != nil {
		return sb, err
	}
	return p.o.Identities.Get(ctx, callerOf(ctx), sandboxID)
}

// notRunning says what would make a sandbox run.
func notRunning(sb sandbox.Sandbox) error {
	e := sandbox.Errorf(sandbox.FailedPrecondition, "sandbox_not_running", "sandbox %s is %s", sb.ID, sb.State)
	if sb.State.Transitional() && sb.State != sandbox.StateDeleting {
		return e.WithHint("wait until its operation %s has ended", sb.Operation).WithRetry(time.Second)
	}
	if _, wakes := sandbox.Find(sb.State, sandbox.VerbWake); wakes {
		return e.WithHint("wake it, or give it the policy wake_on_access")
	}
	if _, starts := sandbox.Find(sb.State, sandbox.VerbStart); starts {
		return e.WithHint("start it again from its recovery point")
	}
	return e.WithHint("only a sandbox that runs can do this")
}

// standing are the states in which what runs in a sandbox stands still, and
// goes on later.
var standing = []sandbox.State{sandbox.StatePaused, sandbox.StateResuming, sandbox.StateSuspended, sandbox.StateRestoring}

// held tells whether a session that runs stands still.
func (p *Plane) held(ctx context.Context, st session.State, sandboxID string) (bool, error) {
	if st.Status != session.Running && st.Status != session.Starting {
		return false, nil
	}
	if st.Held {
		return true, nil
	}
	sb, err := p.o.Identities.Get(ctx, callerOf(ctx), sandboxID)
	return slices.Contains(standing, sb.State), err
}

// known makes sure that the request's caller may have this session, whatever
// its sandbox does.
func (p *Plane) known(r *http.Request, sandboxID, sessionID string) (session.Ref, error) {
	_, err := p.o.Identities.Session(r.Context(), callerOf(r.Context()), sandboxID, sessionID)
	return session.Ref{Sandbox: sandboxID, Session: sessionID}, err
}

// live is known for a session whose sandbox has to run. It may wake it, but
// not for a command that has ended, which the recorder then says.
func (p *Plane) live(r *http.Request, sandboxID, sessionID string) (session.Ref, error) {
	ref, err := p.known(r, sandboxID, sessionID)
	if err != nil {
		return ref, err
	}
	if p.over(ref) {
		return ref, nil
	}
	return ref, p.awake(r.Context(), sandboxID)
}

// over tells whether a session has ended for certain.
func (p *Plane) over(ref session.Ref) bool {
	st, err := p.o.Recorder.State(ref)
	return err == nil && (st.Status == session.Exited || st.Status == session.Lost || st.Status == session.Expired)
}
