package sqlite

import (
	"context"
	"database/sql"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

// BeginCheckpoint inserts the row of an automatic snapshot.
func (s *Store) BeginCheckpoint(ctx context.Context, id string, generation int64, n sandbox.Snapshot) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		sb, err := sandboxByID(ctx, tx, "", id)
		if err != nil {
			return err
		}
		if sb.Generation != generation || sb.State != sandbox.StateRunning && sb.State != sandbox.StateFailed {
			return stale(id)
		}
		n.Purpose, n.Name = sandbox.PurposeCheckpoint, ""
		return s.beginSnapshot(ctx, tx, sb, n, "", s.now(), sb.Image)
	})
}

// FinishCheckpoint makes a checkpoint ready and its sandbox's image, or failed.
func (s *Store) FinishCheckpoint(ctx context.Context, id string, epoch int64, status *sandbox.SnapshotStatus, failure *sandbox.Error) error {
	err := s.write(ctx, func(tx *sql.Tx) error {
		n, err := snapshotByID(ctx, tx, "", id)
		if err != nil {
			return err
		}
		if n.State != sandbox.SnapshotCreating || n.Purpose != sandbox.PurposeCheckpoint {
			return nil // it has ended already
		}
		now := s.now()
		if failure != nil || status == nil || status.Unchanged {
			return setSnapshotState(ctx, tx, n, sandbox.SnapshotFailed, now)
		}
		sb, ok, err := s.wants(ctx, tx, n, epoch)
		if err != nil {
			return err
		}
		if !ok {
			return setSnapshotState(ctx, tx, n, sandbox.SnapshotFailed, now)
		}
		if err := readied(ctx, tx, n, *status, now); err != nil {
			return err
		}
		taken := status.TakenAt
		if taken.IsZero() {
			taken = now
		}
		sb.Image, sb.ImageAt = n.ID, &taken
		return putState(ctx, tx, sb)
	})
	if err == nil {
		failpoint.Hit("store.checkpoint.committed")
	}
	return err
}

// wants tells whether the checkpoint n is still what its sandbox would come
// back from. Besides the epoch its image must be the one that the checkpoint
// began over: a suspend, a stop or a named snapshot that came between holds more.
// And one that comes when the sandbox is being started from that image comes too
// late: the image must not go from under it.
func (s *Store) wants(ctx context.Context, tx *sql.Tx, n sandbox.Snapshot, epoch int64) (sandbox.Sandbox, bool, error) {
	sb, err := sandboxByID(ctx, tx, "", n.Sandbox)
	if sandbox.IsClass(err, sandbox.NotFound) {
		return sb, false, nil
	}
	if err != nil {
		return sb, false, err
	}
	var replaces string
	if err := tx.QueryRowContext(ctx, "SELECT replaces FROM snapshots WHERE id = ?", n.ID).Scan(&replaces); err != nil {
		return sb, false, err
	}
	late := sb.State == sandbox.StateStarting || sb.State == sandbox.StateDeleting || sb.State == sandbox.StateDeleted
	return sb, sb.Epoch == epoch && sb.Image == replaces && !late, nil
}
