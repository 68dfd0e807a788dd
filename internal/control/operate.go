package control

import (
	"context"
	"fmt"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// The bounds of retrying.
const (
	firstBackoff  = 500 * time.Millisecond
	lastBackoff   = 30 * time.Second
	createRetries = 4                // of faults that may pass; lack of capacity is waited for
	deleteTimeout = 5 * time.Minute  // of one attempt
	yieldTimeout  = 30 * time.Second // how long a delete waits for what it superseded
	queueEvery    = time.Second      // how often a waiting create looks at the node's queue
)

// carryOut does what op's row says, as far as it still says so. Where the
// store fails it gives up, and rescan starts it again.
func (c *Control) carryOut(ctx context.Context, op sandbox.Operation, before []*task) {
	for _, t := range before {
		c.yield(ctx, t)
	}
	op, err := c.store.Operation(ctx, "", op.ID)
	if err != nil {
		c.logErr(ctx, "can't read an operation", err)
		return
	}
	if op.State.Done() {
		return
	}
	switch op.Verb {
	case sandbox.VerbCreate:
		err = c.create(ctx, op)
	case sandbox.VerbDelete:
		err = c.delete(ctx, op)
	case sandbox.VerbBuild:
		err = c.build(ctx, op)
	default:
		err = c.abandon(ctx, op)
	}
	switch {
	case err == nil:
	case isStale(err):
		c.log.InfoContext(ctx, "a stale answer was discarded", "operation", op.ID, "sandbox", op.Sandbox)
	default:
		c.logErr(ctx, "an operation was left for later", err, "operation", op.ID, "sandbox", op.Sandbox)
	}
}

// yield cancels t and waits for its end, within a bound: the node fences
// generations, so one that does not heed its context does no harm.
func (c *Control) yield(ctx context.Context, t *task) {
	t.cancel(errSuperseded)
	timer := time.NewTimer(yieldTimeout)
	defer timer.Stop()
	select {
	case <-t.done:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// abandon ends an operation whose verb this build doesn't carry out.
func (c *Control) abandon(ctx context.Context, op sandbox.Operation) error {
	failure := sandbox.Errorf(sandbox.Internal, "verb_unknown", "this version of Cloche can't %s", op.Verb)
	for _, t := range sandbox.Transitions {
		if t.Verb != op.Verb {
			continue
		}
		if err := c.store.FinishOperation(ctx, op.ID, t.Else, nil, failure); !sandbox.IsClass(err, sandbox.Internal) {
			return err
		}
	}
	return failure
}

// progress tells the store how far op is; an error there is the next write's.
func (c *Control) progress(ctx context.Context, op sandbox.Operation, state sandbox.OperationState, step string, delay string) {
	var d *sandbox.Delay
	if delay != "" {
		d = &sandbox.Delay{Reason: delay, Since: c.now().UTC()}
	}
	if err := c.store.UpdateOperation(ctx, op.ID, state, step, d); err != nil {
		c.logErr(ctx, "can't tell an operation's progress", err, "operation", op.ID)
	}
}

// create carries out a create.
func (c *Control) create(ctx context.Context, op sandbox.Operation) error {
	req, err := c.machineRequest(ctx, op)
	if err != nil {
		if sandbox.IsClass(err, sandbox.NotFound) {
			return c.createFailed(ctx, op, sandbox.AsError(err))
		}
		return err
	}
	err = c.creates.take(ctx, func() {
		c.progress(ctx, op, sandbox.OpAccepted, "", fmt.Sprintf("%d other sandboxes are being created", c.o.Creates))
	})
	if err != nil {
		return nil // superseded or stopping: the row says what is next
	}
	defer c.creates.free()

	deadline := op.CreatedAt.Add(c.o.CreateWait)
	faults := 0
	for wait := firstBackoff; ; wait = min(2*wait, lastBackoff) {
		failure := c.attempt(ctx, op, req)
		if ctx.Err() != nil {
			return nil
		}
		if failure == nil {
			return c.created(ctx, op)
		}
		if failure.Class != sandbox.NoCapacity {
			faults++
		}
		if !failure.Retryable || faults > createRetries || c.now().Add(wait).After(deadline) {
			return c.createFailed(ctx, op, failure)
		}
		c.progress(ctx, op, sandbox.OpRunning, "waiting to try again", failure.Message)
		if !sleep(ctx, max(wait, min(failure.RetryAfter, lastBackoff))) {
			return nil
		}
	}
}

// machineRequest is what the node is asked for op's sandbox.
func (c *Control) machineRequest(ctx context.Context, op sandbox.Operation) (sandbox.MachineRequest, error) {
	sb, err := c.store.Sandbox(ctx, op.Project, op.Sandbox)
	if err != nil {
		return sandbox.MachineRequest{}, err
	}
	tpl, err := c.store.Template(ctx, op.Project, sb.Digest)
	if err != nil {
		return sandbox.MachineRequest{}, err
	}
	return sandbox.MachineRequest{
		Project: sb.Project, Sandbox: sb.ID, Generation: op.Generation, Driver: sb.Driver, Digest: sb.Digest,
		Config: tpl.Config, Env: sb.Env, Hostname: strings.ReplaceAll(sb.ID, "_", "-"), Resources: sb.Resources,
	}, nil
}

// attempt asks the node once, telling meanwhile when its queue makes us wait,
// and records the driver.
func (c *Control) attempt(ctx context.Context, op sandbox.Operation, req sandbox.MachineRequest) *sandbox.Error {
	const step = "creating the machine"
	c.progress(ctx, op, sandbox.OpRunning, step, "")
	watching, stop := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		c.watchQueue(watching, op, step)
	}()
	attempt, cancel := context.WithTimeout(ctx, c.o.CreateTimeout)
	status, err := c.node.CreateMachine(attempt, req)
	cancel()
	stop()
	<-watched

	switch {
	case err != nil:
		return sandbox.AsError(err)
	case status.Sandbox != req.Sandbox || status.Generation != req.Generation:
		return sandbox.Errorf(sandbox.Unavailable, "stale_answer", "the node answered about generation %d of %s", status.Generation, status.Sandbox)
	case status.End != nil:
		return sandbox.Errorf(sandbox.Unavailable, "machine_ended", "the machine ended while it came up: %s %s", status.End.Reason, status.End.Detail)
	}
	if err := c.store.SetDriver(ctx, req.Sandbox, req.Generation, status.Driver); err != nil {
		return sandbox.AsError(err)
	}
	return nil
}

// watchQueue tells as a delay that creations wait at the node, and takes it
// back, until ctx ends.
func (c *Control) watchQueue(ctx context.Context, op sandbox.Operation, step string) {
	told := false
	c.every(ctx, queueEvery, func(ctx context.Context) {
		running, waiting, err := c.node.Queue(ctx)
		if err != nil || (waiting > 0) == told {
			return
		}
		told = waiting > 0
		delay := ""
		if told {
			delay = fmt.Sprintf("the node is creating %d machines and %d wait their turn", running, waiting)
		}
		c.progress(ctx, op, sandbox.OpRunning, step, delay)
	})
}

// created ends a create that succeeded. A machine that ended since then has
// been observed already or is in c.ends.
func (c *Control) created(ctx context.Context, op sandbox.Operation) error {
	if err := c.store.FinishOperation(ctx, op.ID, sandbox.StateRunning, nil, nil); err != nil {
		return err
	}
	c.endsMu.Lock()
	status, ended := c.ends[op.Sandbox]
	c.endsMu.Unlock()
	if ended {
		return c.machineEnded(ctx, status)
	}
	return nil
}

func (c *Control) createFailed(ctx context.Context, op sandbox.Operation, failure *sandbox.Error) error {
	end := &sandbox.End{Reason: sandbox.EndCreateFailed, Detail: failure.Message, At: c.now().UTC()}
	return c.store.FinishOperation(ctx, op.ID, sandbox.StateFailed, end, failure)
}

// delete carries out a delete: until it succeeds.
func (c *Control) delete(ctx context.Context, op sandbox.Operation) error {
	err := c.deletes.take(ctx, func() {
		c.progress(ctx, op, sandbox.OpAccepted, "", fmt.Sprintf("%d other sandboxes are being deleted", c.o.Deletes))
	})
	if err != nil {
		return nil // stopping
	}
	defer c.deletes.free()
	c.progress(ctx, op, sandbox.OpRunning, "deleting the machine", "")
	for wait := firstBackoff; ; wait = min(2*wait, lastBackoff) {
		attempt, cancel := context.WithTimeout(ctx, deleteTimeout)
		err := c.node.DeleteMachine(attempt, op.Sandbox, op.Generation)
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			break
		}
		c.logErr(ctx, "a machine can't be deleted yet", err, "sandbox", op.Sandbox)
		c.progress(ctx, op, sandbox.OpRunning, "deleting the machine, trying again", sandbox.AsError(err).Message)
		if !sleep(ctx, wait) {
			return nil
		}
	}
	c.forget(op.Sandbox)
	return c.store.FinishOperation(ctx, op.ID, sandbox.StateDeleted, c.deletedEnd(ctx, op), nil)
}

// deletedEnd is why a deleted sandbox ended: nil where it had ended before.
func (c *Control) deletedEnd(ctx context.Context, op sandbox.Operation) *sandbox.End {
	sb, err := c.store.Sandbox(ctx, "", op.Sandbox)
	if err == nil && sb.End != nil {
		return nil
	}
	reason := sandbox.EndDeleted
	if op.Key == sandbox.SystemKey {
		reason = sandbox.EndExpired
	}
	return &sandbox.End{Reason: reason, At: c.now().UTC()}
}

// sleep tells whether d passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func isStale(err error) bool {
	e := sandbox.AsError(err)
	return e != nil && e.Class == sandbox.Conflict && e.Code == "stale_generation"
}
