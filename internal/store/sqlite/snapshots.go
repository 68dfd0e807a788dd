package sqlite

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const snapshotColumns = `id, project, sandbox, name, kind, purpose, state, parent, template, digest, driver, resources, needs, size_bytes,
	operation, created_at, taken_at, egress`

func scanSnapshot(r scanner) (n sandbox.Snapshot, err error) {
	var resources, needs string
	var created int64
	var taken sql.NullInt64
	err = r.Scan(&n.ID, &n.Project, &n.Sandbox, &n.Name, &n.Kind, &n.Purpose, &n.State, &n.Parent, &n.Template, &n.Digest, &n.Driver, &resources, &needs,
		&n.SizeBytes, &n.Operation, &created, &taken, &n.Egress)
	if err != nil {
		return n, err
	}
	n.CreatedAt, n.TakenAt = when(created), whenPtr(taken)
	return n, errors.Join(json.Unmarshal([]byte(resources), &n.Resources), json.Unmarshal([]byte(needs), &n.Needs))
}

func snapshotByID(ctx context.Context, q queryer, project, id string) (sandbox.Snapshot, error) {
	n, err := scanSnapshot(q.QueryRowContext(ctx,
		"SELECT "+snapshotColumns+" FROM snapshots WHERE id = ?1 AND (?2 = '' OR project = ?2)", id, project))
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.Snapshot{}, sandbox.Errorf(sandbox.NotFound, "snapshot_not_found", "there is no snapshot %s", id).
			WithHint("GET /v1/snapshots lists the snapshots")
	}
	return n, mapError(ctx, err)
}

// readySnapshot is snapshotByID of one that a machine can be made from.
func readySnapshot(ctx context.Context, q queryer, project, id string) (sandbox.Snapshot, error) {
	n, err := snapshotByID(ctx, q, project, id)
	if err == nil && n.State != sandbox.SnapshotReady {
		e := sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_not_ready", "the snapshot %s is %s, not ready", id, n.State)
		if n.State == sandbox.SnapshotCreating {
			e = e.WithHint("wait for its operation to end, then try again").WithRetry(0)
		}
		return n, e
	}
	return n, err
}

// inPast tells whether a snapshot was taken of sb, of a sandbox that it
// descends from, or lies on its way back to the template.
func inPast(ctx context.Context, q queryer, sb sandbox.Sandbox, snap sandbox.Snapshot) (ok bool, err error) {
	err = q.QueryRowContext(ctx, `WITH RECURSIVE
		line(sandbox) AS (
			VALUES (?1)
			UNION SELECT b.parent FROM line JOIN sandboxes b ON b.id = line.sandbox WHERE b.parent <> ''
			UNION SELECT n.sandbox FROM line JOIN sandboxes b ON b.id = line.sandbox JOIN snapshots n ON n.id = b.source
		),
		way(id) AS (
			VALUES (?2)
			UNION SELECT n.parent FROM way JOIN snapshots n ON n.id = way.id WHERE n.parent <> ''
		)
		SELECT EXISTS (SELECT 1 FROM line WHERE sandbox = ?3) OR EXISTS (SELECT 1 FROM way WHERE id = ?4)`,
		sb.ID, sb.Base, snap.Sandbox, snap.ID).Scan(&ok)
	return ok, err
}

// beginSnapshot inserts the row of a snapshot of sb that is to be taken.
func (s *Store) beginSnapshot(ctx context.Context, tx *sql.Tx, sb sandbox.Sandbox, n sandbox.Snapshot, op string, at time.Time, replaces string) error {
	if n.CreatedAt.IsZero() {
		n.CreatedAt = at
	}
	n.Project, n.Sandbox, n.Operation, n.Parent = sb.Project, sb.ID, op, sb.Base
	n.Template, n.Digest, n.Driver, n.Resources, n.Egress = sb.Template, sb.Digest, sb.Driver, sb.Resources, sb.Egress
	_, err := tx.ExecContext(ctx, "INSERT INTO snapshots ("+snapshotColumns+", replaces) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
		n.ID, n.Project, n.Sandbox, n.Name, string(n.Kind), string(n.Purpose), string(sandbox.SnapshotCreating), n.Parent, n.Template, n.Digest, n.Driver,
		encode(n.Resources), encode(sandbox.Needs{}), 0, n.Operation, nanos(n.CreatedAt), nil, n.Egress, replaces)
	if isConstraint(err) {
		return s.constraint(ctx, tx, n.Project, "snapshot", n.ID)
	}
	if err != nil {
		return err
	}
	return became(ctx, tx, n, sandbox.SnapshotCreating, at)
}

// takenBy is the snapshot that op itself takes, while it does.
func takenBy(ctx context.Context, tx *sql.Tx, op sandbox.Operation) (sandbox.Snapshot, bool, error) {
	if op.Snapshot == "" {
		return sandbox.Snapshot{}, false, nil
	}
	n, err := snapshotByID(ctx, tx, op.Project, op.Snapshot)
	if sandbox.IsClass(err, sandbox.NotFound) {
		return n, false, nil
	}
	return n, err == nil && n.Operation == op.ID && n.State == sandbox.SnapshotCreating, err
}

// failSnapshot ends the snapshot that op was taking, if it was.
func failSnapshot(ctx context.Context, tx *sql.Tx, op sandbox.Operation, at time.Time) error {
	n, own, err := takenBy(ctx, tx, op)
	if err != nil || !own {
		return err
	}
	return setSnapshotState(ctx, tx, n, sandbox.SnapshotFailed, at)
}

// readied makes a snapshot ready, with what the node told of it.
func readied(ctx context.Context, tx *sql.Tx, n sandbox.Snapshot, st sandbox.SnapshotStatus, at time.Time) error {
	if st.TakenAt.IsZero() {
		st.TakenAt = at
	}
	n.SizeBytes, n.Needs = st.SizeBytes, st.Needs
	_, err := tx.ExecContext(ctx, "UPDATE snapshots SET size_bytes = ?, needs = ?, taken_at = ? WHERE id = ?",
		st.SizeBytes, encode(st.Needs), nanos(st.TakenAt), n.ID)
	if err != nil {
		return err
	}
	return setSnapshotState(ctx, tx, n, sandbox.SnapshotReady, at)
}

func setSnapshotState(ctx context.Context, tx *sql.Tx, n sandbox.Snapshot, to sandbox.SnapshotState, at time.Time) error {
	if _, err := tx.ExecContext(ctx, "UPDATE snapshots SET state = ? WHERE id = ?", string(to), n.ID); err != nil {
		return err
	}
	return became(ctx, tx, n, to, at)
}

// snapshotChange is the data of an event of type snapshot.state.
type snapshotChange struct {
	Snapshot  string                  `json:"snapshot"`
	Name      string                  `json:"name,omitempty"`
	Kind      sandbox.SnapshotKind    `json:"kind"`
	Purpose   sandbox.SnapshotPurpose `json:"purpose"`
	From      sandbox.SnapshotState   `json:"from,omitempty"`
	To        sandbox.SnapshotState   `json:"to"`
	SizeBytes int64                   `json:"size_bytes,omitempty"`
}

// snapshotGone stands in the last event of a snapshot; no row has it.
const snapshotGone sandbox.SnapshotState = "deleted"

// became writes the event of a snapshot's change from n's state.
func became(ctx context.Context, tx *sql.Tx, n sandbox.Snapshot, to sandbox.SnapshotState, at time.Time) error {
	return insertEvent(ctx, tx, sandbox.Event{
		Project: n.Project, At: at, Type: "snapshot.state", Sandbox: n.Sandbox, Operation: n.Operation,
		Data: []byte(encode(snapshotChange{
			Snapshot: n.ID, Name: n.Name, Kind: n.Kind, Purpose: n.Purpose, From: n.State, To: to, SizeBytes: n.SizeBytes,
		})),
	})
}

// Snapshot returns one snapshot.
func (s *Store) Snapshot(ctx context.Context, project, id string) (sandbox.Snapshot, error) {
	return snapshotByID(ctx, s.r, project, id)
}

// Snapshots lists snapshots, newest first.
func (s *Store) Snapshots(ctx context.Context, project string, f sandbox.SnapshotFilter, p sandbox.Page) ([]sandbox.Snapshot, string, error) {
	var w where
	w.project(project)
	if f.Sandbox != "" {
		w.and("sandbox = ?", f.Sandbox)
	}
	in(&w, "purpose", f.Purposes)
	in(&w, "state", f.States)
	return listing[sandbox.Snapshot]{
		kind: sandbox.KindSnapshot, query: "SELECT " + snapshotColumns + " FROM snapshots", scan: scanSnapshot,
		pos: func(n sandbox.Snapshot) (time.Time, string) { return n.CreatedAt, n.ID },
	}.page(ctx, s.r, w, p)
}
