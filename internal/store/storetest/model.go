package storetest

import (
	"context"
	"testing"
	"time"

	"pgregory.net/rapid"

	"cloche.dev/cloche/internal/sandbox"
)

// Model compares random histories of verbs, ends, observations, checkpoints
// and snapshots' deletions with a simple model: the row at hand after each step, all of
// them after each history, the invariants at the end. Every history has a project
// of its own in one store.
func Model(t *testing.T, open Open) {
	clock := time.Unix(1_800_000_000, 0).UTC()
	s := open(t, func() time.Time { return clock })
	rapid.Check(t, func(r *rapid.T) {
		m := &machine{ctx: context.Background(), s: s, clock: &clock, rows: map[string]*row{}, snaps: map[string]*snap{}}
		m.prepare(r)
		r.Repeat(map[string]func(*rapid.T){
			"create":       m.create,
			"begin":        m.begin,
			"begin more":   m.begin,
			"finish":       m.finish,
			"finish newer": m.finishNewest,
			"observe":      m.observe,
			"checkpoint":   m.checkpoint,
			"checkpointed": m.checkpointed,
			"drop":         m.drop,
			"collect":      m.collect,
			"":             func(r *rapid.T) { m.check(r, m.at) },
		})
		m.check(r, m.ids...)
		m.checkSnaps(r)
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
	snaps   map[string]*snap
	ids     []string // of sandboxes
	names   []string // of snapshots, the gone ones too
	ops     []modelOp
	at      string // the sandbox of the step at hand
}

type row struct {
	state             sandbox.State
	generation, epoch int64
	operation         string
	wants             string // the snapshot of the operation under way
	image, base       string
	source, parent    string
}

type snap struct {
	sandbox, parent, operation string
	state                      sandbox.SnapshotState
	kind                       sandbox.SnapshotKind
	purpose                    sandbox.SnapshotPurpose
	replaces                   string
	epoch                      int64 // of a checkpoint's machine
}

// modelOp is an operation and the state that its sandbox came from.
type modelOp struct {
	op   sandbox.Operation
	from sandbox.State
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

// sample draws one of a list that grows with the history.
func sample(r *rapid.T, list []string, what string) string {
	if len(list) == 0 {
		r.Skip("none yet")
	}
	return rapid.SampledFrom(list).Draw(r, what)
}

func (m *machine) pick(r *rapid.T) string {
	m.at = sample(r, m.ids, "sandbox")
	return m.at
}

func (m *machine) create(r *rapid.T) {
	sb := newSandbox(m.project, "base", m.tick())
	want := &row{state: sandbox.StateCreating, generation: 1}
	code := ""
	if len(m.names) > 0 && rapid.Bool().Draw(r, "from a snapshot") {
		sb.Source = sample(r, m.names, "snapshot")
		want.source = sb.Source
		code = m.ready(sb.Source)
		if n := m.snaps[sb.Source]; n != nil {
			want.base = n.parent
			if n.purpose == sandbox.PurposeNamed {
				want.base = sb.Source
			}
		}
	}
	sb, op, _, err := m.s.CreateSandbox(m.ctx, sb, newOp(sandbox.VerbCreate, m.tick()), sandbox.Capacity{}, sandbox.Idempotency{})
	if e := sandbox.AsError(err); code != "" || err != nil {
		if e == nil || e.Code != code {
			r.Fatalf("create: %v, want %q", err, code)
		}
		return
	}
	want.operation = op.ID
	m.add(sb.ID, want, op)
	m.at = sb.ID
}

func (m *machine) add(id string, want *row, op sandbox.Operation) {
	m.rows[id] = want
	m.ids = append(m.ids, id)
	m.ops = append(m.ops, modelOp{op, sandbox.StateNone})
}

// ready is the code with which a snapshot is refused, "" for none.
func (m *machine) ready(id string) string {
	switch n := m.snaps[id]; {
	case n == nil:
		return "snapshot_not_found"
	case n.state != sandbox.SnapshotReady:
		return "snapshot_not_ready"
	}
	return ""
}

// related tells whether a snapshot lies in a sandbox's past.
func (m *machine) related(id, snapshot string) bool {
	for at := m.rows[id].base; at != ""; at = m.snaps[at].parent {
		if at == snapshot {
			return true
		}
		if m.snaps[at] == nil {
			break
		}
	}
	line := map[string]bool{}
	for todo := []string{id}; len(todo) > 0; todo = todo[1:] {
		want := m.rows[todo[0]]
		if line[todo[0]] || want == nil {
			continue
		}
		line[todo[0]] = true
		if want.parent != "" {
			todo = append(todo, want.parent)
		}
		if n := m.snaps[want.source]; n != nil {
			todo = append(todo, n.sandbox)
		}
	}
	return line[m.snaps[snapshot].sandbox]
}

// refusal is the code with which a verb is refused, "" for none.
func (m *machine) refusal(id string, verb sandbox.Verb, to string) string {
	want := m.rows[id]
	t, ok := sandbox.Find(want.state, verb)
	if !ok || verb == sandbox.VerbExit {
		return "wrong_state"
	}
	switch image := m.snaps[want.image]; {
	case t.Guard == sandbox.HasSnapshot && to == "":
		return string(t.Guard)
	case t.Guard == sandbox.HasSnapshot:
		if code := m.ready(to); code != "" {
			return code
		}
		if !m.related(id, to) {
			return string(t.Guard)
		}
	case t.Guard != sandbox.Always && (image == nil || image.state != sandbox.SnapshotReady),
		t.Guard == sandbox.HasSuspendedAs && image.kind != sandbox.SnapshotMemory:
		return string(t.Guard)
	}
	return ""
}

func (m *machine) begin(r *rapid.T) {
	id := m.pick(r)
	verb := rapid.SampledFrom([]sandbox.Verb{
		sandbox.VerbDelete, sandbox.VerbPause, sandbox.VerbResume, sandbox.VerbStop, sandbox.VerbStart, sandbox.VerbSuspend, sandbox.VerbRestore,
		sandbox.VerbFork, sandbox.VerbWake, sandbox.VerbSnapshot, sandbox.VerbRollback, sandbox.VerbExit, sandbox.VerbCreate,
	}).Draw(r, "verb")
	want := m.rows[id]
	b := bring(verb, m.tick())
	if verb == sandbox.VerbRollback && len(m.names) > 0 {
		b.To = sample(r, m.names, "snapshot")
	}
	code := m.refusal(id, verb, b.To)
	_, op, _, err := m.s.BeginVerb(m.ctx, m.project, id, verb, b, sandbox.Idempotency{})
	if e := sandbox.AsError(err); code != "" || err != nil {
		if e == nil || e.Code != code {
			r.Fatalf("%s from %s: %v, want %q", verb, want.state, err, code)
		}
		return
	}
	t, _ := sandbox.Find(want.state, verb)
	m.failSnap(want)
	m.ops = append(m.ops, modelOp{op, want.state})
	want.state, want.operation, want.wants = t.Via, op.ID, op.Snapshot
	want.generation++
	if op.Generation != want.generation || op.From != t.From {
		r.Fatalf("the operation is %+v, the model %+v", op, want)
	}
	if n := b.Snapshot; n != nil {
		m.snaps[n.ID] = &snap{sandbox: id, parent: want.base, operation: op.ID, state: sandbox.SnapshotCreating, kind: n.Kind, purpose: n.Purpose}
		m.names = append(m.names, n.ID)
	}
	for _, c := range b.Children {
		c.Operation.Generation, c.Operation.Sandbox = 1, c.Sandbox.ID
		m.add(c.Sandbox.ID, &row{
			state: sandbox.StateCreating, generation: 1, operation: c.Operation.ID, base: want.base, source: op.Snapshot, parent: id,
		}, c.Operation)
	}
}

// failSnap ends the snapshot that a row's operation was taking.
func (m *machine) failSnap(want *row) {
	if n := m.snaps[want.wants]; want.operation != "" && n != nil && n.operation == want.operation && n.state == sandbox.SnapshotCreating {
		n.state = sandbox.SnapshotFailed
	}
}

// finish ends any operation there ever was, in any state.
func (m *machine) finish(r *rapid.T) {
	if len(m.ops) == 0 {
		r.Skip("no operation yet")
	}
	m.end(r, rapid.SampledFrom(m.ops).Draw(r, "operation"))
}

// finishNewest ends one that is most likely under way.
func (m *machine) finishNewest(r *rapid.T) {
	if len(m.ops) == 0 {
		r.Skip("no operation yet")
	}
	m.end(r, m.ops[len(m.ops)-1-rapid.IntRange(0, min(2, len(m.ops)-1)).Draw(r, "back")])
}

func (m *machine) end(r *rapid.T, o modelOp) {
	m.at = o.op.Sandbox
	want := m.rows[m.at]
	out := m.outcome(r, o)
	fresh := want.operation == o.op.ID
	t, _ := sandbox.Find(o.from, o.op.Verb)
	fits := out.To == t.To
	if out.Failure != nil {
		fits = out.To == t.Else && !t.Else.Transitional() || out.End != nil && out.To == sandbox.StateFailed && t.Else.HasMachine()
	}
	n := m.snaps[o.op.Snapshot]
	own := n != nil && n.operation == o.op.ID && n.state == sandbox.SnapshotCreating
	err := m.s.FinishOperation(m.ctx, o.op.ID, out)
	switch {
	case !fresh:
		if !sandbox.IsClass(err, sandbox.Conflict) {
			r.Fatalf("a stale end: %v", err)
		}
		return
	case !fits || out.Failure == nil && own != (out.Snapshot != nil):
		if !sandbox.IsClass(err, sandbox.Internal) {
			r.Fatalf("an end beside the table, %s to %s: %v", want.state, out.To, err)
		}
		return
	case err != nil:
		r.Fatal(err)
	}
	if out.Failure != nil {
		m.failSnap(want)
	} else if own {
		n.state = sandbox.SnapshotReady
	}
	want.state, want.operation, want.wants = out.To, "", ""
	if out.Epoch != 0 {
		want.epoch = out.Epoch
	}
	if out.Base != nil {
		want.base = *out.Base
	}
	if out.Image != nil {
		want.image = *out.Image
	}
	if out.To == sandbox.StateDeleted {
		want.image = ""
	}
}

// outcome draws a sensible end of an operation, or a wild one.
func (m *machine) outcome(r *rapid.T, o modelOp) sandbox.Outcome {
	kind := rapid.SampledFrom([]string{"well", "well", "well", "fails", "lost", "wild", "wild failure"}).Draw(r, "how")
	t, _ := sandbox.Find(o.from, o.op.Verb)
	out := sandbox.Outcome{To: rapid.SampledFrom(sandbox.States).Draw(r, "to")}
	switch kind {
	case "well":
		out = well(o.op, m.tick())
		out.To = t.To
		return out
	case "fails", "lost":
		out.To = t.Else
	}
	if kind != "wild" {
		out.Failure = sandbox.Errorf(sandbox.Internal, "x", "x")
	}
	if kind == "lost" {
		out.To, out.End = sandbox.StateFailed, &sandbox.End{Reason: sandbox.EndCrashed, At: m.tick()}
	}
	return out
}

func (m *machine) observe(r *rapid.T) {
	id := m.pick(r)
	want := m.rows[id]
	epoch := want.epoch - int64(rapid.IntRange(0, 1).Draw(r, "old"))
	t, ok := sandbox.Find(want.state, sandbox.VerbExit)
	ok = ok && epoch == want.epoch
	got, err := m.s.Observed(m.ctx, id, epoch, sandbox.End{Reason: sandbox.EndCrashed, At: m.tick()})
	if err != nil || got != ok {
		r.Fatalf("observed from %s: %v %v", want.state, got, err)
	}
	if ok {
		want.state = t.To
	}
}
