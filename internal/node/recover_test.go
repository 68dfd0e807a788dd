package node

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// TestAStopDuringAdoptionEndsNoMachine stops a node whose driver still asks a
// machine. Whatever the driver makes of that, the next one adopts the machine,
// and nobody is told meanwhile that there is none.
func TestAStopDuringAdoptionEndsNoMachine(t *testing.T) {
	for name, says := range map[string]error{
		"silent":      sandbox.Errorf(sandbox.NotFound, "machine_silent", "it does not answer"),
		"interrupted": context.Canceled,
		"unreachable": sandbox.Errorf(sandbox.Unavailable, "engine_gone", "its engine can't be reached"),
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			req := request(1)
			r.create(req)
			id := req.Sandbox
			r.write(id, "/a")
			r.stop()
			asked := make(chan struct{})
			tell := sync.OnceFunc(func() { close(asked) })
			r.d.adopts = func(ctx context.Context) error {
				tell()
				<-ctx.Done()
				return says
			}
			r.start("boot-1")
			<-asked
			type told struct {
				changes sandbox.NodeChanges
				err     error
			}
			observed, deleted := make(chan told, 1), make(chan error, 1)
			old := r.n
			go func() {
				changes, err := old.Observe(background, 0)
				observed <- told{changes, err}
			}()
			go func() { deleted <- old.PauseMachine(background, id, 1) }()
			r.stop()
			if got := <-observed; !sandbox.IsClass(got.err, sandbox.Unavailable) || len(got.changes.Machines) > 0 {
				t.Errorf("a node that stopped first observes %+v", got)
			}
			if err := <-deleted; !sandbox.IsClass(err, sandbox.Unavailable) {
				t.Errorf("its verbs answer %v", err)
			}
			if j, err := loadJournal(r.n.dir(id)); err != nil || j.End != nil {
				t.Fatalf("the journal says %+v, %v", j, err)
			}
			r.d.adopts = nil
			r.restart()
			all, err := r.n.Observe(background, 0)
			if err != nil || len(all.Machines) != 1 || !all.Machines[0].Ready || all.Machines[0].End != nil {
				t.Errorf("after a restart %+v, %v", all.Machines, err)
			}
			r.write(id, "/b")
			if len(r.d.discarded) > 0 || r.h.endOf(id).Reason != "" {
				t.Errorf("discarded %v, told %+v", r.d.discarded, r.h.endOf(id))
			}
		})
	}
}

// busyRig is a node that was started over a machine which stands still for a
// snapshot that an earlier node was killed in, and can't be asked until the
// function that is returned is called; and over another one.
func busyRig(t *testing.T) (r *rig, busy, other string, answers func()) {
	t.Helper()
	r = newRig(t)
	b, o := request(1), request(1)
	r.create(b)
	r.create(o)
	r.stop()
	m := r.d.machine(b.Sandbox)
	m.set(true)
	r.must(wish{Held: sandbox.NewID(sandbox.KindSnapshot), Fence: 1}.save(r.n.dir(b.Sandbox)))
	late := make(chan struct{})
	r.d.late = map[string]chan struct{}{b.Sandbox: late}
	r.start("boot-1")
	return r, b.Sandbox, o.Sandbox, func() { close(late) }
}

// TestAMachineThatCanNotBeAskedHoldsUpNobody starts a node over one that is still
// being written. Others are there at once; calls for it wait, and it goes on as
// soon as it can.
func TestAMachineThatCanNotBeAskedHoldsUpNobody(t *testing.T) {
	r, busy, other, answers := busyRig(t)
	start, cancel := context.WithTimeout(background, 10*time.Second)
	defer cancel()
	all, err := r.n.Observe(start, 0)
	if err != nil || len(all.Machines) != 2 || !all.Machines[0].Ready || !all.Machines[1].Ready {
		t.Fatalf("observed %+v, %v", all.Machines, err)
	}
	r.write(other, "/a")
	r.must(r.n.PauseMachine(start, other, 2))
	short, cancel := context.WithTimeout(background, 50*time.Millisecond)
	defer cancel()
	if err := r.n.PauseMachine(short, busy, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("pausing it: %v", err)
	}
	if _, err := r.n.Client(short, busy); code(err) != "guest_unreachable" {
		t.Errorf("reaching it: %v", err)
	}
	answers()
	r.write(busy, "/a")
	if r.d.machine(busy).isPaused() || loadWish(r.n.dir(busy)).Held != "" {
		t.Error("it does not go on")
	}
	if st := r.snapshot(snap(busy, 1, sandbox.SnapshotMemory)); st.Snapshot == "" {
		t.Error("no snapshot")
	}
}

// TestAMachineThatEndsWhileItIsTakenUpStaysEnded: nobody is told after that that it
// is back.
func TestAMachineThatEndsWhileItIsTakenUpStaysEnded(t *testing.T) {
	r, busy, _, answers := busyRig(t)
	defer answers()
	for end := time.Now().Add(30 * time.Second); !r.h.isOver(busy); time.Sleep(time.Millisecond) {
		r.d.machine(busy).end(sandbox.EndCrashed)
		if time.Now().After(end) {
			t.Fatal("its end is not told")
		}
	}
	if _, err := r.n.Observe(background, 0); err != nil { // when recovery is over
		t.Fatal(err)
	}
	if end := r.h.endOf(busy); end.Reason != sandbox.EndCrashed || !r.h.isOver(busy) {
		t.Errorf("its end is told as %+v, and then that it is back", end)
	}
}

// TestCallsForAMachineThatCanNotBeAskedSupersede each other as ever: one of a new
// generation does not wait for the machine to go on, and sees to it itself.
func TestCallsForAMachineThatCanNotBeAskedSupersede(t *testing.T) {
	r, busy, _, answers := busyRig(t)
	done := make(chan error, 1)
	go func() {
		_, err := r.n.SnapshotMachine(background, snap(busy, 2, sandbox.SnapshotMemory))
		done <- err
	}()
	admitted := func() bool {
		r.n.mu.Lock()
		defer r.n.mu.Unlock()
		c := r.n.calls[busy]
		return c != nil && c.generation == 2
	}
	for end := time.Now().Add(30 * time.Second); !admitted(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a newer call waits for the machine to go on")
		}
	}
	answers()
	r.must(<-done)
	r.write(busy, "/a")

	r, busy, _, answers = busyRig(t)
	defer answers()
	within, cancel := context.WithTimeout(background, 10*time.Second)
	defer cancel()
	r.must(r.n.DeleteMachine(within, busy, 2))
	r.nothingOf(busy)
}

// TestAStopLetsGoOfAMachineThatCanNotBeAsked and the next node takes it up again.
func TestAStopLetsGoOfAMachineThatCanNotBeAsked(t *testing.T) {
	r, busy, _, answers := busyRig(t)
	if _, err := r.n.Observe(background, 0); err != nil {
		t.Fatal(err)
	}
	r.stop()
	answers()
	r.restart()
	r.write(busy, "/a")
}

// TestAMachineThatCouldNotBeBroughtToHowItIsToBe is by the next verb.
func TestAMachineThatCouldNotBeBroughtToHowItIsToBe(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	r.stop()
	r.must(wish{Paused: true, Fence: 1}.save(r.n.dir(req.Sandbox)))
	r.d.fails["pause"] = errors.New("not now")
	r.restart()
	m := r.d.machine(req.Sandbox)
	m.set(false) // nor did it half
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotDisk))
	if !m.isPaused() {
		t.Error("it runs, which its user does not want")
	}
}
