package control

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// SnapshotRequest asks for a named snapshot.
type SnapshotRequest struct {
	Name string               `json:"name,omitempty"`
	Kind sandbox.SnapshotKind `json:"kind,omitempty"` // "" is memory
	// Wait is how long a memory snapshot waits for tunnels and transfers to end
	// before it cuts them.
	Wait time.Duration `json:"wait,omitempty"`
}

// TakeSnapshot asks for a snapshot of a sandbox, which goes on at once.
func (c *Control) TakeSnapshot(ctx context.Context, who sandbox.Caller, id string, req SnapshotRequest, idem sandbox.Idempotency) (snap sandbox.Snapshot, op sandbox.Operation, replayed bool, err error) {
	if err := c.allowed(who, sandbox.ActChange, sandbox.KindSandbox, "sandbox", id); err != nil {
		return snap, op, false, err
	}
	if err := validateSnapshot(&req); err != nil {
		return snap, op, false, err
	}
	if idem, err = stamp(idem, []any{sandbox.VerbSnapshot, id, req}); err != nil {
		return snap, op, false, err
	}
	row := c.newSnapshot(req.Kind, sandbox.PurposeNamed)
	row.Name = req.Name
	_, op, replayed, err = c.begin(ctx, who, id, sandbox.VerbSnapshot, sandbox.Begin{Snapshot: row}, input{Wait: req.Wait}, idem)
	if err != nil {
		return snap, op, false, err
	}
	snap, err = c.store.Snapshot(ctx, op.Project, op.Snapshot)
	return snap, op, replayed, err
}

func validateSnapshot(req *SnapshotRequest) error {
	switch req.Kind {
	case "":
		req.Kind = sandbox.SnapshotMemory
	case sandbox.SnapshotMemory, sandbox.SnapshotDisk:
	default:
		return invalid("bad_kind", "there is no kind of snapshot %s", quote(string(req.Kind))).WithHint("memory or disk")
	}
	if len(req.Name) > MaxName || !printable(req.Name) {
		return invalid("bad_name", "a snapshot's name is at most %d bytes of printable text", MaxName)
	}
	return validateSnapshotWait(req.Wait)
}

func validateSnapshotWait(wait time.Duration) error {
	if wait < 0 || wait > MaxSnapshotWait {
		return invalid("bad_wait", "a snapshot may wait between 0 and %s for connections to end, not %s", MaxSnapshotWait, wait)
	}
	return nil
}

// Snapshot returns a snapshot.
func (c *Control) Snapshot(ctx context.Context, who sandbox.Caller, id string) (sandbox.Snapshot, error) {
	if err := c.allowed(who, sandbox.ActSee, sandbox.KindSnapshot, "snapshot", id); err != nil {
		return sandbox.Snapshot{}, err
	}
	return c.store.Snapshot(ctx, who.Scope(), id)
}

// Snapshots lists snapshots, newest first: the named ones and, where the
// filter names a sandbox, all of its. Those that failed or are being deleted
// are listed only where the filter names their state.
func (c *Control) Snapshots(ctx context.Context, who sandbox.Caller, f sandbox.SnapshotFilter, p sandbox.Page) ([]sandbox.Snapshot, string, error) {
	if err := who.Can(sandbox.ActSee); err != nil {
		return nil, "", err
	}
	if f.Sandbox != "" && !sandbox.ValidID(sandbox.KindSandbox, f.Sandbox) {
		return nil, "", invalid("bad_id", "%s is no id of a sandbox", quote(f.Sandbox))
	}
	for _, s := range f.States {
		switch s {
		case sandbox.SnapshotCreating, sandbox.SnapshotReady, sandbox.SnapshotFailed, sandbox.SnapshotDeleting:
		default:
			return nil, "", invalid("bad_state", "there is no snapshot state %s", quote(string(s)))
		}
	}
	for _, p := range f.Purposes {
		switch p {
		case sandbox.PurposeNamed, sandbox.PurposeSuspend, sandbox.PurposeStop, sandbox.PurposeFork, sandbox.PurposeCheckpoint:
		default:
			return nil, "", invalid("bad_purpose", "there is no snapshot purpose %s", quote(string(p)))
		}
	}
	if f.Sandbox == "" && len(f.Purposes) == 0 {
		f.Purposes = []sandbox.SnapshotPurpose{sandbox.PurposeNamed}
	}
	if len(f.States) == 0 {
		f.States = []sandbox.SnapshotState{sandbox.SnapshotCreating, sandbox.SnapshotReady}
	}
	return c.store.Snapshots(ctx, who.Scope(), f, p)
}

// DeleteSnapshot deletes a named snapshot; its files go soon after.
func (c *Control) DeleteSnapshot(ctx context.Context, who sandbox.Caller, id string) (sandbox.Snapshot, error) {
	if err := c.allowed(who, sandbox.ActChange, sandbox.KindSnapshot, "snapshot", id); err != nil {
		return sandbox.Snapshot{}, err
	}
	snap, err := c.store.DeleteSnapshot(ctx, who.Scope(), id)
	if err != nil {
		return snap, err
	}
	c.bell.ring("")
	c.reap.kick()
	return snap, nil
}
