package storetest

import (
	"slices"
	"time"

	"github.com/google/go-cmp/cmp"

	"cloche.dev/cloche/internal/sandbox"
)

func snapshots(e *env) {
	sb := e.running()
	b := e.bring(sandbox.VerbSnapshot)
	op := e.beginWith(sb.ID, sandbox.VerbSnapshot, b)
	want := sandbox.Snapshot{
		ID: b.Snapshot.ID, Project: e.project, Sandbox: sb.ID, Name: "named", Kind: sandbox.SnapshotMemory, Purpose: sandbox.PurposeNamed,
		State: sandbox.SnapshotCreating, Template: "base", Digest: digestA, Driver: sb.Driver, Resources: sb.Resources, Operation: op.ID,
		CreatedAt: b.Snapshot.CreatedAt,
	}
	if d := cmp.Diff(want, e.snapshot(want.ID)); d != "" || op.Snapshot != want.ID {
		e.Errorf("begun: %s", d)
	}
	at := e.tick()
	e.must(e.s.FinishOperation(e.ctx, op.ID, well(op, at)))
	want.State, want.SizeBytes, want.Needs, want.TakenAt = sandbox.SnapshotReady, 3<<20+1, taken("", at).Needs, &at
	if d := cmp.Diff(want, e.snapshot(want.ID)); d != "" {
		e.Errorf("ready: %s", d)
	}
	op = e.begin(sb.ID, sandbox.VerbSuspend)
	e.must(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateRunning)))
	if got := e.snapshot(op.Snapshot); got.State != sandbox.SnapshotFailed || got.TakenAt != nil {
		e.Errorf("failed: %+v", got)
	}
	op = e.begin(sb.ID, sandbox.VerbFork)
	e.begin(sb.ID, sandbox.VerbDelete)
	if got := e.snapshot(op.Snapshot); got.State != sandbox.SnapshotFailed {
		e.Errorf("superseded: %+v", got)
	}
	if got := e.get(op.Children[0]); got.State != sandbox.StateCreating {
		e.Errorf("the child is control's to fail: %+v", got)
	}
	if n := e.snapshot(want.ID); n.State != sandbox.SnapshotReady {
		e.Errorf("the delete took a named snapshot: %+v", n)
	}
	other := e.newProject("other")
	_, err := e.s.Snapshot(e.ctx, other, want.ID)
	e.wants(err, sandbox.NotFound, "snapshot_not_found")
	_, err = e.s.DeleteSnapshot(e.ctx, other, want.ID)
	e.wants(err, sandbox.NotFound, "snapshot_not_found")
	e.changesOf(want.ID, "creating", "ready")
	e.changesOf(op.Snapshot, "creating", "failed")
}

// changesOf compares the events of a snapshot.
func (e *env) changesOf(id string, want ...string) {
	e.Helper()
	list, err := e.s.Events(e.ctx, e.project, 0, 1000)
	e.must(err)
	var got []string
	for _, ev := range list {
		if data := decode[struct{ Snapshot, From, To string }](e, ev.Data); ev.Type == "snapshot.state" && data.Snapshot == id {
			if len(got) > 0 && got[len(got)-1] != data.From || ev.Sandbox == "" {
				e.Errorf("event %+v after %v", ev, got)
			}
			got = append(got, data.To)
		}
	}
	if !slices.Equal(got, want) {
		e.Errorf("the events of %s are %v, want %v", id, got, want)
	}
}

func snapshotLists(e *env) {
	a, b := e.running().ID, e.running().ID
	var named []string
	for range 3 {
		named = append([]string{e.do(a, sandbox.VerbSnapshot).Snapshot}, named...)
	}
	own := e.do(b, sandbox.VerbSuspend).Snapshot
	other := e.newProject("other")
	list := func(project string, f sandbox.SnapshotFilter) (ids []string) {
		e.Helper()
		for page := (sandbox.Page{Limit: 2}); ; {
			rows, next, err := e.s.Snapshots(e.ctx, project, f, page)
			e.must(err)
			for _, n := range rows {
				ids = append(ids, n.ID)
			}
			if next == "" {
				return ids
			}
			page.Token = next
		}
	}
	for _, c := range []struct {
		project string
		filter  sandbox.SnapshotFilter
		want    []string
	}{
		{e.project, sandbox.SnapshotFilter{}, append([]string{own}, named...)},
		{"", sandbox.SnapshotFilter{Sandbox: a}, named},
		{e.project, sandbox.SnapshotFilter{Purposes: []sandbox.SnapshotPurpose{sandbox.PurposeSuspend, sandbox.PurposeStop}}, []string{own}},
		{e.project, sandbox.SnapshotFilter{Sandbox: b, Purposes: []sandbox.SnapshotPurpose{sandbox.PurposeNamed}}, nil},
		{e.project, sandbox.SnapshotFilter{States: []sandbox.SnapshotState{sandbox.SnapshotCreating}}, nil},
		{other, sandbox.SnapshotFilter{}, nil},
	} {
		if got := list(c.project, c.filter); !slices.Equal(got, c.want) {
			e.Errorf("%+v: %v, want %v", c.filter, got, c.want)
		}
	}
	_, _, err := e.s.Snapshots(e.ctx, e.project, sandbox.SnapshotFilter{}, sandbox.Page{Token: "x"})
	e.wants(err, sandbox.Invalid, "bad_page_token")
}

// tree: first ← second ← third; second goes.
func tree(e *env) {
	a := e.running().ID
	first, second := e.do(a, sandbox.VerbSnapshot).Snapshot, e.do(a, sandbox.VerbSnapshot).Snapshot
	from := e.createFrom(second)
	e.finish(e.operationOf(from))
	if got := e.get(from).Base; got != second {
		e.Errorf("the base of what was made from it is %q", got)
	}
	third := e.do(a, sandbox.VerbSnapshot).Snapshot
	for id, parent := range map[string]string{first: "", second: first, third: second} {
		if got := e.snapshot(id).Parent; got != parent {
			e.Errorf("the parent of %s is %q, want %q", id, got, parent)
		}
	}
	gone, err := e.s.DeleteSnapshot(e.ctx, e.project, second)
	if err != nil || gone.State != sandbox.SnapshotDeleting {
		e.Fatalf("%+v %v", gone, err)
	}
	if again, err := e.s.DeleteSnapshot(e.ctx, e.project, second); err != nil || again.State != sandbox.SnapshotDeleting {
		e.Errorf("again: %+v %v", again, err)
	}
	if n, base := e.snapshot(third), e.get(from).Base; n.Parent != first || base != first {
		e.Errorf("the tree was not closed: %q %q", n.Parent, base)
	}
	e.wants(e.s.RemoveSnapshot(e.ctx, first), sandbox.FailedPrecondition, "wrong_state")
	e.must(e.s.RemoveSnapshot(e.ctx, second))
	e.must(e.s.RemoveSnapshot(e.ctx, second))
	_, err = e.s.Snapshot(e.ctx, e.project, second)
	e.wants(err, sandbox.NotFound, "snapshot_not_found")
	e.changesOf(second, "creating", "ready", "deleting", "deleted")
}

func snapshotInUse(e *env) {
	a := e.running().ID
	first := e.do(a, sandbox.VerbSnapshot).Snapshot
	inUse := func(id string) {
		e.Helper()
		_, err := e.s.DeleteSnapshot(e.ctx, e.project, id)
		e.wants(err, sandbox.FailedPrecondition, "snapshot_in_use")
	}
	inUse(first) // its image
	second := e.do(a, sandbox.VerbSnapshot).Snapshot
	op := e.rollback(a, first)
	inUse(first) // an operation goes back to it
	e.must(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateRunning)))
	child := e.createFrom(first)
	inUse(first) // being created from
	e.finish(e.operationOf(child))
	taking := e.begin(child, sandbox.VerbSnapshot)
	inUse(taking.Snapshot) // being taken
	_, err := e.s.DeleteTemplate(e.ctx, e.project, digestA)
	e.wants(err, sandbox.FailedPrecondition, "template_in_use")
	_, err = e.s.DeleteSnapshot(e.ctx, e.project, first)
	e.must(err)
	_, err = e.s.DeleteSnapshot(e.ctx, e.project, e.do(e.running().ID, sandbox.VerbSuspend).Snapshot)
	e.wants(err, sandbox.FailedPrecondition, "snapshot_not_named")
	// A snapshot outlives its sandbox, and holds its template.
	for _, id := range []string{a, child} {
		e.deleted(id)
	}
	if n := e.snapshot(second); n.State != sandbox.SnapshotReady {
		e.Errorf("%+v", n)
	}
	list, _, err := e.s.Sandboxes(e.ctx, e.project, sandbox.SandboxFilter{States: []sandbox.State{sandbox.StateSuspended}}, sandbox.Page{})
	e.must(err)
	for _, sb := range list {
		e.deleted(sb.ID)
	}
	_, err = e.s.DeleteTemplate(e.ctx, e.project, digestA)
	e.wants(err, sandbox.FailedPrecondition, "template_in_use")
	_, err = e.s.DeleteSnapshot(e.ctx, e.project, second)
	e.must(err)
}

func garbage(e *env) {
	collected := func(want ...string) {
		e.Helper()
		list, err := e.s.GarbageSnapshots(e.ctx, 100)
		e.must(err)
		var got []string
		for _, n := range list {
			if n.State != sandbox.SnapshotDeleting {
				e.Errorf("%+v", n)
			}
			got = append(got, n.ID)
			e.must(e.s.RemoveSnapshot(e.ctx, n.ID))
		}
		if slices.Sort(got); !slices.Equal(got, slices.Sorted(slices.Values(want))) {
			e.Errorf("garbage %v, want %v", got, want)
		}
	}
	a := e.running().ID
	named := e.do(a, sandbox.VerbSnapshot).Snapshot
	suspended := e.do(a, sandbox.VerbSuspend).Snapshot
	collected()
	e.do(a, sandbox.VerbRestore)
	collected() // still the recovery point
	stopped := e.do(a, sandbox.VerbStop).Snapshot
	collected(suspended)
	e.do(a, sandbox.VerbStart)
	op := e.begin(a, sandbox.VerbSuspend)
	collected() // being taken
	e.must(e.s.FinishOperation(e.ctx, op.ID, failed(sandbox.StateRunning)))
	collected(op.Snapshot)
	fork := e.do(a, sandbox.VerbFork)
	collected() // its children are being created from it
	e.must(e.s.FinishOperation(e.ctx, e.operationOf(fork.Children[0]).ID, failed(sandbox.StateFailed)))
	collected(fork.Snapshot)
	// A rollback under way holds what it goes back to, named or not.
	back := e.rollback(a, stopped)
	e.begin(a, sandbox.VerbDelete)
	collected() // deleting: still its image
	if got, err := e.s.Operation(e.ctx, e.project, back.ID); err != nil || got.Error == nil || got.Error.Code != "superseded" {
		e.Errorf("%+v %v", got, err)
	}
	e.finish(e.operationOf(a))
	collected(stopped)
	e.snapshot(named)
	if list, err := e.s.GarbageSnapshots(e.ctx, 0); err != nil || len(list) != 0 {
		e.Errorf("limit 0: %v %v", list, err)
	}
}

func fork(e *env) {
	sb, create := e.create(map[string]string{"a": "b"})
	e.finish(create)
	expires := e.clock.Add(time.Hour)
	_, err := e.s.SetExpiry(e.ctx, e.project, sb.ID, &expires)
	e.must(err)
	base := e.do(sb.ID, sandbox.VerbSnapshot).Snapshot
	b := e.bring(sandbox.VerbFork)
	b.Children = children(3, e.clock)
	b.Children[1].Sandbox.Labels = map[string]string{"c": "d"}
	b.Children[1].Sandbox.Env = map[string]string{"X": "y"}
	idem := sandbox.Idempotency{Key: "k"}
	_, op, replayed, err := e.s.BeginVerb(e.ctx, e.project, sb.ID, sandbox.VerbFork, b, idem)
	e.must(err)
	if replayed || len(op.Children) != 3 || op.Snapshot != b.Snapshot.ID {
		e.Errorf("%+v", op)
	}
	parent := e.get(sb.ID)
	for i, id := range op.Children {
		c, under := e.get(id), e.operationOf(id)
		if c.ID != b.Children[i].Sandbox.ID || c.State != sandbox.StateCreating || c.Source != op.Snapshot || c.Parent != sb.ID || c.Base != base {
			e.Errorf("child %d: %+v", i, c)
		}
		if c.Digest != parent.Digest || c.Resources != parent.Resources || c.Policy != parent.Policy || !c.ExpiresAt.Equal(expires) || c.Image != "" || c.Epoch != 0 {
			e.Errorf("child %d: %+v", i, c)
		}
		if under.ID != b.Children[i].Operation.ID || under.Verb != sandbox.VerbCreate || under.Generation != 1 || under.Key != "key_test" || under.Sandbox != id {
			e.Errorf("child %d: %+v", i, under)
		}
		if want := map[bool]string{true: "", false: "b"}[i == 1]; c.Labels["a"] != want {
			e.Errorf("child %d has the labels %v", i, c.Labels)
		}
	}
	if c := e.get(op.Children[1]); c.Labels["c"] != "d" || c.Env["X"] != "y" {
		e.Errorf("%+v", c)
	}
	e.finish(op)
	for _, id := range op.Children {
		e.finish(e.operationOf(id))
	}
	again := e.bring(sandbox.VerbFork)
	_, op2, replayed, err := e.s.BeginVerb(e.ctx, e.project, sb.ID, sandbox.VerbFork, again, idem)
	if err != nil || !replayed || op2.ID != op.ID || op2.Snapshot != op.Snapshot || !slices.Equal(op2.Children, op.Children) {
		e.Errorf("replay: %+v %v %v", op2, replayed, err)
	}
	if _, err := e.s.Sandbox(e.ctx, e.project, again.Children[0].Sandbox.ID); !sandbox.IsClass(err, sandbox.NotFound) {
		e.Errorf("the replay made a child: %v", err)
	}
	// A child that can't be made undoes all of it.
	twice := e.bring(sandbox.VerbFork)
	twice.Children = append(twice.Children, twice.Children[0])
	_, _, _, err = e.s.BeginVerb(e.ctx, e.project, sb.ID, sandbox.VerbFork, twice, sandbox.Idempotency{})
	e.wants(err, sandbox.Conflict, "sandbox_exists")
	if got := e.get(sb.ID); got.State != sandbox.StateRunning {
		e.Errorf("%+v", got)
	}
}

func createFrom(e *env) {
	a := e.running()
	op := e.begin(a.ID, sandbox.VerbSnapshot)
	in := newSandbox(e.project, "other:thing", e.tick())
	in.Source, in.Resources, in.Parent = op.Snapshot, sandbox.Resources{MilliCPU: 1}, "forged"
	make := func(in sandbox.Sandbox) (sandbox.Sandbox, error) {
		sb, _, _, err := e.s.CreateSandbox(e.ctx, in, e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{})
		return sb, err
	}
	_, err := make(in)
	e.wants(err, sandbox.FailedPrecondition, "snapshot_not_ready")
	o := well(op, e.tick())
	o.Driver = "gvisor"
	e.must(e.s.FinishOperation(e.ctx, op.ID, o))
	e.deleted(a.ID)
	sb, err := make(in)
	e.must(err)
	if sb.Template != "base" || sb.Digest != digestA || sb.Resources != a.Resources || sb.Source != op.Snapshot || sb.Base != op.Snapshot || sb.Parent != "" {
		e.Errorf("%+v", sb)
	}
	other := e.newProject("other")
	in = newSandbox(other, "base", e.tick())
	in.Source = op.Snapshot
	_, err = make(in)
	e.wants(err, sandbox.NotFound, "snapshot_not_found")
}

func inherited(e *env) {
	a := e.running()
	before, _, err := e.s.CreateSession(e.ctx, e.session(a.ID), sandbox.Idempotency{})
	e.must(err)
	fork := e.do(a.ID, sandbox.VerbFork)
	child := fork.Children[0]
	op := e.operationOf(child)
	at := e.tick()
	after := sandbox.Session{
		ID: sandbox.NewID(sandbox.KindSession), Project: e.project, Sandbox: child, Generation: 1, CreatedAt: at, Parent: before.ID, ParentOffset: 1 << 63,
	}
	orphan := after
	orphan.ID, orphan.Parent = sandbox.NewID(sandbox.KindSession), sandbox.NewID(sandbox.KindSession)
	known := e.session(child)
	known.Process.Args = []string{"own"}
	o := well(op, at)
	o.Sessions = []sandbox.Session{after, orphan, known, after}
	e.must(e.s.FinishOperation(e.ctx, op.ID, o))
	got, err := e.s.Session(e.ctx, e.project, child, after.ID)
	e.must(err)
	after.Process, after.Key = before.Process, before.Key
	if d := cmp.Diff(after, got); d != "" {
		e.Errorf("it goes on as %s", d)
	}
	if got, err := e.s.Session(e.ctx, e.project, child, orphan.ID); err != nil || len(got.Process.Args) != 0 || got.Parent != orphan.Parent {
		e.Errorf("%+v %v", got, err)
	}
	if got, err := e.s.Session(e.ctx, e.project, child, known.ID); err != nil || got.Process.Args[0] != "own" {
		e.Errorf("%+v %v", got, err)
	}
	// One that is there is left alone.
	op = e.begin(child, sandbox.VerbPause)
	o = well(op, at)
	again := after
	again.ParentOffset = 1
	o.Sessions = []sandbox.Session{again}
	e.must(e.s.FinishOperation(e.ctx, op.ID, o))
	if got, err := e.s.Session(e.ctx, e.project, child, after.ID); err != nil || got.ParentOffset != after.ParentOffset {
		e.Errorf("%+v %v", got, err)
	}
}
