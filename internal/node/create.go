package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
)

// undoTimeout bounds taking back what a failed or superseded call did.
const undoTimeout = 90 * time.Second

// step is one part of a verb. Undo must succeed when do failed half way or
// never ran, and is given a context that the caller's cancellation doesn't end.
type step struct {
	name string
	do   func(ctx context.Context) error
	undo func(ctx context.Context) error // nil: nothing is to be taken back
	// root: what is undone last, and only when nothing else is left, since a
	// restart finds the rest through it.
	root bool
}

// perform runs steps; when one fails it undoes all of them, last first.
func (n *Node) perform(ctx context.Context, what, id string, steps []step) error {
	for i, s := range steps {
		err := ctx.Err()
		if err == nil {
			err = s.do(ctx)
		}
		if err == nil {
			continue
		}
		err = snapshot.DiskError(err) // whatever the step was, a full disk is an ordinary error
		n.o.Log.Info(what+" failed", "sandbox", id, "step", s.name, "err", err)
		if failpoint.Skip(failpoint.SkipUndo) {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		if uerr := n.undo(ctx, steps[:i+1]); uerr != nil {
			// The journal stays and roots what is left: the next call for this
			// sandbox, or the next start, tries again.
			n.o.Log.Error("undo a failed "+what, "sandbox", id, "err", uerr)
		}
		return fmt.Errorf("%s: %w", s.name, err)
	}
	return nil
}

// undo takes steps back, last first, and goes on past failures; it returns the
// first.
func (n *Node) undo(ctx context.Context, steps []step) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	var first error
	for i := len(steps) - 1; i >= 0; i-- {
		if steps[i].undo == nil || steps[i].root && first != nil {
			continue
		}
		if err := steps[i].undo(ctx); err != nil && first == nil {
			first = fmt.Errorf("undo %q: %w", steps[i].name, err)
		}
	}
	return first
}

// CreateMachine implements sandbox.Machines.
func (n *Node) CreateMachine(ctx context.Context, req sandbox.MachineRequest) (sandbox.MachineStatus, error) {
	var none sandbox.MachineStatus
	ctx, leave, err := n.enter(ctx, req.Sandbox, req.Generation)
	if err != nil {
		return none, err
	}
	defer leave()

	old := n.known(req.Sandbox)
	if old != nil {
		if st := n.statusOf(old); st.Generation == req.Generation && st.Ready {
			st.Sessions = old.journal.Sessions
			return st, nil
		}
	}
	d, err := n.pick(req)
	if err != nil {
		return none, err
	}
	m := n.newMachine(req.Sandbox, nil)
	ready := false
	defer func() {
		if !ready {
			m.unlink()
			n.cut(m)
		}
	}()
	from, err := n.origin(ctx, d, req)
	if err != nil {
		return none, err
	}
	if err := n.takeSlot(ctx); err != nil {
		return none, err
	}
	defer func() { <-n.slots }()
	m.journal = n.newJournal(req, d.Name(), from)
	if fromMemory(req) {
		m.former = from.manifest.Key
	}
	if old != nil && req.Source != nil && req.Source.Replace {
		return n.replace(ctx, d, m, from, old, &ready)
	}
	if err := n.makeRoom(ctx, req, old); err != nil {
		return none, err
	}
	return n.bringUp(ctx, d, m, from, &ready)
}

// makeRoom removes what an earlier generation left under this id, also what
// could not be undone when it was tried.
func (n *Node) makeRoom(ctx context.Context, req sandbox.MachineRequest, old *machine) error {
	if old == nil {
		if _, err := os.Lstat(n.dir(req.Sandbox)); errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return n.sweep(ctx, req.Sandbox)
	}
	return n.remove(ctx, req.Sandbox, func() error {
		if fromMemory(req) && req.Source.Continue { // its sessions wait in the image
			return n.o.Recorder.MachineHeld(ctx, req.Sandbox)
		}
		n.tellEnd(ctx, req.Sandbox, sandbox.End{Reason: sandbox.EndDeleted, At: time.Now().UTC()})
		return nil
	})
}

// bringUp makes the machine, or leaves nothing of it.
func (n *Node) bringUp(ctx context.Context, d driver.Driver, m *machine, from *origin, ready *bool) (sandbox.MachineStatus, error) {
	steps := append(n.steps(d, m, from), n.lastSteps(m, from)...)
	if err := n.perform(ctx, "bring-up", m.id, steps); err != nil {
		return sandbox.MachineStatus{}, err
	}
	*ready = true
	n.o.Recorder.MachineBack(m.id) // before anybody is told that it runs
	n.mu.Lock()
	defer n.mu.Unlock()
	m.ready, m.former = true, nil
	n.machines[m.id] = m
	n.touch(m)
	n.watch(m)
	st := n.status(m)
	st.Sessions = m.journal.Sessions
	return st, nil
}

// steps lists the bring-up of one machine up to where it runs, in order.
func (n *Node) steps(d driver.Driver, m *machine, from *origin) []step {
	req := m.journal.Request
	spec := driver.Spec{
		ID: m.id, Hostname: req.Hostname, Resources: req.Resources, MaxProcs: int(m.journal.MaxProcs),
	}
	return []step{
		{
			name: "note the intent",
			do: func(context.Context) error {
				defer failpoint.Hit("node.create.noted")
				if err := os.Remove(filepath.Join(n.dir(m.id), wishFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
					return err
				}
				return m.journal.save(n.dir(m.id))
			},
			undo: func(context.Context) error { return n.forget(m.id, m.journal.Replaces) },
			root: true,
		},
		{
			name: "find the template and the guest",
			do: func(ctx context.Context) (err error) {
				spec.Image, spec.Guest, err = n.parts(ctx, req, m.journal.Guest)
				return err
			},
		},
		{
			name: "make the network namespace",
			do: func(ctx context.Context) (err error) {
				defer failpoint.Hit("node.create.network")
				spec.NetNS, err = n.o.Networks.Create(ctx, m.id)
				return err
			},
			undo: func(ctx context.Context) error { return n.o.Networks.Delete(ctx, m.id) },
		},
		n.gatewayStep(m),
		{
			name: "create the machine",
			do: func(ctx context.Context) (err error) {
				defer failpoint.Hit("node.create.machine")
				if from == nil {
					m.driver, err = d.Create(ctx, spec)
				} else {
					m.driver, err = d.Restore(ctx, spec, from.image)
				}
				return err
			},
			undo: func(ctx context.Context) error { return d.Discard(ctx, m.id) },
		},
		{
			name: "wait for the agent",
			do: func(ctx context.Context) error {
				defer failpoint.Hit("node.create.hello")
				return n.connect(ctx, m)
			},
			undo: func(context.Context) error { n.cut(m); return nil },
		},
	}
}

// lastSteps make of a machine that runs one that is told of.
func (n *Node) lastSteps(m *machine, from *origin) []step {
	var steps []step
	req := m.journal.Request
	switch {
	case branches(req): // which ends what ran on the timeline before
		steps = append(steps, step{
			name: "let the sessions go on",
			do: func(ctx context.Context) (err error) {
				defer failpoint.Hit("node.create.inherited")
				m.journal.Sessions, err = n.o.Recorder.Inherit(ctx, m.id, req.Project, req.Generation, from.manifest.Sessions)
				return err
			},
			undo: func(ctx context.Context) error {
				n.tellEnd(ctx, m.id, sandbox.End{Reason: sandbox.EndCreateFailed, At: time.Now().UTC()})
				return nil
			},
		})
	case req.Source != nil && req.Source.Replace: // of a suspended sandbox some may still wait
		steps = append(steps, step{
			name: "end the sessions of the abandoned timeline",
			do: func(ctx context.Context) error {
				n.tellEnd(ctx, m.id, sandbox.End{Reason: sandbox.EndRolledBack, At: time.Now().UTC()})
				return nil
			},
		})
	}
	return append(steps, step{
		name: "note that it is done",
		do: func(context.Context) error {
			j := *m.journal
			j.Done, j.Replaces = true, nil
			if err := j.save(n.dir(m.id)); err != nil {
				return err
			}
			m.journal = &j
			failpoint.Hit("node.create.done")
			return nil
		},
	})
}

// forget removes a machine's journal, or puts back the record of the one that
// it was to replace.
func (n *Node) forget(id string, replaced *journal) error {
	if replaced != nil {
		return replaced.save(n.dir(id))
	}
	return os.RemoveAll(n.dir(id))
}

// takeSlot waits for one of the places for creations.
func (n *Node) takeSlot(ctx context.Context) error {
	select {
	case n.slots <- struct{}{}:
		return nil
	default:
	}
	n.mu.Lock()
	n.waiting++
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		n.waiting--
		n.mu.Unlock()
	}()
	select {
	case n.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// environment is what every process in the sandbox gets: the template's, then
// the sandbox's own.
func environment(req sandbox.MachineRequest) map[string]string {
	env := map[string]string{}
	maps.Copy(env, req.Config.Env)
	maps.Copy(env, req.Env)
	return env
}
