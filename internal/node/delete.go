package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// DeleteMachine implements sandbox.Machines.
func (n *Node) DeleteMachine(ctx context.Context, id string, generation int64) error {
	ctx, leave, err := n.enter(ctx, id, generation)
	if err != nil {
		return err
	}
	defer leave()
	err = n.remove(ctx, id, func() error {
		n.tellEnd(ctx, id, sandbox.End{Reason: sandbox.EndDeleted, At: time.Now().UTC()})
		return nil
	})
	if err != nil {
		return err
	}
	n.forgetEgress(id)
	failpoint.Hit("node.delete.swept")
	return n.o.Recorder.DeleteSandbox(ctx, id)
}

// ReleaseMachine implements sandbox.MachineVerbs.
func (n *Node) ReleaseMachine(ctx context.Context, id string, generation int64, end sandbox.End) error {
	ctx, leave, err := n.enter(ctx, id, generation)
	if err != nil {
		return err
	}
	defer leave()
	suspends := end.Reason == sandbox.EndSuspended
	if m := n.known(id); m != nil && (suspends || end.Reason == sandbox.EndStopped) {
		n.mu.Lock()
		alive, held := m.journal.End == nil, m.wish.Held
		n.mu.Unlock()
		// A machine that ended on its own meanwhile can lose nothing any more.
		if alive && !n.complete(held) {
			return sandbox.Errorf(sandbox.FailedPrecondition, "not_held", "the sandbox has gone on since its snapshot, which would be lost")
		}
	}
	if suspends { // while the machine can still go on if this fails
		if err := n.o.Recorder.MachineHeld(ctx, id); err != nil {
			return err
		}
	}
	err = n.remove(ctx, id, func() error {
		if !suspends {
			n.tellEnd(ctx, id, end)
		}
		failpoint.Hit("node.release.told")
		return nil
	})
	if err == nil {
		n.forgetEgress(id)
	}
	return err
}

// remove ends a machine and takes back all of its bring-up. It needs no
// knowledge but the id, and succeeds where there is nothing. tell says what
// becomes of its sessions.
func (n *Node) remove(ctx context.Context, id string, tell func() error) error {
	m := n.known(id)
	if m != nil {
		m.unlink()
		m.watches.Wait() // or a watcher could write the journal again after it was removed
	}
	if err := tell(); err != nil {
		return err
	}
	if err := n.sweep(ctx, id); err != nil {
		return err
	}
	n.mu.Lock()
	delete(n.machines, id)
	n.mu.Unlock()
	return nil
}

// sweep removes from the host whatever bears this id.
func (n *Node) sweep(ctx context.Context, id string) error {
	if err := n.clear(ctx, id); err != nil {
		return err
	}
	return os.RemoveAll(n.dir(id)) // the journal goes last: it roots the rest
}

// clear is sweep but for the journal.
func (n *Node) clear(ctx context.Context, id string) error {
	var errs []error
	for _, d := range n.drivers {
		if err := d.Discard(ctx, id); err != nil {
			errs = append(errs, fmt.Errorf("discard the machine (%s): %w", d.Name(), err))
		}
	}
	failpoint.Hit("node.clear.discarded")
	if len(errs) == 0 { // a namespace goes when nothing is in it
		if err := n.detach(ctx, id); err != nil {
			errs = append(errs, err)
		} else if err := n.o.Networks.Delete(ctx, id); err != nil {
			errs = append(errs, err)
		}
	}
	failpoint.Hit("node.clear.network")
	return errors.Join(errs...)
}

func (n *Node) known(id string) *machine {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.machines[id]
}

func (n *Node) statusOf(m *machine) sandbox.MachineStatus {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.status(m)
}
