package sqlite

import (
	"context"
	"database/sql"
	"slices"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// The writes that begin what moves a sandbox's state after its creation, and
// the event that each move leaves. They ask internal/sandbox's table.

func stale(id string) error {
	return sandbox.Errorf(sandbox.Conflict, "stale_generation", "the sandbox %s has moved on since", id)
}

// BeginVerb moves a sandbox by the table and inserts what b brings.
func (s *Store) BeginVerb(ctx context.Context, project, id string, verb sandbox.Verb, b sandbox.Begin, idem sandbox.Idempotency) (sb sandbox.Sandbox, op sandbox.Operation, replayed bool, err error) {
	failpoint.Hit("store.begin.before")
	err = s.write(ctx, func(tx *sql.Tx) error {
		if sb, err = sandboxByID(ctx, tx, project, id); err != nil {
			return err
		}
		c := claim{sb.Project, "sandbox." + string(verb) + "/" + id, idem, b.Op.CreatedAt}
		_, operation, ok, err := c.replay(ctx, tx)
		if err != nil {
			return err
		}
		if ok {
			replayed = true
			op, err = operationByID(ctx, tx, project, operation)
			return err
		}
		if op, err = s.begin(ctx, tx, &sb, verb, b); err != nil {
			return err
		}
		return c.record(ctx, tx, id, op.ID)
	})
	if err != nil {
		return sandbox.Sandbox{}, sandbox.Operation{}, false, err
	}
	failpoint.Hit("store.begin.committed")
	return sb, op, replayed, nil
}

// begin is BeginVerb without idempotency; it changes sb to the new row.
func (s *Store) begin(ctx context.Context, tx *sql.Tx, sb *sandbox.Sandbox, verb sandbox.Verb, b sandbox.Begin) (op sandbox.Operation, err error) {
	t, ok := sandbox.Find(sb.State, verb)
	if !ok || verb == sandbox.VerbExit {
		return op, sandbox.Refuse(sb.State, verb)
	}
	if err := wellFormed(verb, b); err != nil {
		return op, err
	}
	if err := guard(ctx, tx, *sb, t, b.To); err != nil {
		return op, err
	}
	if err := admit(ctx, tx, sb.Project, b.Capacity, takes(*sb, t, b)); err != nil {
		return op, err
	}
	op = b.Op
	if sb.Operation != "" {
		if err := supersede(ctx, tx, *sb, verb, op.CreatedAt); err != nil {
			return op, err
		}
	}
	from := sb.State
	sb.State, sb.Operation, sb.UpdatedAt = t.Via, op.ID, when(nanos(op.CreatedAt))
	sb.Generation++
	if sb.TouchedAt.Before(sb.UpdatedAt) {
		sb.TouchedAt = sb.UpdatedAt
	}
	op.Project, op.Sandbox, op.Verb, op.State, op.From, op.Generation = sb.Project, sb.ID, verb, sandbox.OpAccepted, from, sb.Generation
	op.Snapshot = b.To
	if b.Snapshot != nil {
		op.Snapshot = b.Snapshot.ID
	}
	op.Children = nil
	for _, c := range b.Children {
		op.Children = append(op.Children, c.Sandbox.ID)
	}
	if err := putState(ctx, tx, *sb); err != nil {
		return op, err
	}
	if err := s.putOperation(ctx, tx, op); err != nil {
		return op, err
	}
	if err := moved(ctx, tx, op.CreatedAt, *sb, from, op.ID); err != nil {
		return op, err
	}
	if b.Snapshot != nil {
		if err := s.beginSnapshot(ctx, tx, *sb, *b.Snapshot, op.ID, op.CreatedAt, ""); err != nil {
			return op, err
		}
	}
	for _, c := range b.Children {
		if err := hasProfile(ctx, tx, sb.Project, c.Sandbox.Egress); err != nil {
			return op, err
		}
		if err := s.insertChild(ctx, tx, *sb, op, c); err != nil {
			return op, err
		}
	}
	return operationByID(ctx, tx, sb.Project, op.ID)
}

// wellFormed checks that a verb brings what it needs and nothing else: a row
// without its snapshot could never finish.
func wellFormed(verb sandbox.Verb, b sandbox.Begin) error {
	takes := []sandbox.Verb{sandbox.VerbSuspend, sandbox.VerbStop, sandbox.VerbSnapshot, sandbox.VerbFork}
	switch {
	case (b.Snapshot != nil) != slices.Contains(takes, verb):
		return sandbox.Errorf(sandbox.Internal, "wrong_begin", "a %s with a snapshot of its own: %v", verb, b.Snapshot != nil)
	case b.To != "" && verb != sandbox.VerbRollback:
		return sandbox.Errorf(sandbox.Internal, "wrong_begin", "a %s goes back to nothing", verb)
	case verb == sandbox.VerbFork && (len(b.Children) < 1 || len(b.Children) > sandbox.MaxChildren):
		return sandbox.Errorf(sandbox.Invalid, "wrong_count", "a fork makes 1 to %d children, not %d", sandbox.MaxChildren, len(b.Children))
	case verb != sandbox.VerbFork && len(b.Children) > 0:
		return sandbox.Errorf(sandbox.Internal, "wrong_begin", "a %s makes no children", verb)
	}
	return nil
}

// guard checks what t needs beside its from-state.
func guard(ctx context.Context, tx *sql.Tx, sb sandbox.Sandbox, t sandbox.Transition, to string) error {
	switch t.Guard {
	case sandbox.HasSnapshot:
		if to == "" {
			return refused(t, "no snapshot is named that it could go back to")
		}
		snap, err := readySnapshot(ctx, tx, sb.Project, to)
		if err != nil {
			return err
		}
		ok, err := inPast(ctx, tx, sb, snap)
		if err == nil && !ok {
			return refused(t, "the snapshot is of another sandbox").
				WithHint("create a sandbox from it, or choose one that was taken of this sandbox or of one that it was forked from")
		}
		return err
	case sandbox.HasDisk, sandbox.HasSuspendedAs:
		if sb.Image == "" {
			return refused(t, "no image of it was kept").WithHint("create a new sandbox")
		}
		snap, err := snapshotByID(ctx, tx, sb.Project, sb.Image)
		if err != nil && !sandbox.IsClass(err, sandbox.NotFound) {
			return err
		}
		if err != nil || snap.State != sandbox.SnapshotReady || t.Guard == sandbox.HasSuspendedAs && snap.Kind != sandbox.SnapshotMemory {
			return refused(t, "its image can't be used").WithHint("roll it back to a snapshot")
		}
	}
	return nil
}

// refused is the error of a guard that does not hold.
func refused(t sandbox.Transition, why string) *sandbox.Error {
	return sandbox.Errorf(sandbox.FailedPrecondition, string(t.Guard), "a sandbox that is %s can't be asked to %s: %s", t.From, t.Verb, why)
}

// supersede ends sb's operation, and the snapshot that it was taking, in
// favour of a verb that was asked for later.
func supersede(ctx context.Context, tx *sql.Tx, sb sandbox.Sandbox, verb sandbox.Verb, at time.Time) error {
	op, err := operationByID(ctx, tx, sb.Project, sb.Operation)
	if err != nil {
		return err
	}
	failure := sandbox.Errorf(sandbox.Conflict, "superseded", "a later %s took its place", verb)
	if err := endOperation(ctx, tx, op.ID, "", failure, at); err != nil {
		return err
	}
	return failSnapshot(ctx, tx, op, at)
}

// insertChild inserts a child of a fork: sb again, but for what it is called
// and where it begins.
func (s *Store) insertChild(ctx context.Context, tx *sql.Tx, sb sandbox.Sandbox, fork sandbox.Operation, c sandbox.NewSandbox) error {
	child := sb
	child.ID, child.Source, child.Parent, child.CreatedAt = c.Sandbox.ID, fork.Snapshot, sb.ID, fork.CreatedAt
	if c.Sandbox.Labels != nil {
		child.Labels = c.Sandbox.Labels
	}
	if c.Sandbox.Env != nil {
		child.Env = c.Sandbox.Env
	}
	if c.Sandbox.Egress != "" {
		child.Egress = c.Sandbox.Egress
	}
	if !c.Sandbox.CreatedAt.IsZero() {
		child.CreatedAt = c.Sandbox.CreatedAt
	}
	op := c.Operation
	if op.CreatedAt.IsZero() {
		op.CreatedAt = fork.CreatedAt
	}
	if op.Key == "" {
		op.Key = fork.Key
	}
	op.Snapshot, op.Children = "", nil
	return s.insertCreate(ctx, tx, child, op)
}

// Observed records that a machine ended on its own.
func (s *Store) Observed(ctx context.Context, id string, epoch int64, end sandbox.End) (changed bool, err error) {
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
		if !ok || sb.Epoch != epoch {
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
	Epoch      int64         `json:"epoch,omitempty"`
	Image      string        `json:"image,omitempty"`
	ImageAt    *time.Time    `json:"image_at,omitempty"`
	End        *sandbox.End  `json:"end,omitempty"`
}

// moved writes the event of a transition of sb from the state `from`.
func moved(ctx context.Context, tx *sql.Tx, at time.Time, sb sandbox.Sandbox, from sandbox.State, op string) error {
	end := sb.End
	if end != nil {
		end = new(end.Told(sb.ImageAt))
	}
	return insertEvent(ctx, tx, sandbox.Event{
		Project: sb.Project, At: at, Type: "sandbox.state", Sandbox: sb.ID, Operation: op,
		Data: []byte(encode(stateChange{
			From: from, To: sb.State, Generation: sb.Generation, Epoch: sb.Epoch, Image: sb.Image, ImageAt: sb.ImageAt, End: end,
		})),
	})
}
