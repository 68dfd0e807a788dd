package sqlite

import (
	"context"
	"database/sql"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// FinishOperation ends an operation and moves its sandbox as o says.
func (s *Store) FinishOperation(ctx context.Context, id string, o sandbox.Outcome) error {
	failpoint.Hit("store.finish.before")
	err := s.write(ctx, func(tx *sql.Tx) error {
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
		if !leads(op, sb.State, o) {
			return sandbox.Errorf(sandbox.Internal, "wrong_transition", "%s can't end in %s from %s", op.Verb, o.To, sb.State)
		}
		now := s.now()
		if err := endOperation(ctx, tx, id, "", o.Failure, now); err != nil {
			return err
		}
		if err := finishSnapshot(ctx, tx, op, o, now); err != nil {
			return err
		}
		from := sb.State
		sb.State, sb.Operation, sb.UpdatedAt = o.To, "", now
		if err := settle(ctx, tx, &sb, o); err != nil {
			return err
		}
		if err := putState(ctx, tx, sb); err != nil {
			return err
		}
		if err := inheritSessions(ctx, tx, sb, o.Sessions, now); err != nil {
			return err
		}
		return moved(ctx, tx, now, sb, from, id)
	})
	if err == nil {
		failpoint.Hit("store.finish.committed")
	}
	return err
}

// leads is sandbox.Leads, narrowed to the row of the table by which op began:
// a snapshot of a paused sandbox does not end in running.
func leads(op sandbox.Operation, via sandbox.State, o sandbox.Outcome) bool {
	if !sandbox.Leads(via, op.Verb, o.To, o.Failure != nil, o.End != nil) {
		return false
	}
	t, ok := sandbox.Find(op.From, op.Verb)
	switch {
	case !ok || t.Via != via: // begun by a build that did not keep From
		return true
	case o.Failure == nil:
		return o.To == t.To
	case o.To == t.Else:
		return true
	}
	return o.End != nil && o.To == sandbox.StateFailed && t.Else.HasMachine()
}

// finishSnapshot ends the snapshot that op was taking, if it was: as ready only
// where the operation succeeded.
func finishSnapshot(ctx context.Context, tx *sql.Tx, op sandbox.Operation, o sandbox.Outcome, at time.Time) error {
	if o.Failure != nil {
		return failSnapshot(ctx, tx, op, at)
	}
	snap, own, err := takenBy(ctx, tx, op)
	if err != nil {
		return err
	}
	if own != (o.Snapshot != nil) || own && o.Snapshot.Snapshot != snap.ID {
		return sandbox.Errorf(sandbox.Internal, "wrong_outcome", "the %s takes the snapshot %q, and its outcome has %+v", op.Verb, op.Snapshot, o.Snapshot)
	}
	if !own {
		return nil
	}
	return readied(ctx, tx, snap, *o.Snapshot, at)
}

// settle applies what o says of the row. An image is always a ready snapshot;
// a deleted sandbox has none, so that nothing roots what it had.
func settle(ctx context.Context, tx *sql.Tx, sb *sandbox.Sandbox, o sandbox.Outcome) error {
	if o.Epoch != 0 {
		sb.Epoch, sb.End = o.Epoch, nil // the end was of the machine before
	}
	if o.End != nil {
		sb.End = o.End
	}
	if o.Driver != "" {
		sb.Driver = o.Driver
	}
	if o.Base != nil {
		sb.Base = *o.Base
	}
	if o.Image != nil {
		sb.Image, sb.ImageAt = *o.Image, o.ImageAt
	}
	if sb.Image == "" && o.Failure == nil && (sb.State == sandbox.StateSuspended || sb.State == sandbox.StateStopped) {
		return sandbox.Errorf(sandbox.Internal, "wrong_outcome", "%s can't be %s without an image", sb.ID, sb.State)
	}
	if sb.State == sandbox.StateDeleted || sb.Image == "" {
		sb.Image, sb.ImageAt = "", nil
		return nil
	}
	if o.Image == nil {
		return nil
	}
	snap, err := readySnapshot(ctx, tx, sb.Project, sb.Image)
	if err != nil {
		return sandbox.Errorf(sandbox.Internal, "wrong_outcome", "the image of %s can't be %s: %w", sb.ID, sb.Image, err)
	}
	if sb.ImageAt == nil {
		sb.ImageAt = snap.TakenAt
	}
	return nil
}
