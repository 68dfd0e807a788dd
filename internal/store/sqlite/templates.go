package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// templateQuery selects templates with their releases as one JSON array.
const templateQuery = `SELECT t.project, t.digest, t.config, t.size_bytes, t.source, t.created_at,
	(SELECT json_group_array(name) FROM (SELECT name FROM releases r WHERE r.project = t.project AND r.digest = t.digest ORDER BY name))
	FROM templates t `

func scanTemplate(r scanner) (t sandbox.Template, err error) {
	var config, releases string
	var created int64
	if err := r.Scan(&t.Project, &t.Digest, &config, &t.SizeBytes, &t.Source, &created, &releases); err != nil {
		return t, err
	}
	t.CreatedAt = when(created)
	if err := errors.Join(json.Unmarshal([]byte(config), &t.Config), json.Unmarshal([]byte(releases), &t.Releases)); err != nil {
		return t, err
	}
	if len(t.Releases) == 0 {
		t.Releases = nil
	}
	return t, nil
}

func templateNotFound(ref string) error {
	return sandbox.Errorf(sandbox.NotFound, "template_not_found", "there is no template %s", ref).
		WithHint("list the templates with `cloche template ls`; `cloche template build base` makes the default one")
}

// templateByRef resolves a digest or a release. Where any project will do, the
// first that has it is taken.
func templateByRef(ctx context.Context, q queryer, project, ref string) (sandbox.Template, error) {
	cond := "WHERE t.digest = ?1"
	name := ref
	if !strings.HasPrefix(ref, "sha256:") {
		if !strings.Contains(ref, ":") {
			name += ":latest"
		}
		cond = "JOIN releases n ON n.project = t.project AND n.digest = t.digest WHERE n.name = ?1"
	}
	t, err := scanTemplate(q.QueryRowContext(ctx, templateQuery+cond+" AND (?2 = '' OR t.project = ?2) ORDER BY t.project LIMIT 1", name, project))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Template{}, templateNotFound(ref)
	}
	return t, mapError(ctx, err)
}

// PutTemplate inserts a template and moves release to it.
func (s *Store) PutTemplate(ctx context.Context, t sandbox.Template, release string) (put sandbox.Template, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO templates (project, digest, config, size_bytes, source, created_at) VALUES (?,?,?,?,?,?)
			ON CONFLICT (project, digest) DO NOTHING`,
			t.Project, t.Digest, encode(t.Config), t.SizeBytes, t.Source, nanos(t.CreatedAt))
		if isConstraint(err) {
			return s.constraint(ctx, tx, t.Project, "template", t.Digest)
		}
		if err != nil {
			return err
		}
		if release != "" {
			if _, err := s.tag(ctx, tx, t.Project, t.Digest, release); err != nil {
				return err
			}
		}
		put, err = templateByRef(ctx, tx, t.Project, t.Digest)
		return err
	})
	return put, err
}

func (s *Store) tag(ctx context.Context, tx *sql.Tx, project, digest, release string) (sandbox.Release, error) {
	r := sandbox.Release{Project: project, Name: release, Digest: digest, UpdatedAt: when(nanos(s.now()))}
	_, err := tx.ExecContext(ctx, `INSERT INTO releases (project, name, digest, updated_at) VALUES (?,?,?,?)
		ON CONFLICT (project, name) DO UPDATE SET digest = excluded.digest, updated_at = excluded.updated_at`,
		r.Project, r.Name, r.Digest, nanos(r.UpdatedAt))
	if err != nil {
		return r, err
	}
	return r, insertEvent(ctx, tx, sandbox.Event{
		Project: project, At: r.UpdatedAt, Type: "template.release",
		Data: []byte(encode(map[string]string{"release": release, "digest": digest})),
	})
}

// Template resolves a reference.
func (s *Store) Template(ctx context.Context, project, ref string) (sandbox.Template, error) {
	return templateByRef(ctx, s.r, project, ref)
}

// Templates lists a project's templates, newest first.
func (s *Store) Templates(ctx context.Context, project string) ([]sandbox.Template, error) {
	return collect(ctx, s.r, scanTemplate, templateQuery+"WHERE ?1 = '' OR t.project = ?1 ORDER BY t.created_at DESC, t.digest", project)
}

// Tag moves or creates a release.
func (s *Store) Tag(ctx context.Context, project, ref, release string) (r sandbox.Release, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		t, err := templateByRef(ctx, tx, project, ref)
		if err != nil {
			return err
		}
		r, err = s.tag(ctx, tx, t.Project, t.Digest, release)
		return err
	})
	return r, err
}

// Untag removes a release; its template stays.
func (s *Store) Untag(ctx context.Context, project, release string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		n, err := exec(ctx, tx, "DELETE FROM releases WHERE name = ?1 AND (?2 = '' OR project = ?2)", release, project)
		if err == nil && n == 0 {
			return sandbox.Errorf(sandbox.NotFound, "release_not_found", "there is no release %s", release)
		}
		return err
	})
}

// DeleteTemplate removes a template that no sandbox and no snapshot uses: both
// are brought up over its image.
func (s *Store) DeleteTemplate(ctx context.Context, project, digest string) (last bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		var users, images int
		err := tx.QueryRowContext(ctx, `SELECT
			(SELECT count(*) FROM sandboxes WHERE digest = ?1 AND (?2 = '' OR project = ?2) AND state <> ?3),
			(SELECT count(*) FROM snapshots WHERE digest = ?1 AND (?2 = '' OR project = ?2))`,
			digest, project, string(sandbox.StateDeleted)).Scan(&users, &images)
		if err != nil {
			return err
		}
		if users+images > 0 {
			return sandbox.Errorf(sandbox.FailedPrecondition, "template_in_use", "%d sandboxes and %d snapshots need this template", users, images).
				WithHint("delete them first")
		}
		n, err := exec(ctx, tx, "DELETE FROM templates WHERE digest = ?1 AND (?2 = '' OR project = ?2)", digest, project)
		if err != nil {
			return err
		}
		if n == 0 {
			return templateNotFound(digest)
		}
		has, err := hasTemplate(ctx, tx, digest)
		last = !has
		return err
	})
	return last && err == nil, err
}

func hasTemplate(ctx context.Context, q queryer, digest string) (has bool, err error) {
	err = q.QueryRowContext(ctx, "SELECT EXISTS (SELECT 1 FROM templates WHERE digest = ?)", digest).Scan(&has)
	return has, mapError(ctx, err)
}

// HasTemplate tells whether any project has this digest.
func (s *Store) HasTemplate(ctx context.Context, digest string) (bool, error) {
	return hasTemplate(ctx, s.r, digest)
}
