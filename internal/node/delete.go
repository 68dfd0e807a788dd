package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// DeleteMachine implements sandbox.Node.
func (n *Node) DeleteMachine(ctx context.Context, id string, generation int64) error {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return sandbox.Errorf(sandbox.Invalid, "bad_id", "%q is not a sandbox id", id)
	}
	ctx, release, err := n.enter(ctx, id, generation)
	if err != nil {
		return err
	}
	defer release()
	if err := n.remove(ctx, id); err != nil {
		return err
	}
	return n.o.Recorder.DeleteSandbox(ctx, id)
}

// remove ends a machine and takes back all of its bring-up. It needs no
// knowledge but the id, and succeeds where there is nothing.
func (n *Node) remove(ctx context.Context, id string) error {
	if m := n.known(id); m != nil {
		m.unlink()
		m.watches.Wait() // or a watcher could write the journal again after it was removed
	}
	n.tellEnd(ctx, id, sandbox.End{Reason: sandbox.EndDeleted, At: time.Now().UTC()})
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
	var errs []error
	for _, d := range n.drivers {
		if err := d.Discard(ctx, id); err != nil {
			errs = append(errs, fmt.Errorf("discard the machine (%s): %w", d.Name(), err))
		}
	}
	if len(errs) == 0 { // a namespace goes when nothing is in it
		if err := n.o.Networks.Delete(ctx, id); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 { // the journal goes last: it roots the rest
		if err := os.RemoveAll(n.dir(id)); err != nil {
			errs = append(errs, err)
		}
	}
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
	return m.status()
}
