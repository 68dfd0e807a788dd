package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

var background = context.Background()

// must fails the test at the first error.
func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) restart() {
	r.stop()
	r.start("boot-1")
	if _, err := r.n.Observe(background, 0); err != nil {
		r.t.Fatal(err)
	}
}

// write changes a sandbox's disk, as the data plane does.
func (r *rig) write(id, what string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	c, err := r.n.Client(ctx, id)
	r.must(err)
	_, err = c.Mkdir(ctx, connect.NewRequest(&guestv1.MkdirRequest{Path: what}))
	r.must(err)
}

func snap(id string, generation int64, kind sandbox.SnapshotKind) sandbox.SnapshotRequest {
	return sandbox.SnapshotRequest{Sandbox: id, Generation: generation, Snapshot: sandbox.NewID(sandbox.KindSnapshot), Kind: kind}
}

func (r *rig) snapshot(q sandbox.SnapshotRequest) sandbox.SnapshotStatus {
	r.t.Helper()
	st, err := r.n.SnapshotMachine(background, q)
	r.must(err)
	return st
}

// from is req for a machine made of a snapshot.
func from(req sandbox.MachineRequest, generation int64, snapshot string, kind sandbox.SnapshotKind, goesOn bool) sandbox.MachineRequest {
	req.Generation = generation
	req.Source = &sandbox.Source{Snapshot: snapshot, Kind: kind, Continue: goesOn}
	return req
}

// files lists what is in the snapshots' directory.
func (r *rig) files() []string {
	r.t.Helper()
	entries, err := os.ReadDir(filepath.Join(r.state, "snapshots"))
	r.must(err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func ended(r sandbox.EndReason) sandbox.End { return sandbox.End{Reason: r, At: time.Now().UTC()} }

func TestPauseAndResume(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	id := req.Sandbox
	for range 2 {
		r.must(r.n.PauseMachine(background, id, 2))
	}
	if !r.d.machine(id).isPaused() {
		t.Error("the machine runs")
	}
	if _, err := r.n.Client(background, id); code(err) != "paused" || !strings.Contains(err.Error(), "resume") {
		t.Errorf("Client of a paused machine: %v", err)
	}
	if all, _ := r.n.Observe(background, 0); len(all.Machines) != 1 || !all.Machines[0].Ready || all.Machines[0].End != nil || all.Machines[0].Durability != sandbox.DurabilitySnapshot {
		t.Errorf("a paused machine is observed as %+v", all.Machines)
	}
	r.restart()
	if !r.d.machine(id).isPaused() {
		t.Error("a restart resumed a machine that the user paused")
	}
	if err := r.n.ResumeMachine(background, id, 1); code(err) != "stale_generation" {
		t.Errorf("the fence was forgotten: %v", err)
	}
	for range 2 {
		r.must(r.n.ResumeMachine(background, id, 3))
	}
	r.write(id, "/a")
	if err := r.n.PauseMachine(background, sandbox.NewID(sandbox.KindSandbox), 1); code(err) != "no_machine" {
		t.Errorf("pause of nothing: %v", err)
	}
}

func TestAFailedPauseLeavesARunningMachine(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	boom := errors.New("boom")
	r.d.fails["pause"] = boom
	if err := r.n.PauseMachine(background, req.Sandbox, 2); !errors.Is(err, boom) {
		t.Errorf("error %v", err)
	}
	r.write(req.Sandbox, "/a")
	if r.d.machine(req.Sandbox).isPaused() || loadWish(r.n.dir(req.Sandbox)).Paused {
		t.Error("it is paused")
	}
}

func TestAMachineThatNobodyPausedGoesOnAfterARestart(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	r.stop()
	r.d.machine(req.Sandbox).set(true) // a kill in the middle of a snapshot
	r.start("boot-1")
	r.write(req.Sandbox, "/a")
}

func TestSuspendAndRestoreIsTheSameSandbox(t *testing.T) {
	for name, paused := range map[string]bool{"running": false, "paused": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			req := request(1)
			r.create(req)
			id := req.Sandbox
			session := r.h.start(id)
			r.write(id, "/a")
			r.d.machine(id).remember("x=1")
			boot := r.d.machine(id).identity().GetBootId()
			if paused {
				r.must(r.n.PauseMachine(background, id, 2))
			}
			q := snap(id, 3, sandbox.SnapshotMemory)
			q.Hold = true
			st := r.snapshot(q)
			if st.Snapshot != q.Snapshot || st.Kind != q.Kind || st.SizeBytes <= 0 || st.Needs.Digest != req.Digest || st.Needs.Guest != "guesthash" || st.Needs.Format == 0 || st.Stood <= 0 || st.Unchanged {
				t.Errorf("status %+v", st)
			}
			if !r.d.machine(id).isPaused() {
				t.Error("the machine goes on after its snapshot")
			}
			if again := r.snapshot(q); !reflect.DeepEqual(again, st) {
				t.Errorf("again %+v", again)
			}
			r.restart()
			if !r.d.machine(id).isPaused() {
				t.Error("a restart let go of a machine that is to be released")
			}
			for range 2 {
				r.must(r.n.ReleaseMachine(background, id, 3, ended(sandbox.EndSuspended)))
			}
			r.nothingOf(id)
			if !r.h.isHeld(id) || r.h.Active(id) != 1 {
				t.Error("its sessions do not wait")
			}
			if again := r.snapshot(q); !reflect.DeepEqual(again, st) {
				t.Errorf("without a machine %+v", again)
			}

			back := r.create(from(req, 4, q.Snapshot, sandbox.SnapshotMemory, true))
			if !back.Ready || back.Generation != 4 || len(back.Sessions) != 0 {
				t.Errorf("restored: %+v", back)
			}
			m := r.d.machine(id)
			if img := m.look(); img.Memory != "x=1" || !slices.Equal(img.Disk, []string{"/a"}) {
				t.Errorf("the machine holds %+v", img)
			}
			setup := m.identity()
			if !setup.GetRestored() || setup.GetGeneration() != 4 || setup.GetBootId() != boot || setup.GetSource() != id || setup.GetMachineId() != machineID(id) || len(setup.GetMachineId()) != 32 {
				t.Errorf("setup %+v", setup)
			}
			if live, _ := r.h.Living(background, id); len(live) != 1 || live[0].ID != session.ID {
				t.Errorf("its sessions are %+v", live)
			}
			r.write(id, "/b")
		})
	}
}

func TestAReleaseNeedsWhatItsMachineWasHeldFor(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	q := snap(req.Sandbox, 2, sandbox.SnapshotMemory)
	r.snapshot(q)
	if err := r.n.ReleaseMachine(background, req.Sandbox, 2, ended(sandbox.EndSuspended)); code(err) != "not_held" {
		t.Errorf("a machine that goes on was released: %v", err)
	}
	q = snap(req.Sandbox, 3, sandbox.SnapshotMemory)
	q.Hold = true
	r.snapshot(q)
	r.must(r.n.ResumeMachine(background, req.Sandbox, 4)) // the suspend was given up
	r.write(req.Sandbox, "/a")
	if err := r.n.ReleaseMachine(background, req.Sandbox, 5, ended(sandbox.EndSuspended)); code(err) != "not_held" {
		t.Errorf("a machine that goes on was released: %v", err)
	}
	q = snap(req.Sandbox, 6, sandbox.SnapshotMemory)
	q.Hold = true
	r.snapshot(q)
	r.h.start(req.Sandbox)
	r.d.machine(req.Sandbox).end(sandbox.EndKilled) // too late to lose anything
	for st, _ := r.n.Observe(background, 0); st.Machines[0].End == nil; st, _ = r.n.Observe(background, 0) {
		time.Sleep(time.Millisecond)
	}
	if r.h.Active(req.Sandbox) != 1 {
		t.Error("the sessions of a held machine ended with it")
	}
	r.must(r.n.ReleaseMachine(background, req.Sandbox, 6, ended(sandbox.EndSuspended)))
	if !r.h.isHeld(req.Sandbox) {
		t.Error("its sessions do not wait")
	}
}

// TestAnEndUnderTheLastSnapshot has a machine end while the snapshot is taken
// after which it was to be released: what came of that decides on its sessions.
func TestAnEndUnderTheLastSnapshot(t *testing.T) {
	for name, whole := range map[string]bool{"whole": true, "failed": false} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			req := request(1)
			r.create(req)
			id := req.Sandbox
			r.h.start(id)
			r.d.block, r.d.begun = make(chan struct{}), make(chan struct{})
			ctx, cancel := context.WithCancel(background)
			defer cancel()
			q := snap(id, 2, sandbox.SnapshotMemory)
			q.Hold = true
			taken := make(chan error, 1)
			go func() {
				_, err := r.n.SnapshotMachine(ctx, q)
				taken <- err
			}()
			<-r.d.begun
			r.d.machine(id).end(sandbox.EndKilled)
			for st, _ := r.n.Observe(background, 0); st.Machines[0].End == nil; st, _ = r.n.Observe(background, 0) {
				time.Sleep(time.Millisecond)
			}
			if r.h.Active(id) != 1 {
				t.Error("its sessions ended before it was known whether the snapshot has them")
			}
			if !whole {
				cancel()
				if err := <-taken; err == nil {
					t.Error("a snapshot that was given up succeeded")
				}
				if r.h.Active(id) != 0 || r.h.endOf(id).Reason != sandbox.EndKilled {
					t.Errorf("the end of its sessions was not told: %+v", r.h.endOf(id))
				}
				return
			}
			close(r.d.block)
			r.must(<-taken)
			r.must(r.n.ReleaseMachine(background, id, 2, ended(sandbox.EndSuspended)))
			if r.h.Active(id) != 1 || !r.h.isHeld(id) {
				t.Error("its sessions do not wait")
			}
			r.create(from(req, 3, q.Snapshot, sandbox.SnapshotMemory, true))
			if r.h.isHeld(id) {
				t.Error("they still wait when it is back")
			}
		})
	}
}

func TestStopAndStartKeepTheDiskOnly(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	id := req.Sandbox
	r.write(id, "/a")
	r.d.machine(id).remember("x=1")
	boot := r.d.machine(id).identity().GetBootId()
	r.h.start(id)
	q := snap(id, 2, sandbox.SnapshotDisk)
	q.Hold, q.Grace = true, time.Second
	r.snapshot(q)
	if r.h.Active(id) != 0 {
		t.Error("the sessions were not asked to end")
	}
	r.must(r.n.ReleaseMachine(background, id, 2, ended(sandbox.EndStopped)))
	r.nothingOf(id)
	if r.h.endOf(id).Reason != sandbox.EndStopped {
		t.Errorf("told %+v", r.h.endOf(id))
	}
	r.create(from(req, 3, q.Snapshot, sandbox.SnapshotDisk, false))
	m := r.d.machine(id)
	if img := m.look(); img.Memory != "" || !slices.Equal(img.Disk, []string{"/a"}) {
		t.Errorf("the machine holds %+v", img)
	}
	if setup := m.identity(); setup.GetRestored() || setup.GetBootId() == boot || setup.GetBootId() == "" || setup.GetMachineId() != machineID(id) {
		t.Errorf("setup %+v", setup)
	}
}

func TestANamedSnapshotLetsItsMachineGoOnAndMakesAnother(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	r.write(req.Sandbox, "/a")
	was := r.h.start(req.Sandbox)
	q := snap(req.Sandbox, 2, sandbox.SnapshotMemory)
	r.snapshot(q)
	r.write(req.Sandbox, "/b")
	if r.h.barriers != 1 {
		t.Errorf("%d barriers", r.h.barriers)
	}

	child := request(1)
	st := r.create(from(child, 7, q.Snapshot, sandbox.SnapshotMemory, false))
	if len(st.Sessions) != 1 || st.Sessions[0].Parent != was.ID || st.Sessions[0].ParentOffset != 42 || st.Sessions[0].Sandbox != child.Sandbox {
		t.Errorf("sessions %+v", st.Sessions)
	}
	if again := r.create(from(child, 7, q.Snapshot, sandbox.SnapshotMemory, false)); !reflect.DeepEqual(again, st) {
		t.Errorf("again %+v", again)
	}
	r.restart()
	if again := r.create(from(child, 7, q.Snapshot, sandbox.SnapshotMemory, false)); !reflect.DeepEqual(again, st) {
		t.Errorf("after a restart %+v", again)
	}
	if all, _ := r.n.Observe(background, 0); len(all.Machines) != 2 || all.Machines[0].Sessions != nil || all.Machines[1].Sessions != nil {
		t.Errorf("observed %+v", all.Machines)
	}
	setup, parent := r.d.machine(child.Sandbox).identity(), r.d.machine(req.Sandbox).identity()
	if setup.GetBootId() == parent.GetBootId() || setup.GetMachineId() == parent.GetMachineId() || setup.GetSource() != req.Sandbox || !setup.GetRestored() {
		t.Errorf("the child's setup %+v", setup)
	}
	if img := r.d.machine(child.Sandbox).look(); !slices.Equal(img.Disk, []string{"/a"}) {
		t.Errorf("the child holds %+v", img)
	}
	if n := r.d.machine(child.Sandbox).spec.MaxProcs; n != 7 {
		t.Errorf("MaxProcs %d", n)
	}
}

func TestAFailedSnapshotLeavesTheMachineAsItWas(t *testing.T) {
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		spoil func(*rig)
		want  func(error) bool
	}{
		"driver":  {func(r *rig) { r.d.fails["snapshot"] = boom }, func(err error) bool { return errors.Is(err, boom) }},
		"pause":   {func(r *rig) { r.d.fails["pause"] = boom }, func(err error) bool { return errors.Is(err, boom) }},
		"barrier": {func(r *rig) { r.h.fail = boom }, func(err error) bool { return errors.Is(err, boom) }},
	} {
		for _, kind := range []sandbox.SnapshotKind{sandbox.SnapshotMemory, sandbox.SnapshotDisk} {
			t.Run(name+" "+string(kind), func(t *testing.T) {
				r := newRig(t)
				req := request(1)
				r.create(req)
				c.spoil(r)
				q := snap(req.Sandbox, 2, kind)
				q.Hold = true
				if _, err := r.n.SnapshotMachine(background, q); !c.want(err) {
					t.Errorf("error %v", err)
				}
				if files := r.files(); len(files) != 0 {
					t.Errorf("left %v", files)
				}
				r.write(req.Sandbox, "/a")
				if r.d.machine(req.Sandbox).isPaused() {
					t.Error("the machine stands still")
				}
				r.h.fail = nil
				r.snapshot(q)
			})
		}
	}
}

func TestADeleteCancelsASnapshot(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	r.d.block, r.d.begun = make(chan struct{}), make(chan struct{})
	failed := make(chan error, 1)
	go func() {
		_, err := r.n.SnapshotMachine(background, snap(req.Sandbox, 2, sandbox.SnapshotMemory))
		failed <- err
	}()
	<-r.d.begun
	r.must(r.n.DeleteMachine(background, req.Sandbox, 3))
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("the snapshot answered %v", err)
	}
	r.nothingOf(req.Sandbox)
	if files := r.files(); len(files) != 0 {
		t.Errorf("left %v", files)
	}
}

func TestCallsWaitWhileASnapshotReplacesTheLink(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	r.d.block, r.d.begun = make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		_, err := r.n.SnapshotMachine(background, snap(req.Sandbox, 2, sandbox.SnapshotMemory))
		done <- err
	}()
	<-r.d.begun
	ctx, cancel := context.WithTimeout(background, 20*time.Millisecond)
	defer cancel()
	if _, err := r.n.Client(ctx, req.Sandbox); code(err) != "guest_unreachable" || !sandbox.IsClass(err, sandbox.Unavailable) {
		t.Errorf("Client: %v", err)
	}
	wrote := make(chan struct{})
	go func() { defer close(wrote); r.write(req.Sandbox, "/a") }()
	select {
	case <-wrote:
		t.Error("a call went through while the link was cut")
	case <-time.After(20 * time.Millisecond):
	}
	close(r.d.block)
	r.must(<-done)
	<-wrote
}

func TestAMemorySnapshotWaitsForTransfersAndThenCutsThem(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	for name, end := range map[string]bool{"it ends in time": true, "it does not end": false} {
		client, conn, err := r.n.Extra(background, req.Sandbox)
		r.must(err)
		q := snap(req.Sandbox, 2, sandbox.SnapshotMemory)
		q.Wait = 100 * time.Millisecond
		if end {
			q.Wait = time.Minute
			time.AfterFunc(50*time.Millisecond, func() { _ = conn.Close() })
		}
		began := time.Now()
		r.snapshot(q)
		if took := time.Since(began); took < 40*time.Millisecond || took > 20*time.Second {
			t.Errorf("%s: it took %s", name, took)
		}
		if _, err := client.Sessions(background, connect.NewRequest(&guestv1.SessionsRequest{})); err == nil {
			t.Errorf("%s: the connection was not cut", name)
		}
		_ = conn.Close()
		r.write(req.Sandbox, "/a")
	}
	_, conn, err := r.n.Extra(background, req.Sandbox)
	r.must(err)
	defer conn.Close()
	client, err := r.n.Client(background, req.Sandbox)
	r.must(err)
	r.snapshot(snap(req.Sandbox, 2, sandbox.SnapshotDisk))
	if _, err := client.Sessions(background, connect.NewRequest(&guestv1.SessionsRequest{})); err != nil {
		t.Errorf("a disk snapshot cut a connection: %v", err)
	}
}

func TestCapacity(t *testing.T) {
	r := newRig(t)
	c, err := r.n.Capacity(background)
	if err != nil || c.MilliCPU < 2000 || c.MemoryMiB <= 0 || c.DiskFree <= 0 || c.DiskFloor != 77 {
		t.Errorf("%+v, %v", c, err)
	}
	for text, want := range map[string]int64{"MemTotal:       16 kB\n": 16, "A: 1 kB\nMemTotal: 5 kB\nB: 2": 5, "": 0, "MemTotal: x kB": 0, "MemTotal: -4 kB": 0} {
		got, err := memTotal(strings.NewReader(text))
		if got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %d, %v", text, got, err)
		}
	}
}
