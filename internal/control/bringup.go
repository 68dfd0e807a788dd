package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// The verbs that end with a new machine: create, restore, start and rollback.
// The machine's generation, its operation's, is the sandbox's epoch from then on.

// create carries out a create: from the template, or from a snapshot, which a
// fork's children wait for.
func (c *Control) create(ctx context.Context, w work) error {
	var from *sandbox.Snapshot
	if w.sb.Source != "" {
		var err error
		if from, err = c.awaitSnapshot(ctx, w, w.sb.Source); err != nil {
			return c.failOrLater(ctx, w, err)
		}
	}
	o, err := c.bringUp(ctx, w, from, false, false)
	if err != nil {
		return c.failOrLater(ctx, w, err)
	}
	failpoint.Hit("control.create.made")
	if from != nil {
		o.Image, o.ImageAt, o.Base = &from.ID, from.TakenAt, base(*from)
	}
	return c.finish(ctx, w, o)
}

// restore goes on where a suspend stood.
func (c *Control) restore(ctx context.Context, w work) error {
	from, err := c.image(ctx, w, w.sb.Image)
	if err != nil {
		return c.failOrLater(ctx, w, err)
	}
	o, err := c.bringUp(ctx, w, from, true, false)
	if err != nil {
		return c.failOrLater(ctx, w, err)
	}
	failpoint.Hit("control.restore.made")
	return c.finish(ctx, w, o)
}

// start boots from the disk that was kept. After a crash the image may hold
// memory: then what lives in it goes on as new sessions, since the present ones
// ended with the machine.
func (c *Control) start(ctx context.Context, w work) error {
	from, err := c.image(ctx, w, w.sb.Image)
	if err != nil {
		return c.failOrLater(ctx, w, err)
	}
	o, err := c.bringUp(ctx, w, from, false, false)
	if err != nil {
		return c.failOrLater(ctx, w, err)
	}
	failpoint.Hit("control.start.made")
	return c.finish(ctx, w, o)
}

// rollback replaces the machine, if there is one, by that of an earlier snapshot.
func (c *Control) rollback(ctx context.Context, w work) error {
	from, err := c.image(ctx, w, w.op.Snapshot)
	if err != nil {
		return c.failOrLater(ctx, w, err)
	}
	o, err := c.bringUp(ctx, w, from, false, true)
	if err != nil {
		return c.failOrLater(ctx, w, err)
	}
	failpoint.Hit("control.rollback.made")
	o.Image, o.ImageAt, o.Base = &from.ID, from.TakenAt, base(*from)
	return c.finish(ctx, w, o)
}

// base is the named snapshot that a timeline which begins at s has passed last.
func base(s sandbox.Snapshot) *string {
	if s.Purpose == sandbox.PurposeNamed {
		return &s.ID
	}
	return &s.Parent
}

// storeTrouble is an error that says nothing about the operation, which is
// left for later.
type storeTrouble struct{ error }

func (e storeTrouble) Unwrap() error { return e.error }

// failOrLater ends an operation by the error of one of its steps, unless that
// is only the store's trouble.
func (c *Control) failOrLater(ctx context.Context, w work, err error) error {
	var trouble storeTrouble
	if errors.As(err, &trouble) {
		return trouble.error
	}
	return c.fail(ctx, w, sandbox.AsError(err))
}

// read sorts a store's error: that something is not there is the operation's end.
func read(err error) error {
	if err == nil || sandbox.IsClass(err, sandbox.NotFound) {
		return err
	}
	return storeTrouble{err}
}

// image is the snapshot that a machine shall be made from, which must be ready.
func (c *Control) image(ctx context.Context, w work, id string) (*sandbox.Snapshot, error) {
	if id == "" {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_image", "the sandbox has no image to go on from")
	}
	s, err := c.store.Snapshot(ctx, w.sb.Project, id)
	if err != nil {
		return nil, read(err)
	}
	if s.State != sandbox.SnapshotReady {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_not_ready", "the snapshot %s is %s", id, s.State)
	}
	return &s, nil
}

// snapshotPoll is how often a child looks whether its snapshot is there, where
// nobody rings: the fork may be carried out elsewhere.
const snapshotPoll = 15 * time.Second

// awaitSnapshot waits until a snapshot that is being taken is ready.
func (c *Control) awaitSnapshot(ctx context.Context, w work, id string) (*sandbox.Snapshot, error) {
	for told := false; ; {
		s, err := c.store.Snapshot(ctx, w.sb.Project, id)
		if err != nil && !sandbox.IsClass(err, sandbox.NotFound) {
			return nil, read(err)
		}
		switch s.State {
		case sandbox.SnapshotReady:
			return &s, nil
		case sandbox.SnapshotCreating:
		default: // or it is gone: only one that failed can go while a create needs it
			return nil, sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_failed", "the snapshot %s that it begins at could not be taken", id)
		}
		if !told {
			c.progress(ctx, w.op, sandbox.OpAccepted, "", "waiting for the snapshot")
			told = true
		}
		ch, leave := c.bell.listen(s.Operation)
		// What finished between the look and listen has not rung for us.
		if again, err := c.store.Snapshot(ctx, w.sb.Project, id); err == nil && again.State == sandbox.SnapshotCreating {
			wait, cancel := context.WithTimeout(ctx, snapshotPoll)
			select {
			case <-ch:
			case <-wait.Done():
			}
			cancel()
		}
		leave()
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
}

// bringUp asks the node for a machine until it is there, and returns what an
// operation that ends with it changes.
func (c *Control) bringUp(ctx context.Context, w work, from *sandbox.Snapshot, goOn, replace bool) (sandbox.Outcome, error) {
	req, err := c.machineRequest(ctx, w)
	if err != nil {
		return sandbox.Outcome{}, read(err)
	}
	if from != nil {
		req.Source = &sandbox.Source{Snapshot: from.ID, Kind: from.Kind, Continue: goOn, Replace: replace}
	}
	err = c.creates.take(ctx, func() {
		c.progress(ctx, w.op, sandbox.OpAccepted, "", fmt.Sprintf("%d other machines are being made", c.o.Creates))
	})
	if err != nil {
		return sandbox.Outcome{}, err // superseded or stopping: the row says what is next
	}
	defer c.creates.free()

	deadline := w.op.CreatedAt.Add(c.o.CreateWait)
	faults := 0
	for wait := firstBackoff; ; wait = min(2*wait, lastBackoff) {
		status, failure := c.make(ctx, w.op, req)
		if ctx.Err() != nil {
			return sandbox.Outcome{}, context.Cause(ctx)
		}
		if failure == nil {
			return c.up(w, status), nil
		}
		if failure.Class != sandbox.NoCapacity && failure.Code != sandbox.CodeDriverProbing {
			faults++
		}
		if !failure.Retryable || faults > createRetries || c.now().Add(wait).After(deadline) {
			return sandbox.Outcome{}, failure
		}
		c.progress(ctx, w.op, sandbox.OpRunning, "waiting to try again", failure.Message)
		if !sleep(ctx, max(wait, min(failure.RetryAfter, lastBackoff))) {
			return sandbox.Outcome{}, context.Cause(ctx)
		}
	}
}

// machineRequest is what the node is asked for op's sandbox.
func (c *Control) machineRequest(ctx context.Context, w work) (sandbox.MachineRequest, error) {
	sb := w.sb
	tpl, err := c.store.Template(ctx, sb.Project, sb.Digest)
	if err != nil {
		return sandbox.MachineRequest{}, err
	}
	return sandbox.MachineRequest{
		Project: sb.Project, Sandbox: sb.ID, Generation: w.op.Generation, Driver: sb.Driver, Digest: sb.Digest,
		Config: tpl.Config, Env: sb.Env, Hostname: strings.ReplaceAll(sb.ID, "_", "-"), Resources: sb.Resources,
	}, nil
}

// make asks the node once, telling meanwhile when its queue makes us wait.
func (c *Control) make(ctx context.Context, op sandbox.Operation, req sandbox.MachineRequest) (status sandbox.MachineStatus, failure *sandbox.Error) {
	const step = "making the machine"
	told := c.soon(ctx, op, step)
	defer told()
	watching, stop := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		c.watchQueue(watching, op, step)
	}()
	failure = attempt(ctx, c.o.CreateTimeout, func(ctx context.Context) (err error) {
		// First, so that no machine ever has more than its profile allows.
		if c.o.Egress != nil {
			if err := c.assign(ctx, req.Sandbox, c.opener()); err != nil {
				return err
			}
		}
		status, err = c.node.CreateMachine(ctx, req)
		return err
	})
	stop()
	<-watched

	switch {
	case failure != nil:
	case status.Sandbox != req.Sandbox || status.Generation != req.Generation:
		failure = sandbox.Errorf(sandbox.Unavailable, "stale_answer", "the node answered about generation %d of %s", status.Generation, status.Sandbox)
	case status.End != nil:
		failure = sandbox.Errorf(sandbox.Unavailable, "machine_ended", "the machine ended while it came up: %s %s", status.End.Reason, status.End.Detail)
	}
	return status, failure
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

// up is the outcome of a machine that came up.
func (c *Control) up(w work, status sandbox.MachineStatus) sandbox.Outcome {
	c.learn(status)
	o := sandbox.Outcome{To: w.t.To, Epoch: status.Generation, Driver: status.Driver}
	for _, ses := range status.Sessions {
		ses.Project, ses.Sandbox = w.sb.Project, w.sb.ID
		ses.Generation = max(ses.Generation, 1)
		ses.Key = cmp.Or(ses.Key, w.op.Key)
		if ses.CreatedAt.IsZero() {
			ses.CreatedAt = c.now().UTC()
		}
		o.Sessions = append(o.Sessions, ses)
	}
	return o
}
