package control

import (
	"context"
	"maps"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// ForkRequest asks for copies of a running sandbox.
type ForkRequest struct {
	Count  int               `json:"count"`            // 1 to sandbox.MaxChildren
	Labels map[string]string `json:"labels,omitempty"` // nil: the parent's
	Env    map[string]string `json:"env,omitempty"`    // nil: the parent's
	Egress string            `json:"egress,omitempty"` // "": the parent's
	// Wait is how long tunnels and transfers may take to end before they are cut.
	Wait time.Duration `json:"wait,omitempty"`
}

// Fork asks for children of a running sandbox: each a sandbox of its own that
// begins where the parent stands. It answers the children's rows; each has its
// own operation.
func (c *Control) Fork(ctx context.Context, who sandbox.Caller, id string, req ForkRequest, idem sandbox.Idempotency) (children []sandbox.NewSandbox, op sandbox.Operation, replayed bool, err error) {
	if err := c.allowed(who, sandbox.ActChange, sandbox.KindSandbox, "sandbox", id); err != nil {
		return nil, op, false, err
	}
	if req.Count < 1 || req.Count > sandbox.MaxChildren {
		return nil, op, false, invalid("bad_count", "a fork makes 1 to %d children, not %d", sandbox.MaxChildren, req.Count)
	}
	for _, err := range []error{ValidateLabels(req.Labels), ValidateEnv(req.Env), validateSnapshotWait(req.Wait), c.validateEgress(req.Egress)} {
		if err != nil {
			return nil, op, false, err
		}
	}
	if idem, err = stamp(idem, []any{sandbox.VerbFork, id, req}); err != nil {
		return nil, op, false, err
	}
	b := sandbox.Begin{Snapshot: c.newSnapshot(sandbox.SnapshotMemory, sandbox.PurposeFork)}
	in := input{Wait: req.Wait}
	for range req.Count {
		child := sandbox.NewSandbox{
			Sandbox: sandbox.Sandbox{
				ID: sandbox.NewID(sandbox.KindSandbox), CreatedAt: c.now().UTC(),
				Labels: maps.Clone(req.Labels), Env: maps.Clone(req.Env), Egress: req.Egress,
			},
			Operation: c.newOperation(who, sandbox.VerbCreate),
		}
		b.Children = append(b.Children, child)
		in.Children = append(in.Children, child.Operation.ID)
	}
	_, op, replayed, err = c.begin(ctx, who, id, sandbox.VerbFork, b, in, idem)
	if err != nil {
		return nil, op, false, err
	}
	children, err = c.children(ctx, op)
	for i := range children {
		if !replayed {
			c.begun(children[i].Operation)
		}
		children[i].Sandbox = seen(who, children[i].Sandbox)
	}
	return children, op, replayed, err
}

// children reads a fork's children back. One that was deleted and pruned
// since is left out.
func (c *Control) children(ctx context.Context, op sandbox.Operation) (list []sandbox.NewSandbox, err error) {
	in, err := inputOf(op)
	if err != nil {
		return nil, err
	}
	for i, id := range op.Children {
		var child sandbox.NewSandbox
		if child.Sandbox, err = c.store.Sandbox(ctx, op.Project, id); err == nil && i < len(in.Children) {
			child.Operation, err = c.store.Operation(ctx, op.Project, in.Children[i])
		}
		switch {
		case sandbox.IsClass(err, sandbox.NotFound):
			continue
		case err != nil:
			return list, err
		}
		list = append(list, child)
	}
	return list, nil
}
