package session

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// TestRollback: the sessions of the abandoned timeline are told and stay
// readable; what lives in the snapshot goes on as new ones.
func TestRollback(t *testing.T) {
	w := newWorld(t)
	id, g := w.machine()
	old := []Ref{w.run(id), w.run(id), w.run(id)}
	for _, ref := range old {
		g.say(t, ref.Session, "past ")
	}
	ended := w.run(id) // its exit is in the snapshot, and told on both timelines
	snap, from := w.snapshot(id, g, func() { g.end(t, ended.Session, 5) })
	w.plug(id, g)
	must(t, w.MachineReady(ctx(t), id))
	w.expect(ended, 0, "", KindExit)
	for _, ref := range old {
		g.say(t, ref.Session, "abandoned")
	}
	g.end(t, old[2].Session, 9)
	w.expect(old[2], 0, "past abandoned", KindExit)
	after := w.run(id) // not in the snapshot
	must(t, w.Barrier(ctx(t), id))
	w.unplug(id)
	must(t, w.MachineEnded(ctx(t), id, sandbox.End{Reason: sandbox.EndRolledBack}))

	made, err := w.Inherit(ctx(t), id, "prj_x", 12, from)
	must(t, err)
	w.plug(id, snap)
	must(t, w.MachineReady(ctx(t), id))
	for _, ref := range []Ref{old[0], old[1], after} {
		all := "past abandoned"
		if ref == after {
			all = ""
		}
		if got := w.expect(ref, 0, all, KindLost); got.last.Loss.Reason != "rolled_back" {
			t.Fatalf("%+v", got.last.Loss)
		}
	}
	if len(made) != 4 {
		t.Fatalf("%+v", made)
	}
	for _, s := range made {
		alias := s.Parent
		if alias == ended.Session {
			if got := w.expect(Ref{id, s.ID}, 0, "", KindExit); got.last.Exit.Code != 5 {
				t.Fatalf("%+v", got.last.Exit)
			}
			continue
		}
		if !slices.Contains(old, Ref{id, alias}) || s.ParentOffset != 5 || s.Sandbox != id || s.ID == alias || s.Process.Args[0] != "cmd" {
			t.Fatalf("%+v", s)
		}
		ref := Ref{id, s.ID}
		if st, err := w.State(ref); err != nil || st.Status != Running || st.Start == nil || st.Start.PID != 42 || st.First != 5 {
			t.Fatalf("%+v %v", st, err)
		}
		must(t, w.Signal(ctx(t), ref, 10))
		must(t, w.Resize(ctx(t), ref, sandbox.WindowSize{Rows: 1, Cols: 1}))
		snap.say(t, alias, "future")
		must(t, w.Barrier(ctx(t), id))
		snap.end(t, alias, 0)
		got := w.expect(ref, 0, "future", KindExit)
		if len(got.gaps) != 1 || got.gaps[0] != [2]uint64{0, 5} || got.start == nil {
			t.Fatalf("%+v", got)
		}
		if got := w.expect(ref, 5, "future", KindExit); got.gaps != nil {
			t.Fatalf("%+v", got)
		}
	}
	// The guest keeps none of them, and an ended namesake frees nothing that lives.
	waitFor(t, func() bool {
		return !snap.has(old[0].Session) && !snap.has(old[1].Session) && !snap.has(old[2].Session)
	})
}

// TestFork: parent and children go their own ways, children's children too,
// and what had ended here but not in the snapshot is not kept by the guest.
func TestFork(t *testing.T) {
	w := newWorld(t)
	parent, g := w.machine()
	ref, ended, told := w.run(parent), w.run(parent), w.run(parent)
	g.say(t, ref.Session, "0123456789")
	g.end(t, told.Session, 0)
	w.expect(told, 0, "", KindExit)
	waitFor(t, func() bool { return !g.has(told.Session) })
	snap, from := w.snapshot(parent, g, func() { g.end(t, ended.Session, 7) })
	snap.procs["ses_strangerstrangerstra"] = &fakeProc{exit: exited(0), moved: make(chan struct{}), room: make(chan struct{})}
	w.plug(parent, g)
	must(t, w.MachineReady(ctx(t), parent))
	if len(from) != 2 {
		t.Fatalf("%+v", from)
	}
	sbx, guest, gen := parent, snap, int64(2)
	for depth := range 3 {
		child := sandbox.NewID(sandbox.KindSandbox)
		made, err := w.Inherit(ctx(t), child, "prj_x", gen, from)
		must(t, err)
		w.plug(child, guest)
		must(t, w.MachineReady(ctx(t), child))
		byParent := map[string]Ref{}
		for _, s := range made {
			byParent[s.Parent] = Ref{child, s.ID}
		}
		if depth == 0 {
			if got := w.expect(byParent[ended.Session], 0, "", KindExit); got.last.Exit.Code != 7 {
				t.Fatalf("%+v", got.last.Exit)
			}
			waitFor(t, func() bool { return !guest.has("ses_strangerstrangerstra") })
		}
		goesOn := byParent[ref.Session]
		if depth > 0 {
			goesOn = Ref{child, made[0].ID}
		}
		guest.say(t, ref.Session, "abc")
		must(t, w.Barrier(ctx(t), child))
		next, list := w.snapshot(child, guest, nil)
		if len(list) != 1 || list[0].ID != goesOn.Session || list[0].Parent != ref.Session || list[0].ParentOffset != uint64(13+3*depth) {
			t.Fatalf("depth %d: %+v", depth, list)
		}
		w.plug(child, guest)
		must(t, w.MachineReady(ctx(t), child))
		guest.end(t, ref.Session, 0)
		w.expect(goesOn, 0, "abc", KindExit)
		sbx, guest, from = child, next, list
	}
	if sbx == parent {
		t.Fatal("no child")
	}
	g.end(t, ref.Session, 1)
	w.expect(ref, 0, "0123456789", KindExit)
}

// TestInheritAgain: whatever ends between, each session of a snapshot goes on
// once for each machine that is made of it.
func TestInheritAgain(t *testing.T) {
	w := newWorld(t)
	id, g := w.machine()
	for range 3 {
		ref := w.run(id)
		g.say(t, ref.Session, "12345678")
	}
	_, from := w.snapshot(id, g, nil)
	child := sandbox.NewID(sandbox.KindSandbox)
	some, err := w.Inherit(ctx(t), child, "prj_x", 3, from[:1]) // as if killed after the first
	must(t, err)
	w.restart()
	all, err := w.Inherit(ctx(t), child, "prj_x", 3, from)
	must(t, err)
	w.restart()
	again, err := w.Inherit(ctx(t), child, "prj_x", 3, from)
	must(t, err)
	if len(all) != 3 || all[0].ID != some[0].ID || w.Active(child) != 3 {
		t.Fatalf("%v %v", some, all)
	}
	for i := range all {
		if all[i].ID != again[i].ID || all[i].ParentOffset != 8 {
			t.Fatalf("%v %v", all, again)
		}
	}
	// Another machine of the same snapshot: the first ones are over.
	next, err := w.Inherit(ctx(t), child, "prj_x", 4, from)
	must(t, err)
	if next[0].ID == all[0].ID || w.Active(child) != 3 {
		t.Fatalf("%v %v", all, next)
	}
	if got := w.expect(Ref{child, all[0].ID}, 8, "", KindLost); got.last.Loss.Reason != "rolled_back" {
		t.Fatalf("%+v", got.last.Loss)
	}
	// One that ended is not what goes on.
	must(t, w.MachineEnded(ctx(t), child, sandbox.End{Reason: sandbox.EndCreateFailed}))
	third, err := w.Inherit(ctx(t), child, "prj_x", 4, from)
	must(t, err)
	if third[0].ID == next[0].ID || w.Active(child) != 3 {
		t.Fatalf("%v %v", next, third)
	}
	if _, err := w.Inherit(ctx(t), child, "prj_x", 5, []sandbox.Session{{ID: "../x"}}); !sandbox.IsClass(err, sandbox.Invalid) {
		t.Fatal(err)
	}
}

// TestInheritedIsUnknown: what the machine does not have after all is lost,
// and what is of an earlier time than the log ends.
func TestInheritedIsUnknown(t *testing.T) {
	w := newWorld(t)
	id, g := w.machine()
	ref := w.run(id)
	early, _ := w.snapshot(id, g, nil)
	w.plug(id, g)
	must(t, w.MachineReady(ctx(t), id))
	g.say(t, ref.Session, "later")
	_, from := w.snapshot(id, g, nil)
	child := sandbox.NewID(sandbox.KindSandbox)
	made, err := w.Inherit(ctx(t), child, "prj_x", 2, from)
	must(t, err)
	w.plug(child, newGuest(nil))
	must(t, w.MachineReady(ctx(t), child))
	if got := w.expect(Ref{child, made[0].ID}, 0, "", KindLost); got.last.Loss.Reason != ReasonUnknown || len(got.gaps) != 1 {
		t.Fatalf("%+v", got)
	}
	must(t, w.MachineHeld(ctx(t), id))
	w.plug(id, early)
	must(t, w.MachineReady(ctx(t), id))
	if got := w.expect(ref, 0, "later", KindLost); got.last.Loss.Reason != "rolled_back" {
		t.Fatalf("%+v", got.last.Loss)
	}
}

func TestTerminate(t *testing.T) {
	w := newWorld(t)
	id, g := w.machine()
	g.kill = func(p *fakeProc) { p.finish(exited(143)) }
	refs := []Ref{w.run(id), w.run(id)}
	must(t, w.Terminate(ctx(t), id, 20*time.Second))
	if w.Active(id) != 0 || g.signal != sigterm {
		t.Fatalf("%d are left", w.Active(id))
	}
	for _, ref := range refs {
		w.expect(ref, 0, "", KindExit)
	}
	g.kill = nil
	deaf := w.run(id)
	began := time.Now()
	must(t, w.Terminate(ctx(t), id, 50*time.Millisecond))
	if d := time.Since(began); d < 50*time.Millisecond || d > 10*time.Second || w.Active(id) != 1 {
		t.Errorf("%v", d)
	}
	must(t, w.MachineEnded(ctx(t), id, sandbox.End{Reason: sandbox.EndStopped}))
	if got := w.expect(deaf, 0, "", KindLost); got.last.Loss.Reason != "stopped" {
		t.Fatalf("%+v", got.last.Loss)
	}
}

// TestOldMeta: what an older Cloche wrote is read.
func TestOldMeta(t *testing.T) {
	w := newWorld(t)
	id, g := w.machine()
	ref := w.run(id)
	g.say(t, ref.Session, "abc")
	must(t, w.Barrier(ctx(t), id))
	w.stop()
	file := filepath.Join(w.sessionDir(ref), metaName)
	b, err := os.ReadFile(file)
	must(t, err)
	old := strings.Replace(string(b), `"version":2`, `"version":1`, 1)
	if old == string(b) {
		t.Fatalf("%s", b)
	}
	must(t, os.WriteFile(file, []byte(old), 0o600))
	w.open()
	must(t, w.MachineReady(ctx(t), id))
	g.end(t, ref.Session, 0)
	w.expect(ref, 0, "abc", KindExit)
}
