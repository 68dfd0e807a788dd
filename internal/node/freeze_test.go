package node

import (
	"slices"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// TestWhatRunsIsFrozenForItsImage looks at what a machine's processes did when
// each kind of image was taken, and that they go on after it.
func TestWhatRunsIsFrozenForItsImage(t *testing.T) {
	r := newRig(t)
	r.d.kernel = true
	req := request(1)
	r.create(req)
	m := r.d.machine(req.Sandbox)
	seen := func(want ...bool) {
		t.Helper()
		m.mu.Lock()
		saw := slices.Clone(m.saw)
		m.mu.Unlock()
		if !slices.Equal(saw, want) {
			t.Errorf("its snapshots saw it frozen: %v, not %v", saw, want)
		}
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			m.mu.Lock()
			frozen := m.frozen
			m.mu.Unlock()
			if !frozen {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("what was frozen does not go on")
			}
		}
	}
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotMemory))
	seen(true)
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotDisk))
	seen(true, false)
	r.d.fails["snapshot"] = sandbox.Errorf(sandbox.Internal, "failed", "it fails")
	if _, err := r.n.SnapshotMachine(background, snap(req.Sandbox, 1, sandbox.SnapshotMemory)); code(err) != "failed" {
		t.Errorf("error %v", err)
	}
	seen(true, false)
	r.must(r.n.PauseMachine(background, req.Sandbox, 1))
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotMemory))
	r.must(r.n.ResumeMachine(background, req.Sandbox, 1))
	seen(true, false, true)
	r.must(r.n.PauseMachine(background, req.Sandbox, 1))
	r.must(r.n.ResumeMachine(background, req.Sandbox, 1))
	seen(true, false, true)
	// Where the kernel is an engine's there is no need.
	r.d.kernel = false
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotMemory))
	seen(true, false, true, false)
}

// TestAnOldAgentIsSnapshottedAsItRuns has one that was never told of Freeze.
func TestAnOldAgentIsSnapshottedAsItRuns(t *testing.T) {
	r := newRig(t)
	r.d.kernel, r.d.old = true, true
	req := request(1)
	r.create(req)
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotMemory))
	if saw := r.d.machine(req.Sandbox).saw; !slices.Equal(saw, []bool{false}) {
		t.Errorf("frozen: %v", saw)
	}
}
