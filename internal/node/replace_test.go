package node

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// rollback is req for going back to a snapshot.
func rollback(req sandbox.MachineRequest, generation int64, snapshot string, kind sandbox.SnapshotKind) sandbox.MachineRequest {
	req = from(req, generation, snapshot, kind, false)
	req.Source.Replace = true
	return req
}

// past makes a sandbox with a snapshot in its past.
func (r *rig) past(kind sandbox.SnapshotKind) (sandbox.MachineRequest, string) {
	r.t.Helper()
	req := request(1)
	r.create(req)
	r.write(req.Sandbox, "/a")
	q := snap(req.Sandbox, 2, kind)
	r.snapshot(q)
	r.write(req.Sandbox, "/b")
	return req, q.Snapshot
}

func TestRollback(t *testing.T) {
	r := newRig(t)
	req, snapshot := r.past(sandbox.SnapshotMemory)
	id := req.Sandbox
	r.h.start(id)
	boot := r.d.machine(id).identity().GetBootId()
	r.must(r.n.PauseMachine(background, id, 3))
	st := r.create(rollback(req, 4, snapshot, sandbox.SnapshotMemory))
	if !st.Ready || st.Generation != 4 || r.h.endOf(id).Reason != sandbox.EndRolledBack {
		t.Errorf("status %+v, told %+v", st, r.h.endOf(id))
	}
	m := r.d.machine(id)
	if img := m.look(); !slices.Equal(img.Disk, []string{"/a"}) || m.isPaused() {
		t.Errorf("the machine holds %+v", img)
	}
	if m.identity().GetBootId() != boot {
		t.Error("a rollback in memory is no new boot")
	}
	r.restart()
	r.write(id, "/c")

	r.h.start(id)
	st = r.create(rollback(req, 5, snapshot, sandbox.SnapshotMemory))
	if !st.Ready || r.h.Active(id) != 0 {
		t.Errorf("status %+v, active %d", st, r.h.Active(id))
	}
}

func TestARollbackOfASuspendedSandboxEndsWhatWaits(t *testing.T) {
	for _, kind := range []sandbox.SnapshotKind{sandbox.SnapshotMemory, sandbox.SnapshotDisk} {
		r := newRig(t)
		req, snapshot := r.past(kind)
		r.h.start(req.Sandbox)
		q := snap(req.Sandbox, 3, sandbox.SnapshotMemory)
		q.Hold = true
		r.snapshot(q)
		r.must(r.n.ReleaseMachine(background, req.Sandbox, 3, ended(sandbox.EndSuspended)))
		bad := rollback(req, 4, sandbox.NewID(sandbox.KindSnapshot), kind)
		if _, err := r.n.CreateMachine(background, bad); code(err) != "snapshot_missing" {
			t.Errorf("error %v", err)
		}
		if r.h.Active(req.Sandbox) != 1 || !r.h.isHeld(req.Sandbox) {
			t.Error("a failed rollback ended the sessions of a suspended sandbox")
		}
		r.create(rollback(req, 5, snapshot, kind))
		if got := r.h.endOf(req.Sandbox).Reason; got != sandbox.EndRolledBack || r.h.Active(req.Sandbox) != 0 {
			t.Errorf("%s: told %q", kind, got)
		}
	}
}

func TestARollbackThatCannotSucceedChangesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(r *rig, q *sandbox.MachineRequest, dir string) error
		want  string
	}{
		"corrupt": {func(_ *rig, _ *sandbox.MachineRequest, dir string) error {
			return os.WriteFile(filepath.Join(dir, "image"), []byte("{}"), 0o600)
		}, "snapshot_corrupt"},
		"foreign project":  {func(_ *rig, q *sandbox.MachineRequest, _ string) error { q.Project = "other"; return nil }, "snapshot_foreign"},
		"foreign template": {func(_ *rig, q *sandbox.MachineRequest, _ string) error { q.Digest = "sha256:other"; return nil }, "snapshot_foreign"},
		"foreign sandbox": {func(_ *rig, q *sandbox.MachineRequest, _ string) error {
			q.Sandbox, q.Source.Continue = sandbox.NewID(sandbox.KindSandbox), true
			return nil
		}, "snapshot_foreign"},
		"missing": {func(_ *rig, _ *sandbox.MachineRequest, dir string) error { return os.RemoveAll(dir) }, "snapshot_missing"},
		"another kind": {func(_ *rig, q *sandbox.MachineRequest, _ string) error {
			q.Source.Kind = sandbox.SnapshotDisk
			return nil
		}, "snapshot_incompatible"},
		"other resources": {func(_ *rig, q *sandbox.MachineRequest, _ string) error { q.Resources.MemoryMiB *= 2; return nil }, "snapshot_incompatible"},
		"no engine": {func(r *rig, _ *sandbox.MachineRequest, _ string) error {
			r.d.missing = sandbox.Errorf(sandbox.FailedPrecondition, "needs_engine", "gone")
			return nil
		}, "needs_engine"},
		"no agent": {func(r *rig, _ *sandbox.MachineRequest, dir string) error {
			r.h.guest = sandbox.Errorf(sandbox.NotFound, "artifact_missing", "gone")
			r.h.current = "newer"
			return nil
		}, "needs_guest"},
		"no such driver": {func(_ *rig, q *sandbox.MachineRequest, _ string) error { q.Driver = "firecracker"; return nil }, "needs_driver"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			req, snapshot := r.past(sandbox.SnapshotMemory)
			r.h.start(req.Sandbox)
			q := rollback(req, 3, snapshot, sandbox.SnapshotMemory)
			r.must(c.spoil(r, &q, filepath.Join(r.state, "snapshots", snapshot)))
			if _, err := r.n.CreateMachine(background, q); code(err) != c.want || !sandbox.IsClass(err, sandbox.FailedPrecondition) {
				t.Errorf("error %v", err)
			}
			r.write(req.Sandbox, "/c")
			if r.h.Active(req.Sandbox) != 1 || r.h.endOf(req.Sandbox).Reason != "" {
				t.Error("the sessions were ended")
			}
			if all, _ := r.n.Observe(background, 0); len(all.Machines) != 1 || !all.Machines[0].Ready || all.Machines[0].Generation != 1 {
				t.Errorf("observed %+v", all.Machines)
			}
		})
	}
}

func TestARollbackThatFailsAfterTheOldMachineEndedSaysSo(t *testing.T) {
	boom := errors.New("boom")
	for _, restart := range []bool{false, true} {
		r := newRig(t)
		req, snapshot := r.past(sandbox.SnapshotMemory)
		r.h.start(req.Sandbox)
		r.d.restore = boom
		q := rollback(req, 3, snapshot, sandbox.SnapshotMemory)
		if _, err := r.n.CreateMachine(background, q); code(err) != "machine_lost" || !errors.Is(err, boom) {
			t.Errorf("error %v", err)
		}
		if restart {
			r.restart()
		}
		all, _ := r.n.Observe(background, 0)
		if len(all.Machines) != 1 || all.Machines[0].Ready || all.Machines[0].Generation != 1 || all.Machines[0].End == nil || all.Machines[0].End.Reason != sandbox.EndRolledBack {
			t.Errorf("observed %+v", all.Machines)
		}
		if r.d.has(req.Sandbox) || r.h.Active(req.Sandbox) != 0 {
			t.Error("something of the old machine lives")
		}
		if _, err := r.n.Client(background, req.Sandbox); code(err) != "not_running" {
			t.Errorf("Client: %v", err)
		}
		r.d.restore = nil
		q.Generation = 4
		if st := r.create(q); !st.Ready || st.Generation != 4 {
			t.Errorf("again: %+v", st)
		}
		r.must(r.n.DeleteMachine(background, req.Sandbox, 5))
		r.nothingOf(req.Sandbox)
	}
}

// small puts a directory of the rig's state on a small disk of its own.
func (r *rig) small(name, options string) {
	r.t.Helper()
	if os.Geteuid() != 0 {
		r.t.Skip("SKIPPED: needs root to mount a small tmpfs")
	}
	dir := filepath.Join(r.state, name)
	if err := syscall.Mount("none", dir, "tmpfs", 0, options); err != nil {
		r.t.Skip("SKIPPED: no tmpfs can be mounted here:", err)
	}
	r.t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
}

func TestAFullDiskFailsASnapshotAndNothingElse(t *testing.T) {
	r := newRig(t)
	r.small("snapshots", "size=256k,mode=0700")
	req := request(1)
	r.create(req)
	r.d.size = 1 << 20
	for _, kind := range []sandbox.SnapshotKind{sandbox.SnapshotMemory, sandbox.SnapshotDisk} {
		q := snap(req.Sandbox, 2, kind)
		q.Hold = true
		if _, err := r.n.SnapshotMachine(background, q); code(err) != "disk_full" || !sandbox.IsClass(err, sandbox.NoCapacity) {
			t.Errorf("%s: %v", kind, err)
		}
		if files := r.files(); len(files) != 0 {
			t.Errorf("left %v", files)
		}
		r.write(req.Sandbox, "/a")
	}
	r.d.size = 0
	r.must(syscall.Mount("none", filepath.Join(r.state, "snapshots"), "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	if _, err := r.n.SnapshotMachine(background, snap(req.Sandbox, 3, sandbox.SnapshotDisk)); code(err) != "disk_failed" || !sandbox.IsClass(err, sandbox.Unavailable) {
		t.Errorf("on a read-only disk: %v", err)
	}
	r.must(syscall.Mount("none", filepath.Join(r.state, "snapshots"), "", syscall.MS_REMOUNT, ""))
	r.snapshot(snap(req.Sandbox, 4, sandbox.SnapshotMemory))
}

func TestAFullDiskFailsACreateAndAPause(t *testing.T) {
	r := newRig(t)
	r.small("machines", "size=64k,mode=0700")
	lives, req := request(1), request(1)
	r.create(lives)
	fill := filepath.Join(r.state, "machines", "fill")
	f, err := os.Create(fill)
	r.must(err)
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	_ = f.Close()
	if _, err := r.n.CreateMachine(background, req); code(err) != "disk_full" {
		t.Errorf("create: %v", err)
	}
	r.nothingOf(req.Sandbox)
	if err := r.n.PauseMachine(background, lives.Sandbox, 2); code(err) != "disk_full" {
		t.Errorf("pause: %v", err)
	}
	r.write(lives.Sandbox, "/a")
	r.must(os.Remove(fill))
	r.create(req)
	r.must(r.n.PauseMachine(background, lives.Sandbox, 3))
}

func TestVerbsRaceByGeneration(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	const verbs = 40
	errs := make(chan error, verbs)
	for i := range verbs {
		generation := int64(2 + i)
		go func() {
			var err error
			switch i % 4 {
			case 0:
				err = r.n.PauseMachine(background, req.Sandbox, generation)
			case 1:
				err = r.n.ResumeMachine(background, req.Sandbox, generation)
			case 2:
				_, err = r.n.SnapshotMachine(background, snap(req.Sandbox, generation, sandbox.SnapshotMemory))
			case 3:
				_, err = r.n.CheckpointMachine(background, snap(req.Sandbox, generation, sandbox.SnapshotDisk))
			}
			errs <- err
		}()
	}
	for range verbs {
		select {
		case err := <-errs:
			if c := code(err); err != nil && c != "stale_generation" && c != "superseded" && c != "paused" && sandbox.AsError(err).Code != "canceled" {
				t.Errorf("a racing verb answered %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("racing verbs wait for each other")
		}
	}
	r.must(r.n.ResumeMachine(background, req.Sandbox, 100))
	r.write(req.Sandbox, "/a")
	r.must(r.n.DeleteMachine(background, req.Sandbox, 101))
	r.nothingOf(req.Sandbox)
}
