package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// The secrets' values come sealed and leave so.

const secretColumns = "id, project, name, hosts, version, source, sealed, created_at, updated_at" //nolint:gosec // names of columns

func scanSecret(r scanner) (x sandbox.Secret, err error) {
	var hosts string
	var source sql.NullString
	var created, updated int64
	err = r.Scan(&x.ID, &x.Project, &x.Name, &hosts, &x.Version, &source, &x.Sealed, &created, &updated)
	if err != nil {
		return x, err
	}
	x.CreatedAt, x.UpdatedAt = when(created), when(updated)
	return x, errors.Join(json.Unmarshal([]byte(hosts), &x.Hosts), decodePtr(source, &x.Source))
}

func secretByName(ctx context.Context, q queryer, project, name string) (sandbox.Secret, error) {
	return oneSecret(ctx, q, "name", project, name)
}

// oneSecret finds a secret by a column that is unique in a project.
func oneSecret(ctx context.Context, q queryer, column, project, value string) (sandbox.Secret, error) {
	x, err := scanSecret(q.QueryRowContext(ctx, "SELECT "+secretColumns+" FROM secrets WHERE project = ? AND "+column+" = ?", project, value))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Secret{}, sandbox.Errorf(sandbox.NotFound, "secret_not_found", "there is no secret %s", value).
			WithHint("list them with `cloche secret ls`")
	}
	return x, mapError(ctx, err)
}

// CreateSecret inserts x.
func (s *Store) CreateSecret(ctx context.Context, x sandbox.Secret) (created sandbox.Secret, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if err := room(ctx, tx, "secrets", x.Project, "secrets", sandbox.MaxSecrets); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, "INSERT INTO secrets ("+secretColumns+") VALUES (?,?,?,?,?,?,?,?,?)",
			x.ID, x.Project, x.Name, encode(x.Hosts), 1, encodePtr(x.Source), x.Sealed, nanos(x.CreatedAt), nanos(x.CreatedAt))
		if isConstraint(err) {
			return s.constraint(ctx, tx, x.Project, "secret", x.Name)
		}
		if err != nil {
			return err
		}
		created, err = s.changedSecret(ctx, tx, x.Project, x.Name)
		return err
	})
	return created, err
}

// changedSecret raises the revision, tells the change and answers the row.
func (s *Store) changedSecret(ctx context.Context, tx *sql.Tx, project, name string) (sandbox.Secret, error) {
	if err := raise(ctx, tx); err != nil {
		return sandbox.Secret{}, err
	}
	x, err := secretByName(ctx, tx, project, name)
	if err != nil {
		return x, err
	}
	return x, s.tellNamed(ctx, tx, project, "egress.secret", named{name, x.Version})
}

// Secret returns one secret.
func (s *Store) Secret(ctx context.Context, project, name string) (sandbox.Secret, error) {
	return secretByName(ctx, s.r, project, name)
}

// Secrets lists a project's secrets by name.
func (s *Store) Secrets(ctx context.Context, project string) ([]sandbox.Secret, error) {
	return collect(ctx, s.r, scanSecret, "SELECT "+secretColumns+" FROM secrets WHERE project = ? ORDER BY name", project)
}

// ReplaceSecret puts a value in place of another.
func (s *Store) ReplaceSecret(ctx context.Context, project, id string, version int64, sealed []byte, at time.Time) (x sandbox.Secret, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if x, err = oneSecret(ctx, tx, "id", project, id); err != nil {
			return err
		}
		if version != 0 && x.Version != version {
			return versionMismatch("secret", x.Name, x.Version, version)
		}
		if _, err := tx.ExecContext(ctx, "UPDATE secrets SET sealed = ?, version = version + 1, updated_at = ? WHERE id = ?", sealed, nanos(at), id); err != nil {
			return err
		}
		x, err = s.changedSecret(ctx, tx, project, x.Name)
		return err
	})
	return x, err
}

// DeleteSecret removes a secret. Profiles that inject it then refuse what they
// would put it into.
func (s *Store) DeleteSecret(ctx context.Context, project, name string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		x, err := secretByName(ctx, tx, project, name)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "DELETE FROM secrets WHERE id = ?", x.ID); err != nil {
			return err
		}
		if err := raise(ctx, tx); err != nil {
			return err
		}
		return s.tellNamed(ctx, tx, project, "egress.secret", named{Name: name})
	})
}
