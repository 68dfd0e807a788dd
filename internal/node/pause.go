package node

import (
	"context"
	"errors"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// running returns the machine that a verb is for, no longer held for a release
// that was given up, and else as it is to be.
func (n *Node) running(ctx context.Context, id string) (*machine, error) {
	n.mu.Lock()
	m, err := n.up(id)
	held := err == nil && m.wish.Held != ""
	adrift := err == nil && m.adrift
	n.mu.Unlock()
	if err != nil {
		return nil, noMachine()
	}
	if held {
		if err := n.unhold(ctx, m); err != nil {
			return nil, verbError(m, err)
		}
	}
	if adrift {
		if err := n.steady(ctx, m); err != nil {
			return nil, verbError(m, err)
		}
	}
	return m, nil
}

func noMachine() error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "no_machine", "the sandbox has no machine on this host").
		WithHint("look at its state with `cloche inspect`")
}

// verbError is what a verb answers whose machine failed it: that it has ended,
// where it has.
func verbError(m *machine, err error) error {
	var known *sandbox.Error
	if err != nil && gone(m) && !errors.As(err, &known) {
		end := m.driver.End()
		return sandbox.Errorf(sandbox.FailedPrecondition, "no_machine", "the machine ended meanwhile (%s %s): %w", end.Reason, end.Detail, err)
	}
	return err
}

// want changes how the machine is to be: first on disk, so that a restart
// brings about what was asked for last. Only the call under way may.
func (n *Node) want(m *machine, change func(*wish)) error {
	n.mu.Lock()
	w := m.wish
	change(&w)
	w.Fence = n.fences[m.id].generation
	n.mu.Unlock()
	if err := w.save(n.dir(m.id)); err != nil {
		return err
	}
	n.mu.Lock()
	m.wish = w
	n.poke(m)
	n.mu.Unlock()
	return nil
}

// PauseMachine implements sandbox.MachineVerbs.
func (n *Node) PauseMachine(ctx context.Context, id string, generation int64) error {
	return n.freeze(ctx, id, generation, true)
}

// ResumeMachine implements sandbox.MachineVerbs. It also lets a machine go on
// that was held for a release which did not come.
func (n *Node) ResumeMachine(ctx context.Context, id string, generation int64) error {
	return n.freeze(ctx, id, generation, false)
}

func (n *Node) freeze(ctx context.Context, id string, generation int64, paused bool) error {
	ctx, leave, err := n.enter(ctx, id, generation)
	if err != nil {
		return err
	}
	defer leave()
	m, err := n.running(ctx, id)
	if err != nil {
		return err
	}
	was := m.wish.Paused
	err = n.perform(ctx, "pause or resume", id, []step{
		{
			name: "note what is wanted",
			do: func(context.Context) error {
				defer failpoint.Hit("node.pause.noted")
				if paused || !was {
					return n.want(m, func(w *wish) { w.Paused = paused })
				}
				// A call to the guest would wait for a machine that stands still: it is
				// told so until the machine runs.
				w := m.wish
				w.Paused = false
				return w.save(n.dir(id))
			},
			undo: func(context.Context) error { return n.want(m, func(w *wish) { w.Paused = was }) },
		},
		{
			name: "make it so",
			do: func(ctx context.Context) error {
				defer failpoint.Hit("node.pause.done")
				if paused && !was {
					n.freezeGuest(ctx, m) // a snapshot may be taken while it stands still
					n.trySync(ctx, m)     // likewise, of the disk
				}
				return n.stand(ctx, m, paused)
			},
			undo: func(ctx context.Context) error { return n.stand(ctx, m, was) },
		},
	})
	if err != nil {
		return verbError(m, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	m.wish.Paused = paused
	n.poke(m)
	return nil
}

// stand makes the machine stand still or go on.
func (n *Node) stand(ctx context.Context, m *machine, still bool) error {
	if still {
		return m.driver.Pause(ctx)
	}
	if err := m.driver.Resume(ctx); err != nil {
		return err
	}
	n.thawGuest(ctx, m)
	return nil
}

// hold makes the machine stand still for a snapshot after which it is to be
// released.
func (n *Node) hold(ctx context.Context, m *machine, snapshot string) error {
	if err := n.want(m, func(w *wish) { w.Held = snapshot }); err != nil {
		return err
	}
	failpoint.Hit("node.hold.noted")
	return m.driver.Pause(ctx)
}

// unhold takes hold back: the machine is as the user wants it, and reachable.
func (n *Node) unhold(ctx context.Context, m *machine) error {
	if !m.wish.Paused {
		if err := m.driver.Resume(ctx); err != nil {
			return err
		}
	}
	if err := n.want(m, func(w *wish) { w.Held = "" }); err != nil {
		return err
	}
	n.join(m)
	return nil
}
