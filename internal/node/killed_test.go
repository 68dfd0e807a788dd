package node

import (
	"slices"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// killedCase is a verb as control carries it out: do is run again after a kill.
type killedCase struct {
	before func(r *rig, req sandbox.MachineRequest) string // returns a snapshot
	do     func(n *Node, req sandbox.MachineRequest, snapshot string) error
	after  func(r *rig, req sandbox.MachineRequest, snapshot string)
}

func create(n *Node, q sandbox.MachineRequest) error {
	_, err := n.CreateMachine(background, q)
	return err
}

// leave takes a snapshot and lets the machine go.
func leave(n *Node, id, snapshot string, kind sandbox.SnapshotKind, reason sandbox.EndReason) error {
	_, err := n.SnapshotMachine(background, sandbox.SnapshotRequest{Sandbox: id, Generation: 3, Snapshot: snapshot, Kind: kind, Hold: true})
	if err != nil {
		return err
	}
	return n.ReleaseMachine(background, id, 3, ended(reason))
}

func killedCases() map[string]killedCase {
	made := func(r *rig, req sandbox.MachineRequest) string {
		r.create(req)
		r.h.start(req.Sandbox)
		r.write(req.Sandbox, "/a")
		return sandbox.NewID(sandbox.KindSnapshot)
	}
	away := func(kind sandbox.SnapshotKind, reason sandbox.EndReason) func(r *rig, req sandbox.MachineRequest) string {
		return func(r *rig, req sandbox.MachineRequest) string {
			snapshot := made(r, req)
			r.must(leave(r.n, req.Sandbox, snapshot, kind, reason))
			return snapshot
		}
	}
	holds := func(disk ...string) func(r *rig, req sandbox.MachineRequest, snapshot string) {
		return func(r *rig, req sandbox.MachineRequest, _ string) {
			r.t.Helper()
			r.write(req.Sandbox, "/z")
			if got := r.d.machine(req.Sandbox).look().Disk; !slices.Equal(got, append(slices.Clone(disk), "/z")) {
				r.t.Errorf("the machine holds %v", got)
			}
		}
	}
	gone := func(sessions int) func(r *rig, req sandbox.MachineRequest, snapshot string) {
		return func(r *rig, req sandbox.MachineRequest, snapshot string) {
			r.t.Helper()
			r.nothingOf(req.Sandbox)
			if files := r.files(); !slices.Equal(files, []string{snapshot}) {
				r.t.Errorf("files %v", files)
			}
			if got := r.h.Active(req.Sandbox); got != sessions {
				r.t.Errorf("%d sessions wait", got)
			}
		}
	}
	return map[string]killedCase{
		"create": {func(*rig, sandbox.MachineRequest) string { return "" }, func(n *Node, req sandbox.MachineRequest, _ string) error { return create(n, req) }, holds()},
		"pause": {
			made, func(n *Node, req sandbox.MachineRequest, _ string) error {
				return n.PauseMachine(background, req.Sandbox, 2)
			},
			func(r *rig, req sandbox.MachineRequest, _ string) {
				if !r.d.machine(req.Sandbox).isPaused() {
					r.t.Error("it is not paused")
				}
			},
		},
		"resume": {func(r *rig, req sandbox.MachineRequest) string {
			made(r, req)
			r.must(r.n.PauseMachine(background, req.Sandbox, 2))
			return ""
		}, func(n *Node, req sandbox.MachineRequest, _ string) error {
			return n.ResumeMachine(background, req.Sandbox, 3)
		}, holds("/a")},
		"snapshot": {made, func(n *Node, req sandbox.MachineRequest, s string) error {
			_, err := n.SnapshotMachine(background, sandbox.SnapshotRequest{Sandbox: req.Sandbox, Generation: 2, Snapshot: s, Kind: sandbox.SnapshotMemory})
			return err
		}, func(r *rig, req sandbox.MachineRequest, s string) {
			holds("/a")(r, req, s)
			if files := r.files(); !slices.Equal(files, []string{s}) {
				r.t.Errorf("files %v", files)
			}
		}},
		"suspend": {made, func(n *Node, req sandbox.MachineRequest, s string) error {
			return leave(n, req.Sandbox, s, sandbox.SnapshotMemory, sandbox.EndSuspended)
		}, gone(1)},
		"stop": {made, func(n *Node, req sandbox.MachineRequest, s string) error {
			return leave(n, req.Sandbox, s, sandbox.SnapshotDisk, sandbox.EndStopped)
		}, gone(0)},
		"restore": {away(sandbox.SnapshotMemory, sandbox.EndSuspended), func(n *Node, req sandbox.MachineRequest, s string) error {
			return create(n, from(req, 4, s, sandbox.SnapshotMemory, true))
		}, func(r *rig, req sandbox.MachineRequest, s string) {
			holds("/a")(r, req, s)
			if r.h.Active(req.Sandbox) != 1 {
				r.t.Error("its session does not go on")
			}
		}},
		"start": {away(sandbox.SnapshotDisk, sandbox.EndStopped), func(n *Node, req sandbox.MachineRequest, s string) error {
			return create(n, from(req, 4, s, sandbox.SnapshotDisk, false))
		}, holds("/a")},
		"rollback": {func(r *rig, req sandbox.MachineRequest) string {
			s := made(r, req)
			_, err := r.n.SnapshotMachine(background, sandbox.SnapshotRequest{Sandbox: req.Sandbox, Generation: 2, Snapshot: s, Kind: sandbox.SnapshotMemory})
			r.must(err)
			r.write(req.Sandbox, "/b")
			return s
		}, func(n *Node, req sandbox.MachineRequest, s string) error {
			return create(n, rollback(req, 4, s, sandbox.SnapshotMemory))
		}, func(r *rig, req sandbox.MachineRequest, s string) {
			holds("/a")(r, req, s)
			if r.h.Active(req.Sandbox) != 1 || r.h.endOf(req.Sandbox).Reason != sandbox.EndRolledBack {
				r.t.Errorf("%d sessions, told %+v", r.h.Active(req.Sandbox), r.h.endOf(req.Sandbox))
			}
		}},
		"delete": {
			made, func(n *Node, req sandbox.MachineRequest, _ string) error {
				return n.DeleteMachine(background, req.Sandbox, 2)
			},
			func(r *rig, req sandbox.MachineRequest, _ string) { r.nothingOf(req.Sandbox) },
		},
	}
}

// TestAKillAtAnyStepIsTakenBackOrFinished stops the node between any two
// effects of each verb, starts another over what it left, and has the verb
// carried out again, as control does.
func TestAKillAtAnyStepIsTakenBackOrFinished(t *testing.T) {
	for name, c := range killedCases() {
		t.Run(name, func(t *testing.T) {
			kills := 0
			for at := 1; ; at++ {
				if !killOnce(t, c, at) {
					break
				}
				kills++
			}
			if kills < 2 {
				t.Errorf("only %d kills", kills)
			}
			t.Logf("%d kills", kills)
		})
	}
}

// killOnce tells whether the verb came as far as its at-th effect.
func killOnce(t *testing.T, c killedCase, at int) bool {
	r, gateway := newEgressRig(t)
	r.d.caches = true
	req := request(1)
	snapshot := c.before(r, req)
	r.d.at.arm(at)
	done := make(chan error, 1)
	old := r.n
	go func() {
		defer close(done) // a thawed one ends here
		done <- c.do(old, req, snapshot)
	}()
	select {
	case err := <-done:
		r.must(err)
		r.d.at.disarm()
		c.after(r, req, snapshot)
		gateway.serves(req.Sandbox)
		r.stop()
		return false
	case <-r.d.at.frozen:
	case <-time.After(20 * time.Second):
		t.Fatal("the verb hangs")
	}
	r.d.at.disarm()
	r.stop()
	r.start("boot-1")
	// What is left is coherent before anybody does anything.
	if _, err := r.n.Observe(background, 0); err != nil {
		t.Fatal(err)
	}
	if err := c.do(r.n, req, snapshot); err != nil {
		t.Errorf("killed at %d: again: %v", at, err)
	} else {
		c.after(r, req, snapshot)
		gateway.serves(req.Sandbox)
	}
	if t.Failed() {
		t.Logf("killed at %d", at)
	}
	r.stop()
	close(r.d.at.thaw) // the rest of the killed one must not be in the next one's way
	<-done
	return !t.Failed()
}
