package sqlite

import (
	"context"
	"errors"

	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"cloche.dev/cloche/internal/sandbox"
)

// mapError turns what SQLite says into the classes. Errors that have a class
// already, and nil, pass. What the host's disk or another process causes is
// never Internal: the transaction is rolled back and can be tried again.
func mapError(ctx context.Context, err error) error {
	var classed *sandbox.Error
	if err == nil || errors.As(err, &classed) {
		return err
	}
	if ctx.Err() != nil {
		return sandbox.AsError(context.Cause(ctx))
	}
	var se *sqlite.Error
	if !errors.As(err, &se) {
		return sandbox.Errorf(sandbox.Internal, "store", "the store failed: %w", err)
	}
	switch se.Code() & 0xff {
	case sqlite3.SQLITE_FULL:
		return sandbox.Errorf(sandbox.Unavailable, "store_full", "the state directory's disk is full: %w", err).
			WithHint("free space there; nothing was changed")
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return sandbox.Errorf(sandbox.Unavailable, "store_busy", "the store is locked by another process: %w", err).
			WithHint("end whatever else has the store open (a backup, a shell) and try again")
	case sqlite3.SQLITE_READONLY:
		return sandbox.Errorf(sandbox.Unavailable, "store_readonly", "the store can't be written: %w", err).
			WithHint("check the state directory's mount options and the file's owner; nothing was changed")
	case sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN:
		return sandbox.Errorf(sandbox.Unavailable, "store_io", "the store can't be read or written: %w", err).
			WithHint("check the state directory's disk and its mount options")
	}
	return sandbox.Errorf(sandbox.Internal, "store", "the store failed: %w", err)
}

// isConstraint tells whether err is a violated UNIQUE, PRIMARY KEY or FOREIGN KEY.
func isConstraint(err error) bool {
	var se *sqlite.Error
	return errors.As(err, &se) && se.Code()&0xff == sqlite3.SQLITE_CONSTRAINT
}
