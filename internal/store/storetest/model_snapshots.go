package storetest

import (
	"context"
	"fmt"

	"pgregory.net/rapid"

	"cloche.dev/cloche/internal/sandbox"
)

// checkpoint begins an automatic snapshot.
func (m *machine) checkpoint(r *rapid.T) {
	id := m.pick(r)
	want := m.rows[id]
	n := sandbox.Snapshot{ID: sandbox.NewID(sandbox.KindSnapshot), Kind: sandbox.SnapshotDisk, CreatedAt: m.tick()}
	generation := want.generation - int64(rapid.IntRange(0, 1).Draw(r, "old"))
	err := m.s.BeginCheckpoint(m.ctx, id, generation, n)
	if want.state != sandbox.StateRunning && want.state != sandbox.StateFailed || generation != want.generation {
		if !sandbox.IsClass(err, sandbox.Conflict) {
			r.Fatalf("a checkpoint of one that is %s: %v", want.state, err)
		}
		return
	}
	if err != nil {
		r.Fatal(err)
	}
	m.snaps[n.ID] = &snap{
		sandbox: id, parent: want.base, state: sandbox.SnapshotCreating, kind: n.Kind, purpose: sandbox.PurposeCheckpoint,
		replaces: want.image, epoch: want.epoch,
	}
	m.names = append(m.names, n.ID)
}

// checkpointed ends one that is under way.
func (m *machine) checkpointed(r *rapid.T) {
	var open []string
	for _, id := range m.names {
		if n := m.snaps[id]; n != nil && n.purpose == sandbox.PurposeCheckpoint && n.state == sandbox.SnapshotCreating {
			open = append(open, id)
		}
	}
	id := sample(r, open, "checkpoint")
	n := m.snaps[id]
	m.at = n.sandbox
	want := m.rows[n.sandbox]
	var failure *sandbox.Error
	status := taken(id, m.tick())
	if rapid.IntRange(0, 3).Draw(r, "fails") == 0 {
		status, failure = nil, sandbox.Errorf(sandbox.Unavailable, "x", "x")
	}
	if err := m.s.FinishCheckpoint(m.ctx, id, n.epoch, status, failure); err != nil {
		r.Fatal(err)
	}
	late := want.state == sandbox.StateStarting || want.state == sandbox.StateDeleting || want.state == sandbox.StateDeleted
	n.state = sandbox.SnapshotFailed
	if failure == nil && want.epoch == n.epoch && want.image == n.replaces && !late {
		n.state, want.image = sandbox.SnapshotReady, id
	}
}

// needed tells whether a snapshot may not go.
func (m *machine) needed(id string) bool {
	for _, want := range m.rows {
		if want.image == id || want.wants == id || want.source == id && want.state == sandbox.StateCreating {
			return true
		}
	}
	return false
}

// doom takes a snapshot out of the tree.
func (m *machine) doom(id string) {
	parent := m.snaps[id].parent
	m.snaps[id].state = sandbox.SnapshotDeleting
	for _, n := range m.snaps {
		if n.parent == id {
			n.parent = parent
		}
	}
	for _, want := range m.rows {
		if want.base == id {
			want.base = parent
		}
	}
}

// drop deletes a snapshot.
func (m *machine) drop(r *rapid.T) {
	id := sample(r, m.names, "snapshot")
	n := m.snaps[id]
	_, err := m.s.DeleteSnapshot(m.ctx, m.project, id)
	code := ""
	switch {
	case n == nil:
		code = "snapshot_not_found"
	case n.purpose != sandbox.PurposeNamed:
		code = "snapshot_not_named"
	case n.state == sandbox.SnapshotDeleting:
	case m.needed(id):
		code = "snapshot_in_use"
	default:
		m.doom(id)
	}
	if e := sandbox.AsError(err); code == "" != (e == nil) || e != nil && e.Code != code {
		r.Fatalf("deleting %+v: %v, want %q", n, err, code)
	}
}

// collect takes the garbage out.
func (m *machine) collect(r *rapid.T) {
	for _, id := range m.names {
		n := m.snaps[id]
		if n != nil && (n.state == sandbox.SnapshotFailed || n.state == sandbox.SnapshotReady && n.purpose != sandbox.PurposeNamed && !m.needed(id)) {
			m.doom(id)
		}
	}
	list, err := m.s.GarbageSnapshots(m.ctx, 1_000_000)
	if err != nil {
		r.Fatal(err)
	}
	m.checkSnaps(r)
	for _, n := range list {
		if err := m.s.RemoveSnapshot(m.ctx, n.ID); err != nil {
			r.Fatal(err)
		}
		delete(m.snaps, n.ID)
	}
}

func (m *machine) check(r *rapid.T, ids ...string) {
	for _, id := range ids {
		want := m.rows[id]
		if want == nil {
			continue // nothing has happened yet
		}
		got, err := m.s.Sandbox(m.ctx, m.project, id)
		if err != nil || got.State != want.state || got.Generation != want.generation || got.Operation != want.operation ||
			got.Epoch != want.epoch || got.Image != want.image || got.Base != want.base {
			r.Fatalf("row %+v, %v; model %+v", got, err, want)
		}
	}
}

func (m *machine) checkSnaps(r *rapid.T) {
	n := 0
	for page := (sandbox.Page{Limit: 500}); ; {
		list, next, err := m.s.Snapshots(m.ctx, m.project, sandbox.SnapshotFilter{}, page)
		if err != nil {
			r.Fatal(err)
		}
		for _, got := range list {
			want := m.snaps[got.ID]
			if want == nil || got.State != want.state || got.Parent != want.parent || got.Sandbox != want.sandbox || got.Purpose != want.purpose {
				r.Fatalf("snapshot %+v, model %+v", got, want)
			}
			n++
		}
		if next == "" {
			break
		}
		page.Token = next
	}
	if n != len(m.snaps) {
		r.Fatalf("%d snapshots, the model has %d", n, len(m.snaps))
	}
}

// CheckInvariants tells what in a store contradicts itself.
func CheckInvariants(ctx context.Context, s sandbox.Store) error {
	open := map[string]sandbox.Operation{}
	ops, err := s.Unfinished(ctx)
	if err != nil {
		return err
	}
	for _, op := range ops {
		open[op.ID] = op
	}
	busy := 0
	err = each(func(p sandbox.Page) ([]sandbox.Sandbox, string, error) {
		return s.Sandboxes(ctx, "", sandbox.SandboxFilter{}, p)
	}, func(sb sandbox.Sandbox) error {
		if err := checkImage(ctx, s, sb); err != nil {
			return err
		}
		if sb.State.Transitional() != (sb.Operation != "") {
			return fmt.Errorf("%s is %s with the operation %q", sb.ID, sb.State, sb.Operation)
		}
		if sb.Operation == "" {
			return nil
		}
		busy++
		op, ok := open[sb.Operation]
		if !ok || op.Sandbox != sb.ID || op.Generation != sb.Generation {
			return fmt.Errorf("%s has generation %d and the operation %+v", sb.ID, sb.Generation, op)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if busy != len(open) {
		return fmt.Errorf("%d operations are open and %d sandboxes have one", len(open), busy)
	}
	return each(func(p sandbox.Page) ([]sandbox.Snapshot, string, error) {
		return s.Snapshots(ctx, "", sandbox.SnapshotFilter{}, p)
	}, func(n sandbox.Snapshot) error {
		if n.State != sandbox.SnapshotCreating || n.Purpose == sandbox.PurposeCheckpoint {
			return nil
		}
		if op, ok := open[n.Operation]; !ok || op.Snapshot != n.ID {
			return fmt.Errorf("the snapshot %s is being taken by %q, which is not under way", n.ID, n.Operation)
		}
		return nil
	})
}

// checkImage: what a sandbox would come back from is there and ready.
func checkImage(ctx context.Context, s sandbox.Store, sb sandbox.Sandbox) error {
	needs := sb.State == sandbox.StateSuspended || sb.State == sandbox.StateStopped
	switch {
	case sb.Image == "" && needs, sb.Image != "" && (sb.State == sandbox.StateDeleted || sb.ImageAt == nil):
		return fmt.Errorf("%s is %s with the image %q of %v", sb.ID, sb.State, sb.Image, sb.ImageAt)
	case sb.Image == "":
		return nil
	}
	n, err := s.Snapshot(ctx, sb.Project, sb.Image)
	if err != nil || n.State != sandbox.SnapshotReady {
		return fmt.Errorf("the image of %s is %+v, %w", sb.ID, n, err)
	}
	return nil
}

// each calls f with every row of a list.
func each[T any](list func(sandbox.Page) ([]T, string, error), f func(T) error) error {
	for page := (sandbox.Page{Limit: 500}); ; {
		rows, next, err := list(page)
		if err != nil {
			return err
		}
		for _, v := range rows {
			if err := f(v); err != nil {
				return err
			}
		}
		if next == "" {
			return nil
		}
		page.Token = next
	}
}
