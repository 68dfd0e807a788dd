package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const sessionColumns = "id, project, sandbox, process, generation, key_id, created_at, parent, parent_offset"

func scanSession(r scanner) (s sandbox.Session, err error) {
	var process string
	var created, offset int64
	if err := r.Scan(&s.ID, &s.Project, &s.Sandbox, &process, &s.Generation, &s.Key, &created, &s.Parent, &offset); err != nil {
		return s, err
	}
	s.CreatedAt, s.ParentOffset = when(created), uint64(offset)
	return s, json.Unmarshal([]byte(process), &s.Process)
}

func sessionByID(ctx context.Context, q queryer, project, sb, id string) (sandbox.Session, error) {
	s, err := scanSession(q.QueryRowContext(ctx,
		"SELECT "+sessionColumns+" FROM sessions WHERE id = ?1 AND (?2 = '' OR project = ?2) AND sandbox = ?3", id, project, sb))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Session{}, sandbox.Errorf(sandbox.NotFound, "session_not_found", "there is no session %s in that sandbox", id)
	}
	return s, mapError(ctx, err)
}

// insertSession tells how many rows it inserted; conflict says what becomes of
// one that is there already.
func insertSession(ctx context.Context, tx *sql.Tx, s sandbox.Session, conflict string) (int64, error) {
	return exec(ctx, tx, "INSERT INTO sessions ("+sessionColumns+") VALUES (?,?,?,?,?,?,?,?,?)"+conflict,
		s.ID, s.Project, s.Sandbox, encode(s.Process), s.Generation, s.Key, nanos(s.CreatedAt), s.Parent, int64(s.ParentOffset))
}

// inheritSessions inserts the sessions that go on in sb from another timeline,
// but for those that are there already.
func inheritSessions(ctx context.Context, tx *sql.Tx, sb sandbox.Sandbox, list []sandbox.Session, now time.Time) error {
	for _, ses := range list {
		ses.Project, ses.Sandbox = sb.Project, sb.ID
		if len(ses.Process.Args) == 0 && ses.Parent != "" {
			before, err := scanSession(tx.QueryRowContext(ctx,
				"SELECT "+sessionColumns+" FROM sessions WHERE id = ? AND project = ?", ses.Parent, sb.Project))
			if err != nil && !errors.Is(err, sql.ErrNoRows) {
				return err
			}
			ses.Process = before.Process
			if ses.Key == "" {
				ses.Key = before.Key
			}
		}
		if ses.CreatedAt.IsZero() {
			ses.CreatedAt = now
		}
		ses.Generation = max(ses.Generation, 1) // tokens begin with it
		if _, err := insertSession(ctx, tx, ses, " ON CONFLICT (id) DO NOTHING"); err != nil {
			return err
		}
	}
	return nil
}

// CreateSession inserts a session of a running sandbox.
func (s *Store) CreateSession(ctx context.Context, ses sandbox.Session, idem sandbox.Idempotency) (created sandbox.Session, replayed bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		sb, err := sandboxByID(ctx, tx, ses.Project, ses.Sandbox)
		if err != nil {
			return err
		}
		ses.Project = sb.Project
		c := claim{ses.Project, "session.create/" + ses.Sandbox, idem, ses.CreatedAt}
		first, _, ok, err := c.replay(ctx, tx)
		if err != nil {
			return err
		}
		if ok {
			replayed = true
			created, err = sessionByID(ctx, tx, ses.Project, ses.Sandbox, first)
			return err
		}
		if !sb.State.Serves() {
			e := sandbox.Errorf(sandbox.FailedPrecondition, "not_running", "the sandbox is %s, not running", sb.State)
			if sb.State.Transitional() && sb.State != sandbox.StateDeleting {
				e = e.WithHint("wait for its operation to end, then try again").WithRetry(0)
			}
			return e
		}
		_, err = insertSession(ctx, tx, ses, "")
		if isConstraint(err) {
			return s.constraint(ctx, tx, ses.Project, "session", ses.ID)
		}
		if err != nil {
			return err
		}
		if err := c.record(ctx, tx, ses.ID, ""); err != nil {
			return err
		}
		created, err = sessionByID(ctx, tx, ses.Project, ses.Sandbox, ses.ID)
		return err
	})
	return created, replayed, err
}

// Session returns one session of a sandbox.
func (s *Store) Session(ctx context.Context, project, sb, id string) (sandbox.Session, error) {
	return sessionByID(ctx, s.r, project, sb, id)
}

// Sessions lists a sandbox's sessions, newest first.
func (s *Store) Sessions(ctx context.Context, project, sb string, p sandbox.Page) ([]sandbox.Session, string, error) {
	if _, err := sandboxByID(ctx, s.r, project, sb); err != nil {
		return nil, "", err
	}
	var w where
	w.and("sandbox = ?", sb)
	return listing[sandbox.Session]{
		kind: sandbox.KindSession, query: "SELECT " + sessionColumns + " FROM sessions", scan: scanSession,
		pos: func(v sandbox.Session) (time.Time, string) { return v.CreatedAt, v.ID },
	}.page(ctx, s.r, w, p)
}

// DeleteSession removes a session's row. Idempotent.
func (s *Store) DeleteSession(ctx context.Context, id string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM sessions WHERE id = ?", id)
		return err
	})
}
