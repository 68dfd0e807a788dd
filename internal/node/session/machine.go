package session

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

// deletedSuffix marks a sandbox's directory that is being removed.
const deletedSuffix = ".deleted"

// maxGuestSessions bounds what is looked at of a guest's list.
const maxGuestSessions = 100_000

// MachineReady is to be called after each control hello of a machine, once
// Guests answers with the new link: running sessions are followed again from
// where their logs end, and those that the guest does not know are lost.
func (m *Manager) MachineReady(ctx context.Context, sandboxID string) error {
	m.unhold(sandboxID, nil)
	// Listed before the guest is asked: what is started later is not in its
	// answer and must not be taken for lost.
	entries := m.entries(sandboxID)
	before := make([]Status, len(entries))
	living := map[string]bool{} // by the guest's ids
	for i, e := range entries {
		e.mu.Lock()
		before[i] = e.status
		e.mu.Unlock()
		if !before[i].Ended() {
			living[e.guest] = true
		}
	}
	if len(entries) == 0 {
		return nil
	}
	client, infos, err := m.guestSessions(ctx, sandboxID)
	if err != nil {
		return err
	}
	errs := []error{m.freeStrangers(ctx, client, sandboxID, infos)}
	for i, e := range entries {
		if before[i].Ended() && living[e.guest] {
			continue // what the guest knows by this id goes on as another session
		}
		errs = append(errs, m.meet(ctx, client, e, before[i], infos[e.guest]))
	}
	return errors.Join(errs...)
}

// freeStrangers lets the guest forget ended sessions that belong to nothing
// here: their end was recorded on another timeline, after its snapshot.
func (m *Manager) freeStrangers(ctx context.Context, client guestv1connect.GuestClient, sandboxID string, infos map[string]*guestv1.SessionInfo) error {
	// Listed after the guest was asked: whatever it was told to start before is there.
	known := map[string]bool{}
	for _, e := range m.entries(sandboxID) {
		known[e.guest] = true
	}
	for id, info := range infos {
		if known[id] || !info.GetExited() {
			continue
		}
		if err := ack(ctx, client, id, info.GetProduced(), true); err != nil {
			return guestapi.FromRPC(err)
		}
	}
	return nil
}

func (m *Manager) guestSessions(ctx context.Context, sandboxID string) (guestv1connect.GuestClient, map[string]*guestv1.SessionInfo, error) {
	client, err := m.opt.Guests.Client(ctx, sandboxID)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := client.Sessions(ctx, connect.NewRequest(&guestv1.SessionsRequest{}))
	if err != nil {
		return nil, nil, guestapi.FromRPC(err)
	}
	list := answer.Msg.GetSessions()
	infos := make(map[string]*guestv1.SessionInfo, min(len(list), maxGuestSessions))
	for _, s := range list[:min(len(list), maxGuestSessions)] {
		infos[s.GetSession()] = s
	}
	return client, infos, nil
}

// meet brings one session and what the guest says of it together.
func (m *Manager) meet(ctx context.Context, client guestv1connect.GuestClient, e *entry, was Status, info *guestv1.SessionInfo) error {
	switch {
	case was.Ended() && info.GetExited():
		return guestapi.FromRPC(ack(ctx, client, e.guest, info.GetProduced(), true))
	case was.Ended():
		return nil
	case info == nil && was == Created:
		return nil
	case info == nil && was == Starting:
		e.op.Lock() // a Start under way knows better
		defer e.op.Unlock()
		e.setStatus(Starting, Created)
		return nil
	case info == nil:
		m.end(ctx, []*entry{e}, ReasonUnknown, "the guest does not know the session", 0)
		return nil
	case was == Running:
		return m.refollow(e, info)
	}
	// The guest runs what we had not heard of as started: this process ended
	// between question and answer. To ask again tells what we missed.
	e.op.Lock()
	defer e.op.Unlock()
	e.mu.Lock()
	status := e.status
	e.mu.Unlock()
	if status != Created && status != Starting {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	e.setStatus(Created, Starting)
	return m.start(ctx, e)
}

// refollow follows a running session over the new link. What the guest was
// told to forget and the log does not have any more (a power loss of this host
// that the machine survived) becomes a gap.
func (m *Manager) refollow(e *entry, info *guestv1.SessionInfo) error {
	e.mu.Lock()
	f := e.follower
	if e.start == nil && e.status == Running { // it was inherited
		e.start, e.unsaved = &Start{PID: info.GetPid(), At: m.opt.Clock()}, true
		e.wake()
	}
	e.mu.Unlock()
	if f != nil {
		f.relink()
		return nil
	}
	m.markDirty(e)
	l, err := m.acquire(e)
	if err != nil {
		return err
	}
	defer m.release(e)
	if l.Written() > info.GetProduced() {
		m.lose(e, l, string(sandbox.EndRolledBack), "the machine is of an earlier time than the log")
		return nil
	}
	if to := info.GetAcked(); to > l.Accepted() && to <= info.GetProduced() {
		if to > maxOffset { // what came after it would begin at 0 again
			m.lose(e, l, ReasonProtocol, "the guest says that it has sent more than there can be")
			return nil
		}
		if err := l.Skip(to); err != nil {
			return sandbox.Errorf(sandbox.Internal, "log_write_failed", "the log of session %s can't be written: %w", e.ref.Session, err)
		}
		m.markDirty(e)
		m.opt.Log.Warn("output that the guest was told to forget is not in the log", "session", e.ref.Session, "to", to)
	}
	return m.startFollower(e)
}

// MachineEnded ends the running sessions of a sandbox as lost, after what had
// arrived of them was appended. It returns when that is done.
func (m *Manager) MachineEnded(ctx context.Context, sandboxID string, end sandbox.End) error {
	m.unhold(sandboxID, &end)
	var running []*entry
	for _, e := range m.entries(sandboxID) {
		if e.running() {
			running = append(running, e)
		}
	}
	reason := string(end.Reason)
	if reason == "" {
		reason = string(sandbox.EndUnknown)
	}
	m.end(ctx, running, reason, end.Detail, drainTimeout)
	return ctx.Err()
}

// end ends sessions as lost, giving their links drain to run dry.
func (m *Manager) end(ctx context.Context, entries []*entry, reason, detail string, drain time.Duration) {
	var wg sync.WaitGroup
	limit := time.Now().Add(drain)
	for _, e := range entries {
		e.mu.Lock()
		f := e.follower
		e.mu.Unlock()
		if f == nil {
			if l, err := m.acquire(e); err == nil {
				m.lose(e, l, reason, detail)
				m.release(e)
			}
			continue
		}
		f.finish(reason, detail)
		wg.Go(func() {
			t := time.NewTimer(time.Until(limit))
			defer t.Stop()
			select {
			case <-f.done:
				return
			case <-t.C:
			case <-ctx.Done():
			}
			f.cutLink()
			select {
			case <-f.done:
			case <-ctx.Done():
			}
		})
	}
	wg.Wait()
}

// Barrier returns once everything that the guest had produced when asked is in
// the logs, on disk, and acknowledged.
func (m *Manager) Barrier(ctx context.Context, sandboxID string) error {
	client, infos, err := m.guestSessions(ctx, sandboxID)
	if err != nil {
		return err
	}
	for _, e := range m.entries(sandboxID) {
		e.mu.Lock()
		running := e.status == Running
		e.mu.Unlock()
		if !running {
			continue
		}
		if err := m.barrier(ctx, client, e, infos[e.guest].GetProduced()); err != nil {
			return err
		}
	}
	return nil
}

func (m *Manager) barrier(ctx context.Context, client guestv1connect.GuestClient, e *entry, produced uint64) error {
	l, err := m.acquire(e)
	if err != nil {
		return err
	}
	defer m.release(e)
	for {
		changed := l.Changed()
		e.mu.Lock()
		status, moved := e.status, e.watch()
		e.mu.Unlock()
		if status != Running {
			return nil // it ended, with a sync of its own
		}
		if l.Written() >= produced {
			break
		}
		select {
		case <-ctx.Done():
			return sandbox.AsError(ctx.Err())
		case <-changed:
		case <-moved:
		}
	}
	if err := m.sync(e); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "log_write_failed", "the log of session %s can't be synced: %w", e.ref.Session, err)
	}
	err = guestapi.FromRPC(ack(ctx, client, e.guest, l.Written(), false))
	if sandbox.IsClass(err, sandbox.NotFound) {
		return nil // it has ended meanwhile, and its end was taken: the guest forgot it
	}
	return err
}

// DeleteSandbox forgets a sandbox's sessions, ends their readers and removes
// their files. Idempotent.
func (m *Manager) DeleteSandbox(_ context.Context, sandboxID string) error {
	if !sandbox.ValidID(sandbox.KindSandbox, sandboxID) {
		return sandbox.Errorf(sandbox.Invalid, "bad_id", "%q is not a sandbox's id", sandboxID)
	}
	for _, e := range m.entries(sandboxID) {
		e.mu.Lock()
		f := e.follower
		e.mu.Unlock()
		m.forget(e)
		if f != nil {
			f.stop()
			<-f.done
		}
	}
	m.mu.Lock()
	delete(m.boxes, sandboxID)
	m.mu.Unlock()
	// Renamed first, so that a kill in between leaves nothing that looks like
	// sessions.
	dir := filepath.Join(m.opt.Dir, sandboxID)
	dead := dir + deletedSuffix
	err := os.RemoveAll(dead)
	if err == nil {
		err = os.Rename(dir, dead)
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = os.RemoveAll(dead)
	}
	if err != nil {
		return sandbox.Errorf(sandbox.Internal, "log_not_removed", "remove the logs of sandbox %s: %w", sandboxID, err)
	}
	return nil
}
