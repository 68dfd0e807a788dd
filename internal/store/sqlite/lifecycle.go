package sqlite

import (
	"context"
	"database/sql"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// The three writes that move a sandbox's state after its creation. Each asks
// internal/sandbox's table.

func stale(id string) error {
	return sandbox.Errorf(sandbox.Conflict, "stale_generation", "the sandbox %s has moved on since", id)
}

// BeginVerb moves a sandbox by the table and inserts op.
func (s *Store) BeginVerb(ctx context.Context, project, id string, verb sandbox.Verb, op sandbox.Operation, idem sandbox.Idempotency) (sb sandbox.Sandbox, _ sandbox.Operation, replayed bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if sb, err = sandboxByID(ctx, tx, project, id); err != nil {
			return err
		}
		c := claim{sb.Project, "sandbox." + string(verb) + "/" + id, idem, op.CreatedAt}
		_, operation, ok, err := c.replay(ctx, tx)
		if err != nil {
			return err
		}
		if ok {
			replayed = true
			op, err = operationByID(ctx, tx, project, operation)
			return err
		}
		if op, err = s.begin(ctx, tx, &sb, verb, op); err != nil {
			return err
		}
		return c.record(ctx, tx, id, op.ID)
	})
	if err != nil {
		return sandbox.Sandbox{}, sandbox.Operation{}, false, err
	}
	return sb, op, replayed, nil
}

// begin is BeginVerb without idempotency; it changes sb to the new row.
func (s *Store) begin(ctx context.Context, tx *sql.Tx, sb *sandbox.Sandbox, verb sandbox.Verb, op sandbox.Operation) (sandbox.Operation, error) {
	t, ok := sandbox.Find(sb.State, verb)
	if !ok || verb == sandbox.VerbExit {
		return op, sandbox.Refuse(sb.State, verb)
	}
	if t.Guard != sandbox.Always {
		// No row of this schema can be a kept disk or a snapshot.
		return op, sandbox.Errorf(sandbox.FailedPrecondition, string(t.Guard), "the sandbox can't be asked to %s: it keeps no disk and no snapshot", verb)
	}
	if sb.Operation != "" {
		failure := sandbox.Errorf(sandbox.Conflict, "superseded", "a later %s took its place", verb)
		if err := endOperation(ctx, tx, sb.Operation, "", failure, op.CreatedAt); err != nil {
			return op, err
		}
	}
	from := sb.State
	sb.State, sb.Operation, sb.UpdatedAt = t.Via, op.ID, when(nanos(op.CreatedAt))
	sb.Generation++
	op.Project, op.Sandbox, op.Verb, op.State, op.Generation = sb.Project, sb.ID, verb, sandbox.OpAccepted, sb.Generation
	if err := putState(ctx, tx, *sb); err != nil {
		return op, err
	}
	if err := insertOperation(ctx, tx, op); err != nil {
		if isConstraint(err) {
			return op, s.constraint(ctx, tx, sb.Project, "operation", op.ID)
		}
		return op, err
	}
	if err := moved(ctx, tx, op.CreatedAt, *sb, from, op.ID); err != nil {
		return op, err
	}
	return operationByID(ctx, tx, sb.Project, op.ID)
}

// FinishOperation ends op and moves its sandbox to `to`.
func (s *Store) FinishOperation(ctx context.Context, id string, to sandbox.State, end *sandbox.End, failure *sandbox.Error) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		op, err := operationByID(ctx, tx, "", id)
		if err != nil {
			return err
		}
		sb, err := sandboxByID(ctx, tx, "", op.Sandbox)
		if err != nil {
			return err
		}
		if op.State.Done() || sb.Generation != op.Generation || sb.Operation != op.ID {
			return stale(sb.ID)
		}
		if !leads(sb.State, op.Verb, to, failure != nil) {
			return sandbox.Errorf(sandbox.Internal, "wrong_transition", "%s can't end in %s from %s", op.Verb, to, sb.State)
		}
		now := s.now()
		if err := endOperation(ctx, tx, id, "", failure, now); err != nil {
			return err
		}
		from := sb.State
		sb.State, sb.Operation, sb.UpdatedAt = to, "", now
		if end != nil {
			sb.End = end
		}
		if err := putState(ctx, tx, sb); err != nil {
			return err
		}
		return moved(ctx, tx, now, sb, from, id)
	})
}

// leads tells whether the table lets verb, under way in via, end in to. What
// the table keeps in a transitional state when it fails (delete) can't end so:
// it is tried until it succeeds, or nothing would be left to lead on.
func leads(via sandbox.State, verb sandbox.Verb, to sandbox.State, failed bool) bool {
	for _, t := range sandbox.Transitions {
		if t.Via == via && t.Verb == verb && (!failed && t.To == to || failed && t.Else == to && !to.Transitional()) {
			return true
		}
	}
	return false
}

// Observed records that a machine ended on its own.
func (s *Store) Observed(ctx context.Context, id string, generation int64, end sandbox.End) (changed bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		changed = false
		sb, err := sandboxByID(ctx, tx, "", id)
		if sandbox.IsClass(err, sandbox.NotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		t, ok := sandbox.Find(sb.State, sandbox.VerbExit)
		if !ok || sb.Generation != generation {
			return nil
		}
		from := sb.State
		sb.State, sb.End, sb.UpdatedAt = t.To, &end, s.now()
		if err := putState(ctx, tx, sb); err != nil {
			return err
		}
		changed = true
		return moved(ctx, tx, sb.UpdatedAt, sb, from, "")
	})
	return changed && err == nil, err
}

// stateChange is the data of an event of type sandbox.state.
type stateChange struct {
	From       sandbox.State `json:"from,omitempty"`
	To         sandbox.State `json:"to"`
	Generation int64         `json:"generation"`
	End        *sandbox.End  `json:"end,omitempty"`
}

// moved writes the event of a transition of sb from the state `from`.
func moved(ctx context.Context, tx *sql.Tx, at time.Time, sb sandbox.Sandbox, from sandbox.State, op string) error {
	return insertEvent(ctx, tx, sandbox.Event{
		Project: sb.Project, At: at, Type: "sandbox.state", Sandbox: sb.ID, Operation: op,
		Data: []byte(encode(stateChange{From: from, To: sb.State, Generation: sb.Generation, End: sb.End})),
	})
}
