package storetest

import (
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// size is what one sandbox of these cases takes.
var size = sandbox.Resources{MilliCPU: 1000, MemoryMiB: 100, DiskMiB: 1000}

// tryCreate asks for a sandbox of that size.
func (e *env) tryCreate(project string, host sandbox.Capacity) (string, error) {
	sb := newSandbox(project, "base", e.tick())
	sb.Resources = size
	sb, op, _, err := e.s.CreateSandbox(e.ctx, sb, e.newOp(sandbox.VerbCreate), host, sandbox.Idempotency{})
	if err == nil {
		e.finish(op)
	}
	return sb.ID, err
}

// ask begins a verb within a capacity and, when it is taken, ends it well.
func (e *env) ask(id string, verb sandbox.Verb, n int, host sandbox.Capacity) error {
	b := e.bring(verb)
	b.Capacity = host
	if verb == sandbox.VerbFork {
		b.Children = children(n, e.clock)
	}
	_, op, _, err := e.s.BeginVerb(e.ctx, "", id, verb, b, sandbox.Idempotency{})
	if err == nil {
		e.finish(op)
	}
	return err
}

func (e *env) full(err error, name string) {
	e.Helper()
	e.wants(err, sandbox.Quota, "quota_"+name)
	if sandbox.AsError(err).Hint == "" {
		e.Errorf("%v has no hint", err)
	}
}

func quotas(e *env) {
	var all sandbox.Capacity
	ids := make([]string, 3)
	for i := range ids {
		id, err := e.tryCreate(e.project, all)
		e.must(err)
		ids[i] = id
	}
	set := func(q sandbox.Quotas) {
		e.Helper()
		if p, err := e.s.SetQuotas(e.ctx, e.project, q); err != nil || p.Quotas != q || p.ID != e.project {
			e.Fatalf("%+v %v", p, err)
		}
	}
	for name, q := range map[string]sandbox.Quotas{
		"running": {Running: 3}, "milli_cpu": {MilliCPU: 3999}, "memory": {MemoryMiB: 399}, "disk": {DiskMiB: 3999},
	} {
		set(q)
		_, err := e.tryCreate(e.project, all)
		e.full(err, name)
		e.full(e.ask(ids[0], sandbox.VerbFork, 1, all), name)
	}
	e.replaysWhenFull(ids[0], set)
	set(sandbox.Quotas{Running: 5})
	e.full(e.ask(ids[0], sandbox.VerbFork, 3, all), "running")
	// A machine that is there may pause, resume, roll back and be saved, however
	// full the project is.
	set(sandbox.Quotas{Running: 1, MilliCPU: 1, MemoryMiB: 1})
	for _, verb := range []sandbox.Verb{sandbox.VerbPause, sandbox.VerbResume, sandbox.VerbSnapshot, sandbox.VerbSuspend} {
		e.must(e.ask(ids[0], verb, 0, all))
	}
	named := e.get(ids[0]).Base
	for verb, name := range map[sandbox.Verb]string{sandbox.VerbRestore: "running", sandbox.VerbWake: "running"} {
		e.full(e.ask(ids[0], verb, 0, all), name)
	}
	b := e.bring(sandbox.VerbRollback)
	b.To = named
	_, _, _, err := e.s.BeginVerb(e.ctx, e.project, ids[0], sandbox.VerbRollback, b, sandbox.Idempotency{})
	e.full(err, "running")
	set(sandbox.Quotas{Running: 3, Suspended: 1, Snapshots: 1})
	e.full(e.ask(ids[1], sandbox.VerbSuspend, 0, all), "suspended")
	e.full(e.ask(ids[1], sandbox.VerbStop, 0, all), "suspended")
	e.full(e.ask(ids[1], sandbox.VerbSnapshot, 0, all), "snapshots")
	e.must(e.ask(ids[0], sandbox.VerbRestore, 0, all))
	// One that is on its way there counts.
	e.begin(ids[0], sandbox.VerbSuspend)
	e.full(e.ask(ids[1], sandbox.VerbStop, 0, all), "suspended")
	set(sandbox.Quotas{DiskMiB: 3000})
	e.full(e.ask(ids[1], sandbox.VerbSnapshot, 0, all), "disk")
	set(sandbox.Quotas{})
	e.must(e.ask(ids[1], sandbox.VerbSnapshot, 0, all))
	_, err = e.s.SetQuotas(e.ctx, sandbox.NewID(sandbox.KindProject), sandbox.Quotas{})
	e.wants(err, sandbox.NotFound, "project_not_found")
	other := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: "born with", Quotas: sandbox.Quotas{Snapshots: 7}, CreatedAt: e.tick()}
	e.must(e.s.CreateProject(e.ctx, other))
	if list, err := e.s.Projects(e.ctx); err != nil || list[1].Quotas != other.Quotas {
		e.Errorf("%+v %v", list, err)
	}
}

// replaysWhenFull: what was promised is answered again, however full it is now.
func (e *env) replaysWhenFull(id string, set func(sandbox.Quotas)) {
	e.Helper()
	idem := sandbox.Idempotency{Key: "k"}
	fork := func() (sandbox.Operation, bool) {
		e.Helper()
		_, op, replayed, err := e.s.BeginVerb(e.ctx, e.project, id, sandbox.VerbFork, e.bring(sandbox.VerbFork), idem)
		e.must(err)
		return op, replayed
	}
	set(sandbox.Quotas{})
	op, _ := fork()
	set(sandbox.Quotas{Running: 1, DiskMiB: 1})
	if again, replayed := fork(); !replayed || again.ID != op.ID {
		e.Errorf("%+v %v", again, replayed)
	}
	e.finish(op)
	child := op.Children[0]
	e.must(e.s.FinishOperation(e.ctx, e.operationOf(child).ID, failed(sandbox.StateFailed)))
	e.deleted(child)
}

func capacity(e *env) {
	none := func(err error, name string) {
		e.Helper()
		e.wants(err, sandbox.NoCapacity, "no_capacity_"+name)
		if f := sandbox.AsError(err); !f.Retryable || f.RetryAfter != 30*time.Second || f.Hint == "" {
			e.Errorf("%+v", f)
		}
	}
	other := e.newProject("other")
	e.put(other, digestA, "base:latest")
	id, err := e.tryCreate(other, sandbox.Capacity{MilliCPU: 1000, MemoryMiB: 100})
	e.must(err)
	_, err = e.tryCreate(e.project, sandbox.Capacity{MemoryMiB: 199})
	none(err, "memory")
	_, err = e.tryCreate(e.project, sandbox.Capacity{MilliCPU: 1999})
	none(err, "cpu")
	tight := sandbox.Capacity{DiskFree: 9 << 30, DiskFloor: 10 << 30}
	_, err = e.tryCreate(e.project, tight)
	none(err, "disk")
	none(e.ask(id, sandbox.VerbSnapshot, 0, tight), "disk")
	none(e.ask(id, sandbox.VerbFork, 1, tight), "disk")
	none(e.ask(id, sandbox.VerbFork, 2, sandbox.Capacity{MemoryMiB: 200}), "memory")
	// The floor is there for those that must be saved.
	e.must(e.ask(id, sandbox.VerbSuspend, 0, tight))
	none(e.ask(id, sandbox.VerbRestore, 0, tight), "disk")
	second, err := e.tryCreate(e.project, sandbox.Capacity{MilliCPU: 1000, MemoryMiB: 100, DiskFree: 10 << 30, DiskFloor: 10 << 30})
	e.must(err)
	none(e.ask(id, sandbox.VerbRestore, 0, sandbox.Capacity{MemoryMiB: 199}), "memory")
	e.must(e.ask(second, sandbox.VerbStop, 0, sandbox.Capacity{MemoryMiB: 1, MilliCPU: 1}))
	e.must(e.ask(id, sandbox.VerbRestore, 0, sandbox.Capacity{MemoryMiB: 199}))
	none(e.ask(second, sandbox.VerbStart, 0, sandbox.Capacity{MilliCPU: 1999}), "cpu")
}

func usage(e *env) {
	has := func(project string, want sandbox.Usage) {
		e.Helper()
		if got, err := e.s.UsageOf(e.ctx, project); err != nil || got != want {
			e.Errorf("usage %+v, %v; want %+v", got, err, want)
		}
	}
	has(e.project, sandbox.Usage{})
	has("", sandbox.Usage{})
	walks := e.walks()
	want := sandbox.Usage{}
	for _, state := range sandbox.States {
		before, err := e.s.UsageOf(e.ctx, e.project)
		e.must(err)
		walks[state]()
		after, err := e.s.UsageOf(e.ctx, e.project)
		e.must(err)
		running, suspended := 1, 0
		switch state {
		case sandbox.StateSuspended, sandbox.StateStopped, sandbox.StateFailed:
			running, suspended = 0, 1
		case sandbox.StateDeleting, sandbox.StateDeleted:
			running = 0
		case sandbox.StateForking:
			running = 2 // and the child
		}
		r := sandbox.DefaultResources
		if got := after.Running - before.Running; got != running || after.MilliCPU-before.MilliCPU != running*r.MilliCPU || after.MemoryMiB-before.MemoryMiB != running*r.MemoryMiB {
			e.Errorf("%s adds %d running: %+v, %+v", state, got, before, after)
		}
		if got := after.Suspended - before.Suspended; got != suspended {
			e.Errorf("%s adds %d suspended", state, got)
		}
		want = after
	}
	other := e.newProject("other")
	e.put(other, digestA, "base:latest")
	has(other, sandbox.Usage{})
	_, err := e.tryCreate(other, sandbox.Capacity{})
	e.must(err)
	has(other, sandbox.Usage{Running: 1, MilliCPU: 1000, MemoryMiB: 100, DiskMiB: 1000})
	has(e.project, want)
	want.Running++
	want.MilliCPU += 1000
	want.MemoryMiB += 100
	want.DiskMiB += 1000
	has("", want)
	// Sizes are summed before they are rounded up: 2 × (3 MiB + 1 byte).
	third := e.newProject("third")
	e.put(third, digestA, "base:latest")
	id, err := e.tryCreate(third, sandbox.Capacity{})
	e.must(err)
	for range 2 {
		e.must(e.ask(id, sandbox.VerbSnapshot, 0, sandbox.Capacity{}))
	}
	has(third, sandbox.Usage{Running: 1, MilliCPU: 1000, MemoryMiB: 100, DiskMiB: 1007, Snapshots: 2})
	e.must(e.ask(id, sandbox.VerbDelete, 0, sandbox.Capacity{}))
	has(third, sandbox.Usage{DiskMiB: 7, Snapshots: 2})
}

func backup(e *env) {
	sb := e.running()
	path := filepath.Join(e.TempDir(), "copy")
	e.must(e.s.Backup(e.ctx, path))
	st, err := os.Stat(path)
	if err != nil || st.Size() == 0 || st.Mode().Perm() != 0o600 {
		e.Errorf("%v %v", st, err)
	}
	e.wants(e.s.Backup(e.ctx, path), sandbox.Conflict, "backup_exists")
	if again, err := os.Stat(path); err != nil || again.Size() != st.Size() || !again.ModTime().Equal(st.ModTime()) {
		e.Errorf("the refused copy changed the file: %v", err)
	}
	if err := e.s.Backup(e.ctx, filepath.Join(e.TempDir(), "no", "copy")); !sandbox.IsClass(err, sandbox.Unavailable) {
		e.Errorf("no directory: %v", err)
	}
	e.get(sb.ID)
}

// drivers asks for one that works, one that doesn't, one that nobody knows of
// yet and one that is not there.
func drivers(e *env) {
	host := sandbox.Capacity{Drivers: []sandbox.DriverStatus{
		{Name: "works", State: sandbox.DriverReady, Default: true}, {Name: "fails", State: sandbox.DriverUnavailable, Reason: "it can't boot"},
	}}
	idem := sandbox.Idempotency{Key: "k"}
	create := func(driver string, idem sandbox.Idempotency) (sandbox.Sandbox, bool, error) {
		sb := newSandbox(e.project, "base", e.tick())
		sb.Driver = driver
		sb, _, replayed, err := e.s.CreateSandbox(e.ctx, sb, e.newOp(sandbox.VerbCreate), host, idem)
		return sb, replayed, err
	}
	first, _, err := create("works", idem)
	if err != nil || first.Driver != "works" {
		e.Errorf("%+v %v", first, err)
	}
	if sb, _, err := create("", sandbox.Idempotency{}); err != nil || sb.Driver != "" {
		e.Errorf("whoever names none has the driver %q before there is a machine: %v", sb.Driver, err)
	}
	_, _, err = create("fails", sandbox.Idempotency{})
	e.wants(err, sandbox.FailedPrecondition, "driver_unavailable")
	_, _, err = create("other", sandbox.Idempotency{})
	e.wants(err, sandbox.Invalid, "unknown_driver")
	host.Drivers[0].State = sandbox.DriverProbing
	_, _, err = create("works", sandbox.Idempotency{})
	e.wants(err, sandbox.Unavailable, "driver_probing")
	if again, replayed, err := create("works", idem); err != nil || !replayed || again.ID != first.ID {
		e.Errorf("a repeated request is not answered as before: %+v %v %v", again, replayed, err)
	}
	host.Drivers = nil // a host that does not tell decides when it is asked for the machine
	if _, _, err := create("other", sandbox.Idempotency{}); err != nil {
		e.Error(err)
	}
}
