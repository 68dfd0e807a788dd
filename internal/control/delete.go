package control

import (
	"context"
	"fmt"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// delete carries out a delete: until it succeeds.
func (c *Control) delete(ctx context.Context, w work) error {
	err := c.deletes.take(ctx, func() {
		c.progress(ctx, w.op, sandbox.OpAccepted, "", fmt.Sprintf("%d other sandboxes are being deleted", c.o.Deletes))
	})
	if err != nil {
		return nil // stopping
	}
	defer c.deletes.free()
	gone := c.insist(ctx, w, "deleting the machine", deleteTimeout, func(ctx context.Context) error {
		return c.node.DeleteMachine(ctx, w.sb.ID, w.op.Generation)
	})
	if !gone {
		return nil // stopping
	}
	failpoint.Hit("control.delete.deleted")
	c.forget(w.sb.ID)
	return c.finish(ctx, w, sandbox.Outcome{To: w.t.To, End: c.deletedEnd(w)})
}

// deletedEnd is why a deleted sandbox ended: nil where it had ended before,
// which deleting it must not hide.
func (c *Control) deletedEnd(w work) *sandbox.End {
	if w.sb.End != nil && (w.op.From == sandbox.StateFailed || w.op.From == sandbox.StateNone) {
		return nil
	}
	reason := sandbox.EndDeleted
	switch w.op.Key {
	case sandbox.SystemKey:
		reason = sandbox.EndExpired
	case sandbox.IdleKey:
		reason = sandbox.EndIdle
	}
	return &sandbox.End{Reason: reason, At: c.now().UTC()}
}
