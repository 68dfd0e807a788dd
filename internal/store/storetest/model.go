package storetest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"cloche.dev/cloche/internal/sandbox"
)

// Model compares random histories of verbs, ends and observations with a
// simple model: the row at hand after each step, all of them after
// each history, the invariants at the end. Every history has a project of its own in one store.
func Model(t *testing.T, open Open) {
	clock := time.Unix(1_800_000_000, 0).UTC()
	s := open(t, func() time.Time { return clock })
	rapid.Check(t, func(r *rapid.T) {
		m := &machine{ctx: context.Background(), s: s, clock: &clock, rows: map[string]*row{}}
		m.prepare(r)
		r.Repeat(map[string]func(*rapid.T){
			"create":  m.create,
			"begin":   m.begin,
			"finish":  m.finish,
			"observe": m.observe,
			"":        func(r *rapid.T) { m.check(r, m.at) },
		})
		m.check(r, m.ids...)
	})
	if err := CheckInvariants(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

// machine is the model: what each row should be.
type machine struct {
	ctx     context.Context
	s       sandbox.Store
	clock   *time.Time
	project string
	rows    map[string]*row
	ids     []string
	ops     []modelOp
	at      string // the sandbox of the step at hand
}

type row struct {
	state      sandbox.State
	generation int64
	operation  string
}

type modelOp struct {
	id, sandbox string
	verb        sandbox.Verb
	generation  int64
}

func (m *machine) tick() time.Time {
	*m.clock = m.clock.Add(time.Second)
	return *m.clock
}

func (m *machine) prepare(r *rapid.T) {
	m.project = sandbox.NewID(sandbox.KindProject)
	if err := m.s.CreateProject(m.ctx, sandbox.Project{ID: m.project, Name: m.project, CreatedAt: m.tick()}); err != nil {
		r.Fatal(err)
	}
	if _, err := m.s.PutTemplate(m.ctx, sandbox.Template{Digest: digestA, Project: m.project, CreatedAt: m.tick()}, "base:latest"); err != nil {
		r.Fatal(err)
	}
}

func (m *machine) create(r *rapid.T) {
	sb, op, _, err := m.s.CreateSandbox(m.ctx, newSandbox(m.project, "base", m.tick()), newOp(sandbox.VerbCreate, m.tick()), sandbox.Idempotency{})
	if err != nil {
		r.Fatal(err)
	}
	m.rows[sb.ID] = &row{sandbox.StateCreating, 1, op.ID}
	m.ids, m.at = append(m.ids, sb.ID), sb.ID
	m.ops = append(m.ops, modelOp{op.ID, sb.ID, sandbox.VerbCreate, 1})
}

func (m *machine) pick(r *rapid.T) string {
	if len(m.ids) == 0 {
		r.Skip("no sandbox yet")
	}
	m.at = rapid.SampledFrom(m.ids).Draw(r, "sandbox")
	return m.at
}

func (m *machine) begin(r *rapid.T) {
	id := m.pick(r)
	verb := rapid.SampledFrom([]sandbox.Verb{
		sandbox.VerbDelete, sandbox.VerbPause, sandbox.VerbResume, sandbox.VerbStop, sandbox.VerbStart, sandbox.VerbSuspend, sandbox.VerbFork,
		sandbox.VerbWake, sandbox.VerbSnapshot, sandbox.VerbExit, sandbox.VerbCreate,
	}).Draw(r, "verb")
	want := m.rows[id]
	t, ok := sandbox.Find(want.state, verb)
	ok = ok && t.Guard == sandbox.Always && verb != sandbox.VerbExit
	_, op, _, err := m.s.BeginVerb(m.ctx, m.project, id, verb, newOp(verb, m.tick()), sandbox.Idempotency{})
	if !ok {
		if !sandbox.IsClass(err, sandbox.FailedPrecondition) {
			r.Fatalf("%s from %s: %v", verb, want.state, err)
		}
		return
	}
	if err != nil {
		r.Fatalf("%s from %s: %v", verb, want.state, err)
	}
	want.state, want.operation = t.Via, op.ID
	want.generation++
	if op.Generation != want.generation {
		r.Fatalf("the operation has generation %d, the model %d", op.Generation, want.generation)
	}
	m.ops = append(m.ops, modelOp{op.ID, id, verb, op.Generation})
}

// finish ends any operation there ever was, in any state.
func (m *machine) finish(r *rapid.T) {
	if len(m.ops) == 0 {
		r.Skip("no operation yet")
	}
	op := rapid.SampledFrom(m.ops).Draw(r, "operation")
	to := rapid.SampledFrom(sandbox.States).Draw(r, "to")
	if rapid.Bool().Draw(r, "sensible") {
		for _, t := range sandbox.Transitions {
			if t.Via == m.rows[op.sandbox].state && t.Verb == op.verb {
				to = t.To
			}
		}
	}
	var failure *sandbox.Error
	if rapid.Bool().Draw(r, "fails") {
		failure = sandbox.Errorf(sandbox.Internal, "x", "x")
	}
	m.at = op.sandbox
	want := m.rows[op.sandbox]
	fresh := want.operation == op.id
	allowed := false
	for _, t := range sandbox.Transitions {
		end := t.To
		if failure != nil {
			end = t.Else
		}
		allowed = allowed || t.Via == want.state && t.Verb == op.verb && end == to && !to.Transitional()
	}
	err := m.s.FinishOperation(m.ctx, op.id, to, nil, failure)
	switch {
	case !fresh:
		if !sandbox.IsClass(err, sandbox.Conflict) {
			r.Fatalf("a stale end: %v", err)
		}
	case !allowed:
		if !sandbox.IsClass(err, sandbox.Internal) {
			r.Fatalf("an end beside the table, %s to %s: %v", want.state, to, err)
		}
	case err != nil:
		r.Fatal(err)
	default:
		want.state, want.operation = to, ""
	}
}

func (m *machine) observe(r *rapid.T) {
	id := m.pick(r)
	want := m.rows[id]
	generation := want.generation - int64(rapid.IntRange(0, 1).Draw(r, "old"))
	t, ok := sandbox.Find(want.state, sandbox.VerbExit)
	ok = ok && generation == want.generation
	got, err := m.s.Observed(m.ctx, id, generation, sandbox.End{Reason: sandbox.EndCrashed, At: m.tick()})
	if err != nil || got != ok {
		r.Fatalf("observed from %s: %v %v", want.state, got, err)
	}
	if ok {
		want.state = t.To
	}
}

func (m *machine) check(r *rapid.T, ids ...string) {
	for _, id := range ids {
		want := m.rows[id]
		if want == nil {
			continue // nothing has happened yet
		}
		got, err := m.s.Sandbox(m.ctx, m.project, id)
		if err != nil || got.State != want.state || got.Generation != want.generation || got.Operation != want.operation {
			r.Fatalf("row %+v, %v; model %+v", got, err, want)
		}
	}
}

// CheckInvariants tells what in a store contradicts itself.
func CheckInvariants(ctx context.Context, s sandbox.Store) error {
	open := map[string]sandbox.Operation{}
	ops, err := s.Unfinished(ctx)
	if err != nil {
		return err
	}
	for _, op := range ops {
		open[op.ID] = op
	}
	busy := 0
	for page := (sandbox.Page{Limit: 500}); ; {
		list, next, err := s.Sandboxes(ctx, "", sandbox.SandboxFilter{}, page)
		if err != nil {
			return err
		}
		for _, sb := range list {
			if sb.State.Transitional() != (sb.Operation != "") {
				return fmt.Errorf("%s is %s with the operation %q", sb.ID, sb.State, sb.Operation)
			}
			if sb.Operation == "" {
				continue
			}
			busy++
			op, ok := open[sb.Operation]
			if !ok || op.Sandbox != sb.ID || op.Generation != sb.Generation {
				return fmt.Errorf("%s has generation %d and the operation %+v", sb.ID, sb.Generation, op)
			}
		}
		if next == "" {
			break
		}
		page.Token = next
	}
	if busy != len(open) {
		return fmt.Errorf("%d operations are open and %d sandboxes have one", len(open), busy)
	}
	return nil
}
