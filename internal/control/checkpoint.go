package control

import (
	"context"
	"sync"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// Automatic checkpoints: the disk of a running sandbox whose machine keeps it
// only in its own memory is saved each so often. They are no operations and no
// state: they give way to every verb.

// beats are when running sandboxes are due.
type beats struct {
	mu      sync.Mutex
	of      map[string]*beat // by sandbox
	mine    map[string]bool  // checkpoints under way here, by snapshot
	scanned time.Time
	soonest time.Time // no sandbox seen by the last scan is due before
}

// beat is one machine's rhythm.
type beat struct {
	epoch     int64
	last      time.Time // when its disk was last known to be saved
	notBefore time.Time // the share of its time that it may stand still, and a failure's backoff
	faults    int
}

// The bounds of looking for who is due.
const (
	scanEvery       = 5 * time.Second // new sandboxes and changed policies
	firstCheckpoint = 5 * time.Second // after a failure, doubled each time
	lastCheckpoint  = 5 * time.Minute
)

// machineUp begins the rhythm of a machine that has just come up.
func (c *Control) machineUp(id string, epoch int64) {
	c.beats.mu.Lock()
	defer c.beats.mu.Unlock()
	c.beats.of[id] = &beat{epoch: epoch, last: c.now()}
}

// checkpointDue starts the checkpoints that are due.
func (c *Control) checkpointDue(ctx context.Context) {
	now := c.now()
	if now.Before(c.beats.soonest) && now.Sub(c.beats.scanned) < scanEvery {
		return
	}
	rows, err := c.runningRows(ctx)
	if err != nil {
		c.logErr(ctx, "can't list running sandboxes", err)
		return
	}
	c.beats.scanned, c.beats.soonest = now, now.Add(scanEvery)
	c.forgetBeats(rows)
	for _, sb := range rows {
		if sb.State != sandbox.StateRunning || sb.Policy.Checkpoint <= 0 || c.durability(sb.Driver) != sandbox.DurabilitySnapshot {
			continue
		}
		if at := c.due(sb); now.Before(at) {
			if at.Before(c.beats.soonest) {
				c.beats.soonest = at
			}
			continue
		}
		c.spawn("checkpoint/"+sb.ID, func(ctx context.Context) { c.checkpointTurn(ctx, sb) })
	}
}

// due is when a sandbox's next checkpoint is.
func (c *Control) due(sb sandbox.Sandbox) time.Time {
	c.beats.mu.Lock()
	defer c.beats.mu.Unlock()
	b := c.beats.of[sb.ID]
	if b == nil || b.epoch != sb.Epoch {
		b = &beat{epoch: sb.Epoch, last: sb.CreatedAt} // it came up before this process did
		c.beats.of[sb.ID] = b
	}
	if sb.ImageAt != nil && sb.ImageAt.After(b.last) {
		b.last = *sb.ImageAt
	}
	at := b.last.Add(sb.Policy.Checkpoint)
	if b.notBefore.After(at) {
		at = b.notBefore
	}
	return at
}

// forgetBeats keeps the beats no more than the running sandboxes.
func (c *Control) forgetBeats(rows map[string]sandbox.Sandbox) {
	c.beats.mu.Lock()
	defer c.beats.mu.Unlock()
	for id, b := range c.beats.of {
		if _, ok := rows[id]; !ok && c.now().Sub(b.last) > scanEvery {
			delete(c.beats.of, id)
		}
	}
}

// checkpointTurn takes a sandbox's checkpoint when it is its turn, and notes
// when the next may be: a machine that stood still for d goes on for at least
// d/StillShare.
func (c *Control) checkpointTurn(ctx context.Context, sb sandbox.Sandbox) {
	if c.checkpoints.take(ctx, func() {}) != nil {
		return // stopping
	}
	defer c.checkpoints.free()
	asked := c.now()
	status, err := c.checkpoint(ctx, sb)
	c.beats.mu.Lock()
	b := c.beats.of[sb.ID]
	if b != nil && b.epoch == sb.Epoch {
		now := c.now()
		switch e := sandbox.AsError(err); {
		case e == nil:
			b.last, b.faults = asked, 0
			b.notBefore = now.Add(time.Duration(float64(status.Stood) / c.o.StillShare))
		case e.Code == "superseded" || e.Class == sandbox.Conflict:
			b.notBefore = now.Add(firstCheckpoint)
		default:
			b.notBefore = now.Add(min(firstCheckpoint<<min(b.faults, 10), lastCheckpoint))
			b.faults++
		}
	}
	c.beats.mu.Unlock()
	if e := sandbox.AsError(err); e != nil && e.Code != "superseded" && e.Class != sandbox.Conflict {
		c.logErr(ctx, "a checkpoint failed", err, "sandbox", sb.ID)
	}
}

// checkpoint saves a running sandbox's disk.
func (c *Control) checkpoint(ctx context.Context, sb sandbox.Sandbox) (status sandbox.SnapshotStatus, err error) {
	row := c.newSnapshot(sandbox.SnapshotDisk, sandbox.PurposeCheckpoint)
	c.beats.own(row.ID, true)
	defer c.beats.own(row.ID, false)
	if err := c.store.BeginCheckpoint(ctx, sb.ID, sb.Generation, *row); err != nil {
		return status, err
	}
	failure := attempt(ctx, c.o.SnapshotTimeout, func(ctx context.Context) (err error) {
		status, err = c.node.CheckpointMachine(ctx, sandbox.SnapshotRequest{
			Sandbox: sb.ID, Generation: sb.Generation, Snapshot: row.ID, Kind: sandbox.SnapshotDisk,
		})
		return err
	})
	failpoint.Hit("control.checkpoint.taken")
	taken := &status
	switch {
	case failure != nil:
		taken = nil
	case status.Unchanged:
		taken, failure = nil, sandbox.Errorf(sandbox.FailedPrecondition, "unchanged", "nothing has changed since the last image")
	}
	if err := c.store.FinishCheckpoint(ctx, row.ID, sb.Epoch, taken, failure); err != nil {
		return status, err
	}
	c.bell.ring("")
	c.reap.kick() // the image before, or this one
	if failure != nil && !status.Unchanged {
		return status, failure
	}
	return status, nil
}

// own notes which checkpoints this process has in hand.
func (b *beats) own(id string, mine bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if mine {
		b.mine[id] = true
	} else {
		delete(b.mine, id)
	}
}

func (b *beats) owns(id string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mine[id]
}

// dropCheckpoints fails the checkpoints that nobody has in hand: a process
// that took them ended, or the store failed at their end.
func (c *Control) dropCheckpoints(ctx context.Context) {
	list, _, err := c.store.Snapshots(ctx, "", sandbox.SnapshotFilter{
		Purposes: []sandbox.SnapshotPurpose{sandbox.PurposeCheckpoint}, States: []sandbox.SnapshotState{sandbox.SnapshotCreating},
	}, sandbox.Page{Limit: 500})
	if err != nil {
		c.logErr(ctx, "can't list checkpoints", err)
		return
	}
	for _, s := range list {
		if c.beats.owns(s.ID) {
			continue
		}
		// Read again: it may have been ours and have ended since the list.
		now, err := c.store.Snapshot(ctx, "", s.ID)
		if err != nil || now.State != sandbox.SnapshotCreating {
			continue
		}
		failure := sandbox.Errorf(sandbox.Unavailable, "interrupted", "the checkpoint was interrupted")
		if err := c.store.FinishCheckpoint(ctx, s.ID, 0, nil, failure); err != nil {
			c.logErr(ctx, "can't give up a checkpoint", err, "snapshot", s.ID)
		}
	}
}
