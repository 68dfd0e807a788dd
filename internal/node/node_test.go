package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestCreateMakesAReadyMachineWithItsIdentity(t *testing.T) {
	r := newRig(t)
	req := request(1)
	st := r.create(req)
	if !st.Ready || st.Generation != 1 || st.Driver != "fake" || st.End != nil {
		t.Errorf("status %+v", st)
	}
	setup := r.d.machines[req.Sandbox].setup
	if setup.Hostname != "h" || setup.Env["A"] != "template" || setup.Env["B"] != "sandbox" || setup.MaxProcsPerUser != 7 {
		t.Errorf("setup %+v", setup)
	}
	if _, err := r.n.Client(context.Background(), req.Sandbox); err != nil {
		t.Errorf("Client: %v", err)
	}
	again := r.create(req)
	if !reflect.DeepEqual(again, st) {
		t.Errorf("the same request answered %+v, then %+v", st, again)
	}
}

func TestAFailedCreateLeavesNothing(t *testing.T) {
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		spoil func(r *rig, req *sandbox.MachineRequest)
		want  func(error) bool
	}{
		"driver fails":    {func(r *rig, _ *sandbox.MachineRequest) { r.d.fail = boom }, func(err error) bool { return errors.Is(err, boom) }},
		"no template":     {func(_ *rig, q *sandbox.MachineRequest) { q.Digest = "sha256:missing" }, func(err error) bool { return code(err) == "template_files_missing" }},
		"unknown driver":  {func(_ *rig, q *sandbox.MachineRequest) { q.Driver = "firecracker" }, func(err error) bool { return code(err) == "unknown_driver" }},
		"agent is silent": {func(r *rig, _ *sandbox.MachineRequest) { r.d.silent = true; r.n.o.HelloWait = 50 * time.Millisecond }, func(err error) bool { return code(err) == "agent_not_ready" }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			req := request(1)
			c.spoil(r, &req)
			_, err := r.n.CreateMachine(context.Background(), req)
			if !c.want(err) {
				t.Errorf("error %v", err)
			}
			r.nothingOf(req.Sandbox)
		})
	}
}

func TestAMachineThatEndsBeforeItsHelloFailsAtOnce(t *testing.T) {
	r := newRig(t)
	r.d.silent = true
	req := request(1)
	go func() {
		for !r.d.has(req.Sandbox) {
			time.Sleep(time.Millisecond)
		}
		r.d.mu.Lock()
		m := r.d.machines[req.Sandbox]
		r.d.mu.Unlock()
		m.end(sandbox.EndOOM)
	}()
	_, err := r.n.CreateMachine(context.Background(), req)
	if code(err) != "machine_ended_early" {
		t.Errorf("error %v", err)
	}
	r.nothingOf(req.Sandbox)
}

func TestDeleteSupersedesACreate(t *testing.T) {
	r := newRig(t)
	r.d.hang = make(chan struct{})
	req := request(1)
	failed := make(chan error)
	go func() {
		_, err := r.n.CreateMachine(context.Background(), req)
		failed <- err
	}()
	for running, _, _ := r.n.Queue(context.Background()); running == 0; running, _, _ = r.n.Queue(context.Background()) {
		time.Sleep(time.Millisecond)
	}
	if err := r.n.DeleteMachine(context.Background(), req.Sandbox, 2); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("the superseded create answered %v", err)
	}
	r.nothingOf(req.Sandbox)
	if _, err := r.n.CreateMachine(context.Background(), req); code(err) != "stale_generation" {
		t.Errorf("a create of an older generation answered %v", err)
	}
}

func TestDeleteIsIdempotentAndTellsTheRecorder(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	for range 2 {
		if err := r.n.DeleteMachine(context.Background(), req.Sandbox, 2); err != nil {
			t.Fatal(err)
		}
	}
	r.nothingOf(req.Sandbox)
	if r.h.endOf(req.Sandbox).Reason != sandbox.EndDeleted || len(r.h.deleted) == 0 {
		t.Errorf("the recorder heard %+v, deleted %v", r.h.ended, r.h.deleted)
	}
	if _, err := r.n.Client(context.Background(), req.Sandbox); code(err) != "not_running" {
		t.Errorf("Client after delete: %v", err)
	}
}

func TestAnEndIsObservedAndSurvivesARestart(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	first, err := r.n.Observe(context.Background(), 0)
	if err != nil || len(first.Machines) != 1 || !first.Machines[0].Ready {
		t.Fatalf("first %+v, %v", first, err)
	}
	go r.d.machines[req.Sandbox].end(sandbox.EndExited)
	next, err := r.n.Observe(context.Background(), first.Cursor)
	if err != nil || len(next.Machines) != 1 || next.Machines[0].Ready || next.Machines[0].End.Reason != sandbox.EndExited {
		t.Fatalf("next %+v, %v", next, err)
	}
	r.stop()
	r.start("boot-1")
	all, err := r.n.Observe(context.Background(), next.Cursor)
	if err != nil || len(all.Machines) != 1 || all.Machines[0].End == nil || all.Machines[0].End.Reason != sandbox.EndExited {
		t.Errorf("after a restart %+v, %v", all, err)
	}
}

func TestObserveWaitsAndEndsWithItsContext(t *testing.T) {
	r := newRig(t)
	first, err := r.n.Observe(context.Background(), 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	next, err := r.n.Observe(ctx, first.Cursor)
	if err != nil || next.Cursor != first.Cursor || len(next.Machines) != 0 {
		t.Errorf("%+v, %v", next, err)
	}
}

func TestARestartAdoptsWhatLives(t *testing.T) {
	r := newRig(t)
	req := request(3)
	r.create(req)
	r.stop()
	r.must(r.h.MachineHeld(background, req.Sandbox)) // as after a kill between a bring-up's end and its last word
	r.start("boot-1")
	if _, err := r.n.Observe(context.Background(), 0); err != nil {
		t.Fatal(err)
	}
	if r.h.isHeld(req.Sandbox) {
		t.Error("what lives is still thought to be suspended")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if _, err := r.n.Client(ctx, req.Sandbox); err != nil {
		t.Errorf("the adopted machine's agent: %v", err)
	}
	if err := r.n.DeleteMachine(context.Background(), req.Sandbox, 2); code(err) != "stale_generation" {
		t.Errorf("the fence was forgotten: %v", err)
	}
}

func TestARestartTellsHowADeadMachineEnded(t *testing.T) {
	for name, c := range map[string]struct {
		boot string
		end  *sandbox.End
		want sandbox.EndReason
	}{
		"the driver knows":       {"boot-1", &sandbox.End{Reason: sandbox.EndOOM}, sandbox.EndOOM},
		"nobody watched":         {"boot-1", nil, sandbox.EndUnknown},
		"the host was restarted": {"boot-2", nil, sandbox.EndHostRestart},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			req := request(1)
			r.create(req)
			r.stop()
			r.d.machines[req.Sandbox].end(sandbox.EndUnknown)
			delete(r.d.machines, req.Sandbox)
			if c.end != nil {
				r.d.ends[req.Sandbox] = *c.end
			}
			r.start(c.boot)
			all, err := r.n.Observe(context.Background(), 0)
			if err != nil || len(all.Machines) != 1 || all.Machines[0].End == nil || all.Machines[0].End.Reason != c.want {
				t.Fatalf("%+v, %v", all, err)
			}
			if got := r.h.endOf(req.Sandbox).Reason; got != c.want {
				t.Errorf("the recorder heard %q", got)
			}
		})
	}
}

func TestARestartUndoesWhatWasNotDoneAndCollectsWhatNothingRoots(t *testing.T) {
	r := newRig(t)
	half, orphan := request(1), sandbox.NewID(sandbox.KindSandbox)
	r.create(half)
	j, err := loadJournal(r.n.dir(half.Sandbox))
	if err != nil {
		t.Fatal(err)
	}
	r.stop()
	j.Done = false
	if err := j.save(r.n.dir(half.Sandbox)); err != nil {
		t.Fatal(err)
	}
	r.h.networks[orphan] = true
	r.start("boot-1")
	if _, err := r.n.Observe(context.Background(), 0); err != nil {
		t.Fatal(err)
	}
	r.nothingOf(half.Sandbox)
	r.nothingOf(orphan)
}

func TestAnUnreadableJournalIsLeftAlone(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	r.stop()
	if err := os.WriteFile(filepath.Join(r.n.dir(req.Sandbox), journalFile), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.start("boot-1")
	if _, err := r.n.Observe(context.Background(), 0); err != nil {
		t.Fatal(err)
	}
	if !r.d.has(req.Sandbox) {
		t.Error("a machine whose journal can't be read was discarded")
	}
}

func TestCreationsQueue(t *testing.T) {
	r := newRig(t)
	r.d.hang = make(chan struct{})
	done := make(chan error, 3)
	for range 3 {
		go func() {
			_, err := r.n.CreateMachine(context.Background(), request(1))
			done <- err
		}()
	}
	for {
		running, waiting, err := r.n.Queue(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if running == 2 && waiting == 1 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	close(r.d.hang)
	for range 3 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
