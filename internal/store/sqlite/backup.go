package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"cloche.dev/cloche/internal/sandbox"
)

// Backup writes a consistent copy of all rows to a new file, without standing
// in the way of writers. A copy that failed is removed.
func (s *Store) Backup(ctx context.Context, path string) (err error) {
	if path, err = filepath.Abs(path); err != nil {
		return backupError(path, err)
	}
	// SQLite fills an empty file. It is made here for its mode, and so that one
	// which is there already is never touched.
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return sandbox.Errorf(sandbox.Conflict, "backup_exists", "there is a file %s already", path).WithHint("name a new file")
	}
	if err != nil {
		return backupError(path, err)
	}
	defer func() {
		if err = errors.Join(err, f.Close()); err != nil {
			_ = os.Remove(path) // the copy's own error says why
		}
	}()
	if err := s.copyTo(ctx, path); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return backupError(path, err)
	}
	return syncDir(filepath.Dir(path))
}

// copyTo uses a connection of its own: the readers' may write nothing, and the
// writer must not wait.
func (s *Store) copyTo(ctx context.Context, path string) (err error) {
	db, err := sql.Open("sqlite", dsn(s.path, "deferred"))
	if err != nil {
		return mapError(ctx, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	_, err = db.ExecContext(ctx, "VACUUM INTO ?", path)
	return mapError(ctx, err)
}

func syncDir(dir string) error {
	d, err := os.Open(filepath.Clean(dir))
	if err != nil {
		return backupError(dir, err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return backupError(dir, err)
	}
	return nil
}

func backupError(path string, err error) error {
	return sandbox.Errorf(sandbox.Unavailable, "backup_failed", "can't write the copy %s: %w", path, err).
		WithHint("check that its directory exists, is writable and isn't full")
}
