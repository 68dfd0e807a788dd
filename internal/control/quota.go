package control

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Usage tells what the caller's project has now, and what it may have.
func (c *Control) Usage(ctx context.Context, who sandbox.Caller) (sandbox.Usage, sandbox.Quotas, error) {
	if err := who.Can(sandbox.ActSee); err != nil {
		return sandbox.Usage{}, sandbox.Quotas{}, err
	}
	projects, err := c.store.Projects(ctx)
	if err != nil {
		return sandbox.Usage{}, sandbox.Quotas{}, err
	}
	var q sandbox.Quotas
	for _, p := range projects {
		if p.ID == who.Project {
			q = p.Quotas
		}
	}
	u, err := c.store.UsageOf(ctx, who.Project)
	return u, q, err
}

// SetQuotas replaces a project's quotas. What is there already stays.
func (c *Control) SetQuotas(ctx context.Context, who sandbox.Caller, project string, q sandbox.Quotas) (sandbox.Project, error) {
	if err := c.allowed(who, sandbox.ActKeys, sandbox.KindProject, "project", project); err != nil {
		return sandbox.Project{}, err
	}
	if min(q.Running, q.Suspended, q.MilliCPU, q.MemoryMiB, q.Snapshots) < 0 || q.DiskMiB < 0 {
		return sandbox.Project{}, invalid("bad_quota", "a quota is not negative").WithHint("0 is no bound")
	}
	return c.store.SetQuotas(ctx, project, q)
}

// capacityAge is how old the node's word on its capacity may be.
const capacityAge = time.Second

// capacity keeps what the node said last. Whose turn it is may read and ask.
type capacity struct {
	turn *slots
	at   time.Time
	is   sandbox.Capacity
}

// capacityOf is what the host lends. Of many who ask at once one asks the node.
func (c *Control) capacityOf(ctx context.Context) (sandbox.Capacity, error) {
	if err := c.capacity.turn.take(ctx, func() {}); err != nil {
		return sandbox.Capacity{}, sandbox.AsError(err)
	}
	defer c.capacity.turn.free()
	now := c.now()
	if age := now.Sub(c.capacity.at); !c.capacity.at.IsZero() && age >= 0 && age < capacityAge {
		return c.capacity.is, nil
	}
	ctx, cancel := context.WithTimeout(ctx, capacityTimeout)
	defer cancel()
	is, err := c.node.Capacity(ctx)
	if err != nil {
		return sandbox.Capacity{}, err
	}
	c.capacity.at, c.capacity.is = now, is
	for _, d := range is.Drivers {
		c.learn(sandbox.MachineStatus{Driver: d.Name, Durability: d.Durability})
	}
	return is, nil
}

// capacityTimeout bounds the question: requests wait for the answer.
const capacityTimeout = 5 * time.Second

// capacityFor is the capacity that a verb is checked against. What frees
// resources must not fail because the node can't tell them, and a delete takes
// none.
func (c *Control) capacityFor(ctx context.Context, verb sandbox.Verb) (sandbox.Capacity, error) {
	if verb == sandbox.VerbDelete {
		return sandbox.Capacity{}, nil
	}
	is, err := c.capacityOf(ctx)
	switch verb {
	case sandbox.VerbPause, sandbox.VerbResume, sandbox.VerbSuspend, sandbox.VerbStop:
		if err != nil {
			return sandbox.Capacity{}, nil
		}
	}
	return is, err
}
