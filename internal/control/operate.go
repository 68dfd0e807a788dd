package control

import (
	"context"
	"sync"
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

// work is an operation under way: its row, its sandbox's as it was when the
// work began, and the row of the table that it goes by.
type work struct {
	op sandbox.Operation
	sb sandbox.Sandbox
	t  sandbox.Transition
	in input
}

// carryOut does what op's row says, as far as it still says so. Where the
// store fails it gives up, and rescan starts it again. Everything that it calls
// is safe to be done again from its beginning, whatever instant it ended at.
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
	if op.Verb == sandbox.VerbBuild {
		err = c.build(ctx, op)
	} else {
		err = c.verb(ctx, op)
	}
	switch {
	case err == nil:
	case isStale(err):
		c.log.InfoContext(ctx, "a stale answer was discarded", "operation", op.ID, "sandbox", op.Sandbox)
	default:
		c.logErr(ctx, "an operation was left for later", err, "operation", op.ID, "sandbox", op.Sandbox)
	}
}

// verb carries out a sandbox's operation: what it is follows from the state
// that the table led it into, so that a wake is whichever of three it became.
func (c *Control) verb(ctx context.Context, op sandbox.Operation) error {
	sb, err := c.store.Sandbox(ctx, "", op.Sandbox)
	if err != nil {
		return err
	}
	w := work{op: op, sb: sb}
	if sb.Operation != op.ID {
		return sandbox.Errorf(sandbox.Conflict, "stale_generation", "the sandbox %s has moved on since", sb.ID)
	}
	if w.t, err = transition(op, sb.State); err != nil {
		return err
	}
	if w.in, err = inputOf(op); err != nil {
		return c.fail(ctx, w, sandbox.AsError(err))
	}
	do := map[sandbox.State]func(context.Context, work) error{
		sandbox.StateCreating: c.create, sandbox.StateDeleting: c.delete,
		sandbox.StatePausing: c.pause, sandbox.StateResuming: c.resume,
		sandbox.StateSuspending: c.suspend, sandbox.StateRestoring: c.restore,
		sandbox.StateStopping: c.stop, sandbox.StateStarting: c.start,
		sandbox.StateSnapping: c.snapshot, sandbox.StateForking: c.fork, sandbox.StateRolling: c.rollback,
	}[sb.State]
	if do == nil {
		return sandbox.Errorf(sandbox.Internal, "verb_unknown", "this version of Cloche can't carry out what is %s", sb.State)
	}
	return do(ctx, w)
}

// transition is the table's row that op goes by. An operation of a build that
// did not keep From gets the first that fits.
func transition(op sandbox.Operation, via sandbox.State) (sandbox.Transition, error) {
	var fits *sandbox.Transition
	for i, t := range sandbox.Transitions {
		if t.Verb != op.Verb || t.Via != via {
			continue
		}
		if t.From == op.From {
			return t, nil
		}
		if fits == nil {
			fits = &sandbox.Transitions[i]
		}
	}
	if fits == nil {
		return sandbox.Transition{}, sandbox.Errorf(sandbox.Internal, "wrong_transition", "no %s leads through %s", op.Verb, via)
	}
	return *fits, nil
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

// tellAfter is how long a step may take before it is told: most end sooner, and
// to tell one is a commit of the store.
const tellAfter = 100 * time.Millisecond

// soon tells that op is at step unless the function that it returns is called
// before long.
func (c *Control) soon(ctx context.Context, op sandbox.Operation, step string) (done func()) {
	var wg sync.WaitGroup
	wg.Add(1)
	t := time.AfterFunc(tellAfter, func() {
		defer wg.Done()
		c.progress(ctx, op, sandbox.OpRunning, step, "")
	})
	return func() {
		if !t.Stop() {
			wg.Wait()
		}
	}
}

// try asks the node once, and again for a short while where that may pass.
func (c *Control) try(ctx context.Context, w work, step string, timeout time.Duration, ask func(context.Context) error) *sandbox.Error {
	until := c.now().Add(c.o.RetryFor)
	for wait := firstBackoff; ; wait = min(2*wait, lastBackoff) {
		told := c.soon(ctx, w.op, step)
		failure := attempt(ctx, timeout, ask)
		told()
		if failure == nil || failure.Class != sandbox.Unavailable || c.now().Add(wait).After(until) || ctx.Err() != nil {
			return failure
		}
		c.progress(ctx, w.op, sandbox.OpRunning, "waiting to try again", failure.Message)
		if !sleep(ctx, wait) {
			return failure
		}
	}
}

// insist asks the node until it succeeds or a later operation is there; false
// says that ctx ended first.
func (c *Control) insist(ctx context.Context, w work, step string, timeout time.Duration, ask func(context.Context) error) bool {
	told := c.soon(ctx, w.op, step)
	defer told()
	for wait := firstBackoff; ; wait = min(2*wait, lastBackoff) {
		failure := attempt(ctx, timeout, ask)
		if ctx.Err() != nil {
			return false
		}
		if failure == nil {
			return true
		}
		c.logErr(ctx, "the node can't do it yet", failure, "sandbox", w.op.Sandbox, "operation", w.op.ID, "step", step)
		c.progress(ctx, w.op, sandbox.OpRunning, step+", trying again", failure.Message)
		if !sleep(ctx, wait) {
			return false
		}
	}
}

func attempt(ctx context.Context, timeout time.Duration, ask func(context.Context) error) *sandbox.Error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return sandbox.AsError(ask(ctx))
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
