package control

import (
	"context"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// reapBatch bounds one round of the reaper.
const reapBatch = 64

// reapSnapshots removes the snapshots that nothing roots: first the files,
// then the row, so that files without a row are always rubbish.
func (c *Control) reapSnapshots(ctx context.Context) {
	c.dropCheckpoints(ctx)
	for ctx.Err() == nil {
		list, err := c.store.GarbageSnapshots(ctx, reapBatch)
		if err != nil {
			c.logErr(ctx, "can't list snapshots that nothing roots", err)
			return
		}
		gone := 0
		for _, s := range list {
			if c.reapOne(ctx, s) {
				gone++
			}
		}
		if gone > 0 {
			c.bell.ring("")
		}
		if len(list) < reapBatch || gone == 0 {
			return
		}
	}
}

func (c *Control) reapOne(ctx context.Context, s sandbox.Snapshot) bool {
	failure := attempt(ctx, deleteTimeout, func(ctx context.Context) error { return c.node.DeleteSnapshot(ctx, s.ID) })
	if failure != nil {
		c.logErr(ctx, "a snapshot's files can't be removed; the next round tries again", failure, "snapshot", s.ID)
		return false
	}
	failpoint.Hit("control.reaper.files_gone")
	if err := c.store.RemoveSnapshot(ctx, s.ID); err != nil {
		c.logErr(ctx, "a snapshot's row can't be removed; the next round tries again", err, "snapshot", s.ID)
		return false
	}
	return true
}

// censusSnapshots removes the node's snapshots that have no row. The files are
// listed first: a row is there before its files, and goes after them.
func (c *Control) censusSnapshots(ctx context.Context) error {
	names, err := c.node.ListSnapshots(ctx)
	if err != nil {
		return err
	}
	for _, id := range names {
		_, err := c.store.Snapshot(ctx, "", id)
		if err == nil {
			continue
		}
		if !sandbox.IsClass(err, sandbox.NotFound) {
			return err
		}
		c.log.WarnContext(ctx, "removing a snapshot that has no row", "snapshot", id)
		if failure := attempt(ctx, deleteTimeout, func(ctx context.Context) error { return c.node.DeleteSnapshot(ctx, id) }); failure != nil {
			c.logErr(ctx, "can't remove it; the next census tries again", failure, "snapshot", id)
		}
	}
	return nil
}
