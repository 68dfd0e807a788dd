package sqlite

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// idemLife is how long a key is remembered.
const idemLife = 24 * time.Hour

// claim is one use of an idempotency key. kind names the route, with the
// sandbox where the route has one.
type claim struct {
	project, kind string
	idem          sandbox.Idempotency
	at            time.Time
}

// replay looks the key up: subject and operation of the first call with it,
// or ok=false where this is the first.
func (c claim) replay(ctx context.Context, tx *sql.Tx) (subject, operation string, ok bool, err error) {
	if c.idem.Key == "" {
		return "", "", false, nil
	}
	var request []byte
	err = tx.QueryRowContext(ctx,
		"SELECT request, subject, operation FROM idempotency WHERE project = ? AND kind = ? AND key = ? AND created_at > ?",
		c.project, c.kind, c.idem.Key, nanos(c.at.Add(-idemLife))).Scan(&request, &subject, &operation)
	if errors.Is(err, sql.ErrNoRows) {
		return "", "", false, nil
	}
	if err != nil {
		return "", "", false, err
	}
	if !bytes.Equal(request, c.idem.Request[:]) {
		return "", "", false, sandbox.Errorf(sandbox.Conflict, "idempotency_mismatch", "this idempotency key was used with another request").
			WithHint("use a new key for a new request; a key is remembered for 24 hours")
	}
	return subject, operation, true, nil
}

// record remembers the key, in place of one that is past its life.
func (c claim) record(ctx context.Context, tx *sql.Tx, subject, operation string) error {
	if c.idem.Key == "" {
		return nil
	}
	_, err := tx.ExecContext(ctx,
		"INSERT OR REPLACE INTO idempotency (project, kind, key, request, subject, operation, created_at) VALUES (?,?,?,?,?,?,?)",
		c.project, c.kind, c.idem.Key, c.idem.Request[:], subject, operation, nanos(c.at))
	return err
}
