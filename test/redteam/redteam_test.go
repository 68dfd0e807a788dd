package redteam

import (
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/client"
)

// techniques are all of them.
var techniques = slices.Concat(nameTechniques, httpTechniques, packetTechniques)

func TestTable(t *testing.T) { tableCheck(t, techniques) }

// TestRedTeam tries every technique in a sandbox whose profile forbids it, and
// then in one where no rule is in its way, to show that it would arrive.
func TestRedTeam(t *testing.T) {
	a := newArena(t)
	var bypasses, stopped, controlled int
	for _, k := range techniques {
		t.Run(k.name, func(t *testing.T) {
			if places := a.try(t, "rules", k); len(places) > 0 {
				bypasses++
				t.Errorf("BYPASS: %s arrived at %s", k.what, strings.Join(places, ", "))
				return
			}
			stopped++
			if k.uncontrolled != "" {
				t.Logf("not controlled: %s", k.uncontrolled)
				return
			}
			if places := a.attempt(t, "open", k); len(places) == 0 {
				t.Errorf("the control: with no rule in its way it arrived nowhere either")
				return
			}
			controlled++
		})
	}
	t.Logf("%d techniques: %d stopped, %d bypasses, %d arrive where no rule is in their way", len(techniques), stopped, bypasses, controlled)
}

// try makes one attempt that must be stopped, and demands that it is known how.
func (a *arena) try(t *testing.T, profile string, k technique) (places []string) {
	t.Helper()
	tok, begin := token(), time.Now()
	results := a.do(t, profile, k.steps(a, tok))
	switch {
	case k.inside:
		if results[0].Err == "" {
			t.Errorf("the sandbox's own kernel let it go: %+v", results)
		} else {
			t.Logf("refused inside: %s", results[0].Err)
		}
	default:
		want := k.reason
		if want == "" {
			want = k.counter
		}
		a.demandRecord(t, a.boxes[profile], begin, want)
	}
	return a.arrived(tok)
}

// attempt makes one attempt and tells where it arrived, once it has.
func (a *arena) attempt(t *testing.T, profile string, k technique) (places []string) {
	t.Helper()
	tok := token()
	a.do(t, profile, k.steps(a, tok))
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
	t.Errorf("no refusal for the reason %q in the audit, only %q", reason, seen)
}

var _ = client.Options{}
