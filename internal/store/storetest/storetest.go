// Package storetest holds every sandbox.Store to one contract. A store's own
// tests call Run (and Model, which compares it with a simple model over random
// histories); stores that keep files also kill themselves with Child and
// CheckInvariants. A second store is done when it passes unchanged.
package storetest

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Open makes a fresh, empty store whose clock is now.
type Open func(t testing.TB, now func() time.Time) sandbox.Store

// Run holds the stores that open makes to the contract, case by case.
func Run(t *testing.T, open Open) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			e := newEnv(t, open)
			c.run(e)
		})
	}
}

// testCase is one clause of the contract.
type testCase struct {
	name string
	run  func(*env)
}

var cases = []testCase{
	{"projects have unique names", projects},
	{"keys are kept, revoked and replayed", keys},
	{"create pins the template and writes all rows", createSandbox},
	{"an unknown template or project is not found", createRefused},
	{"a repeated key answers the first rows", idempotency},
	{"a key with another request is a conflict", idempotencyMismatch},
	{"a key is forgotten after its life", idempotencyExpires},
	{"concurrent duplicates get one row", duplicates},
	{"every answer of the transition table", table},
	{"a later verb supersedes the one under way", supersede},
	{"an operation of an older generation can't finish", staleFinish},
	{"an operation ends once", finishTwice},
	{"an end may not leave the table", wrongEnd},
	{"an observed end is fenced by generation and state", observed},
	{"an outcome sets what a machine's coming and going changes", outcomes},
	{"an outcome must fit its operation", wrongOutcome},
	{"a lost machine ends a verb in failed", lost},
	{"a verb that fails goes back where it came from", wayBack},
	{"a verb brings what it needs and nothing else", wrongBegin},
	{"guards ask for the image and its kind", guards},
	{"a rollback goes to this sandbox's past", past},
	{"snapshots become ready with their operation, or fail with it", snapshots},
	{"snapshots are listed, paged and filtered", snapshotLists},
	{"snapshots form a tree that a deletion closes", tree},
	{"a snapshot in use stays", snapshotInUse},
	{"what nothing needs is garbage", garbage},
	{"a fork makes children and is replayed from its row", fork},
	{"a sandbox is created from a snapshot", createFrom},
	{"sessions go on from another timeline", inherited},
	{"a checkpoint becomes the image of the machine it was taken of", checkpoints},
	{"quotas bound what a project has", quotas},
	{"a driver is asked for by name", drivers},
	{"the host's capacity bounds all projects", capacity},
	{"usage follows every state", usage},
	{"a touch never goes back", touches},
	{"idle sandboxes are found", idle},
	{"a backup is a new file", backup},
	{"another project's rows are not found", projectsApart},
	{"lists are paged, newest first, without gaps", paging},
	{"a bad page token is invalid", badTokens},
	{"lists are filtered by label and state", filters},
	{"labels and expiry change until deletion", changes},
	{"expired sandboxes are found", expired},
	{"operations tell their progress until they end", progress},
	{"builds are operations without a sandbox", builds},
	{"events follow every change in order", events},
	{"sessions need a running sandbox", sessions},
	{"releases move and digests stay", templates},
	{"a template in use stays", templateInUse},
	{"egress profiles have versions and names", egressProfiles},
	{"a sandbox has an egress profile that stays", egressOfSandboxes},
	{"secrets are replaced by version", secrets},
	{"whatever changes an assignment raises its revision", egressStates},
	{"the sandboxes that an egress change concerns are found", egressUsers},
	{"prune removes what is past its keeping", prune},
	{"a cancelled call is unavailable and changes nothing", cancelled},
}

// env is one fresh store with a project and a template in it.
type env struct {
	*testing.T
	ctx     context.Context
	s       sandbox.Store
	clock   time.Time
	project string
}

const (
	digestA = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	digestB = "sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
)

func newEnv(t *testing.T, open Open) *env {
	e := &env{T: t, ctx: t.Context(), clock: time.Unix(1_800_000_000, 0).UTC()}
	e.s = open(t, func() time.Time { return e.clock })
	e.project = e.newProject("default")
	e.put(e.project, digestA, "base:latest")
	return e
}

func (e *env) newProject(name string) string {
	e.Helper()
	p := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: name, CreatedAt: e.tick()}
	e.must(e.s.CreateProject(e.ctx, p))
	return p.ID
}

func (e *env) put(project, digest, release string) sandbox.Template {
	e.Helper()
	t, err := e.s.PutTemplate(e.ctx, sandbox.Template{
		Digest: digest, Project: project, Source: "tar", SizeBytes: 5, CreatedAt: e.tick(),
		Config: sandbox.RuntimeConfig{User: "user", Env: map[string]string{"A": "b"}},
	}, release)
	e.must(err)
	return t
}

// tick moves the clock on, so that rows have an order.
func (e *env) tick() time.Time {
	e.clock = e.clock.Add(time.Second)
	return e.clock
}

func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// wants fails unless err has the class and code.
func (e *env) wants(err error, class sandbox.Class, code string) {
	e.Helper()
	if got := sandbox.AsError(err); got == nil || got.Class != class || got.Code != code {
		e.Fatalf("got %v, want %s %s", err, class, code)
	}
}

func (e *env) newOp(verb sandbox.Verb) sandbox.Operation { return newOp(verb, e.tick()) }

func newOp(verb sandbox.Verb, at time.Time) sandbox.Operation {
	return sandbox.Operation{ID: sandbox.NewID(sandbox.KindOperation), Verb: verb, Key: "key_test", CreatedAt: at}
}

func newSandbox(project, template string, at time.Time) sandbox.Sandbox {
	return sandbox.Sandbox{
		ID: sandbox.NewID(sandbox.KindSandbox), Project: project, Template: template, Resources: sandbox.DefaultResources, Policy: sandbox.DefaultPolicy,
		CreatedAt: at,
	}
}

// create inserts a sandbox with labels.
func (e *env) create(labels map[string]string) (sandbox.Sandbox, sandbox.Operation) {
	e.Helper()
	sb := newSandbox(e.project, "base", e.tick())
	sb.Labels = labels
	sb, op, _, err := e.s.CreateSandbox(e.ctx, sb, e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{})
	e.must(err)
	return sb, op
}

func (e *env) running() sandbox.Sandbox {
	e.Helper()
	sb, op := e.create(nil)
	e.finish(op)
	return e.get(sb.ID)
}

func (e *env) get(id string) sandbox.Sandbox {
	e.Helper()
	sb, err := e.s.Sandbox(e.ctx, e.project, id)
	e.must(err)
	return sb
}

func (e *env) bring(verb sandbox.Verb) sandbox.Begin { return bring(verb, e.tick()) }

// bring makes what a verb brings, but for a rollback's snapshot.
func bring(verb sandbox.Verb, at time.Time) sandbox.Begin {
	b := sandbox.Begin{Op: newOp(verb, at)}
	snap := func(purpose sandbox.SnapshotPurpose, kind sandbox.SnapshotKind) {
		b.Snapshot = &sandbox.Snapshot{ID: sandbox.NewID(sandbox.KindSnapshot), Purpose: purpose, Kind: kind, CreatedAt: at}
	}
	switch verb {
	case sandbox.VerbSuspend:
		snap(sandbox.PurposeSuspend, sandbox.SnapshotMemory)
	case sandbox.VerbStop:
		snap(sandbox.PurposeStop, sandbox.SnapshotDisk)
	case sandbox.VerbSnapshot:
		snap(sandbox.PurposeNamed, sandbox.SnapshotMemory)
		b.Snapshot.Name = "named"
	case sandbox.VerbFork:
		snap(sandbox.PurposeFork, sandbox.SnapshotMemory)
		b.Children = children(1, at)
	}
	return b
}

func children(n int, at time.Time) (list []sandbox.NewSandbox) {
	for range n {
		list = append(list, sandbox.NewSandbox{
			Sandbox: sandbox.Sandbox{ID: sandbox.NewID(sandbox.KindSandbox)}, Operation: newOp(sandbox.VerbCreate, at),
		})
	}
	return list
}

func (e *env) begin(id string, verb sandbox.Verb) sandbox.Operation {
	e.Helper()
	return e.beginWith(id, verb, e.bring(verb))
}

func (e *env) beginWith(id string, verb sandbox.Verb, b sandbox.Begin) sandbox.Operation {
	e.Helper()
	_, op, _, err := e.s.BeginVerb(e.ctx, e.project, id, verb, b, sandbox.Idempotency{})
	e.must(err)
	return op
}

func (e *env) finish(op sandbox.Operation) {
	e.Helper()
	e.must(e.s.FinishOperation(e.ctx, op.ID, well(op, e.tick())))
}

// do asks for a verb and ends it well.
func (e *env) do(id string, verb sandbox.Verb) sandbox.Operation {
	e.Helper()
	op := e.begin(id, verb)
	e.finish(op)
	return op
}

// rollback begins one to a snapshot.
func (e *env) rollback(id, to string) sandbox.Operation {
	e.Helper()
	b := e.bring(sandbox.VerbRollback)
	b.To = to
	return e.beginWith(id, sandbox.VerbRollback, b)
}

// well is how control ends an operation that succeeded, where a snapshot was
// taken of a running sandbox.
func well(op sandbox.Operation, at time.Time) sandbox.Outcome {
	o := sandbox.Outcome{}
	switch op.Verb {
	case sandbox.VerbPause:
		o.To = sandbox.StatePaused
	case sandbox.VerbSuspend:
		o.To, o.Image = sandbox.StateSuspended, &op.Snapshot
	case sandbox.VerbStop:
		o.To, o.Image = sandbox.StateStopped, &op.Snapshot
	case sandbox.VerbDelete:
		o.To, o.End = sandbox.StateDeleted, &sandbox.End{Reason: sandbox.EndDeleted, At: at}
	case sandbox.VerbResume, sandbox.VerbWake, sandbox.VerbFork:
		o.To = sandbox.StateRunning
	case sandbox.VerbSnapshot:
		o.To, o.Image, o.Base = sandbox.StateRunning, &op.Snapshot, &op.Snapshot
	case sandbox.VerbRollback:
		o.To, o.Epoch, o.Image, o.Base = sandbox.StateRunning, op.Generation, &op.Snapshot, &op.Snapshot
	default:
		o.To, o.Epoch = sandbox.StateRunning, op.Generation
	}
	if op.Snapshot != "" && op.Verb != sandbox.VerbRollback {
		o.Snapshot = taken(op.Snapshot, at)
	}
	return o
}

func taken(id string, at time.Time) *sandbox.SnapshotStatus {
	return &sandbox.SnapshotStatus{
		Snapshot: id, SizeBytes: 3<<20 + 1, TakenAt: at,
		Needs: sandbox.Needs{Format: 1, Driver: "gvisor", CPU: []string{"avx"}, Digest: digestA},
	}
}

// decode reads an event's data.
func decode[T any](e *env, data []byte) (v T) {
	e.Helper()
	e.must(json.Unmarshal(data, &v))
	return v
}

// failed is how control ends an operation that did not.
func failed(to sandbox.State) sandbox.Outcome {
	return sandbox.Outcome{To: to, Failure: sandbox.Errorf(sandbox.Internal, "x", "x")}
}

func (e *env) snapshot(id string) sandbox.Snapshot {
	e.Helper()
	n, err := e.s.Snapshot(e.ctx, e.project, id)
	e.must(err)
	return n
}

func (e *env) deleted(id string) {
	e.Helper()
	e.do(id, sandbox.VerbDelete)
}
