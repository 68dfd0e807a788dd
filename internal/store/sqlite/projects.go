package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// CreateProject inserts p; Conflict where its id or name is taken.
func (s *Store) CreateProject(ctx context.Context, p sandbox.Project) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO projects (id, name, quotas, created_at) VALUES (?,?,?,?)",
			p.ID, p.Name, encode(p.Quotas), nanos(p.CreatedAt))
		if isConstraint(err) {
			return sandbox.Errorf(sandbox.Conflict, "project_exists", "there is a project %q already", p.Name)
		}
		return err
	})
}

const projectColumns = "id, name, quotas, created_at"

func scanProject(r scanner) (p sandbox.Project, err error) {
	var quotas string
	var at int64
	if err := r.Scan(&p.ID, &p.Name, &quotas, &at); err != nil {
		return p, err
	}
	p.CreatedAt = when(at)
	return p, json.Unmarshal([]byte(quotas), &p.Quotas)
}

func projectByID(ctx context.Context, q queryer, id string) (sandbox.Project, error) {
	p, err := scanProject(q.QueryRowContext(ctx, "SELECT "+projectColumns+" FROM projects WHERE id = ?", id))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Project{}, projectNotFound(id)
	}
	return p, mapError(ctx, err)
}

func projectNotFound(id string) error {
	return sandbox.Errorf(sandbox.NotFound, "project_not_found", "there is no project %s", id)
}

// Projects lists every project, oldest first.
func (s *Store) Projects(ctx context.Context) ([]sandbox.Project, error) {
	return collect(ctx, s.r, scanProject, "SELECT "+projectColumns+" FROM projects ORDER BY created_at, id")
}

const keyColumns = "id, project, name, role, hash, created_at, revoked_at"

func scanKey(r scanner) (k sandbox.Key, err error) {
	var at int64
	var revoked sql.NullInt64
	err = r.Scan(&k.ID, &k.Project, &k.Name, &k.Role, &k.Hash, &at, &revoked)
	k.CreatedAt, k.RevokedAt = when(at), whenPtr(revoked)
	return k, err
}

func keyByID(ctx context.Context, q queryer, id string) (sandbox.Key, error) {
	k, err := scanKey(q.QueryRowContext(ctx, "SELECT "+keyColumns+" FROM keys WHERE id = ?", id))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Key{}, keyNotFound(id)
	}
	return k, mapError(ctx, err)
}

func keyNotFound(id string) error {
	return sandbox.Errorf(sandbox.NotFound, "key_not_found", "there is no key %s", id).WithHint("list the keys with `cloche key ls`")
}

// CreateKey inserts k; a replayed call answers the first call's row.
func (s *Store) CreateKey(ctx context.Context, k sandbox.Key, idem sandbox.Idempotency) (created sandbox.Key, replayed bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		c := claim{k.Project, "key.create", idem, k.CreatedAt}
		first, _, ok, err := c.replay(ctx, tx)
		if err != nil {
			return err
		}
		if ok {
			replayed = true
			created, err = keyByID(ctx, tx, first)
			return err
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO keys ("+keyColumns+") VALUES (?,?,?,?,?,?,?)",
			k.ID, k.Project, k.Name, string(k.Role), k.Hash, nanos(k.CreatedAt), nanosPtr(k.RevokedAt))
		if isConstraint(err) {
			return s.constraint(ctx, tx, k.Project, "key", k.ID)
		}
		if err != nil {
			return err
		}
		if err := c.record(ctx, tx, k.ID, ""); err != nil {
			return err
		}
		created, err = keyByID(ctx, tx, k.ID)
		return err
	})
	return created, replayed, err
}

// constraint explains a violated constraint of an insert: no such project, or
// the id is there already.
func (s *Store) constraint(ctx context.Context, tx *sql.Tx, project, what, id string) error {
	var n int
	if err := tx.QueryRowContext(ctx, "SELECT count(*) FROM projects WHERE id = ?", project).Scan(&n); err != nil {
		return err
	}
	if n == 0 {
		return projectNotFound(project)
	}
	return sandbox.Errorf(sandbox.Conflict, what+"_exists", "there is a %s %s already", what, id)
}

// KeyByID returns a key of any project: it is how a caller is found out.
func (s *Store) KeyByID(ctx context.Context, id string) (sandbox.Key, error) {
	return keyByID(ctx, s.r, id)
}

// Keys lists a project's keys, revoked ones included, oldest first.
func (s *Store) Keys(ctx context.Context, project string) ([]sandbox.Key, error) {
	return collect(ctx, s.r, scanKey,
		"SELECT "+keyColumns+" FROM keys WHERE ?1 = '' OR project = ?1 ORDER BY created_at, id", project)
}

// RevokeKey ends a key for good. Again: no change.
func (s *Store) RevokeKey(ctx context.Context, project, id string, at time.Time) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		n, err := exec(ctx, tx, "UPDATE keys SET revoked_at = coalesce(revoked_at, ?) WHERE id = ? AND (?3 = '' OR project = ?3)",
			nanos(at), id, project)
		if err == nil && n == 0 {
			return keyNotFound(id)
		}
		return err
	})
}
