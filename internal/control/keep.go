package control

import (
	"context"
	"fmt"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// The verbs that need the machine that is there.

// pause stops the machine in memory. One that fails may have paused it all the
// same, so it is undone.
func (c *Control) pause(ctx context.Context, w work) error {
	failure := c.try(ctx, w, "pausing the machine", c.o.MachineTimeout, func(ctx context.Context) error {
		return c.node.PauseMachine(ctx, w.sb.ID, w.op.Generation)
	})
	if failure != nil {
		c.undo(ctx, w, failure, c.node.ResumeMachine)
		return c.fail(ctx, w, failure)
	}
	failpoint.Hit("control.pause.paused")
	return c.finish(ctx, w, sandbox.Outcome{To: w.t.To})
}

// resume lets it go on.
func (c *Control) resume(ctx context.Context, w work) error {
	failure := c.try(ctx, w, "resuming the machine", c.o.MachineTimeout, func(ctx context.Context) error {
		return c.node.ResumeMachine(ctx, w.sb.ID, w.op.Generation)
	})
	if failure != nil {
		c.undo(ctx, w, failure, c.node.PauseMachine)
		return c.fail(ctx, w, failure)
	}
	failpoint.Hit("control.resume.resumed")
	return c.finish(ctx, w, sandbox.Outcome{To: w.t.To})
}

// undo asks for the contrary of what failed, for as long as anything is tried
// again: a row must not say of a machine that it runs while it stands still.
func (c *Control) undo(ctx context.Context, w work, failure *sandbox.Error, contrary func(context.Context, string, int64) error) {
	until := c.now().Add(c.o.RetryFor)
	for wait := firstBackoff; failure.Code != noMachine && ctx.Err() == nil; wait = min(2*wait, lastBackoff) {
		err := attempt(ctx, c.o.MachineTimeout, func(ctx context.Context) error { return contrary(ctx, w.sb.ID, w.op.Generation) })
		if err == nil || err.Code == noMachine || isStale(err) {
			return
		}
		if c.now().Add(wait).After(until) || !sleep(ctx, wait) {
			c.logErr(ctx, "what failed can't be undone", err, "sandbox", w.sb.ID, "verb", w.op.Verb)
			return
		}
	}
}

// suspend saves memory and disk and frees the host. Until the snapshot is
// there a failure leaves the machine as it was; from then on the machine is
// only held, and is released whatever it takes.
func (c *Control) suspend(ctx context.Context, w work) error {
	status, failure := c.take(ctx, w, sandbox.SnapshotRequest{Kind: sandbox.SnapshotMemory, Hold: true})
	if failure != nil {
		return c.fail(ctx, w, failure)
	}
	failpoint.Hit("control.suspend.snapshotted")
	if !c.release(ctx, w, sandbox.EndSuspended) {
		return nil // superseded or stopping
	}
	failpoint.Hit("control.suspend.released")
	return c.finish(ctx, w, saved(w, status))
}

// stop is suspend without the memory. Sessions get their grace only where they
// can use it: a paused machine's can't.
func (c *Control) stop(ctx context.Context, w work) error {
	req := sandbox.SnapshotRequest{Kind: sandbox.SnapshotDisk, Hold: true}
	if w.t.From == sandbox.StateRunning {
		req.Grace = w.in.Grace
	}
	status, failure := c.take(ctx, w, req)
	if failure != nil {
		return c.fail(ctx, w, failure)
	}
	failpoint.Hit("control.stop.snapshotted")
	if !c.release(ctx, w, sandbox.EndStopped) {
		return nil // superseded or stopping
	}
	failpoint.Hit("control.stop.released")
	return c.finish(ctx, w, saved(w, status))
}

// snapshot takes a named snapshot, which the sandbox's timeline has then passed
// through.
func (c *Control) snapshot(ctx context.Context, w work) error {
	row, err := c.store.Snapshot(ctx, w.sb.Project, w.op.Snapshot)
	if err != nil {
		return c.failOrLater(ctx, w, read(err))
	}
	status, failure := c.take(ctx, w, sandbox.SnapshotRequest{Kind: row.Kind, Wait: w.in.Wait})
	if failure != nil {
		return c.fail(ctx, w, failure)
	}
	failpoint.Hit("control.snapshot.taken")
	o := saved(w, status)
	o.Base = &w.op.Snapshot
	return c.finish(ctx, w, o)
}

// fork takes the snapshot that the children wait for.
func (c *Control) fork(ctx context.Context, w work) error {
	status, failure := c.take(ctx, w, sandbox.SnapshotRequest{Kind: sandbox.SnapshotMemory, Wait: w.in.Wait})
	if failure != nil {
		return c.fail(ctx, w, failure)
	}
	failpoint.Hit("control.fork.taken")
	return c.finish(ctx, w, saved(w, status))
}

// saved is the outcome of a verb that saved the sandbox: whatever it was for,
// the image is the newest that is complete, and so the recovery point.
func saved(w work, status sandbox.SnapshotStatus) sandbox.Outcome {
	return sandbox.Outcome{To: w.t.To, Snapshot: &status, Image: &status.Snapshot, ImageAt: &status.TakenAt}
}

// take asks the node for the operation's snapshot.
func (c *Control) take(ctx context.Context, w work, req sandbox.SnapshotRequest) (status sandbox.SnapshotStatus, failure *sandbox.Error) {
	err := c.snapshots.take(ctx, func() {
		c.progress(ctx, w.op, sandbox.OpAccepted, "", fmt.Sprintf("%d other snapshots are being taken", c.o.Snapshots))
	})
	if err != nil {
		return status, sandbox.AsError(err)
	}
	defer c.snapshots.free()
	req.Sandbox, req.Generation, req.Snapshot = w.sb.ID, w.op.Generation, w.op.Snapshot
	failure = c.try(ctx, w, "taking the snapshot", c.o.SnapshotTimeout+req.Grace+req.Wait, func(ctx context.Context) (err error) {
		status, err = c.node.SnapshotMachine(ctx, req)
		return err
	})
	if failure == nil && status.Snapshot != req.Snapshot {
		failure = sandbox.Errorf(sandbox.Internal, "stale_answer", "the node answered about the snapshot %s", status.Snapshot)
	}
	return status, failure
}

// release ends a machine whose snapshot is there; false where ctx ended first.
func (c *Control) release(ctx context.Context, w work, reason sandbox.EndReason) bool {
	end := sandbox.End{Reason: reason, Detail: whose(w.op.Key), At: c.now().UTC()}
	return c.insist(ctx, w, "releasing the machine", c.o.MachineTimeout, func(ctx context.Context) error {
		return c.node.ReleaseMachine(ctx, w.sb.ID, w.op.Generation, end)
	})
}

// whose tells who of Cloche itself asked for something; "" where a user did.
func whose(key string) string {
	switch key {
	case sandbox.SystemKey:
		return "its time to live ran out"
	case sandbox.IdleKey:
		return "nothing used it"
	case sandbox.DrainKey:
		return "the host goes down"
	}
	return ""
}
