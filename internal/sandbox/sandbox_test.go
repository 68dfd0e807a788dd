package sandbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"cloche.dev/cloche/internal/sandbox"
)

var update = flag.Bool("update", false, "rewrite the golden file of the transition table")

var verbs = []sandbox.Verb{
	sandbox.VerbCreate, sandbox.VerbDelete, sandbox.VerbStop, sandbox.VerbStart, sandbox.VerbPause, sandbox.VerbResume, sandbox.VerbSuspend,
	sandbox.VerbRestore, sandbox.VerbWake, sandbox.VerbFork, sandbox.VerbSnapshot, sandbox.VerbRollback, sandbox.VerbExit, sandbox.VerbBuild,
}

// TestTableAnswers prints what every verb does in every state, so that a
// change of the lifecycle shows as a change of the golden file.
func TestTableAnswers(t *testing.T) {
	var b strings.Builder
	for _, from := range append([]sandbox.State{sandbox.StateNone}, sandbox.States...) {
		for _, verb := range verbs {
			tr, ok := sandbox.Find(from, verb)
			if !ok {
				continue
			}
			guard := ""
			if tr.Guard != sandbox.Always {
				guard = " if " + string(tr.Guard)
			}
			fmt.Fprintf(&b, "%-13s %-9s%s: %s -> %s, else %s\n", or(from, "(none)"), verb, guard, tr.Via, tr.To, tr.Else)
		}
	}
	const golden = "testdata/table.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), b.String()); d != "" {
		t.Errorf("the table's answers changed (go test -update rewrites the file):\n%s", d)
	}
}

func or(s sandbox.State, other string) string {
	if s == sandbox.StateNone {
		return other
	}
	return string(s)
}

func TestTableInvariants(t *testing.T) {
	known := map[sandbox.State]bool{sandbox.StateNone: true}
	for _, s := range sandbox.States {
		known[s] = true
	}
	reached := map[sandbox.State]bool{}
	seen := map[string]bool{}
	for _, tr := range sandbox.Transitions {
		name := fmt.Sprintf("%s from %q", tr.Verb, tr.From)
		if row := fmt.Sprintf("%s/%s/%s", tr.From, tr.Verb, tr.Guard); seen[row] {
			t.Errorf("%s: two rows with the same guard", name)
		} else {
			seen[row] = true
		}
		for _, s := range []sandbox.State{tr.From, tr.Via, tr.To, tr.Else} {
			if !known[s] {
				t.Errorf("%s: %q is no state", name, s)
			}
		}
		reached[tr.Via], reached[tr.To], reached[tr.Else] = true, true, true
		if tr.Verb == sandbox.VerbExit {
			continue // an observation has no operation under way
		}
		if !tr.Via.Transitional() {
			t.Errorf("%s: goes through %s, which is not transitional", name, tr.Via)
		}
		if tr.From.Transitional() && tr.Verb != sandbox.VerbDelete {
			t.Errorf("%s: only delete may interrupt an operation", name)
		}
		if tr.To.Transitional() {
			t.Errorf("%s: ends in %s, which is transitional", name, tr.To)
		}
	}
	for _, s := range sandbox.States {
		if !reached[s] {
			t.Errorf("%s can't be reached", s)
		}
	}
}

func TestDeleteFromEveryStateWithARow(t *testing.T) {
	for _, s := range sandbox.States {
		_, ok := sandbox.Find(s, sandbox.VerbDelete)
		if want := s != sandbox.StateDeleting && s != sandbox.StateDeleted; ok != want {
			t.Errorf("delete from %s: %v, want %v", s, ok, want)
		}
	}
}

func TestNothingLeavesDeleted(t *testing.T) {
	for _, verb := range verbs {
		if _, ok := sandbox.Find(sandbox.StateDeleted, verb); ok {
			t.Errorf("%s is possible on a deleted sandbox", verb)
		}
	}
}

func TestRefuse(t *testing.T) {
	e := sandbox.Refuse(sandbox.StateCreating, sandbox.VerbPause)
	if e.Class != sandbox.FailedPrecondition || e.Code != "wrong_state" || !e.Retryable || e.Hint == "" {
		t.Errorf("in a transitional state: %+v", e)
	}
	if e := sandbox.Refuse(sandbox.StateDeleted, sandbox.VerbPause); e.Retryable {
		t.Errorf("in a final state: %+v", e)
	}
}

var kinds = []string{
	sandbox.KindSandbox, sandbox.KindOperation, sandbox.KindSession, sandbox.KindSnapshot,
	sandbox.KindTemplate, sandbox.KindProject, sandbox.KindKey, sandbox.KindPolicy,
}

func TestIDs(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		for _, kind := range kinds {
			id := sandbox.NewID(kind)
			if !strings.HasPrefix(id, kind) || !sandbox.ValidID(kind, id) || seen[id] {
				t.Fatalf("NewID(%q) = %q", kind, id)
			}
			seen[id] = true
			for _, other := range kinds {
				if other != kind && sandbox.ValidID(other, id) {
					t.Fatalf("%q passes as %q", id, other)
				}
			}
		}
	}
	good := sandbox.NewID(sandbox.KindSandbox)
	for _, bad := range []string{"", "sbx_", good[:len(good)-1], good + "a", strings.ToUpper(good), good[:len(good)-1] + "1", good[:len(good)-1] + "/", " " + good} {
		if sandbox.ValidID(sandbox.KindSandbox, bad) {
			t.Errorf("%q is taken for an id", bad)
		}
	}
}

func FuzzValidID(f *testing.F) {
	f.Add("sbx_aaaaaaaaaaaaaaaaaaaa")
	f.Add("sbx_../../../../../../../")
	f.Fuzz(func(t *testing.T, s string) {
		if sandbox.ValidID(sandbox.KindSandbox, s) && (len(s) != 24 || strings.ContainsAny(s, "/.\x00 ")) {
			t.Errorf("%q is taken for an id", s)
		}
	})
}

func TestErrors(t *testing.T) {
	cause := errors.New("cause")
	e := sandbox.Errorf(sandbox.Unavailable, "x", "failed: %w", cause)
	if !e.Retryable || !errors.Is(e, cause) || e.Error() != "failed: cause" {
		t.Errorf("Errorf: %+v", e)
	}
	h := e.WithHint("do %s", "this").WithRetry(3)
	if h.Error() != "failed: cause (do this)" || h.RetryAfter != 3 || e.Hint != "" || !errors.Is(h, cause) {
		t.Errorf("WithHint: %+v, original %+v", h, e)
	}
	wrapped := fmt.Errorf("outer: %w", h)
	if sandbox.AsError(wrapped) != h || !sandbox.IsClass(wrapped, sandbox.Unavailable) || sandbox.IsClass(nil, sandbox.Unavailable) {
		t.Error("an Error is not found through a wrap")
	}
	for _, c := range []struct {
		err   error
		class sandbox.Class
		code  string
	}{
		{context.DeadlineExceeded, sandbox.Unavailable, "deadline_exceeded"},
		{context.Canceled, sandbox.Unavailable, "canceled"},
		{cause, sandbox.Internal, "internal"},
	} {
		if got := sandbox.AsError(c.err); got.Class != c.class || got.Code != c.code || !errors.Is(got, c.err) {
			t.Errorf("AsError(%v) = %+v", c.err, got)
		}
	}
	if sandbox.AsError(nil) != nil {
		t.Error("AsError(nil) is not nil")
	}
	b, err := json.Marshal(h)
	var back sandbox.Error
	if err != nil || json.Unmarshal(b, &back) != nil || back.Code != h.Code || back.Message != h.Message || back.Hint != h.Hint {
		t.Errorf("an Error does not survive JSON: %s %v", b, err)
	}
}

func TestResources(t *testing.T) {
	if err := sandbox.DefaultResources.Validate(); err != nil {
		t.Error(err)
	}
	for _, change := range []func(*sandbox.Resources){
		func(r *sandbox.Resources) { r.MilliCPU = sandbox.MinMilliCPU - 1 },
		func(r *sandbox.Resources) { r.MemoryMiB = sandbox.MaxMemoryMiB + 1 },
		func(r *sandbox.Resources) { r.DiskMiB = -1 },
	} {
		r := sandbox.DefaultResources
		change(&r)
		if err := r.Validate(); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

func TestRoles(t *testing.T) {
	want := map[sandbox.Role]string{
		sandbox.RoleAdmin:   "see change data template build_host keys",
		sandbox.RoleProject: "see change data template",
		sandbox.RoleRead:    "see",
		"":                  "",
		"root":              "",
	}
	for role, actions := range want {
		c := sandbox.Caller{KeyID: "k", Project: "p", Role: role}
		var may []string
		for _, a := range sandbox.Actions {
			if c.May(a) {
				may = append(may, string(a))
			}
			if err := c.Can(a); (err == nil) != c.May(a) || err != nil && !sandbox.IsClass(err, sandbox.Denied) {
				t.Errorf("%q %s: %v", role, a, err)
			}
		}
		if got := strings.Join(may, " "); got != actions {
			t.Errorf("%q may %q, want %q", role, got, actions)
		}
		if (c.Scope() == "") != (role == sandbox.RoleAdmin) {
			t.Errorf("%q has the scope %q", role, c.Scope())
		}
	}
}
