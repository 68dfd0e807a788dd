package sqlite

import (
	"context"
	"database/sql"

	"cloche.dev/cloche/internal/sandbox"
)

// What keeps a snapshot's files: a sandbox whose image it is, one that is
// being created from it, an operation under way that takes it or goes back to it.
const (
	isImage   = "EXISTS (SELECT 1 FROM sandboxes b WHERE b.image = n.id AND b.image <> '' AND b.state <> 'deleted')"
	isSource  = "EXISTS (SELECT 1 FROM sandboxes b WHERE b.source = n.id AND b.source <> '' AND b.state = 'creating')"
	isWanted  = "EXISTS (SELECT 1 FROM operations o WHERE o.ended_at IS NULL AND o.snapshot = n.id)"
	isNeeded  = isImage + " OR " + isSource + " OR " + isWanted
	isGarbage = "n.state = 'failed' OR n.state = 'ready' AND n.purpose <> 'named' AND NOT (" + isNeeded + ")"
)

// DeleteSnapshot moves a named snapshot to deleting.
func (s *Store) DeleteSnapshot(ctx context.Context, project, id string) (n sandbox.Snapshot, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if n, err = snapshotByID(ctx, tx, project, id); err != nil {
			return err
		}
		if n.Purpose != sandbox.PurposeNamed {
			return sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_not_named", "the snapshot %s is Cloche's own (%s)", id, n.Purpose).
				WithHint("it goes when its sandbox no longer needs it")
		}
		if n.State == sandbox.SnapshotDeleting {
			return nil
		}
		var needed bool
		if err := tx.QueryRowContext(ctx, "SELECT "+isNeeded+" FROM snapshots n WHERE n.id = ?", id).Scan(&needed); err != nil {
			return err
		}
		if needed {
			return sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_in_use", "a sandbox would come back from the snapshot %s, or an operation needs it", id).
				WithHint("delete the sandbox, or wait until its operation has ended and it has a newer image")
		}
		n, err = doom(ctx, tx, s, n)
		return err
	})
	return n, err
}

// doom moves a snapshot to deleting and takes it out of the tree.
func doom(ctx context.Context, tx *sql.Tx, s *Store, n sandbox.Snapshot) (sandbox.Snapshot, error) {
	for _, q := range []string{
		"UPDATE snapshots SET parent = ? WHERE parent = ? AND parent <> ''",
		"UPDATE sandboxes SET base = ? WHERE base = ? AND base <> ''",
	} {
		if _, err := tx.ExecContext(ctx, q, n.Parent, n.ID); err != nil {
			return n, err
		}
	}
	if err := setSnapshotState(ctx, tx, n, sandbox.SnapshotDeleting, s.now()); err != nil {
		return n, err
	}
	return snapshotByID(ctx, tx, n.Project, n.ID)
}

const garbageQuery = "SELECT " + snapshotColumns + " FROM snapshots n WHERE " + isGarbage + " ORDER BY created_at, id LIMIT ?"

// GarbageSnapshots moves what nothing needs to deleting, and lists it.
func (s *Store) GarbageSnapshots(ctx context.Context, limit int) (list []sandbox.Snapshot, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		found, err := collect(ctx, tx, scanSnapshot, garbageQuery, limit)
		if err != nil {
			return err
		}
		for _, n := range found {
			if _, err := doom(ctx, tx, s, n); err != nil {
				return err
			}
		}
		list, err = collect(ctx, tx, scanSnapshot,
			"SELECT "+snapshotColumns+" FROM snapshots WHERE state = 'deleting' ORDER BY created_at, id LIMIT ?", limit)
		return err
	})
	return list, err
}

// RemoveSnapshot removes the row of a snapshot whose files are gone.
// Idempotent; one that may still be needed is refused.
func (s *Store) RemoveSnapshot(ctx context.Context, id string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		n, err := snapshotByID(ctx, tx, "", id)
		if sandbox.IsClass(err, sandbox.NotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		if n.State != sandbox.SnapshotDeleting {
			return sandbox.Errorf(sandbox.FailedPrecondition, "wrong_state", "the snapshot %s is %s, not being deleted", id, n.State)
		}
		if _, err := tx.ExecContext(ctx, "DELETE FROM snapshots WHERE id = ?", id); err != nil {
			return err
		}
		return became(ctx, tx, n, snapshotGone, s.now())
	})
}
