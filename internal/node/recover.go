package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// recover takes up what an earlier process left: machines whose bring-up was
// done are adopted, the others are undone, and what no journal roots is
// collected.
func (n *Node) recover(ctx context.Context) {
	if err := n.snapshots.Sweep(); err != nil {
		n.o.Log.Error("remove unfinished snapshots", "err", err)
	}
	entries, err := os.ReadDir(filepath.Join(n.o.StateDir, "machines"))
	if err != nil {
		n.o.Log.Error("list the machines' journals", "err", err)
		return
	}
	var wg sync.WaitGroup
	limit := make(chan struct{}, 8)
	rooted := map[string]bool{}
	for _, e := range entries {
		id := e.Name()
		if !sandbox.ValidID(sandbox.KindSandbox, id) {
			continue
		}
		rooted[id] = true
		wg.Add(1)
		limit <- struct{}{}
		go func() {
			defer wg.Done()
			defer func() { <-limit }()
			n.recoverOne(ctx, id)
		}()
	}
	wg.Wait()
	n.collect(ctx, rooted)
}

func (n *Node) recoverOne(ctx context.Context, id string) {
	log := n.o.Log.With("sandbox", id)
	j, err := loadJournal(n.dir(id))
	if err != nil {
		log.Error("a machine's journal is unreadable; the machine is left alone", "err", err)
		return
	}
	if j, err = n.undone(ctx, id, j); err != nil {
		log.Error("undo an unfinished bring-up", "err", err)
	}
	if j == nil {
		return
	}
	m := n.newMachine(id, j)
	m.wish = loadWish(n.dir(id))
	m.ready = true
	n.mu.Lock()
	n.raise(id, max(j.Request.Generation, m.wish.Fence), time.Now())
	n.mu.Unlock()
	held := n.complete(m.wish.Held)
	if j.End == nil {
		end, err := n.adopt(ctx, m)
		if err != nil {
			m.unlink()
			return // nothing is known of it: the next start finds it as it is
		}
		if end != nil {
			j.End = end
			if err := j.save(n.dir(id)); err != nil {
				log.Error("save a machine's end", "err", err)
			}
			log.Info("machine ended while nobody watched", "reason", end.Reason)
		}
	}
	if j.End != nil && !held { // the release of a machine that is held says what becomes of its sessions
		n.tellEnd(ctx, id, *j.End)
	}
	n.mu.Lock()
	n.machines[id] = m
	n.touch(m)
	n.mu.Unlock()
}

// undone takes back a bring-up that did not end, and what is left of a machine
// that was ended for another's sake. It returns the journal of what is there then.
func (n *Node) undone(ctx context.Context, id string, j *journal) (*journal, error) {
	switch {
	case j == nil:
		return nil, n.sweep(ctx, id)
	case !j.Done:
		if err := n.clear(ctx, id); err != nil {
			return j.Replaces, err // the journal stays, and roots what is left
		}
		return j.Replaces, n.forget(id, j.Replaces)
	case j.End != nil && j.End.Reason == sandbox.EndRolledBack:
		return j, n.clear(ctx, id)
	}
	return j, nil
}

// adopt takes up one machine, or tells how it ended. A machine that can't be
// taken up for another reason is ended: nobody could reach it. Its error is the
// context's: nobody has waited for the machine's answer, whatever came instead.
func (n *Node) adopt(ctx context.Context, m *machine) (*sandbox.End, error) {
	end := func(r sandbox.EndReason, detail string) (*sandbox.End, error) {
		return &sandbox.End{Reason: r, Detail: detail, At: time.Now().UTC()}, nil
	}
	d, ok := n.drivers[m.journal.Driver]
	if !ok {
		return end(sandbox.EndUnknown, "this daemon has no driver "+m.journal.Driver)
	}
	var err error
	m.driver, err = n.askFor(ctx, d, m.id)
	var ended *driver.Ended
	switch {
	case err == nil:
		n.takeUp(ctx, m)
		return nil, nil
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.As(err, &ended) && ended.End.Reason != sandbox.EndUnknown:
		return &ended.End, nil
	case m.journal.BootID != n.o.BootID:
		return end(sandbox.EndHostRestart, "the host was restarted")
	case sandbox.IsClass(err, sandbox.NotFound):
		return end(sandbox.EndUnknown, "it ended while the daemon was down")
	default:
		give := d.Discard
		if s, ok := d.(driver.Salvager); ok { // its disk is not lost with it
			give = s.Halt
		}
		if derr := give(ctx, m.id); derr != nil {
			n.o.Log.Error("end a machine that can't be adopted", "sandbox", m.id, "err", derr)
		}
		return end(sandbox.EndUnknown, "it could not be adopted: "+err.Error())
	}
}

// adoptWait is how long a driver that can't be asked now is asked again.
const adoptWait = 20 * time.Second

// askFor adopts a machine, again where the driver was only not to be reached: an
// engine's process may end at any time and is started anew, and its machines
// live on.
func (n *Node) askFor(ctx context.Context, d driver.Driver, id string) (driver.Machine, error) {
	for end := time.Now().Add(adoptWait); ; {
		m, err := d.Adopt(ctx, id)
		if !sandbox.IsClass(err, sandbox.Unavailable) || time.Now().After(end) {
			return m, err
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// takeUpWait is how long recovery waits for a machine that was adopted to be as it
// is to be. All but a few are at once; that they are waited for bounds how many are
// asked at a time.
const takeUpWait = time.Second

// takeUp follows an adopted machine and brings it to how it is to be. That may
// take minutes, where it is still being written to an image that an earlier
// process asked for; so it is a call of its own, which others for this sandbox
// wait for or supersede, and nobody else.
func (n *Node) takeUp(ctx context.Context, m *machine) {
	n.reattach(ctx, m) // before it goes on
	if !n.complete(m.wish.Held) {
		n.o.Recorder.MachineBack(m.id) // before it can be ready, or end
	}
	n.mu.Lock()
	n.watch(m)
	m.adrift = true
	own, leave := n.admit(n.ctx, m.id, &call{generation: n.fences[m.id].generation}) //nolint:contextcheck // it outlives recovery
	n.mu.Unlock()
	if m.wish.Held == "" {
		n.join(m)
	}
	done := make(chan struct{})
	n.wg.Go(func() {
		defer close(done)
		defer leave()
		if err := n.steady(own, m); err != nil && own.Err() == nil && !gone(m) { // the next verb tries again
			n.o.Log.Error("pause or resume an adopted machine", "sandbox", m.id, "err", err)
		}
	})
	select {
	case <-done:
	case <-time.After(takeUpWait):
	case <-ctx.Done():
	}
}

// steady brings an adopted machine to how it is to be: one that stands still only
// because an earlier process was killed goes on. Only the call under way may.
func (n *Node) steady(ctx context.Context, m *machine) error {
	held := n.complete(m.wish.Held)
	if !held && m.wish.Held != "" { // a snapshot that was not finished
		if err := n.unhold(ctx, m); err != nil {
			return err
		}
	}
	still := held || m.wish.Paused
	paused, err := m.driver.Paused(ctx)
	switch {
	case err == nil && still && !paused:
		err = m.driver.Pause(ctx)
	case err == nil && !still && paused:
		err = m.driver.Resume(ctx)
	}
	if err == nil {
		n.mu.Lock()
		m.adrift = false
		n.mu.Unlock()
	}
	return err
}

// collect removes what bears a sandbox's id and has no journal.
func (n *Node) collect(ctx context.Context, rooted map[string]bool) {
	found := map[string]bool{}
	note := func(ids []string, err error) {
		if err != nil {
			n.o.Log.Error("take the census", "err", err)
		}
		for _, id := range ids {
			if sandbox.ValidID(sandbox.KindSandbox, id) && !rooted[id] {
				found[id] = true
			}
		}
	}
	for _, d := range n.drivers {
		note(d.List(ctx))
	}
	note(n.o.Networks.List(ctx))
	for id := range found {
		n.o.Log.Info("collecting what nothing roots", "sandbox", id)
		if err := n.sweep(ctx, id); err != nil {
			n.o.Log.Error("collect", "sandbox", id, "err", err)
		}
	}
}
