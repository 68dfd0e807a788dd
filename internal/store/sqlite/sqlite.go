// Package sqlite keeps Cloche's rows in one SQLite file: the store of a single
// host.
//
// Invariants: one call is one transaction; there is one writer connection,
// whose transactions begin IMMEDIATE (so a read that decides a write can't be
// overtaken), beside a pool of readers; the journal is WAL with
// synchronous=FULL, so what was answered survives a power loss. Lifecycle
// rules come from internal/sandbox's table and from nowhere else. Nothing here
// grows with the bytes that commands print.
//
// internal/server opens it and hands it to control as a sandbox.Store.
package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/pressly/goose/v3"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"cloche.dev/cloche/internal/sandbox"
)

//go:embed migrations/*.sql
var migrations embed.FS

// readers is how many reads may run at once beside the writer.
const readers = 8

// Store is a sandbox.Store in a file.
type Store struct {
	path string
	w, r *sql.DB
	now  func() time.Time
}

var _ sandbox.Store = (*Store)(nil)

// Open opens the store at path, making and migrating it as needed. A file
// that a newer Cloche has migrated is refused (code "store_newer"). now is
// the clock for the times of changes; nil is time.Now.
func Open(ctx context.Context, path string, now func() time.Time) (*Store, error) {
	if now == nil {
		now = time.Now
	}
	// The file is made here and not by SQLite for its mode: environments of
	// sandboxes stand in it. The journal files inherit it.
	f, err := os.OpenFile(filepath.Clean(path), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, openError(path, err)
	}
	if err := f.Close(); err != nil {
		return nil, openError(path, err)
	}
	w, err := sql.Open("sqlite", dsn(path, "immediate", "journal_mode(WAL)", "synchronous(FULL)", "foreign_keys(1)", "cache_size(-512)"))
	if err != nil {
		return nil, openError(path, err)
	}
	w.SetMaxOpenConns(1)
	if err := migrate(ctx, w, path); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	r, err := sql.Open("sqlite", dsn(path, "deferred", "query_only(1)", "cache_size(-128)"))
	if err != nil {
		return nil, errors.Join(openError(path, err), w.Close())
	}
	r.SetMaxOpenConns(readers)
	r.SetMaxIdleConns(readers)
	return &Store{path: path, w: w, r: r, now: now}, nil
}

// Close ends both pools; calls under way finish first.
func (s *Store) Close() error { return errors.Join(s.r.Close(), s.w.Close()) }

// dsn names the file and how a connection to it behaves. The pages that each
// keeps (cache_size, in KiB) are few: the kernel has the file too, and a daemon is
// to stay small however many rows there are.
func dsn(path, txlock string, pragmas ...string) string {
	q := url.Values{"_txlock": {txlock}, "_pragma": append([]string{"busy_timeout(5000)"}, pragmas...)}
	return (&url.URL{Scheme: "file", Opaque: (&url.URL{Path: path}).EscapedPath(), RawQuery: q.Encode()}).String()
}

func openError(path string, err error) error {
	return sandbox.Errorf(sandbox.Unavailable, "store_open", "can't open the store %s: %w", path, err).
		WithHint("check that the state directory exists, is writable and isn't full")
}

func migrate(ctx context.Context, db *sql.DB, path string) error {
	dir, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return fmt.Errorf("embedded migrations: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectSQLite3, db, dir, goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return openError(path, err)
	}
	has, knows, err := p.GetVersions(ctx)
	if err != nil {
		return openError(path, err)
	}
	if has > knows {
		return sandbox.Errorf(sandbox.FailedPrecondition, "store_newer",
			"the store %s has schema version %d and this Cloche knows versions up to %d", path, has, knows).
			WithHint("start the newer Cloche that wrote it, or restore a copy of the state directory from before the upgrade")
	}
	if _, err := p.Up(ctx); err != nil {
		return openError(path, err)
	}
	return nil
}

// queryer is what both a transaction and a pool can do.
type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// write runs f in a transaction on the writer and commits when f succeeds.
func (s *Store) write(ctx context.Context, f func(tx *sql.Tx) error) error {
	tx, err := s.w.BeginTx(ctx, nil)
	if err != nil {
		return mapError(ctx, err)
	}
	if err := f(tx); err != nil {
		// The rollback's own error adds nothing: the connection is dropped then.
		_ = tx.Rollback()
		return mapError(ctx, err)
	}
	return mapError(ctx, tx.Commit())
}

// exec runs one statement and tells how many rows it changed.
func exec(ctx context.Context, tx *sql.Tx, query string, args ...any) (int64, error) {
	res, err := tx.ExecContext(ctx, query, args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

// collect reads every row of a query with scan.
func collect[T any](ctx context.Context, q queryer, scan func(scanner) (T, error), query string, args ...any) ([]T, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, mapError(ctx, err)
	}
	defer func() { _ = rows.Close() }() // what it could tell, rows.Err tells
	list := []T{}
	for rows.Next() {
		v, err := scan(rows)
		if err != nil {
			return nil, mapError(ctx, err)
		}
		list = append(list, v)
	}
	return list, mapError(ctx, rows.Err())
}

// scanner is a *sql.Row or *sql.Rows.
type scanner interface{ Scan(dest ...any) error }
