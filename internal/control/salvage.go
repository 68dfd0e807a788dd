package control

import (
	"context"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// A machine of durability "crash" leaves its disk behind when it ends by
// itself. That is saved as a checkpoint of the sandbox that has failed, and is
// its image from then on, whether somebody starts it again or not.

// salvages are those under way or given up, by sandbox.
type salvages struct {
	mu sync.Mutex
	of map[string]*salvaging
}

// salvaging is what became of the disk of one machine.
type salvaging struct {
	epoch     int64
	over      bool           // it was saved, or nothing was left
	failure   *sandbox.Error // of the last try
	notBefore time.Time
	faults    int
}

// unsaved returns what is known of a failed sandbox's disk that is newer than
// its image and still to be saved; nil where there is no such disk.
func (c *Control) unsaved(sb sandbox.Sandbox) *salvaging {
	switch {
	case sb.State != sandbox.StateFailed || sb.End == nil || c.durability(sb.Driver) != sandbox.DurabilityCrash,
		sb.End.Reason == sandbox.EndCreateFailed, sb.End.Reason == sandbox.EndRolledBack,
		sb.ImageAt != nil && !sb.ImageAt.Before(sb.End.At):
		return nil
	}
	c.salvages.mu.Lock()
	defer c.salvages.mu.Unlock()
	s := c.salvages.of[sb.ID]
	if s == nil || s.epoch != sb.Epoch {
		s = &salvaging{epoch: sb.Epoch}
		c.salvages.of[sb.ID] = s
	}
	if s.over {
		return nil
	}
	now := *s
	return &now
}

// salvage saves the disk of a sandbox that has failed, when it is time to.
func (c *Control) salvage(sb sandbox.Sandbox, s *salvaging) {
	if c.now().Before(s.notBefore) {
		return
	}
	c.spawn("salvage/"+sb.ID, func(ctx context.Context) {
		if c.checkpoints.take(ctx, func() {}) != nil {
			return // stopping
		}
		defer c.checkpoints.free()
		_, err := c.checkpoint(ctx, sb)
		if c.salvaged(sb, sandbox.AsError(err)) {
			c.crash.kick() // it may be started now
		} else {
			c.logErr(ctx, "the disk of a machine that ended can't be saved yet", err, "sandbox", sb.ID)
		}
	})
}

// salvaged notes how a try went, and tells whether it was the last.
func (c *Control) salvaged(sb sandbox.Sandbox, failure *sandbox.Error) bool {
	c.salvages.mu.Lock()
	defer c.salvages.mu.Unlock()
	s := c.salvages.of[sb.ID]
	if s == nil || s.epoch != sb.Epoch {
		return true // another machine came up meanwhile
	}
	s.over = failure == nil || failure.Code == noMachine
	if s.over {
		s.failure = nil
		return true
	}
	s.failure, s.notBefore = failure, c.now().Add(min(firstCheckpoint<<min(s.faults, 10), lastCheckpoint))
	s.faults++
	return false
}

// forgetSalvages keeps them no more than the failed sandboxes.
func (c *Control) forgetSalvages(failed map[string]bool) {
	c.salvages.mu.Lock()
	defer c.salvages.mu.Unlock()
	for id := range c.salvages.of {
		if !failed[id] {
			delete(c.salvages.of, id)
		}
	}
}

// saveRetry is when a start that came too early may be asked for again.
const saveRetry = 2 * time.Second

// savedFirst refuses to start a sandbox from an image that is older than the
// disk which its last machine has left: the start would end that.
func (c *Control) savedFirst(ctx context.Context, project, id string) error {
	sb, err := c.store.Sandbox(ctx, project, id)
	if err != nil {
		return err
	}
	s := c.unsaved(sb)
	if s == nil {
		return nil
	}
	c.crash.kick()
	if s.failure != nil {
		return sandbox.Errorf(s.failure.Class, "disk_not_saved", "the disk that the sandbox's machine has left can't be saved: %s", s.failure.Message).
			WithHint("mend that and try again, or give the disk up: roll back to a snapshot").WithRetry(saveRetry)
	}
	return sandbox.Errorf(sandbox.Unavailable, "disk_being_saved", "the disk that the sandbox's machine has left is being saved").
		WithHint("try again soon").WithRetry(saveRetry)
}
