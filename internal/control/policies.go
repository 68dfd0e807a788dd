package control

import (
	"context"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// What Cloche asks of sandboxes on its own: at the end of their TTL, when
// nothing uses them, and when they crashed.

// The bounds of one round.
const (
	expireBatch = 256
	idleBatch   = 256
	retryAfter  = time.Minute // until a policy's verb that could not be begun, or failed, is asked again
)

// retries are the instants before which a policy does not ask a sandbox again:
// the loops are quicker than what they ask for.
type retries struct {
	mu sync.Mutex
	at map[string]time.Time
}

// due tells whether a policy may ask a sandbox now, and then not again for a while.
func (r *retries) due(key string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for old, at := range r.at {
		if !now.Before(at) {
			delete(r.at, old)
		}
	}
	if _, wait := r.at[key]; wait {
		return false
	}
	r.at[key] = now.Add(retryAfter)
	return true
}

// expire does to sandboxes whose TTL has run out what their policy says.
func (c *Control) expire(ctx context.Context) {
	list, err := c.store.ExpiredSandboxes(ctx, c.now(), expireBatch)
	if err != nil {
		c.logErr(ctx, "can't list expired sandboxes", err)
		return
	}
	for _, sb := range list {
		verb := sb.Policy.OnExpiry.Verb()
		if verb == "" {
			verb = sandbox.VerbDelete // a row of a build without policies
		}
		if c.retries.due(sandbox.SystemKey+sb.ID, c.now()) {
			c.impose(ctx, sb, verb, sandbox.SystemKey)
		}
	}
}

// expiryDone takes the TTL of a sandbox away that was suspended or stopped at
// its end: it would be again as soon as somebody wakes it.
func (c *Control) expiryDone(ctx context.Context, w work, o sandbox.Outcome) {
	if w.op.Key != sandbox.SystemKey || w.op.Verb == sandbox.VerbDelete || o.Failure != nil {
		return
	}
	sb, err := c.store.Sandbox(ctx, "", w.sb.ID)
	if err == nil && (sb.ExpiresAt == nil || sb.ExpiresAt.After(w.op.CreatedAt)) {
		return // somebody has set another meanwhile
	}
	if err == nil {
		_, err = c.store.SetExpiry(ctx, "", w.sb.ID, nil)
	}
	if err != nil {
		c.logErr(ctx, "can't take away a TTL that has run out", err, "sandbox", w.sb.ID)
	}
}

// idle does to sandboxes that nothing has touched what their policy says.
func (c *Control) idle(ctx context.Context) {
	c.flush(ctx) // the rows must know what is used
	list, err := c.store.IdleSandboxes(ctx, c.now(), idleBatch)
	if err != nil {
		c.logErr(ctx, "can't list idle sandboxes", err)
		return
	}
	for _, sb := range list {
		verb := sb.Policy.Idle.Action.Verb()
		if verb == "" || c.touched(sb.ID) || !c.retries.due(sandbox.IdleKey+sb.ID, c.now()) {
			continue
		}
		c.impose(ctx, sb, verb, sandbox.IdleKey)
	}
}

// impose asks a sandbox for a verb in Cloche's own name. What the table does
// not allow now is no fault: somebody else was faster.
func (c *Control) impose(ctx context.Context, sb sandbox.Sandbox, verb sandbox.Verb, key string) {
	who := sandbox.Caller{KeyID: key, Project: sb.Project, Role: sandbox.RoleProject}
	_, _, _, err := c.ask(ctx, who, sb.ID, verb, input{}, sandbox.Idempotency{})
	if err != nil && !sandbox.IsClass(err, sandbox.FailedPrecondition) && !sandbox.IsClass(err, sandbox.NotFound) {
		c.logErr(ctx, "a policy can't be carried out", err, "sandbox", sb.ID, "verb", verb, "key", key)
	}
}

// startCrashed saves what is left of the disks of failed sandboxes, and starts
// those again whose policy says so and that have an image to go on from.
func (c *Control) startCrashed(ctx context.Context) {
	failed := map[string]bool{}
	filter := sandbox.SandboxFilter{States: []sandbox.State{sandbox.StateFailed}}
	for page := (sandbox.Page{Limit: 500}); ; {
		list, next, err := c.store.Sandboxes(ctx, "", filter, page)
		if err != nil {
			c.logErr(ctx, "can't list failed sandboxes", err)
			return
		}
		for _, sb := range list {
			failed[sb.ID] = true
			if s := c.unsaved(sb); s != nil {
				c.salvage(sb, s)
				continue
			}
			if sb.Policy.OnCrash != sandbox.ReactStart || sb.Image == "" || sb.End == nil || sb.End.Reason == sandbox.EndCreateFailed {
				continue
			}
			if ok, err := c.mayStart(ctx, sb); err != nil {
				c.logErr(ctx, "can't tell how often a sandbox was started again", err, "sandbox", sb.ID)
			} else if ok {
				c.impose(ctx, sb, sandbox.VerbStart, sandbox.CrashKey)
			}
		}
		if next == "" {
			c.forgetSalvages(failed)
			return
		}
		page.Token = next
	}
}

// crashBackoff is how long after its n-th start within the window a sandbox
// that crashed again is left alone, times n.
const crashBackoff = 20 * time.Second

// mayStart tells from the operations, which outlive this process, whether a
// crashed sandbox may be started now: not too often, a little later each time,
// and not where the last start failed for good.
func (c *Control) mayStart(ctx context.Context, sb sandbox.Sandbox) (bool, error) {
	ops, _, err := c.store.Operations(ctx, sb.Project, sandbox.OperationFilter{Sandbox: sb.ID}, sandbox.Page{Limit: 50})
	if err != nil {
		return false, err
	}
	now := c.now()
	starts := 0
	var last time.Time
	for i, op := range ops {
		if op.Verb != sandbox.VerbStart || op.Key != sandbox.CrashKey {
			continue
		}
		if i == 0 && op.Error != nil && !op.Error.Retryable {
			return false, nil
		}
		if now.Sub(op.CreatedAt) < c.o.CrashWindow {
			starts++
			if last.IsZero() {
				last = op.CreatedAt
			}
		}
	}
	return starts < c.o.CrashStarts && now.Sub(last) >= time.Duration(starts)*crashBackoff, nil
}
