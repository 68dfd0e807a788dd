package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"

	"cloche.dev/cloche/internal/sandbox"
)

// Profiles, and what assignments are made of. Whatever may change an
// assignment raises the revision in the same transaction.

// profileContent is what a profile's content column holds.
type profileContent struct {
	Rules   []sandbox.EgressRule `json:"rules,omitempty"`
	Default sandbox.EgressAction `json:"default"`
	DryRun  bool                 `json:"dry_run,omitempty"`
	Limits  sandbox.EgressLimits `json:"limits"`
}

const profileColumns = "id, project, name, version, content, created_at, updated_at"

func scanProfile(r scanner) (p sandbox.EgressProfile, err error) {
	var content string
	var created, updated int64
	if err := r.Scan(&p.ID, &p.Project, &p.Name, &p.Version, &content, &created, &updated); err != nil {
		return p, err
	}
	var c profileContent
	err = json.Unmarshal([]byte(content), &c)
	p.Rules, p.Default, p.DryRun, p.Limits = c.Rules, c.Default, c.DryRun, c.Limits
	p.CreatedAt, p.UpdatedAt = when(created), when(updated)
	return p, err
}

func profileByName(ctx context.Context, q queryer, project, name string) (sandbox.EgressProfile, error) {
	p, err := scanProfile(q.QueryRowContext(ctx, "SELECT "+profileColumns+" FROM egress_profiles WHERE project = ? AND name = ?", project, name))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.EgressProfile{}, sandbox.Errorf(sandbox.NotFound, "profile_not_found", "there is no egress profile %s", name).
			WithHint("list them with `cloche egress profile ls`")
	}
	return p, mapError(ctx, err)
}

// hasProfile refuses a name that is neither a preset's nor a profile's; ""
// names nothing.
func hasProfile(ctx context.Context, q queryer, project, name string) error {
	if name == "" || sandbox.IsPreset(name) {
		return nil
	}
	_, err := profileByName(ctx, q, project, name)
	return err
}

func putContent(ctx context.Context, tx *sql.Tx, p sandbox.EgressProfile) (string, error) {
	if _, err := tx.ExecContext(ctx, "DELETE FROM egress_injects WHERE profile = ?", p.ID); err != nil {
		return "", err
	}
	for _, r := range p.Rules {
		for _, i := range r.Inject {
			if _, err := tx.ExecContext(ctx, "INSERT OR IGNORE INTO egress_injects (profile, secret) VALUES (?,?)", p.ID, i.Secret); err != nil {
				return "", err
			}
		}
	}
	return encode(profileContent{p.Rules, p.Default, p.DryRun, p.Limits}), raise(ctx, tx)
}

// raise makes the states that are read from now on newer.
func raise(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, "UPDATE egress_revision SET n = n + 1")
	return err
}

// named is the data of events about what has a name and a version.
type named struct {
	Name    string `json:"name"`
	Version int64  `json:"version,omitempty"` // missing: it was deleted
}

func (s *Store) tellNamed(ctx context.Context, tx *sql.Tx, project, event string, n named) error {
	return insertEvent(ctx, tx, sandbox.Event{Project: project, At: s.now(), Type: event, Data: []byte(encode(n))})
}

// room refuses one row more than most in a project.
func room(ctx context.Context, tx *sql.Tx, table, project, what string, most int) error {
	var n int
	if err := tx.QueryRowContext(ctx, "SELECT count(*) FROM "+table+" WHERE project = ?", project).Scan(&n); err != nil {
		return err
	}
	if n >= most {
		return sandbox.Errorf(sandbox.Quota, "too_many_"+what, "a project may have %d %s", most, what).WithHint("delete one that nothing needs")
	}
	return nil
}

// CreateEgressProfile inserts p.
func (s *Store) CreateEgressProfile(ctx context.Context, p sandbox.EgressProfile, idem sandbox.Idempotency) (created sandbox.EgressProfile, replayed bool, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		c := claim{p.Project, "egress.profile.create", idem, p.CreatedAt}
		_, _, ok, err := c.replay(ctx, tx)
		if err != nil {
			return err
		}
		if ok {
			replayed = true
			created, err = profileByName(ctx, tx, p.Project, p.Name)
			return err
		}
		if err := room(ctx, tx, "egress_profiles", p.Project, "profiles", sandbox.MaxEgressProfiles); err != nil {
			return err
		}
		p.Version = 1
		_, err = tx.ExecContext(ctx, "INSERT INTO egress_profiles ("+profileColumns+") VALUES (?,?,?,?,?,?,?)",
			p.ID, p.Project, p.Name, p.Version, "{}", nanos(p.CreatedAt), nanos(p.CreatedAt))
		if isConstraint(err) {
			return s.constraint(ctx, tx, p.Project, "profile", p.Name)
		}
		if err != nil {
			return err
		}
		if err := c.record(ctx, tx, p.ID, ""); err != nil {
			return err
		}
		created, err = s.fillProfile(ctx, tx, p)
		return err
	})
	return created, replayed, err
}

// fillProfile writes p's content below its version, tells it and reads it back.
func (s *Store) fillProfile(ctx context.Context, tx *sql.Tx, p sandbox.EgressProfile) (sandbox.EgressProfile, error) {
	content, err := putContent(ctx, tx, p)
	if err != nil {
		return p, err
	}
	if _, err := tx.ExecContext(ctx, "UPDATE egress_profiles SET content = ? WHERE id = ?", content, p.ID); err != nil {
		return p, err
	}
	if err := s.tellNamed(ctx, tx, p.Project, "egress.profile", named{p.Name, p.Version}); err != nil {
		return p, err
	}
	return profileByName(ctx, tx, p.Project, p.Name)
}

// EgressProfile returns one profile.
func (s *Store) EgressProfile(ctx context.Context, project, name string) (sandbox.EgressProfile, error) {
	return profileByName(ctx, s.r, project, name)
}

// EgressProfiles lists a project's profiles by name.
func (s *Store) EgressProfiles(ctx context.Context, project string) ([]sandbox.EgressProfile, error) {
	return collect(ctx, s.r, scanProfile, "SELECT "+profileColumns+" FROM egress_profiles WHERE project = ? ORDER BY name", project)
}

// ReplaceEgressProfile puts p in place of the version that it names.
func (s *Store) ReplaceEgressProfile(ctx context.Context, p sandbox.EgressProfile) (put sandbox.EgressProfile, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		is, err := profileByName(ctx, tx, p.Project, p.Name)
		if err != nil {
			return err
		}
		if is.Version != p.Version {
			return versionMismatch("profile", p.Name, is.Version, p.Version)
		}
		p.ID, p.Version = is.ID, is.Version+1
		if _, err := tx.ExecContext(ctx, "UPDATE egress_profiles SET version = ?, updated_at = ? WHERE id = ?", p.Version, nanos(p.UpdatedAt), p.ID); err != nil {
			return err
		}
		put, err = s.fillProfile(ctx, tx, p)
		return err
	})
	return put, err
}

func versionMismatch(what, name string, is, asked int64) error {
	return sandbox.Errorf(sandbox.Conflict, "version_mismatch", "the %s %s has version %d by now, not %d", what, name, is, asked).
		WithHint("read it again, and change what is there now")
}

// DeleteEgressProfile removes a profile that no sandbox has.
func (s *Store) DeleteEgressProfile(ctx context.Context, project, name string) error {
	return s.write(ctx, func(tx *sql.Tx) error {
		p, err := profileByName(ctx, tx, project, name)
		if err != nil {
			return err
		}
		var users int
		err = tx.QueryRowContext(ctx, "SELECT count(*) FROM sandboxes WHERE project = ? AND egress = ? AND state <> 'deleted'", project, name).Scan(&users)
		if err != nil {
			return err
		}
		if users > 0 {
			return sandbox.Errorf(sandbox.FailedPrecondition, "profile_in_use", "%d sandboxes have the egress profile %s", users, name).
				WithHint("give them another one with `cloche egress set`, or delete them")
		}
		if _, err := tx.ExecContext(ctx, "DELETE FROM egress_profiles WHERE id = ?", p.ID); err != nil {
			return err
		}
		return s.tellNamed(ctx, tx, project, "egress.profile", named{Name: name})
	})
}

// SetSandboxEgress gives a sandbox another profile.
func (s *Store) SetSandboxEgress(ctx context.Context, project, id, profile string) (sb sandbox.Sandbox, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		if sb, err = sandboxByID(ctx, tx, project, id); err != nil {
			return err
		}
		if err := hasProfile(ctx, tx, sb.Project, profile); err != nil {
			return err
		}
		if err := raise(ctx, tx); err != nil {
			return err
		}
		sb, err = s.changeIn(ctx, tx, project, id, "sandbox.egress", "egress", profile, map[string]any{"egress": profile})
		return err
	})
	return sb, err
}

// EgressState reads in one transaction what a sandbox's assignment is made of.
func (s *Store) EgressState(ctx context.Context, id string) (st sandbox.EgressState, err error) {
	tx, err := s.r.BeginTx(ctx, nil)
	if err != nil {
		return st, mapError(ctx, err)
	}
	defer func() { _ = tx.Rollback() }() // it changes nothing
	if st.Sandbox, err = sandboxByID(ctx, tx, "", id); err != nil {
		return st, err
	}
	project := st.Sandbox.Project
	if name := st.Sandbox.Egress; name != "" && !sandbox.IsPreset(name) {
		p, err := profileByName(ctx, tx, project, name)
		if err != nil {
			return st, err
		}
		st.Profile = &p
		st.Secrets, err = collect(ctx, tx, scanSecret, "SELECT "+secretColumns+` FROM secrets WHERE project = ?
			AND name IN (SELECT secret FROM egress_injects WHERE profile = ?) ORDER BY name`, project, p.ID)
		if err != nil {
			return st, err
		}
	}
	if st.CA, err = authorityOf(ctx, tx, project); err != nil {
		return st, err
	}
	err = tx.QueryRowContext(ctx, "SELECT n FROM egress_revision").Scan(&st.Revision)
	return st, mapError(ctx, err)
}

// EgressUsers names the sandboxes that what is given concerns.
func (s *Store) EgressUsers(ctx context.Context, project, profile, secret string) ([]string, error) {
	query, args := "SELECT id FROM sandboxes WHERE state NOT IN ('suspended', 'stopped', 'failed', 'deleting', 'deleted')", []any{}
	if project != "" {
		query, args = query+" AND project = ?", append(args, project)
	}
	switch {
	case secret != "":
		query += " AND egress IN (SELECT p.name FROM egress_profiles p JOIN egress_injects i ON i.profile = p.id WHERE p.project = sandboxes.project AND i.secret = ?)"
		args = append(args, secret)
	case profile != "":
		query, args = query+" AND egress = ?", append(args, profile)
	}
	return collect(ctx, s.r, func(r scanner) (id string, err error) { return id, r.Scan(&id) }, query+" ORDER BY id", args...)
}

// RaiseEgressRevision makes the states that are read from now on newer.
func (s *Store) RaiseEgressRevision(ctx context.Context) error {
	return s.write(ctx, func(tx *sql.Tx) error { return raise(ctx, tx) })
}

func authorityOf(ctx context.Context, q queryer, project string) (a sandbox.Authority, err error) {
	err = q.QueryRowContext(ctx, "SELECT cert, key FROM authorities WHERE project = ?", project).Scan(&a.Cert, &a.Key)
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Authority{}, nil
	}
	return a, mapError(ctx, err)
}

// PutAuthority keeps a project's first authority.
func (s *Store) PutAuthority(ctx context.Context, project string, a sandbox.Authority) (put sandbox.Authority, err error) {
	err = s.write(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "INSERT INTO authorities (project, cert, key) VALUES (?,?,?) ON CONFLICT (project) DO NOTHING", project, a.Cert, a.Key)
		if isConstraint(err) {
			return projectNotFound(project)
		}
		if err != nil {
			return err
		}
		if err := raise(ctx, tx); err != nil {
			return err
		}
		put, err = authorityOf(ctx, tx, project)
		return err
	})
	return put, err
}
