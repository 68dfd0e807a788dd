package session

import (
	"cmp"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

// sigterm is what a command is asked to end with.
const sigterm = 15

// MachineHeld is to be called when a machine was let go to be restored later:
// its sessions neither end nor are they asked for until MachineReady. Their
// readers stay, and hear nothing. Idempotent.
func (m *Manager) MachineHeld(_ context.Context, sandboxID string) error {
	m.mu.Lock()
	b := m.box(sandboxID)
	b.held, b.end = true, nil
	m.mu.Unlock()
	// It is not synced: a host that goes down takes no held machine with it, and
	// without the file sessions wait as well, only for a guest that is not there.
	err := os.WriteFile(m.heldFile(sandboxID), nil, 0o600)
	if errors.Is(err, os.ErrNotExist) {
		err = nil // it has no session
	}
	errs := []error{err}
	for _, e := range m.entries(sandboxID) {
		errs = append(errs, m.hold(e))
	}
	return errors.Join(errs...)
}

// MachineBack takes MachineHeld or MachineEnded back before MachineReady is
// called: what is asked of the sandbox's sessions waits for its guest. Idempotent.
func (m *Manager) MachineBack(sandboxID string) { m.unhold(sandboxID, nil) }

func (m *Manager) heldFile(sandboxID string) string {
	return filepath.Join(m.opt.Dir, sandboxID, heldName)
}

// hold ends the following of one session and lets go of what it holds open.
func (m *Manager) hold(e *entry) error {
	e.mu.Lock()
	if e.status.Ended() || e.deleted {
		e.mu.Unlock()
		return nil
	}
	e.held = true
	f := e.follower
	e.wake()
	e.mu.Unlock()
	if f != nil {
		f.stop()
		<-f.done
	}
	err := m.sync(e)
	e.mu.Lock()
	if e.follower == f {
		e.follower = nil
	}
	l := e.rest()
	e.mu.Unlock()
	m.closeLog(e, l)
	return err
}

// unhold takes MachineHeld back, and notes how the machine ended, nil where it
// is there.
func (m *Manager) unhold(sandboxID string, end *sandbox.End) {
	m.mu.Lock()
	b := m.boxes[sandboxID]
	if b == nil && end != nil {
		b = m.box(sandboxID)
	}
	held := b != nil && b.held
	if b != nil {
		b.held, b.end = false, end
	}
	m.mu.Unlock()
	if !held {
		return
	}
	if err := os.Remove(m.heldFile(sandboxID)); err != nil && !errors.Is(err, os.ErrNotExist) {
		m.opt.Log.Warn("a sandbox's mark of being held can't be removed", "sandbox", sandboxID, "error", err)
	}
	for _, e := range m.entries(sandboxID) {
		e.mu.Lock()
		e.held = false
		e.wake()
		e.mu.Unlock()
	}
}

// Living lists the sessions that run in the machine now, for the manifest of a
// snapshot: Parent is the id by which the guest knows each, and ParentOffset
// the offset up to which its output is in the log here, which is all that the guest
// may have been told to forget. It asks nothing of the guest. Called after
// Barrier and once no connection is left, so that both stay true.
func (m *Manager) Living(_ context.Context, sandboxID string) ([]sandbox.Session, error) {
	var list []sandbox.Session
	for _, e := range m.entries(sandboxID) {
		e.mu.Lock()
		alive := (e.status == Running || e.status == Starting) && !e.deleted
		var s sandbox.Session
		if alive {
			s = *e.session
		}
		e.mu.Unlock()
		if !alive {
			continue
		}
		l, err := m.acquire(e)
		if sandbox.IsClass(err, sandbox.NotFound) {
			continue // deleted meanwhile
		}
		if err != nil {
			return nil, err
		}
		s.Parent, s.ParentOffset = e.guest, l.Written()
		m.release(e)
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b sandbox.Session) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return list, nil
}

// Inherit makes new sessions of those that a machine on a new timeline brought
// along; from is Living's answer of when its snapshot was taken. What ran here
// on the timeline before ends with it. It is idempotent by (sandbox, epoch),
// also over restarts, and called before MachineReady.
func (m *Manager) Inherit(ctx context.Context, sandboxID, project string, epoch int64, from []sandbox.Session) ([]sandbox.Session, error) {
	if !sandbox.ValidID(sandbox.KindSandbox, sandboxID) || len(from) > maxGuestSessions || epoch <= 0 {
		return nil, sandbox.Errorf(sandbox.Invalid, "bad_inheritance", "%d sessions can't go on in sandbox %q", len(from), sandboxID)
	}
	var stale []*entry
	known := map[string]*entry{} // by parent
	for _, e := range m.entries(sandboxID) {
		e.mu.Lock()
		switch {
		case e.status.Ended() || e.deleted:
		case e.epoch == epoch:
			known[e.session.Parent] = e
		case e.status != Created:
			stale = append(stale, e)
		}
		e.mu.Unlock()
	}
	list := make([]sandbox.Session, 0, len(from))
	for _, f := range from {
		e := known[f.ID]
		if e == nil {
			var err error
			if e, err = m.inherit(sandboxID, project, epoch, f); err != nil {
				return nil, err
			}
			failpoint.Hit("session.inherit.made")
			known[f.ID] = e
		}
		e.mu.Lock()
		if e.session != nil { // not ended meanwhile
			list = append(list, *e.session)
		}
		e.mu.Unlock()
	}
	m.unhold(sandboxID, nil)
	m.end(ctx, stale, string(sandbox.EndRolledBack), "the sandbox went on from a snapshot", 0)
	return list, ctx.Err()
}

// inherit makes the session that goes on from f, durably.
func (m *Manager) inherit(sandboxID, project string, epoch int64, f sandbox.Session) (*entry, error) {
	guest := cmp.Or(f.Parent, f.ID)
	if !sandbox.ValidID(sandbox.KindSession, f.ID) || !sandbox.ValidID(sandbox.KindSession, guest) {
		return nil, sandbox.Errorf(sandbox.Invalid, "bad_id", "%q is not a session's id", f.ID)
	}
	s := sandbox.Session{
		ID: sandbox.NewID(sandbox.KindSession), Project: project, Sandbox: sandboxID, Process: f.Process,
		Generation: 1, Key: f.Key, CreatedAt: m.opt.Clock().UTC(), Parent: f.ID, ParentOffset: f.ParentOffset,
	}
	ref := Ref{sandboxID, s.ID}
	// Without a start: that is known, and told, once the guest was met.
	e := newEntry(ref, m.sessionDir(ref), &meta{Session: s, Guest: guest, Epoch: epoch, Status: Running})
	e.op.Lock()
	defer e.op.Unlock()
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil, closedError()
	}
	m.box(sandboxID).sessions[s.ID] = e
	m.mu.Unlock()
	return e, m.make(e)
}

// Terminate asks every running session to end (SIGTERM) and waits until all
// have ended, at most grace: that some have not by then is no error.
func (m *Manager) Terminate(ctx context.Context, sandboxID string, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	var asked []*entry
	for _, e := range m.entries(sandboxID) {
		if !e.running() {
			continue
		}
		client, err := m.opt.Guests.Client(ctx, sandboxID)
		if err != nil {
			return err
		}
		_, err = client.Signal(ctx, connect.NewRequest(&guestv1.SignalRequest{Session: e.guest, Signal: sigterm}))
		if err != nil { // most likely it has just ended
			m.opt.Log.Debug("a session could not be asked to end", "session", e.ref.Session, "error", err)
		}
		asked = append(asked, e)
	}
	for _, e := range asked {
		if !e.await(ctx) {
			return nil
		}
	}
	return nil
}

// running tells whether e's command runs, or may.
func (e *entry) running() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return !e.deleted && (e.status == Running || e.status == Starting)
}

// await waits until e has ended; false when ctx ended first.
func (e *entry) await(ctx context.Context) bool {
	for {
		e.mu.Lock()
		over, moved := e.deleted || e.status.Ended(), e.watch()
		e.mu.Unlock()
		if over {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-moved:
		}
	}
}

// Active counts the sandbox's running sessions.
func (m *Manager) Active(sandboxID string) int {
	n := 0
	for _, e := range m.entries(sandboxID) {
		if e.running() {
			n++
		}
	}
	return n
}
