package redteam

import (
	"bytes"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// techniques are all of them.
var techniques = slices.Concat(nameTechniques, httpTechniques, confusionTechniques, packetTechniques, hostTechniques, secretTechniques)

// workers are how many try at once, each in a sandbox of its own.
const workers = 4

func TestTable(t *testing.T) { tableCheck(t, techniques) }

// TestRedTeam tries every technique in a sandbox whose profile forbids it, and
// then in one where no rule is in its way, to show that it would arrive.
func TestRedTeam(t *testing.T) {
	a := newArena(t, workers)
	var bypasses, stopped, controlled, own atomic.Int32
	next := make(chan technique)
	var wg sync.WaitGroup
	for _, box := range a.ruled {
		wg.Go(func() {
			for k := range next {
				t.Run(k.name, func(t *testing.T) {
					if places := a.try(t, box, k); len(places) > 0 {
						bypasses.Add(1)
						t.Errorf("BYPASS: %s arrived at %s", k.what, strings.Join(places, ", "))
						return
					}
					stopped.Add(1)
					switch {
					case k.own != nil:
						own.Add(1)
					case k.uncontrolled != "":
						t.Logf("not controlled: %s", k.uncontrolled)
					case len(a.attempt(t, a.open, k)) == 0:
						t.Errorf("the control: with no rule in its way it arrived nowhere either")
					default:
						controlled.Add(1)
					}
				})
			}
		})
	}
	for _, k := range techniques {
		next <- k
	}
	close(next)
	wg.Wait()
	t.Logf("%d techniques: %d stopped, %d bypasses; %d arrive where no rule is in their way, %d have a control of their own",
		len(techniques), stopped.Load(), bypasses.Load(), controlled.Load(), own.Load())
}

// try makes one attempt that must be stopped, and demands that it is known how.
func (a *arena) try(t *testing.T, box string, k technique) (places []string) {
	t.Helper()
	tok, begin := token(), time.Now()
	if k.own != nil {
		return k.own(t, a, box, tok)
	}
	results := a.doIn(t, box, k.steps(a, tok))
	switch {
	case k.inside:
		if results[0].Err == "" {
			t.Errorf("the sandbox's own kernel let it go: %+v", results)
		} else {
			t.Logf("refused inside: %s", results[0].Err)
		}
	case k.removed:
		if !bytes.Contains(results[0].Got, []byte("served ")) {
			t.Errorf("the request was not served: %s %q", results[0].Err, results[0].Got)
		}
	case k.reason != "":
		a.demandRecord(t, box, begin, k.reason)
	default:
		a.demandRecord(t, box, begin, k.counter)
	}
	if t.Failed() {
		t.Logf("what came of it inside: %+v", results)
	}
	return k.through(a.arrived(tok))
}

// through are the places where nothing of an attempt may arrive.
func (k technique) through(places []string) []string {
	return slices.DeleteFunc(places, func(p string) bool { return slices.Contains(k.legit, p) })
}

// attempt makes one attempt and tells where it arrived, once it has.
func (a *arena) attempt(t *testing.T, box string, k technique) (places []string) {
	t.Helper()
	tok := token()
	a.doIn(t, box, k.steps(a, tok))
	for end := time.Now().Add(3 * time.Second); len(places) == 0 && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		places = a.arrived(tok)
	}
	return places
}

// demandRecord waits for a line of the audit that tells of a refusal for this
// reason.
func (a *arena) demandRecord(t *testing.T, box string, since time.Time, reason string) {
	t.Helper()
	var seen []string
	patience := 3 * time.Second
	if strings.HasPrefix(reason, "packet:") {
		patience = 30 * time.Second // the kernel's counters are looked at now and then
	}
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		seen = seen[:0]
		for _, r := range a.audit(t, box, since) {
			if r.Verdict == "allowed" {
				continue
			}
			seen = append(seen, r.Reason)
			if r.Reason == reason || strings.HasPrefix(r.Reason, reason+":") {
				t.Logf("stopped: %s %s %s%s (rule %q, reason %s)", r.Kind, r.Method, r.Host, r.Path, r.Rule, r.Reason)
				return
			}
		}
	}
	t.Errorf("no refusal for the reason %q in the audit, only %.1000q", reason, strings.Join(seen, " "))
}
