package control

import (
	"context"

	"cloche.dev/cloche/internal/sandbox"
)

// finish ends an operation. Where ctx has ended it does nothing: the operation
// is superseded, or the next Run does it again.
func (c *Control) finish(ctx context.Context, w work, o sandbox.Outcome) error {
	if ctx.Err() != nil {
		return nil
	}
	if err := c.store.FinishOperation(ctx, w.op.ID, o); err != nil {
		return err
	}
	c.bell.ring(w.op.ID)
	if o.Epoch != 0 {
		c.machineUp(w.sb.ID, o.Epoch)
	}
	if o.Image != nil || o.Failure != nil || o.To == sandbox.StateDeleted {
		c.reap.kick() // a snapshot may have become garbage
	}
	c.expiryDone(ctx, w, o)
	if o.To == sandbox.StateFailed {
		c.crash.kick()
	}
	return c.applyEnd(ctx, w.sb.ID)
}

// applyEnd tells a row the end of its machine that was observed while the row
// could not take it.
func (c *Control) applyEnd(ctx context.Context, id string) error {
	c.endsMu.Lock()
	status, ended := c.ends[id]
	c.endsMu.Unlock()
	if ended {
		return c.machineEnded(ctx, status)
	}
	return nil
}

// fail ends an operation that failed: the sandbox goes to where the table
// says, or to failed if it should have a machine there and that has ended.
func (c *Control) fail(ctx context.Context, w work, failure *sandbox.Error) error {
	if ctx.Err() != nil {
		return nil
	}
	o := sandbox.Outcome{To: w.t.Else, Failure: failure}
	switch {
	case w.op.Verb == sandbox.VerbCreate:
		o.End = &sandbox.End{Reason: sandbox.EndCreateFailed, Detail: failure.Message, At: c.now().UTC()}
	case w.t.Else.HasMachine():
		if o.End = c.lost(ctx, w, failure); o.End != nil {
			o.To = sandbox.StateFailed
		}
	}
	c.log.WarnContext(ctx, "an operation failed", "operation", w.op.ID, "sandbox", w.sb.ID, "verb", w.op.Verb, "code", failure.Code)
	return c.finish(ctx, w, o)
}

// lost is how the sandbox's machine ended where it has ended meanwhile; nil
// where it lives, or where the node can't tell: then the next census does.
func (c *Control) lost(ctx context.Context, w work, failure *sandbox.Error) *sandbox.End {
	c.endsMu.Lock()
	status, ended := c.ends[w.sb.ID]
	c.endsMu.Unlock()
	if ended && status.Generation == w.sb.Epoch {
		return c.withLoss(w.sb, *status.End)
	}
	ask, cancel := context.WithTimeout(ctx, c.o.MachineTimeout)
	defer cancel()
	now, err := c.node.Observe(ask, 0)
	if err != nil && failure.Code != noMachine {
		c.logErr(ctx, "the node can't tell whether a machine lives", err, "sandbox", w.sb.ID)
		return nil
	}
	for _, m := range now.Machines {
		if m.Sandbox != w.sb.ID || m.Generation != w.sb.Epoch {
			continue
		}
		if m.End == nil {
			return nil
		}
		return c.withLoss(w.sb, *m.End)
	}
	end := sandbox.End{Reason: sandbox.EndUnknown, Detail: "the host has no machine for it any more", At: c.now().UTC()}
	if w.op.Verb == sandbox.VerbRollback {
		end = sandbox.End{Reason: sandbox.EndRolledBack, Detail: "its machine was given up for a rollback that failed", At: end.At}
	}
	return c.withLoss(w.sb, end)
}

// noMachine is the code of the node's error where a verb finds no machine.
const noMachine = "no_machine"

// withLoss notes of an end whether something is lost with the machine.
func (c *Control) withLoss(sb sandbox.Sandbox, end sandbox.End) *sandbox.End {
	end.Loses = c.durability(sb.Driver) == sandbox.DurabilitySnapshot
	return &end
}

// durability is what the node said of a driver's machines; "" before it did.
func (c *Control) durability(driver string) sandbox.Durability {
	d, _ := c.durabilities.Load(driver)
	is, _ := d.(sandbox.Durability)
	return is
}

func (c *Control) learn(m sandbox.MachineStatus) {
	if m.Durability == "" {
		return
	}
	if was, _ := c.durabilities.Swap(m.Driver, m.Durability); was != m.Durability {
		c.crash.kick() // there may be disks to save
	}
}
