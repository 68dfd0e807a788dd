package control

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// observe follows the node until ctx ends: at first, after each failure and
// every few minutes as a census, in between as changes.
func (c *Control) observe(ctx context.Context) {
	for wait := firstBackoff; ctx.Err() == nil; {
		if err := c.follow(ctx); err != nil {
			c.logErr(ctx, "the node can't be observed", err)
			sleep(ctx, wait)
			wait = min(2*wait, lastBackoff)
			continue
		}
		wait = firstBackoff
	}
}

// follow takes one census and then applies changes until the next is due.
func (c *Control) follow(ctx context.Context) error {
	// The rows are read first: what becomes running after that is not missed.
	running, err := c.runningRows(ctx)
	if err != nil {
		return err
	}
	changes, err := c.node.Observe(ctx, 0)
	if err != nil {
		return err
	}
	if err := c.census(ctx, running, changes.Machines); err != nil {
		return err
	}
	if err := c.censusSnapshots(ctx); err != nil {
		return err
	}
	due, cancel := context.WithTimeout(ctx, censusEvery)
	defer cancel()
	for due.Err() == nil {
		next, err := c.node.Observe(due, changes.Cursor)
		if due.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		for _, m := range next.Machines {
			if err := c.machineEnded(ctx, m); err != nil {
				return err
			}
		}
		changes.Cursor = next.Cursor
	}
	return nil
}

// runningRows are the sandboxes that should have a machine, by id.
func (c *Control) runningRows(ctx context.Context) (map[string]sandbox.Sandbox, error) {
	filter := sandbox.SandboxFilter{}
	for _, s := range sandbox.States {
		if _, ok := sandbox.Find(s, sandbox.VerbExit); ok {
			filter.States = append(filter.States, s)
		}
	}
	rows := map[string]sandbox.Sandbox{}
	for page := (sandbox.Page{Limit: 500}); ; {
		list, next, err := c.store.Sandboxes(ctx, "", filter, page)
		if err != nil {
			return nil, err
		}
		for _, sb := range list {
			rows[sb.ID] = sb
		}
		if next == "" {
			return rows, nil
		}
		page.Token = next
	}
}

// census compares the node's machines with the rows: the ended are told, the
// lost are marked, what no row roots is removed.
func (c *Control) census(ctx context.Context, running map[string]sandbox.Sandbox, machines []sandbox.MachineStatus) error {
	has := make(map[string]int64, len(machines))
	for _, m := range machines {
		has[m.Sandbox] = m.Generation
		c.learn(m)
		if err := c.machineEnded(ctx, m); err != nil {
			return err
		}
		if _, ok := running[m.Sandbox]; ok {
			continue
		}
		if err := c.collect(ctx, m); err != nil {
			return err
		}
	}
	c.forgetAllBut(has)
	for id, sb := range running {
		// A machine of another epoch is not the row's. Where the row has moved on
		// since it was read, its epoch has too, and the store changes nothing.
		epoch, ok := has[id]
		if ok && epoch == sb.Epoch {
			continue
		}
		end := sandbox.End{Reason: sandbox.EndHostRestart, Detail: "the host has no machine for it any more", At: c.now().UTC()}
		if err := c.observed(ctx, id, sb.Epoch, end); err != nil {
			return err
		}
	}
	return nil
}

// collect removes a machine that no row roots. A row roots its machine until
// it is deleted; rows are inserted before their machines are asked for. A
// living machine of a row that settled without one (a node that did not heed
// its deadline) is released. Both are fenced by the row's generation, so that
// what an operation brings up meanwhile is not theirs.
func (c *Control) collect(ctx context.Context, m sandbox.MachineStatus) error {
	sb, err := c.store.Sandbox(ctx, "", m.Sandbox)
	remove := func(ctx context.Context) error {
		return c.node.DeleteMachine(ctx, m.Sandbox, max(m.Generation, sb.Generation))
	}
	switch {
	case sandbox.IsClass(err, sandbox.NotFound) || err == nil && sb.State == sandbox.StateDeleted:
	case err != nil:
		return err
	case m.End != nil || sb.Operation != "" || sb.State.HasMachine():
		return nil
	default:
		remove = func(ctx context.Context) error {
			end := sandbox.End{Reason: sandbox.EndStopped, Detail: "no sandbox had it", At: c.now().UTC()}
			if sb.State == sandbox.StateSuspended {
				end.Reason = sandbox.EndSuspended
			}
			return c.node.ReleaseMachine(ctx, m.Sandbox, sb.Generation, end)
		}
	}
	c.spawn(m.Sandbox, func(ctx context.Context) {
		c.log.WarnContext(ctx, "removing a machine that no sandbox has", "sandbox", m.Sandbox)
		if err := attempt(ctx, deleteTimeout, remove); err != nil {
			c.logErr(ctx, "can't remove it; the next census tries again", err, "sandbox", m.Sandbox)
		}
	})
	return nil
}

// machineEnded tells the row of a machine that ended. The status is kept: a row
// that an operation has in hand can't take it yet, and finish looks here after
// it can.
func (c *Control) machineEnded(ctx context.Context, m sandbox.MachineStatus) error {
	c.learn(m)
	if m.End == nil {
		return nil
	}
	c.endsMu.Lock()
	c.ends[m.Sandbox] = m
	c.endsMu.Unlock()
	return c.observed(ctx, m.Sandbox, m.Generation, *m.End)
}

// observed tells a row that its machine of this epoch has ended by itself.
func (c *Control) observed(ctx context.Context, id string, epoch int64, end sandbox.End) error {
	sb, err := c.store.Sandbox(ctx, "", id)
	if sandbox.IsClass(err, sandbox.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	changed, err := c.store.Observed(ctx, id, epoch, *c.withLoss(sb, end))
	if err != nil {
		return err
	}
	if changed {
		c.log.InfoContext(ctx, "a machine ended", "sandbox", id, "reason", end.Reason)
		c.bell.ring(id)
		c.crash.kick()
	}
	return nil
}

func (c *Control) forget(id string) {
	c.endsMu.Lock()
	defer c.endsMu.Unlock()
	delete(c.ends, id)
}

// forgetAllBut keeps c.ends no larger than the node's census.
func (c *Control) forgetAllBut(has map[string]int64) {
	c.endsMu.Lock()
	defer c.endsMu.Unlock()
	for id := range c.ends {
		if _, ok := has[id]; !ok {
			delete(c.ends, id)
		}
	}
}

// The keeping of rows.
const (
	keepDeleted   = 24 * time.Hour
	keepEnded     = 7 * 24 * time.Hour
	keepIdempoten = 24 * time.Hour
)

func (c *Control) prune(ctx context.Context) {
	now := c.now()
	if err := c.store.Prune(ctx, now.Add(-keepDeleted), now.Add(-keepEnded), now.Add(-keepIdempoten)); err != nil {
		c.logErr(ctx, "can't prune the store", err)
	}
	c.collectFiles(ctx)
}
