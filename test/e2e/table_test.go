package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/test/harness"
	"cloche.dev/cloche/test/linear"
)

// line is one line of the golden table.
type line struct{ state, verb, answer string }

// golden reads the table, which a person wrote.
func golden(t *testing.T) (all []line) {
	t.Helper()
	text, err := os.ReadFile("testdata/lifecycle.golden")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for l := range strings.Lines(string(text)) {
		f := strings.Fields(l)
		if len(f) == 0 || f[0] == "#" {
			continue
		}
		if len(f) < 3 || seen[f[0]+" "+f[1]] {
			t.Fatalf("a line that is no line, or there twice: %q", l)
		}
		seen[f[0]+" "+f[1]] = true
		all = append(all, line{f[0], f[1], strings.Join(f[2:], " ")})
	}
	return all
}

// walk is a table that is being walked.
type walk struct {
	t       *testing.T
	d       *harness.Daemon
	snap    string // of the sandbox that all others are made from
	foreign string // of another
	lines   []line
	walked  int
}

// of lists the lines of a state.
func (w *walk) of(state string) (list []line) {
	for _, l := range w.lines {
		if l.state == state {
			list = append(list, l)
		}
	}
	return list
}

// fresh is a new sandbox that runs and has a recovery point.
func (w *walk) fresh() box { return newBox(w.t, w.d, map[string]any{"snapshot": w.snap}) }

// send asks for a line's verb.
func (w *walk) send(b box, verb string) reply {
	name, which, _ := strings.Cut(verb, "~")
	to := map[string]string{"": w.snap, "foreign": w.foreign, "absent": "snp_aaaaaaaaaaaaaaaaaaaa"}[which]
	return b.ask(name, to, false)
}

// surprise reports an answer that the table does not have.
func (w *walk) surprise(l line, got string) {
	w.t.Helper()
	w.t.Errorf("%s %s: the table says %q, it is %q", l.state, l.verb, l.answer, got)
}

// refused sends every verb of a state that the table refuses, which must leave
// the sandbox as it is.
func (w *walk) refused(b box, state string) {
	w.t.Helper()
	var before api.Sandbox
	if state != "none" {
		before = b.get()
	}
	for _, l := range w.of(state) {
		if !strings.HasPrefix(l.answer, "refused ") {
			continue
		}
		w.walked++
		r := w.send(b, l.verb)
		if got := "refused " + r.refusedAs(); got != l.answer {
			w.surprise(l, got)
			continue
		}
		var p api.Problem
		r.into(w.t, &p)
		if transitional := strings.HasSuffix(strings.TrimSuffix(state, "_back"), "ing") && state != "running"; transitional != p.Retryable {
			w.t.Errorf("%s %s: retryable is %v: %s", l.state, l.verb, p.Retryable, r.body)
		}
	}
	if state == "none" {
		return
	}
	if now := b.get(); now.State != before.State || now.Operation != before.Operation || now.Epoch != before.Epoch {
		w.t.Errorf("refusals changed a sandbox that was %s: %+v", state, now)
	}
}

// accepted sends one verb that the table accepts and waits for what becomes of it.
func (w *walk) accepted(b box, l line) {
	w.t.Helper()
	w.walked++
	f := strings.Fields(l.answer)
	r := w.send(b, l.verb)
	if r.status != 202 {
		w.surprise(l, "refused "+r.refusedAs())
		return
	}
	a := r.answer(w.t)
	if a.Sandbox.Id != "" && string(a.Sandbox.State) != f[1] {
		w.surprise(l, "accepted "+string(a.Sandbox.State))
	}
	op := b.ended(a.Operation.Id)
	s := b.get()
	if op.State != api.OperationSucceeded || string(s.State) != f[2] || s.Operation != "" {
		w.surprise(l, fmt.Sprintf("%s: %+v, and the sandbox is %s", op.State, op.Error, s.State))
	}
	for _, c := range a.Children {
		w.t.Cleanup(func() { b.do("DELETE", "/v1/sandboxes/"+c.Sandbox.Id, nil) })
	}
}

// bring brings a running, paused, suspended, stopped or failed sandbox to a state.
func bring(b box, snap, state string) {
	b.t.Helper()
	for range 4 {
		s := b.state()
		if string(s) == strings.TrimSuffix(state, "+image") {
			return
		}
		switch {
		case s == api.SandboxFailed:
			b.rollback(snap)
		case s != api.SandboxRunning:
			b.verb("wake")
		case strings.HasPrefix(state, "failed"):
			if !b.kill() {
				b.t.Fatal("the machine's process was not found")
			}
			b.is(api.SandboxFailed)
		default:
			b.verb(map[string]string{"paused": "pause", "suspended": "suspend", "stopped": "stop"}[state])
		}
	}
	b.t.Fatalf("the sandbox can't be brought to %s, it is %s", state, b.state())
}

// TestTable walks the whole table of the lifecycle on real machines, and races
// verbs against each other. Nothing may surprise the hand-written table.
func TestTable(t *testing.T) {
	begin := time.Now()
	d := harness.Start(t)
	w := &walk{t: t, d: d, lines: golden(t)}
	first := newBox(t, d, nil)
	other := newBox(t, d, nil)
	w.snap, w.foreign = first.snapshot("s", "memory"), other.snapshot("f", "disk")
	first.verb("delete")
	t.Run("steady", func(t *testing.T) { w.t = t; w.steady(other) })
	t.Run("transitional", func(t *testing.T) { w.t = t; w.transitional() })
	if w.walked != len(w.lines) {
		t.Errorf("%d of %d lines were walked", w.walked, len(w.lines))
	}
	t.Logf("%d lines walked in %.1f s (load %s)", w.walked, time.Since(begin).Seconds(), load())
}

// steady walks the states in which no operation is under way.
func (w *walk) steady(other box) {
	t := w.t
	b := w.fresh()
	for _, state := range []string{"running", "paused", "suspended", "stopped", "failed+image"} {
		bring(b.in(t), w.snap, state)
		w.refused(b.in(t), state)
		for _, l := range w.of(state) {
			switch {
			case l.answer == "-":
				bring(b.in(t), w.snap, state)
				if b.in(t).sentry() != 0 {
					t.Errorf("a sandbox that is %s has a machine", state)
				}
				w.walked++
			case strings.HasPrefix(l.answer, "refused"):
			case strings.HasPrefix(l.answer, "ends"):
				bring(b.in(t), w.snap, state)
				if !b.kill() {
					t.Errorf("no machine to kill in %s", state)
				}
				b.in(t).is(api.SandboxFailed)
				if s := b.in(t).get(); s.End == nil || s.End.Reason != "killed" {
					t.Errorf("%s exit: the end is %+v", state, s.End)
				}
				w.walked++
			default:
				bring(b.in(t), w.snap, state)
				w.accepted(b.in(t), l)
				if l.verb == "delete" {
					b = w.fresh()
				}
			}
		}
	}
	b.in(t).verb("delete")
	w.refused(b.in(t), "deleted")
	w.walked += 1 // deleted exit: there is nothing to end
	none := b.in(t).other("sbx_aaaaaaaaaaaaaaaaaaaa")
	w.refused(none, "none")
	w.walked += 2 // none create: made every other sandbox here; none exit
	never := newBox(t, w.d, nil)
	never.kill()
	never.is(api.SandboxFailed)
	w.refused(never, "failed")
	w.walked++ // failed exit
	w.accepted(never, line{"failed", "delete", "accepted deleting deleted"})
	other.in(t).verb("delete")
}

// transitional holds every transitional state open at once, by a control
// process of the engine that stands still, and walks them all.
func (w *walk) transitional() {
	t := w.t
	from := map[string][2]string{ // state: where it comes from, by which verb
		"pausing": {"running", "pause"}, "resuming": {"paused", "resume"},
		"suspending": {"running", "suspend"}, "restoring": {"suspended", "restore"},
		"stopping": {"running", "stop"}, "starting": {"stopped", "start"},
		"forking": {"running", "fork"}, "snapshotting": {"running", "snapshot"}, "rolling_back": {"running", "rollback"},
	}
	boxes := map[string]box{}
	for state, f := range from {
		b := w.fresh()
		bring(b, w.snap, f[0])
		boxes[state] = b
	}
	thaw := freeze(t, w.d)
	defer thaw()
	for state, f := range from {
		b := boxes[state]
		if r := w.send(b, f[1]); r.status != 202 {
			t.Fatalf("%s: %s", state, r.body)
		} else if kids := r.answer(t).Children; len(kids) > 0 {
			boxes["creating"] = b.other(kids[0].Sandbox.Id)
		}
	}
	for state, b := range boxes {
		if s := b.state(); string(s) != state {
			t.Fatalf("%s can't be held open: it is %s", state, s)
		}
		w.refused(b, state)
	}
	deletes := map[string]string{} // sandbox: operation
	for state, b := range boxes {
		r := b.ask("delete", "", false)
		if r.status != 202 {
			w.surprise(line{state, "delete", "accepted deleting deleted"}, r.refusedAs())
			continue
		}
		deletes[b.id] = r.answer(t).Operation.Id
		w.walked++
	}
	last := boxes["rolling_back"]
	if s := last.state(); s != api.SandboxDeleting {
		t.Errorf("deleting can't be held open: it is %s", s)
	} else {
		w.refused(last, "deleting")
		if again := last.ask("delete", "", false).answer(t).Operation.Id; again != deletes[last.id] {
			t.Errorf("deleting delete: another operation: %s, %s", again, deletes[last.id])
		}
		w.walked++
	}
	thaw()
	for state, b := range boxes {
		if op := b.ended(deletes[b.id]); op.State != api.OperationSucceeded || b.state() != api.SandboxDeleted {
			w.surprise(line{state, "delete", "accepted deleting deleted"}, fmt.Sprint(op.State, op.Error))
		}
	}
}

// verbs are those that can be asked for of a sandbox that is there.
var verbs = []string{"pause", "resume", "suspend", "restore", "stop", "start", "wake", "snapshot", "fork", "rollback", "delete"}

// taken are the verbs that a state accepts; two others can't meet.
var taken = map[string]string{
	"running": "pause suspend stop snapshot fork rollback delete", "paused": "resume wake suspend stop snapshot rollback delete",
	"suspended": "restore wake rollback delete", "stopped": "start wake rollback delete",
}

// race is two verbs that are sent at once in a state.
type race struct{ state, one, two string }

// races lists every pair of which the state accepts one at least.
func races() (all []race) {
	for state, list := range taken {
		for i, one := range verbs {
			for _, two := range verbs[i:] {
				if f := strings.Fields(list); slices.Contains(f, one) || slices.Contains(f, two) {
					all = append(all, race{state, one, two})
				}
			}
		}
	}
	return all
}

// TestRacingVerbs sends every pair of verbs at once to running, paused,
// suspended and stopped sandboxes: an order of the two must explain both
// answers and what became of the sandbox.
func TestRacingVerbs(t *testing.T) {
	d := harness.Start(t)
	first := newBox(t, d, nil)
	snap := first.snapshot("s", "memory")
	first.verb("delete")
	all := races()
	rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	if !long() {
		all = all[:min(60, len(all))]
	}
	begin := time.Now()
	next := make(chan race, len(all))
	for _, r := range all {
		next <- r
	}
	close(next)
	var lanes sync.WaitGroup
	for range 3 {
		lanes.Go(func() {
			var o *overHTTP
			for r := range next {
				if o == nil {
					o = historyOf(newBox(t, d, map[string]any{"snapshot": snap}))
				}
				if !r.run(t, o, snap) {
					o = nil
				}
			}
			if o != nil {
				o.do("DELETE", o.path(""), nil)
			}
		})
	}
	lanes.Wait()
	t.Logf("%d pairs raced in %.1f s (load %s)", len(all), time.Since(begin).Seconds(), load())
}

// run races the pair on o, which runs; it tells whether o runs afterwards.
func (r race) run(t *testing.T, o *overHTTP, snap string) bool {
	ctx := context.Background()
	h := linear.Begun(snap)
	if verb := map[string]string{"paused": "pause", "suspended": "suspend", "stopped": "stop"}[r.state]; verb != "" {
		_, done := h.Ask(ctx, o, 0, linear.Ask{Verb: verb})
		<-done
	}
	var both sync.WaitGroup
	for i, verb := range []string{r.one, r.two} {
		a := linear.Ask{Verb: verb}
		if verb == "rollback" {
			a.To = snap
		}
		both.Go(func() {
			_, done := h.Ask(ctx, o, i+1, a)
			<-done
		})
	}
	both.Wait()
	o.orphans()
	home := o.home(h, snap)
	h.Settle(ctx, o)
	if err := h.Check(time.Minute); err != nil {
		t.Errorf("%s and %s of a sandbox that is %s: %v", r.one, r.two, r.state, err)
	}
	return home
}
