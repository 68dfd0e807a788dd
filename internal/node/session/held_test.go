package session

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

// world is machines of several sandboxes, each with a guest of its own.
type world struct {
	*rig
	mu    sync.Mutex
	links map[string]*link
}

func newWorld(t testing.TB) *world {
	w := &world{links: map[string]*link{}}
	w.rig = newRig(t, func(*fakeProc, []string) {}, func(o *Options) { o.Guests = w })
	return w
}

// Client implements Guests.
func (w *world) Client(ctx context.Context, id string) (guestv1connect.GuestClient, error) {
	w.mu.Lock()
	l := w.links[id]
	w.mu.Unlock()
	if l == nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "guest_unreachable", "no machine")
	}
	return l.Client(ctx, id)
}

// plug gives a sandbox a machine with this guest.
func (w *world) plug(id string, g *fakeGuest) *fakeGuest {
	l := newLink(w.t, g.serve(w.t))
	w.mu.Lock()
	w.links[id] = l
	w.mu.Unlock()
	return g
}

// unplug closes the link to the machine, and thereby ends every connection.
func (w *world) unplug(id string) {
	w.mu.Lock()
	l := w.links[id]
	delete(w.links, id)
	w.mu.Unlock()
	if l != nil {
		l.setBroken(true)
	}
}

func (w *world) run(id string) Ref {
	w.t.Helper()
	ref := w.register(id)
	_, err := w.Start(ctx(w.t), ref)
	must(w.t, err)
	return ref
}

func (w *world) machine() (string, *fakeGuest) {
	id := sandbox.NewID(sandbox.KindSandbox)
	return id, w.plug(id, newGuest(func(*fakeProc, []string) {}))
}

// snapshot does what a node does for a memory snapshot.
func (w *world) snapshot(id string, g *fakeGuest, late func()) (*fakeGuest, []sandbox.Session) {
	w.t.Helper()
	must(w.t, w.Barrier(ctx(w.t), id))
	w.unplug(id)
	if late != nil {
		late() // what is written after the barrier stays in the guest
	}
	from, err := w.Living(ctx(w.t), id)
	must(w.t, err)
	return g.snapshot(), from
}

func (w *world) restart() {
	w.t.Helper()
	w.stop()
	w.open()
}

func (w *world) expect(ref Ref, from uint64, all string, kind Kind) told {
	w.t.Helper()
	got := w.read(ref, from)
	if string(got.all) != all || got.last.Kind != kind {
		w.t.Fatalf("session %s: %q, then %s %+v", ref.Session, got.all, got.last.Kind, got.last.Loss)
	}
	return got
}

func wantCode(t testing.TB, err error, code string) {
	t.Helper()
	if sandbox.AsError(err) == nil || sandbox.AsError(err).Code != code || !sandbox.IsClass(err, sandbox.FailedPrecondition) {
		t.Fatalf("%v, want %s", err, code)
	}
}

// TestSuspendAndRestore: sessions go on over it as if nothing had been, also
// when the node is started anew meanwhile.
func TestSuspendAndRestore(t *testing.T) {
	for _, restart := range []bool{false, true} {
		w := newWorld(t)
		id, g := w.machine()
		goes, ends, fresh := w.run(id), w.run(id), w.register(id)
		g.say(t, goes.Session, "before ")
		g.say(t, ends.Session, "all")
		snap, _ := w.snapshot(id, g, func() {
			g.say(t, goes.Session, "behind the barrier ")
			g.end(t, ends.Session, 4)
		})
		live := make(chan told, 1)
		if !restart {
			go func() {
				got, err := readSession(ctx(t), w.Manager, goes, 0)
				if err != nil {
					t.Error(err)
				}
				live <- got
			}()
		}
		for range 2 {
			must(t, w.MachineHeld(ctx(t), id))
		}
		if restart {
			w.restart()
		}
		for _, ref := range []Ref{goes, ends, fresh} {
			st, err := w.State(ref)
			if err != nil || !st.Held || st.Status.Ended() || ref == goes && st.End != 7 {
				t.Fatalf("%+v %v", st, err)
			}
		}
		e, err := w.get(goes)
		must(t, err)
		e.mu.Lock()
		open, follower := e.log != nil && restart, e.follower != nil
		e.mu.Unlock()
		if open || follower {
			t.Errorf("held, it has log %v, follower %v", open, follower)
		}
		_, err = w.Start(ctx(t), fresh)
		wantCode(t, err, "machine_held")
		_, err = w.Stdin(ctx(t), goes, 0, []byte("x"), false)
		wantCode(t, err, "machine_held")
		wantCode(t, w.Signal(ctx(t), goes, 15), "machine_held")

		w.plug(id, snap)
		must(t, w.MachineReady(ctx(t), id))
		if st, err := w.State(goes); err != nil || st.Held || st.Status != Running {
			t.Fatalf("%+v %v", st, err)
		}
		snap.say(t, goes.Session, "after")
		snap.end(t, goes.Session, 0)
		got := w.expect(goes, 0, "before behind the barrier after", KindExit)
		if got.gaps != nil || got.start == nil {
			t.Fatalf("%+v", got)
		}
		if got := w.expect(ends, 0, "all", KindExit); got.last.Exit.Code != 4 {
			t.Fatalf("%+v", got.last.Exit)
		}
		if !restart {
			if got := <-live; string(got.all) != "before behind the barrier after" || got.last.Kind != KindExit {
				t.Fatalf("the reader that stayed: %q %s", got.all, got.last.Kind)
			}
		}
		_, err = w.Start(ctx(t), fresh)
		must(t, err)
		if !snap.has(fresh.Session) {
			t.Error("the guest was not asked to start it")
		}
		if _, err := os.Stat(w.heldFile(id)); err == nil {
			t.Error("the mark of being held is still there")
		}
	}
}

// TestSuspendedWhileStarting: the machine is let go between the question and
// the answer. Whether the command runs is known when it is back.
func TestSuspendedWhileStarting(t *testing.T) {
	for _, c := range []struct{ asked, answered, early bool }{{}, {early: true}, {asked: true}, {asked: true, early: true}, {asked: true, answered: true}} {
		w := newWorld(t)
		id, g := w.machine()
		other, ref := w.run(id), w.register(id)
		gate := make(chan struct{})
		g.mu.Lock()
		g.gate = gate
		g.mu.Unlock()
		started := make(chan error, 1)
		go func() {
			_, err := w.Start(ctx(t), ref)
			started <- err
		}()
		e, err := w.get(ref)
		must(t, err)
		<-g.arrived // the question, which waits at the gate
		if !e.running() {
			t.Fatal("it was asked for without being written down")
		}
		var snap *fakeGuest
		switch {
		case c.answered: // after the machine was let go
			must(t, w.MachineHeld(ctx(t), id))
			close(gate)
			must(t, <-started)
			w.unplug(id)
			snap = g.snapshot()
		default:
			if c.early { // it is let go before the answer fails
				must(t, w.MachineHeld(ctx(t), id))
			}
			w.unplug(id)
			if err := <-started; err == nil {
				t.Fatal("it started")
			}
			if snap = g.snapshot(); c.asked {
				close(gate)
				waitFor(t, func() bool { return g.has(ref.Session) })
				snap = g.snapshot()
			}
			must(t, w.MachineHeld(ctx(t), id))
		}
		e.mu.Lock()
		follower, status := e.follower, e.status
		e.mu.Unlock()
		if follower != nil || status.Ended() || status == Created {
			t.Fatalf("%+v: %s, follower %v", c, status, follower != nil)
		}
		w.plug(id, snap)
		must(t, w.MachineReady(ctx(t), id))
		if !c.asked {
			close(gate)
			if st, err := w.State(ref); err != nil || st.Status != Created {
				t.Fatal(st.Status, err)
			}
			_, err := w.Start(ctx(t), ref)
			must(t, err)
		}
		snap.say(t, ref.Session, "once")
		for _, r := range []Ref{ref, other} {
			snap.end(t, r.Session, 0)
		}
		w.expect(ref, 0, "once", KindExit)
		w.expect(other, 0, "", KindExit)
	}
}

// TestHeldMachineEnds: what will not be restored after all ends.
func TestHeldMachineEnds(t *testing.T) {
	w := newWorld(t)
	id, g := w.machine()
	ref := w.run(id)
	g.say(t, ref.Session, "abc")
	w.snapshot(id, g, nil)
	must(t, w.MachineHeld(ctx(t), id))
	w.restart()
	must(t, w.MachineEnded(ctx(t), id, sandbox.End{Reason: sandbox.EndStopped}))
	if got := w.expect(ref, 0, "abc", KindLost); got.last.Loss.Reason != "stopped" {
		t.Fatalf("%+v", got.last.Loss)
	}
	if st, err := w.State(ref); err != nil || st.Held || st.End != 3 {
		t.Fatalf("%+v %v", st, err)
	}
	_, err := w.Start(ctx(t), w.register(id))
	wantCode(t, err, "machine_ended")
}

// TestManySuspensions: a command that writes all the time, suspended and
// restored again and again, the node killed or not, links cut: its log is what
// it wrote.
func TestManySuspensions(t *testing.T) {
	w := newWorld(t)
	id, g := w.machine()
	ref := w.run(id)
	rng := rand.New(rand.NewPCG(3, 4))
	var want []byte
	for round := range 12 {
		p, err := g.proc(ref.Session)
		must(t, err)
		stop, stopped := make(chan struct{}), make(chan struct{})
		go func() { // runs as long as its machine
			defer close(stopped)
			for n := uint64(0); ; n++ {
				select {
				case <-stop:
					return
				default:
					b := noise(uint64(round)<<4+n, 1+int(n*7919%20_000))
					want = append(want, b...)
					p.write(n%2 == 0, b)
				}
			}
		}()
		time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond) // any time will do
		if round%3 == 0 {
			w.links[id].cut()
		}
		for err = w.Barrier(ctx(t), id); sandbox.IsClass(err, sandbox.Unavailable); { // it may meet the cut
			err = w.Barrier(ctx(t), id)
		}
		must(t, err)
		close(stop)
		<-stopped
		must(t, w.Barrier(ctx(t), id)) // so that there is room for what follows
		w.unplug(id)
		b := noise(uint64(round), rng.IntN(300_000)) // this nobody takes until the machine is back
		want = append(want, b...)
		p.write(true, b)
		snap := g.snapshot()
		must(t, w.MachineHeld(ctx(t), id))
		if round%4 == 1 {
			w.restart()
		}
		g = w.plug(id, snap)
		must(t, w.MachineReady(ctx(t), id))
	}
	g.end(t, ref.Session, 0)
	if got := w.read(ref, 0); !bytes.Equal(got.all, want) || got.gaps != nil || got.last.Kind != KindExit {
		t.Fatalf("%d of %d bytes, gaps %v, %s", len(got.all), len(want), got.gaps, got.last.Kind)
	}
	t.Logf("%d bytes", len(want))
}

func waitFor(t testing.TB, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it never came")
		}
	}
}
