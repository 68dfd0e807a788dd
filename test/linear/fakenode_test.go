package linear_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// fakeNode keeps the contract of sandbox.Node in memory, slowly, and fails at
// random in every way that the contract allows.
type fakeNode struct {
	mu       sync.Mutex
	rng      *rand.Rand
	machines map[string]*fakeMachine
	images   map[string]sandbox.SnapshotStatus
	fences   map[string]int64
	changed  []sandbox.MachineStatus
	wake     chan struct{}
	faults   float64 // the share of calls that fail
}

type fakeMachine struct {
	status sandbox.MachineStatus
	paused bool
}

func newFakeNode(rng *rand.Rand, faults float64) *fakeNode {
	return &fakeNode{
		rng: rng, faults: faults, wake: make(chan struct{}),
		machines: map[string]*fakeMachine{}, images: map[string]sandbox.SnapshotStatus{}, fences: map[string]int64{},
	}
}

var _ sandbox.Node = (*fakeNode)(nil)

// draw tells how long a call takes and how it shall fail: "" (it does not),
// "before" it has done anything, or "after" half of it.
func (n *fakeNode) draw() (time.Duration, string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	wait := time.Duration(0)
	if n.rng.IntN(3) > 0 {
		wait = time.Duration(n.rng.IntN(8000)) * time.Microsecond
	}
	if n.rng.Float64() >= n.faults {
		return wait, ""
	}
	return wait, []string{"before", "after"}[n.rng.IntN(2)]
}

// enter takes a call's time and fences it.
func (n *fakeNode) enter(ctx context.Context, id string, generation int64) (fault string, err error) {
	wait, fault := n.draw()
	if err := n.fence(id, generation); err != nil {
		return "", err
	}
	select {
	case <-time.After(wait):
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
	return fault, n.fence(id, generation)
}

func (n *fakeNode) fence(id string, generation int64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if generation < n.fences[id] {
		return sandbox.Errorf(sandbox.Conflict, "stale_generation", "a newer generation was seen")
	}
	n.fences[id] = generation
	return nil
}

func (n *fakeNode) fault() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.rng.IntN(4) == 0 {
		return sandbox.Errorf(sandbox.Unavailable, "fake_busy", "the fake is busy")
	}
	return sandbox.Errorf(sandbox.Internal, "fake_fault", "the fake failed")
}

// alive is the machine of a sandbox; call it with the lock held.
func (n *fakeNode) alive(id string) (*fakeMachine, error) {
	m := n.machines[id]
	if m == nil || m.status.End != nil {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "no_machine", "the sandbox has no machine")
	}
	return m, nil
}

func (n *fakeNode) CreateMachine(ctx context.Context, req sandbox.MachineRequest) (sandbox.MachineStatus, error) {
	fault, err := n.enter(ctx, req.Sandbox, req.Generation)
	if err != nil {
		return sandbox.MachineStatus{}, err
	}
	n.mu.Lock()
	if m := n.machines[req.Sandbox]; m != nil && m.status.End == nil {
		if m.status.Generation == req.Generation {
			defer n.mu.Unlock()
			return m.status, nil
		}
		if fault != "before" { // what it replaces goes first
			delete(n.machines, req.Sandbox)
		}
	}
	if req.Source != nil {
		if img, ok := n.images[req.Source.Snapshot]; !ok || img.Kind != req.Source.Kind {
			n.mu.Unlock()
			return sandbox.MachineStatus{}, sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_missing", "no such image")
		}
	}
	if fault != "" {
		n.mu.Unlock()
		return sandbox.MachineStatus{}, n.fault()
	}
	defer n.mu.Unlock()
	m := &fakeMachine{status: sandbox.MachineStatus{Sandbox: req.Sandbox, Generation: req.Generation, Driver: "fake", Ready: true}}
	n.machines[req.Sandbox] = m
	return m.status, nil
}

func (n *fakeNode) DeleteMachine(ctx context.Context, id string, generation int64) error {
	fault, err := n.enter(ctx, id, generation)
	if err != nil {
		return err
	}
	if fault == "before" {
		return n.fault()
	}
	n.mu.Lock()
	delete(n.machines, id)
	n.mu.Unlock()
	if fault != "" {
		return n.fault()
	}
	return nil
}

func (n *fakeNode) hold(ctx context.Context, id string, generation int64, paused bool) error {
	fault, err := n.enter(ctx, id, generation)
	if err != nil {
		return err
	}
	if fault == "before" {
		return n.fault()
	}
	n.mu.Lock()
	m, err := n.alive(id)
	if err == nil {
		m.paused = paused
	}
	n.mu.Unlock()
	if fault != "" && err == nil {
		return n.fault()
	}
	return err
}

func (n *fakeNode) PauseMachine(ctx context.Context, id string, generation int64) error {
	return n.hold(ctx, id, generation, true)
}

func (n *fakeNode) ResumeMachine(ctx context.Context, id string, generation int64) error {
	return n.hold(ctx, id, generation, false)
}

func (n *fakeNode) ReleaseMachine(ctx context.Context, id string, generation int64, _ sandbox.End) error {
	fault, err := n.enter(ctx, id, generation)
	if err != nil {
		return err
	}
	if fault == "before" {
		return n.fault()
	}
	n.mu.Lock()
	delete(n.machines, id)
	n.mu.Unlock()
	if fault != "" {
		return n.fault()
	}
	return nil
}

func (n *fakeNode) SnapshotMachine(ctx context.Context, req sandbox.SnapshotRequest) (sandbox.SnapshotStatus, error) {
	n.mu.Lock()
	if img, ok := n.images[req.Snapshot]; ok {
		n.mu.Unlock()
		return img, nil
	}
	n.mu.Unlock()
	fault, err := n.enter(ctx, req.Sandbox, req.Generation)
	if err != nil {
		return sandbox.SnapshotStatus{}, err
	}
	if fault != "" {
		return sandbox.SnapshotStatus{}, n.fault()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	m, err := n.alive(req.Sandbox)
	if err != nil {
		return sandbox.SnapshotStatus{}, err
	}
	m.paused = m.paused || req.Hold
	img := sandbox.SnapshotStatus{Snapshot: req.Snapshot, Sandbox: req.Sandbox, Kind: req.Kind, SizeBytes: 1, TakenAt: time.Now()}
	n.images[req.Snapshot] = img
	return img, nil
}

func (n *fakeNode) CheckpointMachine(ctx context.Context, req sandbox.SnapshotRequest) (sandbox.SnapshotStatus, error) {
	return n.SnapshotMachine(ctx, req)
}

func (n *fakeNode) DeleteSnapshot(_ context.Context, id string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.images, id)
	return nil
}

func (n *fakeNode) ListSnapshots(context.Context) ([]string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var ids []string
	for id := range n.images {
		ids = append(ids, id)
	}
	return ids, nil
}

func (n *fakeNode) SetEgress(context.Context, sandbox.EgressAssignment) error { return nil }

func (n *fakeNode) Queue(context.Context) (int, int, error) { return 0, 0, nil }

func (n *fakeNode) Capacity(context.Context) (sandbox.Capacity, error) {
	return sandbox.Capacity{}, nil
}

func (n *fakeNode) Observe(ctx context.Context, cursor int64) (sandbox.NodeChanges, error) {
	for {
		n.mu.Lock()
		wake := n.wake
		out := sandbox.NodeChanges{Cursor: int64(len(n.changed)) + 1}
		if cursor == 0 {
			for _, m := range n.machines {
				out.Machines = append(out.Machines, m.status)
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

// Crash ends a machine by itself, if there is one.
func (n *fakeNode) Crash(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	m, err := n.alive(id)
	if err != nil {
		return
	}
	m.status.Ready, m.status.End = false, &sandbox.End{Reason: sandbox.EndKilled, At: time.Now()}
	n.changed = append(n.changed, m.status)
	close(n.wake)
	n.wake = make(chan struct{})
}

// Stop implements below.
func (n *fakeNode) Stop() {}

// is tells what there is of a sandbox: "running", "paused" or "".
func (n *fakeNode) is(id string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch m, err := n.alive(id); {
	case err != nil:
		return ""
	case m.paused:
		return "paused"
	}
	return "running"
}
