package control

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// VerbRequest is what a verb needs beside its name.
type VerbRequest struct {
	// Grace, of a stop, is how long the sessions of a running sandbox may take
	// to end after SIGTERM; 0 gives none.
	Grace time.Duration `json:"grace,omitempty"`
}

// input is what an operation keeps of its request for its resumption.
type input struct {
	Grace time.Duration `json:"grace,omitempty"` // stop
	Wait  time.Duration `json:"wait,omitempty"`  // snapshot, fork
	// Children are the ids of a fork's create operations, in the order of
	// Operation.Children.
	Children []string `json:"children,omitempty"`
}

func inputOf(op sandbox.Operation) (in input, err error) {
	if len(op.Input) == 0 {
		return in, nil
	}
	if err := json.Unmarshal(op.Input, &in); err != nil {
		return in, sandbox.Errorf(sandbox.Internal, "bad_input", "the stored request can't be read: %w", err)
	}
	return in, nil
}

// Do asks a sandbox to pause, resume, suspend, restore, stop, start or wake.
// It answers as soon as the rows are there; the operation tells the rest.
func (c *Control) Do(ctx context.Context, who sandbox.Caller, id string, verb sandbox.Verb, req VerbRequest, idem sandbox.Idempotency) (sb sandbox.Sandbox, op sandbox.Operation, replayed bool, err error) {
	if err := c.allowed(who, sandbox.ActChange, sandbox.KindSandbox, "sandbox", id); err != nil {
		return sb, op, false, err
	}
	switch verb {
	case sandbox.VerbPause, sandbox.VerbResume, sandbox.VerbSuspend, sandbox.VerbRestore, sandbox.VerbStop, sandbox.VerbStart, sandbox.VerbWake:
	default:
		return sb, op, false, invalid("bad_verb", "a sandbox can't be asked so to %s", quote(string(verb)))
	}
	if req.Grace < 0 || req.Grace > MaxGrace || req.Grace > 0 && verb != sandbox.VerbStop {
		return sb, op, false, invalid("bad_grace", "a stop's grace must lie between 0 and %s, and no other verb has one", MaxGrace)
	}
	if idem, err = stamp(idem, []any{verb, id, req}); err != nil {
		return sb, op, false, err
	}
	return c.ask(ctx, who, id, verb, input{Grace: req.Grace}, idem)
}

// ask begins a verb that needs nothing but itself and, where it saves the
// sandbox, the row of the snapshot that it makes.
func (c *Control) ask(ctx context.Context, who sandbox.Caller, id string, verb sandbox.Verb, in input, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error) {
	b := sandbox.Begin{}
	switch verb {
	case sandbox.VerbSuspend:
		b.Snapshot = c.newSnapshot(sandbox.SnapshotMemory, sandbox.PurposeSuspend)
	case sandbox.VerbStop:
		b.Snapshot = c.newSnapshot(sandbox.SnapshotDisk, sandbox.PurposeStop)
	}
	return c.begin(ctx, who, id, verb, b, in, idem)
}

// begin writes a verb and starts it. Roles are the caller's business.
func (c *Control) begin(ctx context.Context, who sandbox.Caller, id string, verb sandbox.Verb, b sandbox.Begin, in input, idem sandbox.Idempotency) (sb sandbox.Sandbox, op sandbox.Operation, replayed bool, err error) {
	b.Op = c.newOperation(who, verb)
	if b.Op.Input, err = json.Marshal(in); err != nil {
		return sb, op, false, fmt.Errorf("store a verb's request: %w", err)
	}
	if b.Capacity, err = c.capacityFor(ctx, verb); err != nil {
		return sb, op, false, err
	}
	if verb == sandbox.VerbStart {
		if err := c.savedFirst(ctx, who.Scope(), id); err != nil {
			return sb, op, false, err
		}
	}
	sb, op, replayed, err = c.store.BeginVerb(ctx, who.Scope(), id, verb, b, idem)
	if err != nil {
		return sb, op, false, err
	}
	if !replayed {
		c.begun(op)
	}
	return sb, op, replayed, nil
}

// newSnapshot is the row of a snapshot that a verb makes; the store fills in
// what is its sandbox's.
func (c *Control) newSnapshot(kind sandbox.SnapshotKind, purpose sandbox.SnapshotPurpose) *sandbox.Snapshot {
	return &sandbox.Snapshot{
		ID: sandbox.NewID(sandbox.KindSnapshot), Kind: kind, Purpose: purpose,
		State: sandbox.SnapshotCreating, CreatedAt: c.now().UTC(),
	}
}

// Rollback asks a sandbox to go back to an earlier snapshot of its own, in
// place. The sessions of the timeline that it leaves end.
func (c *Control) Rollback(ctx context.Context, who sandbox.Caller, id, snapshot string, idem sandbox.Idempotency) (sb sandbox.Sandbox, op sandbox.Operation, replayed bool, err error) {
	if err := c.allowed(who, sandbox.ActChange, sandbox.KindSandbox, "sandbox", id); err != nil {
		return sb, op, false, err
	}
	if err := validateID(sandbox.KindSnapshot, "snapshot", snapshot); err != nil {
		return sb, op, false, err
	}
	if idem, err = stamp(idem, []any{sandbox.VerbRollback, id, snapshot}); err != nil {
		return sb, op, false, err
	}
	return c.begin(ctx, who, id, sandbox.VerbRollback, sandbox.Begin{To: snapshot}, input{}, idem)
}
