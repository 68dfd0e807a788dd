package control

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Access wakes a sandbox where its policy says so and waits until it runs. It
// answers nil at once where it runs, may not be woken, or can't be: the caller
// then finds what there is. An operation that is under way is waited for first.
func (c *Control) Access(ctx context.Context, project, id string) error {
	if err := validateID(sandbox.KindSandbox, "sandbox", id); err != nil {
		return err
	}
	deadline := c.now().Add(c.o.AccessWait)
	woken := "" // the operation of our own, whose failure is the answer
	for {
		sb, err := c.store.Sandbox(ctx, project, id)
		if err != nil {
			return err
		}
		if sb.State.Serves() || !sb.Policy.WakeOnAccess {
			return nil
		}
		if woken != "" && sb.Operation != woken {
			return c.wokenAs(ctx, woken)
		}
		if _, wakes := sandbox.Find(sb.State, sandbox.VerbWake); wakes {
			who := sandbox.Caller{KeyID: sandbox.AccessKey, Project: sb.Project, Role: sandbox.RoleProject}
			_, op, _, err := c.ask(ctx, who, id, sandbox.VerbWake, input{}, sandbox.Idempotency{})
			switch {
			case sandbox.AsError(err) != nil && sandbox.AsError(err).Code == "wrong_state":
				continue // somebody else was faster; look again
			case err != nil:
				return err
			}
			woken, sb.Operation = op.ID, op.ID
		} else if sb.Operation == "" || sb.State == sandbox.StateDeleting {
			return nil
		}
		left := deadline.Sub(c.now())
		if left <= 0 {
			return sandbox.Errorf(sandbox.Unavailable, "wake_slow", "the sandbox is %s and does not run yet", sb.State).WithRetry(time.Second)
		}
		if err := c.settled(ctx, sb.Operation, left); err != nil {
			return err
		}
	}
}

// settled waits until an operation has ended, at most for wait.
func (c *Control) settled(ctx context.Context, op string, wait time.Duration) error {
	return c.await(ctx, op, wait, func() (bool, error) {
		o, err := c.store.Operation(ctx, "", op)
		return o.State.Done(), err
	})
}

// wokenAs tells why the sandbox does not run although it was woken: the wake's
// failure, or nothing where something else has happened to it since.
func (c *Control) wokenAs(ctx context.Context, id string) error {
	op, err := c.store.Operation(ctx, "", id)
	if err != nil {
		return err
	}
	if op.Error != nil {
		return op.Error
	}
	return nil
}
