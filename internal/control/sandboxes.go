package control

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// CreateRequest asks for a sandbox of a template or of a snapshot.
type CreateRequest struct {
	Template string            `json:"template,omitempty"` // name, name:tag or digest
	Snapshot string            `json:"snapshot,omitempty"` // id; instead of Template
	Driver   string            `json:"driver,omitempty"`   // "" is the host's default. With Snapshot it is the snapshot's
	Labels   map[string]string `json:"labels,omitempty"`
	Env      map[string]string `json:"env,omitempty"`
	// Resources: zero fields get the defaults. With Snapshot they are the snapshot's.
	Resources sandbox.Resources `json:"resources"`
	TTL       time.Duration     `json:"ttl,omitempty"` // 0 is none
	Policy    PolicyPatch       `json:"policy"`        // of sandbox.DefaultPolicy
	// Egress is the egress profile; "" is the snapshot's with Snapshot, else the
	// preset none.
	Egress string `json:"egress,omitempty"`
}

// CreateSandbox asks for a sandbox in the caller's project. It answers as soon
// as the rows are there; the operation tells the rest.
func (c *Control) CreateSandbox(ctx context.Context, who sandbox.Caller, req CreateRequest, idem sandbox.Idempotency) (sb sandbox.Sandbox, op sandbox.Operation, replayed bool, err error) {
	if err := who.Can(sandbox.ActChange); err != nil {
		return sb, op, false, err
	}
	if idem, err = stamp(idem, req); err != nil {
		return sb, op, false, err
	}
	policy, err := validateCreate(&req)
	if err == nil {
		err = c.validateEgress(req.Egress)
	}
	if err != nil {
		return sb, op, false, err
	}
	host, err := c.capacityFor(ctx, sandbox.VerbCreate)
	if err != nil {
		return sb, op, false, err
	}
	now := c.now().UTC()
	sb = sandbox.Sandbox{
		ID: sandbox.NewID(sandbox.KindSandbox), Project: who.Project, Template: req.Template, Source: req.Snapshot, Driver: req.Driver,
		Labels: req.Labels, Env: req.Env, Resources: req.Resources, Policy: policy, Egress: req.Egress, CreatedAt: now, TouchedAt: now,
	}
	if req.TTL > 0 {
		at := now.Add(req.TTL)
		sb.ExpiresAt = &at
	}
	sb, op, replayed, err = c.store.CreateSandbox(ctx, sb, c.newOperation(who, sandbox.VerbCreate), host, idem)
	if err != nil {
		return sb, op, false, err
	}
	if !replayed {
		c.begun(op)
	}
	return sb, op, replayed, nil
}

// validateCreate checks a request, fills in its defaults and answers its policy.
func validateCreate(req *CreateRequest) (sandbox.Policy, error) {
	policy, err := req.Policy.apply(sandbox.DefaultPolicy)
	errs := []error{err, ValidateLabels(req.Labels), ValidateEnv(req.Env), ValidateTTL(req.TTL)}
	if req.Snapshot != "" {
		errs = append(errs, validateSource(*req))
	} else {
		req.Resources = withDefaults(req.Resources)
		errs = append(errs, ValidateRef(req.Template), req.Resources.Validate())
	}
	for _, err := range errs {
		if err != nil {
			return policy, err
		}
	}
	return policy, nil
}

// validateSource checks a request that names a snapshot, which has a template
// and resources of its own.
func validateSource(req CreateRequest) error {
	if req.Template != "" {
		return invalid("bad_source", "a sandbox is made from a template or from a snapshot, not from both")
	}
	if req.Driver != "" {
		return invalid("bad_driver", "a sandbox that is made from a snapshot has the snapshot's driver").WithHint("name none")
	}
	if req.Resources != (sandbox.Resources{}) {
		return invalid("bad_resources", "a sandbox that is made from a snapshot has the snapshot's resources").WithHint("name none")
	}
	return validateID(sandbox.KindSnapshot, "snapshot", req.Snapshot)
}

func (c *Control) newOperation(who sandbox.Caller, verb sandbox.Verb) sandbox.Operation {
	return sandbox.Operation{
		ID: sandbox.NewID(sandbox.KindOperation), Project: who.Project, Verb: verb,
		State: sandbox.OpAccepted, Key: who.KeyID, CreatedAt: c.now().UTC(),
	}
}

// begun starts an operation whose row was just written.
func (c *Control) begun(op sandbox.Operation) {
	c.launch(op)
	c.bell.ring("")
}

// Delete asks for a sandbox to be deleted, whatever its state. Where that is
// under way already, it answers the operation that does it.
func (c *Control) Delete(ctx context.Context, who sandbox.Caller, id string, idem sandbox.Idempotency) (sb sandbox.Sandbox, op sandbox.Operation, replayed bool, err error) {
	if err := c.allowed(who, sandbox.ActChange, sandbox.KindSandbox, "sandbox", id); err != nil {
		return sb, op, false, err
	}
	if idem, err = stamp(idem, id); err != nil {
		return sb, op, false, err
	}
	sb, op, replayed, err = c.ask(ctx, who, id, sandbox.VerbDelete, input{}, idem)
	if !sandbox.IsClass(err, sandbox.FailedPrecondition) {
		return sb, op, replayed, err
	}
	now, getErr := c.store.Sandbox(ctx, who.Scope(), id)
	if getErr != nil || now.State != sandbox.StateDeleting {
		return sandbox.Sandbox{}, sandbox.Operation{}, false, err
	}
	if op, getErr = c.store.Operation(ctx, who.Scope(), now.Operation); getErr != nil {
		return sandbox.Sandbox{}, sandbox.Operation{}, false, err
	}
	return now, op, true, nil
}

// allowed checks the role and the form of an id.
func (c *Control) allowed(who sandbox.Caller, a sandbox.Action, kind, what, id string) error {
	if err := who.Can(a); err != nil {
		return err
	}
	return validateID(kind, what, id)
}

// seen is sb as the caller may see it: environments hold secrets, so who may
// not run commands sees none.
func seen(who sandbox.Caller, sb sandbox.Sandbox) sandbox.Sandbox {
	if !who.May(sandbox.ActData) {
		sb.Env = nil
	}
	return sb
}

// Get returns a sandbox; one that was deleted in the last day still answers.
func (c *Control) Get(ctx context.Context, who sandbox.Caller, id string) (sandbox.Sandbox, error) {
	if err := c.allowed(who, sandbox.ActSee, sandbox.KindSandbox, "sandbox", id); err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := c.store.Sandbox(ctx, who.Scope(), id)
	return seen(who, sb), err
}

// List lists sandboxes, newest first. Deleted ones are listed only where the
// filter names their state.
func (c *Control) List(ctx context.Context, who sandbox.Caller, f sandbox.SandboxFilter, p sandbox.Page) ([]sandbox.Sandbox, string, error) {
	if err := who.Can(sandbox.ActSee); err != nil {
		return nil, "", err
	}
	if err := ValidateLabels(f.Labels); err != nil {
		return nil, "", err
	}
	known := map[sandbox.State]bool{}
	for _, s := range sandbox.States {
		known[s] = true
	}
	for _, s := range f.States {
		if !known[s] {
			return nil, "", invalid("bad_state", "there is no state %s", quote(string(s)))
		}
	}
	if len(f.States) == 0 {
		for _, s := range sandbox.States {
			if s != sandbox.StateDeleted {
				f.States = append(f.States, s)
			}
		}
	}
	list, next, err := c.store.Sandboxes(ctx, who.Scope(), f, p)
	for i := range list {
		list[i] = seen(who, list[i])
	}
	return list, next, err
}

// SetLabels replaces a sandbox's labels.
func (c *Control) SetLabels(ctx context.Context, who sandbox.Caller, id string, labels map[string]string) (sandbox.Sandbox, error) {
	if err := c.allowed(who, sandbox.ActChange, sandbox.KindSandbox, "sandbox", id); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := ValidateLabels(labels); err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := c.store.SetLabels(ctx, who.Scope(), id, labels)
	c.bell.ring("")
	return sb, err
}

// SetTTL makes a sandbox expire ttl from now; 0 takes its TTL away.
func (c *Control) SetTTL(ctx context.Context, who sandbox.Caller, id string, ttl time.Duration) (sandbox.Sandbox, error) {
	if err := c.allowed(who, sandbox.ActChange, sandbox.KindSandbox, "sandbox", id); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := ValidateTTL(ttl); err != nil {
		return sandbox.Sandbox{}, err
	}
	var at *time.Time
	if ttl > 0 {
		t := c.now().UTC().Add(ttl)
		at = &t
	}
	sb, err := c.store.SetExpiry(ctx, who.Scope(), id, at)
	c.bell.ring("")
	return sb, err
}

// MaxWait bounds how long a call may wait for something to change.
const MaxWait = 60 * time.Second

// Operation returns an operation; with a wait it answers when the operation
// has ended or the wait is over, whatever is first.
func (c *Control) Operation(ctx context.Context, who sandbox.Caller, id string, wait time.Duration) (op sandbox.Operation, err error) {
	if err := c.allowed(who, sandbox.ActSee, sandbox.KindOperation, "operation", id); err != nil {
		return op, err
	}
	err = c.await(ctx, id, wait, func() (bool, error) {
		op, err = c.store.Operation(ctx, who.Scope(), id)
		return op.State.Done(), err
	})
	return op, err
}

// await calls look until it says true, each time the key rings, at most for
// wait. The end of the wait is no error; that of ctx is.
func (c *Control) await(ctx context.Context, key string, wait time.Duration, look func() (bool, error)) error {
	timer := time.NewTimer(min(max(wait, 0), MaxWait))
	defer timer.Stop()
	for {
		ch, leave := c.bell.listen(key)
		done, err := look()
		if err != nil || done || wait <= 0 {
			leave()
			return err
		}
		select {
		case <-ch:
			leave()
		case <-timer.C:
			leave()
			_, err := look()
			return err
		case <-ctx.Done():
			leave()
			return sandbox.AsError(ctx.Err())
		}
	}
}

// Operations lists operations, newest first.
func (c *Control) Operations(ctx context.Context, who sandbox.Caller, f sandbox.OperationFilter, p sandbox.Page) ([]sandbox.Operation, string, error) {
	if err := who.Can(sandbox.ActSee); err != nil {
		return nil, "", err
	}
	if f.Sandbox != "" && !sandbox.ValidID(sandbox.KindSandbox, f.Sandbox) {
		return nil, "", invalid("bad_id", "%s is no id of a sandbox", quote(f.Sandbox))
	}
	for _, s := range f.States {
		if s != sandbox.OpAccepted && s != sandbox.OpRunning && !s.Done() {
			return nil, "", invalid("bad_state", "there is no operation state %s", quote(string(s)))
		}
	}
	return c.store.Operations(ctx, who.Scope(), f, p)
}

// Events lists events after seq, oldest first; with a wait it answers when
// there is one or the wait is over.
func (c *Control) Events(ctx context.Context, who sandbox.Caller, after int64, limit int, wait time.Duration) (list []sandbox.Event, err error) {
	if err := who.Can(sandbox.ActSee); err != nil {
		return nil, err
	}
	if after < 0 {
		return nil, invalid("bad_seq", "a sequence number is not negative")
	}
	err = c.await(ctx, "", wait, func() (bool, error) {
		list, err = c.store.Events(ctx, who.Scope(), after, limit)
		return len(list) > 0, err
	})
	return list, err
}
