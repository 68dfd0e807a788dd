package storetest

import (
	"encoding/base64"
	"fmt"
	"slices"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

func projects(e *env) {
	err := e.s.CreateProject(e.ctx, sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: "default", CreatedAt: e.tick()})
	e.wants(err, sandbox.Conflict, "project_exists")
	e.newProject("other")
	list, err := e.s.Projects(e.ctx)
	if err != nil || len(list) != 2 || list[0].ID != e.project || list[1].Name != "other" {
		e.Errorf("%+v %v", list, err)
	}
}

func keys(e *env) {
	k := sandbox.Key{ID: sandbox.NewID(sandbox.KindKey), Project: e.project, Name: "n", Role: sandbox.RoleRead, Hash: []byte{1, 2}, CreatedAt: e.tick()}
	idem := sandbox.Idempotency{Key: "k"}
	made, replayed, err := e.s.CreateKey(e.ctx, k, idem)
	if err != nil || replayed || made.Name != "n" || made.Role != sandbox.RoleRead || string(made.Hash) != "\x01\x02" {
		e.Errorf("%+v %v %v", made, replayed, err)
	}
	k2 := k
	k2.ID = sandbox.NewID(sandbox.KindKey)
	if again, replayed, err := e.s.CreateKey(e.ctx, k2, idem); err != nil || !replayed || again.ID != k.ID {
		e.Errorf("replay: %+v %v %v", again, replayed, err)
	}
	k2.Project = sandbox.NewID(sandbox.KindProject)
	_, _, err = e.s.CreateKey(e.ctx, k2, sandbox.Idempotency{})
	e.wants(err, sandbox.NotFound, "project_not_found")
	e.wants(e.s.RevokeKey(e.ctx, k2.Project, k.ID, e.clock), sandbox.NotFound, "key_not_found")
	revoked := e.tick()
	e.must(e.s.RevokeKey(e.ctx, e.project, k.ID, revoked))
	e.must(e.s.RevokeKey(e.ctx, "", k.ID, e.tick()))
	got, err := e.s.KeyByID(e.ctx, k.ID)
	if err != nil || got.RevokedAt == nil || !got.RevokedAt.Equal(revoked) {
		e.Errorf("%+v %v", got, err)
	}
	if list, err := e.s.Keys(e.ctx, k2.Project); err != nil || len(list) != 0 {
		e.Errorf("another project's keys: %v %v", list, err)
	}
	_, err = e.s.KeyByID(e.ctx, k2.ID)
	e.wants(err, sandbox.NotFound, "key_not_found")
}

func projectsApart(e *env) {
	sb := e.running()
	ses, _, err := e.s.CreateSession(e.ctx, e.session(sb.ID), sandbox.Idempotency{})
	e.must(err)
	op := e.begin(sb.ID, sandbox.VerbPause)
	other := e.newProject("other")
	missing := map[string]error{}
	_, missing["sandbox"] = e.s.Sandbox(e.ctx, other, sb.ID)
	_, missing["labels"] = e.s.SetLabels(e.ctx, other, sb.ID, nil)
	_, missing["expiry"] = e.s.SetExpiry(e.ctx, other, sb.ID, nil)
	_, _, _, missing["verb"] = e.s.BeginVerb(e.ctx, other, sb.ID, sandbox.VerbDelete, e.bring(sandbox.VerbDelete), sandbox.Idempotency{})
	_, missing["operation"] = e.s.Operation(e.ctx, other, op.ID)
	_, missing["session"] = e.s.Session(e.ctx, other, sb.ID, ses.ID)
	_, missing["session elsewhere"] = e.s.Session(e.ctx, e.project, sandbox.NewID(sandbox.KindSandbox), ses.ID)
	_, _, missing["sessions"] = e.s.Sessions(e.ctx, other, sb.ID, sandbox.Page{})
	foreign := e.session(sb.ID)
	foreign.Project = other
	_, _, missing["new session"] = e.s.CreateSession(e.ctx, foreign, sandbox.Idempotency{})
	_, missing["template"] = e.s.Template(e.ctx, other, digestA)
	_, missing["release"] = e.s.Template(e.ctx, other, "base:latest")
	_, missing["tag"] = e.s.Tag(e.ctx, other, digestA, "x:y")
	missing["untag"] = e.s.Untag(e.ctx, other, "base:latest")
	_, missing["delete template"] = e.s.DeleteTemplate(e.ctx, other, digestA)
	for what, err := range missing {
		if !sandbox.IsClass(err, sandbox.NotFound) {
			e.Errorf("%s: %v", what, err)
		}
	}
	sbs, _, err := e.s.Sandboxes(e.ctx, other, sandbox.SandboxFilter{}, sandbox.Page{})
	e.must(err)
	ops, _, err := e.s.Operations(e.ctx, other, sandbox.OperationFilter{Sandbox: sb.ID}, sandbox.Page{})
	e.must(err)
	evs, err := e.s.Events(e.ctx, other, 0, 100)
	e.must(err)
	if len(sbs)+len(ops)+len(evs) != 0 {
		e.Errorf("lists show %v %v %v", sbs, ops, evs)
	}
	if got, err := e.s.Sandbox(e.ctx, "", sb.ID); err != nil || got.ID != sb.ID {
		e.Errorf("project \"\" is not any: %v", err)
	}
}

func paging(e *env) {
	var want []string
	for range 23 {
		sb, _ := e.create(nil)
		want = append(want, sb.ID)
	}
	// Rows of the same instant are not lost between pages either.
	at := e.clock
	for range 5 {
		sb, _, _, err := e.s.CreateSandbox(e.ctx, newSandbox(e.project, "base", at), newOp(sandbox.VerbCreate, at), sandbox.Capacity{}, sandbox.Idempotency{})
		e.must(err)
		want = append(want, sb.ID)
	}
	var got []string
	var last sandbox.Sandbox
	page := sandbox.Page{Limit: 4}
	for n := 0; ; n++ {
		list, next, err := e.s.Sandboxes(e.ctx, e.project, sandbox.SandboxFilter{}, page)
		e.must(err)
		if len(list) > 4 || n > 10 {
			e.Fatalf("page %d has %d rows", n, len(list))
		}
		for _, sb := range list {
			if last.ID != "" && sb.CreatedAt.After(last.CreatedAt) {
				e.Error("not newest first")
			}
			last = sb
			got = append(got, sb.ID)
		}
		if n == 1 {
			e.create(nil) // a new row doesn't shift the pages after
		}
		if next == "" {
			break
		}
		page.Token = next
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		e.Errorf("pages hold %d rows, want %d", len(got), len(want))
	}
	ops, next, err := e.s.Operations(e.ctx, e.project, sandbox.OperationFilter{}, sandbox.Page{Limit: 10})
	if err != nil || len(ops) != 10 || next == "" {
		e.Errorf("operations: %d %q %v", len(ops), next, err)
	}
}

func badTokens(e *env) {
	enc := func(s string) string { return base64.RawURLEncoding.EncodeToString([]byte(s)) }
	for _, token := range []string{
		"x", "!!", enc("."), enc("1.2"), enc("1." + sandbox.NewID(sandbox.KindKey)), enc("zz zz." + sandbox.NewID(sandbox.KindSandbox)),
		enc("1' OR 1=1 --"), fmt.Sprintf("%0300d", 1),
	} {
		_, _, err := e.s.Sandboxes(e.ctx, e.project, sandbox.SandboxFilter{}, sandbox.Page{Token: token})
		e.wants(err, sandbox.Invalid, "bad_page_token")
		_, _, err = e.s.Operations(e.ctx, e.project, sandbox.OperationFilter{}, sandbox.Page{Token: token})
		e.wants(err, sandbox.Invalid, "bad_page_token")
	}
}

func filters(e *env) {
	a, _ := e.create(map[string]string{"team": "x", "a.b/c": "1"})
	b, op := e.create(map[string]string{"team": "x"})
	c, _ := e.create(map[string]string{"team": "y"})
	e.must(e.s.FinishOperation(e.ctx, op.ID, sandbox.Outcome{To: sandbox.StateRunning}))
	for _, f := range []struct {
		filter sandbox.SandboxFilter
		want   []string
	}{
		{sandbox.SandboxFilter{}, []string{c.ID, b.ID, a.ID}},
		{sandbox.SandboxFilter{Labels: map[string]string{"team": "x"}}, []string{b.ID, a.ID}},
		{sandbox.SandboxFilter{Labels: map[string]string{"team": "x", "a.b/c": "1"}}, []string{a.ID}},
		{sandbox.SandboxFilter{Labels: map[string]string{"team": "z"}}, nil},
		{sandbox.SandboxFilter{Labels: map[string]string{"tea": "x"}}, nil},
		{sandbox.SandboxFilter{States: []sandbox.State{sandbox.StateRunning}}, []string{b.ID}},
		{sandbox.SandboxFilter{States: []sandbox.State{sandbox.StateRunning, sandbox.StateCreating}, Labels: map[string]string{"team": "y"}}, []string{c.ID}},
	} {
		list, _, err := e.s.Sandboxes(e.ctx, e.project, f.filter, sandbox.Page{})
		e.must(err)
		var got []string
		for _, sb := range list {
			got = append(got, sb.ID)
		}
		if !slices.Equal(got, f.want) {
			e.Errorf("%+v: %v, want %v", f.filter, got, f.want)
		}
	}
	ops, _, err := e.s.Operations(e.ctx, e.project, sandbox.OperationFilter{Sandbox: b.ID, States: []sandbox.OperationState{sandbox.OpSucceeded}}, sandbox.Page{})
	if err != nil || len(ops) != 1 || ops[0].ID != op.ID {
		e.Errorf("operations: %v %v", ops, err)
	}
}

func changes(e *env) {
	sb := e.running()
	got, err := e.s.SetLabels(e.ctx, e.project, sb.ID, map[string]string{"a": "b"})
	if err != nil || got.Labels["a"] != "b" || got.Generation != sb.Generation {
		e.Errorf("%+v %v", got, err)
	}
	at := e.clock.Add(time.Hour)
	if got, err = e.s.SetExpiry(e.ctx, e.project, sb.ID, &at); err != nil || got.ExpiresAt == nil || !got.ExpiresAt.Equal(at) {
		e.Errorf("%+v %v", got, err)
	}
	if got, err = e.s.SetExpiry(e.ctx, e.project, sb.ID, nil); err != nil || got.ExpiresAt != nil || got.Labels["a"] != "b" {
		e.Errorf("%+v %v", got, err)
	}
	e.begin(sb.ID, sandbox.VerbDelete)
	_, err = e.s.SetLabels(e.ctx, e.project, sb.ID, nil)
	e.wants(err, sandbox.FailedPrecondition, "wrong_state")
}

func expired(e *env) {
	at := e.clock.Add(time.Hour)
	with := func(on sandbox.Reaction, verbs ...sandbox.Verb) string {
		id := e.running().ID
		_, err := e.s.SetExpiry(e.ctx, e.project, id, &at)
		e.must(err)
		p := sandbox.DefaultPolicy
		p.OnExpiry = on
		_, err = e.s.SetPolicy(e.ctx, e.project, id, p)
		e.must(err)
		for _, verb := range verbs {
			e.do(id, verb)
		}
		return id
	}
	e.begin(with(sandbox.ReactDelete), sandbox.VerbDelete)
	with(sandbox.ReactDelete, sandbox.VerbDelete)
	e.running()
	want := []string{
		with(sandbox.ReactDelete), with(sandbox.ReactDelete, sandbox.VerbSuspend), with(sandbox.ReactSuspend), with(sandbox.ReactSuspend, sandbox.VerbPause),
		with(sandbox.ReactStop),
	}
	// The verb has been done, or can't be asked for now.
	with(sandbox.ReactSuspend, sandbox.VerbSuspend)
	with(sandbox.ReactStop, sandbox.VerbStop)
	e.begin(with(sandbox.ReactSuspend), sandbox.VerbSnapshot)
	slices.Sort(want)
	for when, want := range map[time.Time][]string{at.Add(-1): nil, at: want} {
		list, err := e.s.ExpiredSandboxes(e.ctx, when, 10)
		e.must(err)
		var got []string
		for _, sb := range list {
			got = append(got, sb.ID)
		}
		if !slices.Equal(got, want) {
			e.Errorf("at %s: %v, want %v", when, got, want)
		}
	}
	if list, err := e.s.ExpiredSandboxes(e.ctx, at, 0); err != nil || len(list) != 0 {
		e.Errorf("limit 0: %v %v", list, err)
	}
}

func progress(e *env) {
	_, op := e.create(nil)
	get := func() sandbox.Operation {
		got, err := e.s.Operation(e.ctx, e.project, op.ID)
		e.must(err)
		return got
	}
	delay := &sandbox.Delay{Reason: "full", Since: e.clock}
	e.must(e.s.UpdateOperation(e.ctx, op.ID, sandbox.OpAccepted, "", delay))
	if got := get(); got.StartedAt != nil || got.Delay == nil || got.Delay.Reason != "full" || !got.Delay.Since.Equal(e.clock) {
		e.Errorf("accepted: %+v", got)
	}
	started := e.tick()
	e.must(e.s.UpdateOperation(e.ctx, op.ID, sandbox.OpRunning, "one", nil))
	e.tick()
	e.must(e.s.UpdateOperation(e.ctx, op.ID, sandbox.OpRunning, "two", nil))
	if got := get(); got.State != sandbox.OpRunning || got.Step != "two" || got.Delay != nil || !got.StartedAt.Equal(started) {
		e.Errorf("running: %+v", got)
	}
	e.wants(e.s.UpdateOperation(e.ctx, op.ID, sandbox.OpFailed, "", nil), sandbox.Internal, "wrong_transition")
	e.must(e.s.FinishOperation(e.ctx, op.ID, sandbox.Outcome{To: sandbox.StateFailed, Failure: sandbox.Errorf(sandbox.NoCapacity, "full", "full").WithHint("h")}))
	e.must(e.s.UpdateOperation(e.ctx, op.ID, sandbox.OpRunning, "late", delay))
	got := get()
	if got.State != sandbox.OpFailed || got.Step != "" || got.Delay != nil || got.EndedAt == nil {
		e.Errorf("ended: %+v", got)
	}
	if f := got.Error; f == nil || f.Class != sandbox.NoCapacity || f.Code != "full" || f.Hint != "h" || !f.Retryable {
		e.Errorf("failure: %+v", f)
	}
}

func builds(e *env) {
	op, _, err := e.s.CreateOperation(e.ctx, e.build(), sandbox.Idempotency{})
	if err != nil || op.State != sandbox.OpAccepted || string(op.Input) != `{"a":1}` || op.Sandbox != "" {
		e.Fatalf("%+v %v", op, err)
	}
	list, err := e.s.Unfinished(e.ctx)
	if err != nil || len(list) != 1 || string(list[0].Input) != `{"a":1}` {
		e.Errorf("%v %v", list, err)
	}
	e.must(e.s.EndBuild(e.ctx, op.ID, digestA, nil))
	e.must(e.s.EndBuild(e.ctx, op.ID, "", sandbox.Errorf(sandbox.Internal, "late", "late")))
	got, err := e.s.Operation(e.ctx, e.project, op.ID)
	if err != nil || got.State != sandbox.OpSucceeded || got.Template != digestA || got.Error != nil {
		e.Errorf("%+v %v", got, err)
	}
	_, other := e.create(nil)
	e.wants(e.s.EndBuild(e.ctx, other.ID, "", nil), sandbox.Internal, "wrong_transition")
}

func events(e *env) {
	first, err := e.s.Events(e.ctx, e.project, 0, 1000)
	e.must(err)
	var after int64
	if len(first) > 0 {
		after = first[len(first)-1].Seq
	}
	sb := e.running()
	e.deleted(sb.ID)
	list, err := e.s.Events(e.ctx, e.project, after, 1000)
	e.must(err)
	var types []string
	for _, ev := range list {
		if ev.Seq <= after || ev.Project != e.project || ev.Sandbox != sb.ID {
			e.Errorf("event %+v after %d", ev, after)
		}
		after = ev.Seq
		types = append(types, ev.Type)
	}
	if want := []string{"sandbox.state", "sandbox.state", "sandbox.state", "sandbox.state"}; !slices.Equal(types, want) {
		e.Errorf("types %v", types)
	}
	if one, err := e.s.Events(e.ctx, e.project, list[0].Seq, 1); err != nil || len(one) != 1 || one[0].Seq != list[1].Seq {
		e.Errorf("limit 1: %v %v", one, err)
	}
}

func (e *env) session(sb string) sandbox.Session {
	return sandbox.Session{
		ID: sandbox.NewID(sandbox.KindSession), Project: e.project, Sandbox: sb, Generation: 1, Key: "key_test", CreatedAt: e.tick(),
		Process: sandbox.Process{Args: []string{"sh", "-c", "x"}, TTY: &sandbox.WindowSize{Rows: 1, Cols: 2}, Timeout: time.Second},
	}
}

func sessions(e *env) {
	sb, op := e.create(nil)
	_, _, err := e.s.CreateSession(e.ctx, e.session(sb.ID), sandbox.Idempotency{})
	e.wants(err, sandbox.FailedPrecondition, "not_running")
	e.must(e.s.FinishOperation(e.ctx, op.ID, sandbox.Outcome{To: sandbox.StateRunning}))
	idem := sandbox.Idempotency{Key: "k"}
	ses, replayed, err := e.s.CreateSession(e.ctx, e.session(sb.ID), idem)
	if err != nil || replayed || ses.Process.Args[2] != "x" || ses.Process.TTY.Cols != 2 || ses.Process.Timeout != time.Second || ses.Generation != 1 {
		e.Errorf("%+v %v %v", ses, replayed, err)
	}
	if again, replayed, err := e.s.CreateSession(e.ctx, e.session(sb.ID), idem); err != nil || !replayed || again.ID != ses.ID {
		e.Errorf("replay: %+v %v %v", again, replayed, err)
	}
	second, _, err := e.s.CreateSession(e.ctx, e.session(sb.ID), sandbox.Idempotency{})
	e.must(err)
	list, next, err := e.s.Sessions(e.ctx, e.project, sb.ID, sandbox.Page{Limit: 1})
	if err != nil || len(list) != 1 || list[0].ID != second.ID || next == "" {
		e.Errorf("page 1: %v %q %v", list, next, err)
	}
	list, next, err = e.s.Sessions(e.ctx, e.project, sb.ID, sandbox.Page{Limit: 1, Token: next})
	if err != nil || len(list) != 1 || list[0].ID != ses.ID || next != "" {
		e.Errorf("page 2: %v %q %v", list, next, err)
	}
	e.must(e.s.DeleteSession(e.ctx, ses.ID))
	e.must(e.s.DeleteSession(e.ctx, ses.ID))
	_, err = e.s.Session(e.ctx, e.project, sb.ID, ses.ID)
	e.wants(err, sandbox.NotFound, "session_not_found")
}

func templates(e *env) {
	again := e.put(e.project, digestA, "base:1")
	if !slices.Equal(again.Releases, []string{"base:1", "base:latest"}) || again.Config.Env["A"] != "b" || again.SizeBytes != 5 {
		e.Errorf("put again: %+v", again)
	}
	e.put(e.project, digestB, "")
	r, err := e.s.Tag(e.ctx, e.project, digestB, "base:latest")
	if err != nil || r.Digest != digestB || r.Name != "base:latest" {
		e.Errorf("%+v %v", r, err)
	}
	for ref, want := range map[string]string{"base": digestB, "base:latest": digestB, "base:1": digestA, digestA: digestA} {
		if got, err := e.s.Template(e.ctx, e.project, ref); err != nil || got.Digest != want {
			e.Errorf("%s is %s, %v", ref, got.Digest, err)
		}
	}
	list, err := e.s.Templates(e.ctx, e.project)
	if err != nil || len(list) != 2 || list[0].Digest != digestB {
		e.Errorf("%+v %v", list, err)
	}
	e.must(e.s.Untag(e.ctx, e.project, "base:1"))
	e.wants(e.s.Untag(e.ctx, e.project, "base:1"), sandbox.NotFound, "release_not_found")
	_, err = e.s.Tag(e.ctx, e.project, "nope", "x:y")
	e.wants(err, sandbox.NotFound, "template_not_found")
}

func templateInUse(e *env) {
	other := e.newProject("other")
	e.put(other, digestA, "")
	sb := e.running()
	_, err := e.s.DeleteTemplate(e.ctx, e.project, digestA)
	e.wants(err, sandbox.FailedPrecondition, "template_in_use")
	e.deleted(sb.ID)
	if last, err := e.s.DeleteTemplate(e.ctx, e.project, digestA); err != nil || last {
		e.Errorf("another project has it: %v %v", last, err)
	}
	_, err = e.s.Template(e.ctx, e.project, "base:latest")
	e.wants(err, sandbox.NotFound, "template_not_found")
	if has, err := e.s.HasTemplate(e.ctx, digestA); err != nil || !has {
		e.Errorf("has %v %v", has, err)
	}
	if last, err := e.s.DeleteTemplate(e.ctx, other, digestA); err != nil || !last {
		e.Errorf("the last: %v %v", last, err)
	}
	if has, err := e.s.HasTemplate(e.ctx, digestA); err != nil || has {
		e.Errorf("has %v %v", has, err)
	}
	_, err = e.s.DeleteTemplate(e.ctx, other, digestA)
	e.wants(err, sandbox.NotFound, "template_not_found")
}

func prune(e *env) {
	old := e.running()
	ses, _, err := e.s.CreateSession(e.ctx, e.session(old.ID), sandbox.Idempotency{})
	e.must(err)
	e.deleted(old.ID)
	kept := e.running()
	cut := e.tick()
	e.tick()
	recent := e.running()
	e.deleted(recent.ID)
	long := cut.Add(-time.Hour * 1000)
	e.must(e.s.Prune(e.ctx, cut, long, long))
	_, err = e.s.Sandbox(e.ctx, e.project, old.ID)
	e.wants(err, sandbox.NotFound, "sandbox_not_found")
	_, err = e.s.Session(e.ctx, e.project, old.ID, ses.ID)
	e.wants(err, sandbox.NotFound, "session_not_found")
	e.get(kept.ID)
	e.get(recent.ID)
	ops := func(id string) int {
		list, _, err := e.s.Operations(e.ctx, e.project, sandbox.OperationFilter{Sandbox: id}, sandbox.Page{})
		e.must(err)
		return len(list)
	}
	if n := ops(old.ID); n != 2 {
		e.Errorf("its operations went with it: %d", n)
	}
	e.must(e.s.Prune(e.ctx, long, cut, cut))
	if a, b := ops(old.ID), ops(recent.ID); a != 0 || b != 2 {
		e.Errorf("operations: %d and %d", a, b)
	}
	if list, err := e.s.Events(e.ctx, e.project, 0, 1000); err != nil || list[0].At.Before(cut) {
		e.Errorf("old events stay: %v", err)
	}
}
