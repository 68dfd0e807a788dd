package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"

	"cloche.dev/cloche/internal/sandbox"
)

// maxEvents bounds one answer of Events.
const maxEvents = 1000

func insertEvent(ctx context.Context, tx *sql.Tx, e sandbox.Event) error {
	_, err := tx.ExecContext(ctx, "INSERT INTO events (project, at, type, sandbox, operation, data) VALUES (?,?,?,?,?,?)",
		e.Project, nanos(e.At), e.Type, e.Sandbox, e.Operation, rawOrNil(e.Data))
	return err
}

func scanEvent(r scanner) (e sandbox.Event, err error) {
	var at int64
	var data sql.NullString
	err = r.Scan(&e.Seq, &e.Project, &at, &e.Type, &e.Sandbox, &e.Operation, &data)
	e.At = when(at)
	if data.Valid {
		e.Data = json.RawMessage(data.String)
	}
	return e, err
}

// Events lists events after seq, oldest first.
func (s *Store) Events(ctx context.Context, project string, after int64, limit int) ([]sandbox.Event, error) {
	if limit <= 0 || limit > maxEvents {
		limit = maxEvents
	}
	query, args := "SELECT seq, project, at, type, sandbox, operation, data FROM events WHERE seq > ?", []any{after}
	if project != "" {
		query += " AND project = ?"
		args = append(args, project)
	}
	return collect(ctx, s.r, scanEvent, query+" ORDER BY seq LIMIT ?", append(args, limit)...)
}
