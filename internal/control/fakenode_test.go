package control_test

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// fakeNode carries machines and snapshots in memory, and keeps the promises
// that sandbox.Node makes. Tests make it fail, wait, lie and lose answers.
type fakeNode struct {
	mu       sync.Mutex
	machines map[string]sandbox.MachineStatus
	paused   map[string]bool
	snaps    map[string]sandbox.SnapshotStatus
	fences   map[string]int64
	cursor   int64
	changed  []sandbox.MachineStatus
	wake     chan struct{}
	waiting  int // what Queue answers
	creates  []sandbox.MachineRequest
	deletes  []string
	taken    []sandbox.SnapshotRequest // that there was no snapshot for yet
	released map[string]sandbox.End
	host     sandbox.Capacity
	stood    time.Duration // by a checkpoint
	same     bool          // checkpoints answer Unchanged
	keeps    bool          // machines leave their disks behind: durability crash
	sessions []sandbox.Session
	egress   map[string]sandbox.EgressAssignment
	assigned int // how often

	// What to do instead of the ordinary; may be nil.
	create func(ctx context.Context, req sandbox.MachineRequest) (sandbox.MachineStatus, error)
	delete func(ctx context.Context, id string) error
	// before is asked ahead of every call that names a sandbox or a snapshot.
	before func(ctx context.Context, call, id string) error
	// lost calls are carried out, but their answers never come.
	lost map[string]bool
}

func newNode() *fakeNode {
	return &fakeNode{
		machines: map[string]sandbox.MachineStatus{}, paused: map[string]bool{}, snaps: map[string]sandbox.SnapshotStatus{},
		fences: map[string]int64{}, released: map[string]sandbox.End{}, lost: map[string]bool{}, wake: make(chan struct{}),
		egress: map[string]sandbox.EgressAssignment{},
	}
}

var errNoMachine = sandbox.Errorf(sandbox.FailedPrecondition, "no_machine", "there is no machine")

// do fences a call, carries it out under the lock, and loses its answer where
// a test wants that.
func (n *fakeNode) do(ctx context.Context, call, id string, generation int64, f func() error) error {
	n.mu.Lock()
	before := n.before
	n.mu.Unlock()
	if before != nil {
		if err := before(ctx, call, id); err != nil {
			return err
		}
	}
	n.mu.Lock()
	if generation < n.fences[id] {
		n.mu.Unlock()
		return sandbox.Errorf(sandbox.Conflict, "stale_generation", "a newer operation on this sandbox has begun")
	}
	if generation > 0 {
		n.fences[id] = generation
	}
	err := f()
	lost := n.lost[call]
	n.mu.Unlock()
	if lost {
		<-ctx.Done()
		return ctx.Err()
	}
	return err
}

func (n *fakeNode) CreateMachine(ctx context.Context, req sandbox.MachineRequest) (st sandbox.MachineStatus, err error) {
	n.mu.Lock()
	n.creates = append(n.creates, req)
	hook := n.create
	n.mu.Unlock()
	if hook != nil {
		if st, err := hook(ctx, req); err != nil || st.Sandbox != "" {
			return st, err
		}
	}
	err = n.do(ctx, "create", req.Sandbox, req.Generation, func() error {
		if m, ok := n.machines[req.Sandbox]; ok && m.Generation == req.Generation {
			st = m
			return nil
		}
		if m, ok := n.machines[req.Sandbox]; ok && m.End == nil && (req.Source == nil || !req.Source.Replace) {
			return sandbox.Errorf(sandbox.Internal, "machine_there", "the sandbox has a machine already")
		}
		if req.Source != nil {
			snap, ok := n.snaps[req.Source.Snapshot]
			if !ok || snap.Kind != req.Source.Kind {
				return sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_missing", "there is no such snapshot here")
			}
		}
		st = sandbox.MachineStatus{
			Sandbox: req.Sandbox, Generation: req.Generation, Driver: "fake", Durability: sandbox.DurabilitySnapshot,
			Ready: true, Sessions: slices.Clone(n.sessions),
		}
		if n.keeps {
			st.Durability = sandbox.DurabilityCrash
		}
		kept := st
		kept.Sessions = nil
		n.machines[req.Sandbox] = kept
		delete(n.paused, req.Sandbox)
		return nil
	})
	return st, err
}

func (n *fakeNode) DeleteMachine(ctx context.Context, id string, generation int64) error {
	n.mu.Lock()
	n.deletes = append(n.deletes, id)
	hook := n.delete
	n.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, id); err != nil {
			return err
		}
	}
	return n.do(ctx, "delete", id, generation, func() error {
		delete(n.machines, id)
		delete(n.paused, id)
		return nil
	})
}

// living is called under the lock.
func (n *fakeNode) living(id string) bool {
	m, ok := n.machines[id]
	return ok && m.End == nil
}

func (n *fakeNode) PauseMachine(ctx context.Context, id string, generation int64) error {
	return n.do(ctx, "pause", id, generation, func() error {
		if !n.living(id) {
			return errNoMachine
		}
		n.paused[id] = true
		return nil
	})
}

func (n *fakeNode) ResumeMachine(ctx context.Context, id string, generation int64) error {
	return n.do(ctx, "resume", id, generation, func() error {
		if !n.living(id) {
			return errNoMachine
		}
		delete(n.paused, id)
		return nil
	})
}

func (n *fakeNode) ReleaseMachine(ctx context.Context, id string, generation int64, end sandbox.End) error {
	return n.do(ctx, "release", id, generation, func() error {
		if n.living(id) {
			n.released[id] = end
		}
		delete(n.machines, id)
		delete(n.paused, id)
		return nil
	})
}

func (n *fakeNode) SnapshotMachine(ctx context.Context, req sandbox.SnapshotRequest) (st sandbox.SnapshotStatus, err error) {
	err = n.do(ctx, "snapshot", req.Sandbox, req.Generation, func() error {
		if st = n.snaps[req.Snapshot]; st.Snapshot != "" {
			return nil
		}
		if !n.living(req.Sandbox) {
			return errNoMachine
		}
		st = sandbox.SnapshotStatus{
			Snapshot: req.Snapshot, Sandbox: req.Sandbox, Kind: req.Kind, SizeBytes: 1 << 20,
			Needs: sandbox.Needs{Format: 1, Driver: "fake"}, TakenAt: time.Now().UTC(), Stood: time.Millisecond,
		}
		n.snaps[req.Snapshot] = st
		n.taken = append(n.taken, req)
		if req.Hold {
			n.paused[req.Sandbox] = true
		}
		return nil
	})
	return st, err
}

func (n *fakeNode) CheckpointMachine(ctx context.Context, req sandbox.SnapshotRequest) (st sandbox.SnapshotStatus, err error) {
	err = n.do(ctx, "checkpoint", req.Sandbox, req.Generation, func() error {
		m := n.machines[req.Sandbox]
		if m.End != nil && m.Durability == sandbox.DurabilityCrash {
			st = sandbox.SnapshotStatus{
				Snapshot: req.Snapshot, Sandbox: req.Sandbox, Kind: sandbox.SnapshotDisk, SizeBytes: 1 << 20,
				Needs: sandbox.Needs{Format: 1, Driver: "fake"}, TakenAt: m.End.At,
			}
			n.snaps[req.Snapshot] = st
			n.taken = append(n.taken, req)
			return nil
		}
		if !n.living(req.Sandbox) {
			return errNoMachine
		}
		if n.same {
			st = sandbox.SnapshotStatus{Snapshot: req.Snapshot, Sandbox: req.Sandbox, Unchanged: true}
			return nil
		}
		st = sandbox.SnapshotStatus{
			Snapshot: req.Snapshot, Sandbox: req.Sandbox, Kind: sandbox.SnapshotDisk, SizeBytes: 1 << 20,
			Needs: sandbox.Needs{Format: 1, Driver: "fake"}, TakenAt: time.Now().UTC(), Stood: n.stood,
		}
		n.snaps[req.Snapshot] = st
		n.taken = append(n.taken, req)
		return nil
	})
	return st, err
}

func (n *fakeNode) DeleteSnapshot(ctx context.Context, id string) error {
	return n.do(ctx, "delete snapshot", id, 0, func() error {
		delete(n.snaps, id)
		return nil
	})
}

func (n *fakeNode) ListSnapshots(context.Context) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Sorted(maps.Keys(n.snaps)), nil
}

// SetEgress is not fenced by a generation, but by the assignment's revision.
func (n *fakeNode) SetEgress(ctx context.Context, a sandbox.EgressAssignment) error {
	n.mu.Lock()
	before := n.before
	n.mu.Unlock()
	if before != nil {
		if err := before(ctx, "egress", a.Sandbox); err != nil {
			return err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.assigned++
	if a.Revision >= n.egress[a.Sandbox].Revision {
		n.egress[a.Sandbox] = a
	}
	return nil
}

func (n *fakeNode) Capacity(ctx context.Context) (host sandbox.Capacity, err error) {
	err = n.do(ctx, "capacity", "", 0, func() error { host = n.host; return nil })
	return host, err
}

func (n *fakeNode) Observe(ctx context.Context, cursor int64) (sandbox.NodeChanges, error) {
	for {
		n.mu.Lock()
		out := sandbox.NodeChanges{Cursor: n.cursor + 1}
		wake := n.wake
		if cursor == 0 {
			for _, m := range n.machines {
				out.Machines = append(out.Machines, m)
			}
			n.mu.Unlock()
			return out, nil
		}
		out.Machines = append(out.Machines, n.changed[cursor-1:]...)
		n.mu.Unlock()
		if len(out.Machines) > 0 {
			return out, nil
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return sandbox.NodeChanges{Cursor: cursor}, nil
		}
	}
}

func (n *fakeNode) Queue(context.Context) (int, int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return 4, n.waiting, nil
}

// end ends a machine and tells it.
func (n *fakeNode) end(id string, reason sandbox.EndReason) {
	n.mu.Lock()
	defer n.mu.Unlock()
	st := n.machines[id]
	st.Ready, st.End = false, &sandbox.End{Reason: reason, At: time.Now().UTC()}
	n.machines[id] = st
	delete(n.paused, id)
	n.changed = append(n.changed, st)
	n.cursor++
	close(n.wake)
	n.wake = make(chan struct{})
}

func (n *fakeNode) has(id string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ok := n.machines[id]
	return ok
}

// is tells what the node has for a sandbox.
func (n *fakeNode) is(id string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case !n.living(id):
		return "none"
	case n.paused[id]:
		return "paused"
	}
	return "running"
}

func (n *fakeNode) created() []sandbox.MachineRequest {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.creates)
}

func (n *fakeNode) last() sandbox.MachineRequest {
	all := n.created()
	return all[len(all)-1]
}

func (n *fakeNode) snapshots() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Sorted(maps.Keys(n.snaps))
}

func (n *fakeNode) asked() []sandbox.SnapshotRequest {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.taken)
}

func (n *fakeNode) set(f func(*fakeNode)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(n)
}

// fails makes a call fail until err is nil.
func (n *fakeNode) fails(call string, err error) {
	n.set(func(n *fakeNode) {
		n.before = func(_ context.Context, c, _ string) error {
			if c == call {
				return err
			}
			return nil
		}
	})
}

// blocks makes a call wait for the end of its context, before it does anything.
func (n *fakeNode) blocks(call string) {
	n.set(func(n *fakeNode) {
		n.before = func(ctx context.Context, c, _ string) error {
			if c != call {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}
	})
}

// heals takes back what fails, blocks and loses.
func (n *fakeNode) heals() {
	n.set(func(n *fakeNode) { n.before, n.create, n.delete, n.lost = nil, nil, nil, map[string]bool{} })
}
