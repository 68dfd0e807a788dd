package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const operationColumns = `id, project, verb, sandbox, template, state, step, delay, error, key_id, generation,
	lease_until, input, created_at, started_at, ended_at, snapshot, children, from_state`

func scanOperation(r scanner) (op sandbox.Operation, err error) {
	var delay, failure, input, children sql.NullString
	var lease, started, ended sql.NullInt64
	var created int64
	err = r.Scan(&op.ID, &op.Project, &op.Verb, &op.Sandbox, &op.Template, &op.State, &op.Step, &delay, &failure, &op.Key, &op.Generation,
		&lease, &input, &created, &started, &ended, &op.Snapshot, &children, &op.From)
	if err != nil {
		return op, err
	}
	op.CreatedAt, op.StartedAt, op.EndedAt = when(created), whenPtr(started), whenPtr(ended)
	if lease.Valid {
		op.LeaseUntil = when(lease.Int64)
	}
	if input.Valid {
		op.Input = json.RawMessage(input.String)
	}
	if children.Valid {
		err = json.Unmarshal([]byte(children.String), &op.Children)
	}
	return op, errors.Join(err, decodePtr(delay, &op.Delay), decodePtr(failure, &op.Error))
}

func operationByID(ctx context.Context, q queryer, project, id string) (sandbox.Operation, error) {
	op, err := scanOperation(q.QueryRowContext(ctx,
		"SELECT "+operationColumns+" FROM operations WHERE id = ?1 AND (?2 = '' OR project = ?2)", id, project))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Operation{}, sandbox.Errorf(sandbox.NotFound, "operation_not_found", "there is no operation %s", id).
			WithHint("ended operations are kept for 7 days")
	}
	return op, mapError(ctx, err)
}

func insertOperation(ctx context.Context, tx *sql.Tx, op sandbox.Operation) error {
	var lease any
	if !op.LeaseUntil.IsZero() {
		lease = nanos(op.LeaseUntil)
	}
	var children any
	if len(op.Children) > 0 {
		children = encode(op.Children)
	}
	_, err := tx.ExecContext(ctx, "INSERT INTO operations ("+operationColumns+") VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
		op.ID, op.Project, string(op.Verb), op.Sandbox, op.Template, string(op.State), op.Step, encodePtr(op.Delay), encodePtr(op.Error), op.Key,
		op.Generation, lease, rawOrNil(op.Input), nanos(op.CreatedAt), nanosPtr(op.StartedAt), nanosPtr(op.EndedAt),
		op.Snapshot, children, string(op.From))
	return err
}

// endOperation ends one that has not ended: as failed where failure is set. One
// that succeeded before anybody told that it had started did so at once.
func endOperation(ctx context.Context, tx *sql.Tx, id, template string, failure *sandbox.Error, at time.Time) error {
	state := sandbox.OpSucceeded
	if failure != nil {
		state = sandbox.OpFailed
	}
	_, err := tx.ExecContext(ctx, `UPDATE operations SET state = ?1, error = ?2, template = coalesce(nullif(?3, ''), template), step = '', delay = NULL,
		started_at = coalesce(started_at, CASE WHEN ?2 IS NULL THEN created_at ELSE ?4 END), ended_at = ?4 WHERE id = ?5 AND ended_at IS NULL`,
		string(state), encodePtr(failure), template, nanos(at), id)
	return err
}

// Operation returns one operation.
func (s *Store) Operation(ctx context.Context, project, id string) (sandbox.Operation, error) {
	return operationByID(ctx, s.r, project, id)
}

// Operations lists operations, newest first.
func (s *Store) Operations(ctx context.Context, project string, f sandbox.OperationFilter, p sandbox.Page) ([]sandbox.Operation, string, error) {
	var w where
	w.project(project)
	if f.Sandbox != "" {
		w.and("sandbox = ?", f.Sandbox)
	}
	in(&w, "state", f.States)
	return listing[sandbox.Operation]{
		kind: sandbox.KindOperation, query: "SELECT " + operationColumns + " FROM operations", scan: scanOperation,
		pos: func(op sandbox.Operation) (time.Time, string) { return op.CreatedAt, op.ID },
	}.page(ctx, s.r, w, p)
}

// CreateOperation inserts an operation that has no sandbox.
func (s *Store) CreateOperation(ctx context.Context, op sandbox.Operation, idem sandbox.Idempotency) (created sandbox.Operation, replayed bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		c := claim{op.Project, "operation." + string(op.Verb), idem, op.CreatedAt}
		_, first, ok, err := c.replay(ctx, tx)
		if err != nil {
			return err
		}
		if ok {
			replayed = true
			created, err = operationByID(ctx, tx, op.Project, first)
			return err
		}
		op.Sandbox, op.State = "", sandbox.OpAccepted
		if err := insertOperation(ctx, tx, op); err != nil {
			if isConstraint(err) {
				return s.constraint(ctx, tx, op.Project, "operation", op.ID)
			}
			return err
		}
		if err := told(ctx, tx, op, op.CreatedAt); err != nil {
			return err
		}
		if err := c.record(ctx, tx, "", op.ID); err != nil {
			return err
		}
		created, err = operationByID(ctx, tx, op.Project, op.ID)
		return err
	})
	return created, replayed, err
}

// told writes the event of an operation without a sandbox.
func told(ctx context.Context, tx *sql.Tx, op sandbox.Operation, at time.Time) error {
	data := map[string]any{"verb": op.Verb, "state": op.State}
	if op.Template != "" {
		data["template"] = op.Template
	}
	return insertEvent(ctx, tx, sandbox.Event{Project: op.Project, At: at, Type: "operation.state", Operation: op.ID, Data: []byte(encode(data))})
}

// UpdateOperation tells how far an operation is.
func (s *Store) UpdateOperation(ctx context.Context, id string, state sandbox.OperationState, step string, delay *sandbox.Delay) error {
	if state.Done() {
		return sandbox.Errorf(sandbox.Internal, "wrong_transition", "an update can't end an operation")
	}
	return s.write(ctx, func(tx *sql.Tx) error {
		started := any(nil)
		if state == sandbox.OpRunning {
			started = nanos(s.now())
		}
		_, err := tx.ExecContext(ctx, `UPDATE operations SET state = ?, step = ?, delay = ?, started_at = coalesce(started_at, ?)
			WHERE id = ? AND ended_at IS NULL`, string(state), step, encodePtr(delay), started, id)
		return err
	})
}

// EndBuild ends a build operation.
func (s *Store) EndBuild(ctx context.Context, id, template string, failure *sandbox.Error) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		op, err := operationByID(ctx, tx, "", id)
		if err != nil || op.State.Done() {
			return err
		}
		if op.Verb != sandbox.VerbBuild {
			return sandbox.Errorf(sandbox.Internal, "wrong_transition", "%s is no build", id)
		}
		now := s.now()
		if err := endOperation(ctx, tx, id, template, failure, now); err != nil {
			return err
		}
		if op, err = operationByID(ctx, tx, "", id); err != nil {
			return err
		}
		return told(ctx, tx, op, now)
	})
}

// Unfinished lists operations that have not ended, oldest first.
func (s *Store) Unfinished(ctx context.Context) ([]sandbox.Operation, error) {
	return collect(ctx, s.r, scanOperation, "SELECT "+operationColumns+" FROM operations WHERE ended_at IS NULL ORDER BY created_at, id")
}
