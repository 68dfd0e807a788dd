// Package storetest holds every sandbox.Store to one contract. A store's own
// tests call Run (and Model, which compares it with a simple model over random
// histories); stores that keep files also kill themselves with Child and
// CheckInvariants. A second store is done when it passes unchanged.
package storetest

import (
	"context"
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
	{"the driver is fenced by generation", driver},
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
		ID: sandbox.NewID(sandbox.KindSandbox), Project: project, Template: template, Resources: sandbox.DefaultResources, CreatedAt: at,
	}
}

// create inserts a sandbox with labels.
func (e *env) create(labels map[string]string) (sandbox.Sandbox, sandbox.Operation) {
	e.Helper()
	sb := newSandbox(e.project, "base", e.tick())
	sb.Labels = labels
	sb, op, _, err := e.s.CreateSandbox(e.ctx, sb, e.newOp(sandbox.VerbCreate), sandbox.Idempotency{})
	e.must(err)
	return sb, op
}

func (e *env) running() sandbox.Sandbox {
	e.Helper()
	sb, op := e.create(nil)
	e.must(e.s.FinishOperation(e.ctx, op.ID, sandbox.StateRunning, nil, nil))
	return e.get(sb.ID)
}

func (e *env) get(id string) sandbox.Sandbox {
	e.Helper()
	sb, err := e.s.Sandbox(e.ctx, e.project, id)
	e.must(err)
	return sb
}

func (e *env) begin(id string, verb sandbox.Verb) sandbox.Operation {
	e.Helper()
	_, op, _, err := e.s.BeginVerb(e.ctx, e.project, id, verb, e.newOp(verb), sandbox.Idempotency{})
	e.must(err)
	return op
}

func (e *env) deleted(id string) {
	e.Helper()
	op := e.begin(id, sandbox.VerbDelete)
	e.must(e.s.FinishOperation(e.ctx, op.ID, sandbox.StateDeleted, &sandbox.End{Reason: sandbox.EndDeleted, At: e.clock}, nil))
}
