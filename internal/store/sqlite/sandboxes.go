package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
)

const sandboxColumns = `id, project, template, digest, driver, state, generation, labels, env, resources,
	created_at, updated_at, expires_at, ended, operation, epoch, policy, touched_at, image, image_at, base, source, parent, egress`

func scanSandbox(r scanner) (sb sandbox.Sandbox, err error) {
	var labels, env, resources, policy string
	var created, updated, touched int64
	var expires, imaged sql.NullInt64
	var ended sql.NullString
	err = r.Scan(&sb.ID, &sb.Project, &sb.Template, &sb.Digest, &sb.Driver, &sb.State, &sb.Generation, &labels, &env, &resources,
		&created, &updated, &expires, &ended, &sb.Operation, &sb.Epoch, &policy, &touched, &sb.Image, &imaged, &sb.Base, &sb.Source, &sb.Parent, &sb.Egress)
	if err != nil {
		return sb, err
	}
	sb.CreatedAt, sb.UpdatedAt, sb.TouchedAt = when(created), when(updated), when(touched)
	sb.ExpiresAt, sb.ImageAt = whenPtr(expires), whenPtr(imaged)
	return sb, errors.Join(
		json.Unmarshal([]byte(labels), &sb.Labels),
		json.Unmarshal([]byte(env), &sb.Env),
		json.Unmarshal([]byte(resources), &sb.Resources),
		json.Unmarshal([]byte(policy), &sb.Policy),
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
	_, err := tx.ExecContext(ctx, `UPDATE sandboxes SET state = ?, generation = ?, operation = ?, ended = ?, updated_at = ?,
		epoch = ?, driver = ?, touched_at = ?, image = ?, image_at = ?, base = ? WHERE id = ?`,
		string(sb.State), sb.Generation, sb.Operation, encodePtr(sb.End), nanos(sb.UpdatedAt),
		sb.Epoch, sb.Driver, nanos(sb.TouchedAt), sb.Image, nanosPtr(sb.ImageAt), sb.Base, sb.ID)
	return err
}

// CreateSandbox inserts sb and op, pinning the template.
func (s *Store) CreateSandbox(ctx context.Context, sb sandbox.Sandbox, op sandbox.Operation, host sandbox.Capacity, idem sandbox.Idempotency) (sandbox.Sandbox, sandbox.Operation, bool, error) {
	failpoint.Hit("store.begin.before")
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
		if err := pin(ctx, tx, &sb); err != nil {
			return err
		}
		if err := drivable(sb, host); err != nil {
			return err
		}
		if err := hasProfile(ctx, tx, sb.Project, sb.Egress); err != nil {
			return err
		}
		if err := admit(ctx, tx, sb.Project, host, machines(1, sb.Resources).onDisk(1, sb.Resources)); err != nil {
			return err
		}
		sb.Parent = ""
		if err := s.insertCreate(ctx, tx, sb, op); err != nil {
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
	failpoint.Hit("store.begin.committed")
	return sb, op, replayed, nil
}

// pin resolves what sb is made from: its template or, where it has one, its
// source snapshot, which then decides on template, driver and resources, and on
// the egress profile where none is asked for.
func pin(ctx context.Context, tx *sql.Tx, sb *sandbox.Sandbox) error {
	sb.Base = ""
	if sb.Source == "" {
		tpl, err := templateByRef(ctx, tx, sb.Project, sb.Template)
		sb.Digest = tpl.Digest
		return err
	}
	from, err := readySnapshot(ctx, tx, sb.Project, sb.Source)
	if err != nil {
		return err
	}
	sb.Template, sb.Digest, sb.Driver, sb.Resources = from.Template, from.Digest, from.Driver, from.Resources
	if sb.Egress == "" {
		if hasProfile(ctx, tx, sb.Project, from.Egress) != nil {
			return sandbox.Errorf(sandbox.FailedPrecondition, "profile_gone", "the egress profile %s that the snapshot was taken with is gone", from.Egress).
				WithHint("name one for the new sandbox")
		}
		sb.Egress = from.Egress
	}
	sb.Base = from.Parent
	if from.Purpose == sandbox.PurposeNamed {
		sb.Base = from.ID
	}
	return nil
}

// drivable refuses a driver that was asked for and that the host can't run. One
// that a snapshot brings is not asked for: its operation waits, or says why.
func drivable(sb sandbox.Sandbox, host sandbox.Capacity) error {
	if sb.Driver == "" || sb.Source != "" || len(host.Drivers) == 0 {
		return nil
	}
	_, err := sandbox.FindDriver(host.Drivers, sb.Driver)
	return err
}

// insertCreate inserts a sandbox in its first state, its operation and its event.
func (s *Store) insertCreate(ctx context.Context, tx *sql.Tx, sb sandbox.Sandbox, op sandbox.Operation) error {
	t, _ := sandbox.Find(sandbox.StateNone, sandbox.VerbCreate)
	sb.State, sb.Generation, sb.Epoch, sb.Operation, sb.UpdatedAt, sb.TouchedAt = t.Via, 1, 0, op.ID, op.CreatedAt, op.CreatedAt
	sb.End, sb.Image, sb.ImageAt = nil, "", nil
	op.Project, op.Sandbox, op.Verb, op.State, op.From, op.Generation = sb.Project, sb.ID, t.Verb, sandbox.OpAccepted, t.From, sb.Generation
	_, err := tx.ExecContext(ctx, "INSERT INTO sandboxes ("+sandboxColumns+`, milli_cpu, memory_mib, disk_mib)
		VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)`,
		sb.ID, sb.Project, sb.Template, sb.Digest, sb.Driver, string(sb.State), sb.Generation, encode(sb.Labels), encode(sb.Env), encode(sb.Resources),
		nanos(sb.CreatedAt), nanos(sb.UpdatedAt), nanosPtr(sb.ExpiresAt), encodePtr(sb.End), sb.Operation,
		sb.Epoch, encode(sb.Policy), nanos(sb.TouchedAt), sb.Image, nanosPtr(sb.ImageAt), sb.Base, sb.Source, sb.Parent, sb.Egress,
		sb.Resources.MilliCPU, sb.Resources.MemoryMiB, sb.Resources.DiskMiB)
	if isConstraint(err) {
		return s.constraint(ctx, tx, sb.Project, "sandbox", sb.ID)
	}
	if err != nil {
		return err
	}
	if err := s.putOperation(ctx, tx, op); err != nil {
		return err
	}
	return moved(ctx, tx, op.CreatedAt, sb, sandbox.StateNone, op.ID)
}

// putOperation inserts op; Conflict where its id is taken.
func (s *Store) putOperation(ctx context.Context, tx *sql.Tx, op sandbox.Operation) error {
	err := insertOperation(ctx, tx, op)
	if isConstraint(err) {
		return s.constraint(ctx, tx, op.Project, "operation", op.ID)
	}
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
	return listing[sandbox.Sandbox]{
		kind: sandbox.KindSandbox, query: "SELECT " + sandboxColumns + " FROM sandboxes", scan: scanSandbox,
		pos: func(sb sandbox.Sandbox) (time.Time, string) { return sb.CreatedAt, sb.ID },
	}.page(ctx, s.r, w, p)
}

// change runs one UPDATE of a sandbox that is not deleted, tells it as an event
// and answers the new row.
func (s *Store) change(ctx context.Context, project, id, event, set string, value any, data any) (sb sandbox.Sandbox, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		sb, err = s.changeIn(ctx, tx, project, id, event, set, value, data)
		return err
	})
	return sb, err
}

func (s *Store) changeIn(ctx context.Context, tx *sql.Tx, project, id, event, set string, value any, data any) (sandbox.Sandbox, error) {
	sb, err := sandboxByID(ctx, tx, project, id)
	if err != nil {
		return sb, err
	}
	if sb.State == sandbox.StateDeleted || sb.State == sandbox.StateDeleting {
		return sb, sandbox.Errorf(sandbox.FailedPrecondition, "wrong_state", "a sandbox that is %s can't be changed", sb.State)
	}
	now := s.now()
	if _, err := exec(ctx, tx, "UPDATE sandboxes SET "+set+" = ?, updated_at = ? WHERE id = ?", value, nanos(now), id); err != nil {
		return sb, err
	}
	e := sandbox.Event{Project: sb.Project, At: now, Type: event, Sandbox: id, Data: json.RawMessage(encode(data))}
	if err := insertEvent(ctx, tx, e); err != nil {
		return sb, err
	}
	return sandboxByID(ctx, tx, project, id)
}

// SetLabels replaces a sandbox's labels.
func (s *Store) SetLabels(ctx context.Context, project, id string, labels map[string]string) (sandbox.Sandbox, error) {
	return s.change(ctx, project, id, "sandbox.labels", "labels", encode(labels), map[string]any{"labels": labels})
}

// SetExpiry sets or clears the time at which a sandbox is deleted.
func (s *Store) SetExpiry(ctx context.Context, project, id string, at *time.Time) (sandbox.Sandbox, error) {
	return s.change(ctx, project, id, "sandbox.expiry", "expires_at", nanosPtr(at), map[string]any{"expires_at": at})
}

// SetPolicy replaces a sandbox's policy.
func (s *Store) SetPolicy(ctx context.Context, project, id string, p sandbox.Policy) (sandbox.Sandbox, error) {
	return s.change(ctx, project, id, "sandbox.policy", "policy", encode(p), map[string]any{"policy": p})
}

// Touch notes when sandboxes were last touched.
func (s *Store) Touch(ctx context.Context, at map[string]time.Time) error {
	if len(at) == 0 {
		return nil
	}
	return s.write(ctx, func(tx *sql.Tx) error {
		for id, t := range at {
			if _, err := tx.ExecContext(ctx, "UPDATE sandboxes SET touched_at = ?1 WHERE id = ?2 AND touched_at < ?1", nanos(t), id); err != nil {
				return err
			}
		}
		return nil
	})
}

// askable lists the states from which the table takes verb, as SQL literals.
func askable(verb sandbox.Verb) string {
	var states []string
	for _, t := range sandbox.Transitions {
		if t.Verb == verb {
			states = append(states, "'"+string(t.From)+"'")
		}
	}
	return strings.Join(states, ",")
}

// expiredQuery finds sandboxes by the verb that their policy asks for.
var expiredQuery = "SELECT " + sandboxColumns + ` FROM sandboxes WHERE expires_at IS NOT NULL AND expires_at <= ?1 AND
	CASE json_extract(policy, '$.on_expiry')
	WHEN 'suspend' THEN state IN (` + askable(sandbox.VerbSuspend) + `)
	WHEN 'stop' THEN state IN (` + askable(sandbox.VerbStop) + `)
	WHEN 'delete' THEN state IN (` + askable(sandbox.VerbDelete) + `) END
	ORDER BY expires_at, id LIMIT ?2`

// ExpiredSandboxes lists sandboxes whose TTL has passed.
func (s *Store) ExpiredSandboxes(ctx context.Context, now time.Time, limit int) ([]sandbox.Sandbox, error) {
	return collect(ctx, s.r, scanSandbox, expiredQuery, nanos(now), limit)
}

// idleQuery reads no more rows than there are machines.
const idleQuery = "SELECT " + sandboxColumns + ` FROM sandboxes WHERE state IN ('running', 'paused')
	AND json_extract(policy, '$.idle.action') IN ('suspend', 'stop', 'delete')
	AND touched_at + json_extract(policy, '$.idle.after') <= ?1 ORDER BY touched_at, id LIMIT ?2`

// IdleSandboxes lists sandboxes that nothing has touched for longer than their
// policy says.
func (s *Store) IdleSandboxes(ctx context.Context, now time.Time, limit int) ([]sandbox.Sandbox, error) {
	return collect(ctx, s.r, scanSandbox, idleQuery, nanos(now), limit)
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
