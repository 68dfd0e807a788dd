package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const sandboxColumns = `id, project, template, digest, driver, state, generation, labels, env, resources,
	created_at, updated_at, expires_at, ended, operation`

func scanSandbox(r scanner) (sb sandbox.Sandbox, err error) {
	var labels, env, resources string
	var created, updated int64
	var expires sql.NullInt64
	var ended sql.NullString
	err = r.Scan(&sb.ID, &sb.Project, &sb.Template, &sb.Digest, &sb.Driver, &sb.State, &sb.Generation, &labels, &env, &resources,
		&created, &updated, &expires, &ended, &sb.Operation)
	if err != nil {
		return sb, err
	}
	sb.CreatedAt, sb.UpdatedAt, sb.ExpiresAt = when(created), when(updated), whenPtr(expires)
	return sb, errors.Join(
		json.Unmarshal([]byte(labels), &sb.Labels),
		json.Unmarshal([]byte(env), &sb.Env),
		json.Unmarshal([]byte(resources), &sb.Resources),
		decodePtr(ended, &sb.End),
	)
}

func sandboxByID(ctx context.Context, q queryer, project, id string) (sandbox.Sandbox, error) {
	sb, err := scanSandbox(q.QueryRowContext(ctx,
		"SELECT "+sandboxColumns+" FROM sandboxes WHERE id = ?1 AND (?2 = '' OR project = ?2)", id, project))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Sandbox{}, sandboxNotFound(id)
	}
	return sb, mapError(ctx, err)
}

func sandboxNotFound(id string) error {
	return sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "there is no sandbox %s", id).WithHint("list the sandboxes with `cloche ls`")
}

// putState writes what a transition changes.
func putState(ctx context.Context, tx *sql.Tx, sb sandbox.Sandbox) error {
	_, err := tx.ExecContext(ctx, "UPDATE sandboxes SET state = ?, generation = ?, operation = ?, ended = ?, updated_at = ? WHERE id = ?",
		string(sb.State), sb.Generation, sb.Operation, encodePtr(sb.End), nanos(sb.UpdatedAt), sb.ID)
	return err
}

// CreateSandbox inserts sb and op, pinning the template.
func (s *Store) CreateSandbox(ctx context.Context, sb sandbox.Sandbox, op sandbox.Operation, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error) {
	var replayed bool
	err := s.write(ctx, func(tx *sql.Tx) (err error) {
		c := claim{sb.Project, "sandbox.create", idem, op.CreatedAt}
		subject, operation, ok, err := c.replay(ctx, tx)
		if err != nil {
			return err
		}
		if ok {
			replayed = true
			sb, op, err = bothRows(ctx, tx, sb.Project, subject, operation)
			return err
		}
		tpl, err := templateByRef(ctx, tx, sb.Project, sb.Template)
		if err != nil {
			return err
		}
		t, _ := sandbox.Find(sandbox.StateNone, sandbox.VerbCreate)
		sb.Digest, sb.State, sb.Generation, sb.Operation, sb.UpdatedAt = tpl.Digest, t.Via, 1, op.ID, op.CreatedAt
		op.Project, op.Sandbox, op.Verb, op.State, op.Generation = sb.Project, sb.ID, t.Verb, sandbox.OpAccepted, sb.Generation
		if err := insertSandbox(ctx, tx, sb); err != nil {
			if isConstraint(err) {
				return s.constraint(ctx, tx, sb.Project, "sandbox", sb.ID)
			}
			return err
		}
		if err := insertOperation(ctx, tx, op); err != nil {
			return err
		}
		if err := moved(ctx, tx, op.CreatedAt, sb, sandbox.StateNone, op.ID); err != nil {
			return err
		}
		if err := c.record(ctx, tx, sb.ID, op.ID); err != nil {
			return err
		}
		sb, op, err = bothRows(ctx, tx, sb.Project, sb.ID, op.ID)
		return err
	})
	if err != nil {
		return sandbox.Sandbox{}, sandbox.Operation{}, false, err
	}
	return sb, op, replayed, nil
}

func insertSandbox(ctx context.Context, tx *sql.Tx, sb sandbox.Sandbox) error {
	_, err := tx.ExecContext(ctx, "INSERT INTO sandboxes ("+sandboxColumns+") VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
		sb.ID, sb.Project, sb.Template, sb.Digest, sb.Driver, string(sb.State), sb.Generation, encode(sb.Labels), encode(sb.Env), encode(sb.Resources),
		nanos(sb.CreatedAt), nanos(sb.UpdatedAt), nanosPtr(sb.ExpiresAt), encodePtr(sb.End), sb.Operation)
	return err
}

func bothRows(ctx context.Context, tx *sql.Tx, project, id, operation string) (sandbox.Sandbox, sandbox.Operation, error) {
	sb, err := sandboxByID(ctx, tx, project, id)
	if err != nil {
		return sandbox.Sandbox{}, sandbox.Operation{}, err
	}
	op, err := operationByID(ctx, tx, project, operation)
	return sb, op, err
}

// Sandbox returns one sandbox.
func (s *Store) Sandbox(ctx context.Context, project, id string) (sandbox.Sandbox, error) {
	return sandboxByID(ctx, s.r, project, id)
}

// Sandboxes lists sandboxes, newest first.
func (s *Store) Sandboxes(ctx context.Context, project string, f sandbox.SandboxFilter, p sandbox.Page) ([]sandbox.Sandbox, string, error) {
	var w where
	w.project(project)
	in(&w, "state", f.States)
	for k, v := range f.Labels {
		w.and("EXISTS (SELECT 1 FROM json_each(labels) AS l WHERE l.key = ? AND l.value = ?)", k, v)
	}
	limit, err := w.page(p, sandbox.KindSandbox)
	if err != nil {
		return nil, "", err
	}
	tail, args := w.sql(limit)
	list, err := collect(ctx, s.r, scanSandbox, "SELECT "+sandboxColumns+" FROM sandboxes"+tail, args...)
	if err != nil {
		return nil, "", err
	}
	list, next := cut(list, limit, func(sb sandbox.Sandbox) (time.Time, string) { return sb.CreatedAt, sb.ID })
	return list, next, nil
}

// change runs one UPDATE of a sandbox that is not deleted, tells it as an event
// and answers the new row.
func (s *Store) change(ctx context.Context, project, id, event, set string, value any, data any) (sb sandbox.Sandbox, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if sb, err = sandboxByID(ctx, tx, project, id); err != nil {
			return err
		}
		if sb.State == sandbox.StateDeleted || sb.State == sandbox.StateDeleting {
			return sandbox.Errorf(sandbox.FailedPrecondition, "wrong_state", "a sandbox that is %s can't be changed", sb.State)
		}
		now := s.now()
		if _, err := exec(ctx, tx, "UPDATE sandboxes SET "+set+" = ?, updated_at = ? WHERE id = ?", value, nanos(now), id); err != nil {
			return err
		}
		e := sandbox.Event{Project: sb.Project, At: now, Type: event, Sandbox: id, Data: json.RawMessage(encode(data))}
		if err := insertEvent(ctx, tx, e); err != nil {
			return err
		}
		sb, err = sandboxByID(ctx, tx, project, id)
		return err
	})
	return sb, err
}

// SetLabels replaces a sandbox's labels.
func (s *Store) SetLabels(ctx context.Context, project, id string, labels map[string]string) (sandbox.Sandbox, error) {
	return s.change(ctx, project, id, "sandbox.labels", "labels", encode(labels), map[string]any{"labels": labels})
}

// SetExpiry sets or clears the time at which a sandbox is deleted.
func (s *Store) SetExpiry(ctx context.Context, project, id string, at *time.Time) (sandbox.Sandbox, error) {
	return s.change(ctx, project, id, "sandbox.expiry", "expires_at", nanosPtr(at), map[string]any{"expires_at": at})
}

// SetDriver records the driver that a machine was made with.
func (s *Store) SetDriver(ctx context.Context, id string, generation int64, driver string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		n, err := exec(ctx, tx, "UPDATE sandboxes SET driver = ? WHERE id = ? AND generation = ?", driver, id, generation)
		if err == nil && n == 0 {
			return stale(id)
		}
		return err
	})
}

// ExpiredSandboxes lists sandboxes whose TTL has passed.
func (s *Store) ExpiredSandboxes(ctx context.Context, now time.Time, limit int) ([]sandbox.Sandbox, error) {
	return collect(ctx, s.r, scanSandbox, "SELECT "+sandboxColumns+` FROM sandboxes
		WHERE expires_at IS NOT NULL AND expires_at <= ? AND state NOT IN (?, ?) ORDER BY expires_at, id LIMIT ?`,
		nanos(now), string(sandbox.StateDeleting), string(sandbox.StateDeleted), limit)
}

// Prune removes what is past its keeping.
func (s *Store) Prune(ctx context.Context, deleted, ended, idem time.Time) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		for _, q := range []struct {
			sql  string
			args []any
		}{
			{"DELETE FROM sandboxes WHERE state = ? AND updated_at < ?", []any{string(sandbox.StateDeleted), nanos(deleted)}},
			{"DELETE FROM operations WHERE ended_at < ?", []any{nanos(ended)}},
			{"DELETE FROM events WHERE at < ?", []any{nanos(ended)}},
			{"DELETE FROM idempotency WHERE created_at < ?", []any{nanos(idem)}},
		} {
			if _, err := tx.ExecContext(ctx, q.sql, q.args...); err != nil {
				return err
			}
		}
		return nil
	})
}
