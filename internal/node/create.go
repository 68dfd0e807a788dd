package node

import (
	"context"
	"fmt"
	"maps"
	"os"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// undoTimeout bounds taking back what a failed or superseded call did.
const undoTimeout = 90 * time.Second

// step is one part of bring-up. Undo must succeed when do failed half way or
// never ran, and is given a context that the caller's cancellation doesn't end.
type step struct {
	name string
	do   func(ctx context.Context) error
	undo func(ctx context.Context) error
}

// CreateMachine implements sandbox.Node.
func (n *Node) CreateMachine(ctx context.Context, req sandbox.MachineRequest) (sandbox.MachineStatus, error) {
	var none sandbox.MachineStatus
	d, err := n.pick(req.Driver)
	if err != nil {
		return none, err
	}
	ctx, release, err := n.enter(ctx, req.Sandbox, req.Generation)
	if err != nil {
		return none, err
	}
	defer release()

	if m := n.known(req.Sandbox); m != nil {
		st := n.statusOf(m)
		if st.Generation == req.Generation && st.Ready {
			return st, nil
		}
		if err := n.remove(ctx, req.Sandbox); err != nil {
			return none, err
		}
	}
	if err := n.takeSlot(ctx); err != nil {
		return none, err
	}
	defer func() { <-n.slots }()
	return n.bringUp(ctx, d, req)
}

// bringUp runs the steps; when one fails it undoes all of them, last first.
func (n *Node) bringUp(ctx context.Context, d driver.Driver, req sandbox.MachineRequest) (sandbox.MachineStatus, error) {
	m := n.newMachine(req.Sandbox, newJournal(req, d.Name(), n.o.Guests.Current(), n.o.BootID))
	steps := n.steps(d, m)
	for i, s := range steps {
		err := ctx.Err()
		if err == nil {
			err = s.do(ctx)
		}
		if err == nil {
			continue
		}
		m.unlink()
		n.o.Log.Info("bring-up failed", "sandbox", m.id, "step", s.name, "err", err)
		if uerr := n.undo(ctx, steps[:i+1]); uerr != nil {
			// The journal stays and roots what is left: the next call for this
			// sandbox, or the next start, tries again.
			n.o.Log.Error("undo a failed bring-up", "sandbox", m.id, "err", uerr)
		}
		return sandbox.MachineStatus{}, fmt.Errorf("%s: %w", s.name, err)
	}
	n.mu.Lock()
	m.ready = true
	n.machines[m.id] = m
	n.touch(m)
	st := m.status()
	n.watch(m)
	n.mu.Unlock()
	return st, nil
}

// steps lists the bring-up of one machine, in order.
func (n *Node) steps(d driver.Driver, m *machine) []step {
	req := m.journal.Request
	spec := driver.Spec{
		ID: m.id, Hostname: req.Hostname, Resources: req.Resources, MaxProcs: int(n.maxProcs(req.Resources)),
	}
	nothing := func(context.Context) error { return nil }
	return []step{
		{
			name: "note the intent",
			do:   func(context.Context) error { return m.journal.save(n.dir(m.id)) },
			undo: func(context.Context) error { return os.RemoveAll(n.dir(m.id)) },
		},
		{
			name: "find the template and the guest",
			do: func(ctx context.Context) (err error) {
				if spec.Image, err = n.o.Images.Image(ctx, req.Digest); err != nil {
					return err
				}
				spec.Guest, err = n.o.Guests.Path(m.journal.Guest)
				return err
			},
			undo: nothing,
		},
		{
			name: "make the network namespace",
			do: func(ctx context.Context) (err error) {
				spec.NetNS, err = n.o.Networks.Create(ctx, m.id)
				return err
			},
			undo: func(ctx context.Context) error { return n.o.Networks.Delete(ctx, m.id) },
		},
		{
			name: "create the machine",
			do: func(ctx context.Context) (err error) {
				m.driver, err = d.Create(ctx, spec)
				return err
			},
			undo: func(ctx context.Context) error { return d.Discard(ctx, m.id) },
		},
		{
			name: "wait for the agent",
			do:   func(ctx context.Context) error { return n.connect(ctx, m) },
			undo: func(context.Context) error {
				if m.link != nil {
					m.link.Close()
				}
				return nil
			},
		},
		{
			name: "note that it is done",
			do: func(context.Context) error {
				m.journal.Done = true
				return m.journal.save(n.dir(m.id))
			},
			undo: nothing,
		},
	}
}

// undo takes steps back, last first, and goes on past failures; it returns the
// first.
func (n *Node) undo(ctx context.Context, steps []step) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	var first error
	for i := len(steps) - 1; i >= 0; i-- {
		if i == 0 && first != nil {
			break // the journal goes last, and only when nothing is left
		}
		if err := steps[i].undo(ctx); err != nil && first == nil {
			first = fmt.Errorf("undo %q: %w", steps[i].name, err)
		}
	}
	return first
}

// pick finds the driver of a request.
func (n *Node) pick(name string) (driver.Driver, error) {
	if name == "" {
		name = n.o.Default
	}
	if d, ok := n.drivers[name]; ok {
		return d, nil
	}
	return nil, sandbox.Errorf(sandbox.FailedPrecondition, "driver_unavailable", "this host has no driver %q", name).
		WithHint("`cloche doctor` tells which drivers work here and why")
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
