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
	has := make(map[string]bool, len(machines))
	for _, m := range machines {
		has[m.Sandbox] = true
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
		if has[id] {
			continue
		}
		end := sandbox.End{Reason: sandbox.EndHostRestart, Detail: "the host has no machine for it any more", At: c.now().UTC()}
		if err := c.observed(ctx, id, sb.Generation, end); err != nil {
			return err
		}
	}
	return nil
}

// collect removes a machine that no row roots. A row roots its machine until
// it is deleted; rows are inserted before their machines are asked for.
func (c *Control) collect(ctx context.Context, m sandbox.MachineStatus) error {
	generation := m.Generation
	sb, err := c.store.Sandbox(ctx, "", m.Sandbox)
	switch {
	case sandbox.IsClass(err, sandbox.NotFound):
	case err != nil:
		return err
	case sb.State != sandbox.StateDeleted:
		return nil
	default:
		generation = max(generation, sb.Generation)
	}
	c.spawn(m.Sandbox, func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, deleteTimeout)
		defer cancel()
		c.log.WarnContext(ctx, "removing a machine that no sandbox has", "sandbox", m.Sandbox)
		if err := c.node.DeleteMachine(ctx, m.Sandbox, generation); err != nil {
			c.logErr(ctx, "can't remove it; the next census tries again", err, "sandbox", m.Sandbox)
		}
	})
	return nil
}

// machineEnded tells the row of a machine that ended. The status is kept: the
// row of a create that is about to finish can't take it yet, and created looks
// here after it can.
func (c *Control) machineEnded(ctx context.Context, m sandbox.MachineStatus) error {
	if m.End == nil {
		return nil
	}
	c.endsMu.Lock()
	c.ends[m.Sandbox] = m
	c.endsMu.Unlock()
	return c.observed(ctx, m.Sandbox, m.Generation, *m.End)
}

func (c *Control) observed(ctx context.Context, id string, generation int64, end sandbox.End) error {
	changed, err := c.store.Observed(ctx, id, generation, end)
	if err != nil {
		return err
	}
	if changed {
		c.log.InfoContext(ctx, "a machine ended", "sandbox", id, "reason", end.Reason, "detail", end.Detail)
		c.bell.ring(id)
	}
	return nil
}

func (c *Control) forget(id string) {
	c.endsMu.Lock()
	defer c.endsMu.Unlock()
	delete(c.ends, id)
}

// forgetAllBut keeps c.ends no larger than the node's census.
func (c *Control) forgetAllBut(has map[string]bool) {
	c.endsMu.Lock()
	defer c.endsMu.Unlock()
	for id := range c.ends {
		if !has[id] {
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

// expireBatch bounds one round of expire.
const expireBatch = 256

// expire deletes sandboxes whose TTL has run out.
func (c *Control) expire(ctx context.Context) {
	list, err := c.store.ExpiredSandboxes(ctx, c.now(), expireBatch)
	if err != nil {
		c.logErr(ctx, "can't list expired sandboxes", err)
		return
	}
	for _, sb := range list {
		_, _, _, err := c.begin(ctx, sandbox.System, sb.ID, sandbox.VerbDelete, sandbox.Idempotency{})
		if err != nil && !sandbox.IsClass(err, sandbox.FailedPrecondition) && !sandbox.IsClass(err, sandbox.NotFound) {
			c.logErr(ctx, "can't delete an expired sandbox", err, "sandbox", sb.ID)
		}
	}
}
