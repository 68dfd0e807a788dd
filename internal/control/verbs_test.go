package control_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRolesAreAsked(t *testing.T) {
	bubble(t, func(w *world) {
		sb := w.running()
		ctx := w.t.Context()
		_, err := w.c.SetLabels(ctx, w.user, sb.ID, map[string]string{"a": "b"})
		w.must(err)
		denied := map[string]error{}
		_, _, _, denied["create"] = w.c.CreateSandbox(ctx, w.reader, control.CreateRequest{Template: "base"}, sandbox.Idempotency{})
		_, _, _, denied["delete"] = w.c.Delete(ctx, w.reader, sb.ID, sandbox.Idempotency{})
		_, denied["labels"] = w.c.SetLabels(ctx, w.reader, sb.ID, nil)
		_, denied["ttl"] = w.c.SetTTL(ctx, w.reader, sb.ID, time.Hour)
		_, _, denied["session"] = w.c.CreateSession(ctx, w.reader, sb.ID, sandbox.Process{Args: []string{"id"}}, sandbox.Idempotency{})
		_, _, denied["import"] = w.c.Import(ctx, w.reader, strings.NewReader(""), sandbox.RuntimeConfig{}, "")
		_, _, denied["build"] = w.c.Build(ctx, w.user, sandbox.BaseTemplate, sandbox.Idempotency{})
		_, denied["keys"] = w.c.Keys(ctx, w.user, "")
		_, _, _, denied["create key"] = w.c.CreateKey(ctx, w.user, "", "n", sandbox.RoleAdmin, sandbox.Idempotency{})
		denied["revoke"] = w.c.RevokeKey(ctx, w.user, sandbox.NewID(sandbox.KindKey))
		denied["delete template"] = w.c.DeleteTemplate(ctx, w.reader, "base")
		_, _, _, denied["verb"] = w.c.Do(ctx, w.reader, sb.ID, sandbox.VerbPause, control.VerbRequest{}, sandbox.Idempotency{})
		_, _, _, denied["snapshot"] = w.c.TakeSnapshot(ctx, w.reader, sb.ID, control.SnapshotRequest{}, sandbox.Idempotency{})
		_, _, _, denied["fork"] = w.c.Fork(ctx, w.reader, sb.ID, control.ForkRequest{Count: 1}, sandbox.Idempotency{})
		_, _, _, denied["rollback"] = w.c.Rollback(ctx, w.reader, sb.ID, sandbox.NewID(sandbox.KindSnapshot), sandbox.Idempotency{})
		_, denied["delete snapshot"] = w.c.DeleteSnapshot(ctx, w.reader, sandbox.NewID(sandbox.KindSnapshot))
		for what, err := range denied {
			if !sandbox.IsClass(err, sandbox.Denied) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if got, err := w.c.Get(ctx, w.reader, sb.ID); err != nil || got.Labels["a"] != "b" {
			t.Errorf("a reader gets %+v %v", got, err)
		}
	})
}

func TestReadersSeeNoEnvironment(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		secret := map[string]string{"TOKEN": "s3cret"}
		sb, op := w.create(control.CreateRequest{Env: secret})
		w.ended(op)
		ses, _, err := w.c.CreateSession(ctx, w.user, sb.ID, sandbox.Process{Args: []string{"id"}, Env: secret}, sandbox.Idempotency{})
		w.must(err)
		got, err := w.c.Get(ctx, w.reader, sb.ID)
		w.must(err)
		list, _, err := w.c.List(ctx, w.reader, sandbox.SandboxFilter{}, sandbox.Page{})
		w.must(err)
		one, err := w.c.Session(ctx, w.reader, sb.ID, ses.ID)
		w.must(err)
		many, _, err := w.c.Sessions(ctx, w.reader, sb.ID, sandbox.Page{})
		w.must(err)
		events, err := w.c.Events(ctx, w.reader, 0, 100, 0)
		w.must(err)
		b, err := json.Marshal([]any{got, list, one, many, events})
		w.must(err)
		if strings.Contains(string(b), "s3cret") {
			t.Errorf("a reader sees %s", b)
		}
		if mine, err := w.c.Get(ctx, w.user, sb.ID); err != nil || mine.Env["TOKEN"] != "s3cret" {
			t.Errorf("its owner sees %+v %v", mine, err)
		}
	})
}

func TestAnotherProjectFindsNothing(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		sb := w.running()
		ses, _, err := w.c.CreateSession(ctx, w.user, sb.ID, sandbox.Process{Args: []string{"id"}}, sandbox.Idempotency{})
		w.must(err)
		other := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: "other", CreatedAt: time.Now()}
		w.must(w.store.CreateProject(ctx, other))
		stranger := sandbox.Caller{KeyID: "key_x", Project: other.ID, Role: sandbox.RoleProject}
		missing := map[string]error{}
		_, missing["get"] = w.c.Get(ctx, stranger, sb.ID)
		_, _, _, missing["delete"] = w.c.Delete(ctx, stranger, sb.ID, sandbox.Idempotency{})
		_, missing["labels"] = w.c.SetLabels(ctx, stranger, sb.ID, nil)
		_, missing["ttl"] = w.c.SetTTL(ctx, stranger, sb.ID, time.Hour)
		_, missing["operation"] = w.c.Operation(ctx, stranger, sb.Operation, 0)
		_, _, missing["session"] = w.c.CreateSession(ctx, stranger, sb.ID, sandbox.Process{Args: []string{"id"}}, sandbox.Idempotency{})
		_, missing["get session"] = w.c.Session(ctx, stranger, sb.ID, ses.ID)
		_, _, missing["sessions"] = w.c.Sessions(ctx, stranger, sb.ID, sandbox.Page{})
		_, missing["template"] = w.c.Template(ctx, stranger, digestA)
		_, _, _, missing["create"] = w.c.CreateSandbox(ctx, stranger, control.CreateRequest{Template: digestA}, sandbox.Idempotency{})
		missing["delete template"] = w.c.DeleteTemplate(ctx, stranger, digestA)
		snap := w.done(sb, sandbox.VerbSnapshot).Snapshot
		_, missing["snapshot"] = w.c.Snapshot(ctx, stranger, snap)
		_, missing["delete snapshot"] = w.c.DeleteSnapshot(ctx, stranger, snap)
		_, _, _, missing["verb"] = w.c.Do(ctx, stranger, sb.ID, sandbox.VerbPause, control.VerbRequest{}, sandbox.Idempotency{})
		_, _, _, missing["fork"] = w.c.Fork(ctx, stranger, sb.ID, control.ForkRequest{Count: 1}, sandbox.Idempotency{})
		_, _, _, missing["rollback"] = w.c.Rollback(ctx, stranger, sb.ID, snap, sandbox.Idempotency{})
		_, _, _, missing["create from it"] = w.c.CreateSandbox(ctx, stranger, control.CreateRequest{Snapshot: snap}, sandbox.Idempotency{})
		_, missing["policy"] = w.c.SetPolicy(ctx, stranger, sb.ID, still)
		for what, err := range missing {
			if !sandbox.IsClass(err, sandbox.NotFound) {
				t.Errorf("%s: %v", what, err)
			}
		}
		events, err := w.c.Events(ctx, stranger, 0, 100, 0)
		if err != nil || len(events) != 0 {
			t.Errorf("events: %v %v", events, err)
		}
	})
}

func TestSessionNeedsARunningSandbox(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		sb := w.running()
		p := sandbox.Process{Args: []string{"id"}}
		first, _, err := w.c.CreateSession(ctx, w.user, sb.ID, p, sandbox.Idempotency{Key: "s"})
		w.must(err)
		again, replayed, err := w.c.CreateSession(ctx, w.user, sb.ID, p, sandbox.Idempotency{Key: "s"})
		if err != nil || !replayed || again.ID != first.ID {
			t.Errorf("replay: %+v %v %v", again, replayed, err)
		}
		w.ended(w.del(sb.ID))
		if _, _, err := w.c.CreateSession(ctx, w.user, sb.ID, p, sandbox.Idempotency{}); sandbox.AsError(err).Code != "not_running" {
			t.Errorf("in a deleted sandbox: %v", err)
		}
	})
}

func TestFilesWithoutARowAreCollected(t *testing.T) {
	const orphan = "sha256:bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
	bubble(t, func(w *world) {
		synctest.Wait() // the prune of the start
		w.builder.mu.Lock()
		defer w.builder.mu.Unlock()
		if len(w.builder.removed) != 1 || w.builder.removed[0] != orphan {
			t.Errorf("removed %q, want only the digest that no row has", w.builder.removed)
		}
	}, func(o *control.Options) { o.Builder.(*fakeBuilder).files = []string{digestA, orphan} })
}

func TestKeys(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		k, secret, _, err := w.c.CreateKey(ctx, w.admin, "", "ci", sandbox.RoleRead, sandbox.Idempotency{Key: "x"})
		if err != nil || secret != "text of "+k.ID || k.Hash != nil {
			t.Errorf("%+v %q %v", k, secret, err)
		}
		again, secret, replayed, err := w.c.CreateKey(ctx, w.admin, "", "ci", sandbox.RoleRead, sandbox.Idempotency{Key: "x"})
		if err != nil || !replayed || secret != "" || again.ID != k.ID {
			t.Errorf("replay: %+v %q %v %v", again, secret, replayed, err)
		}
		w.must(w.c.RevokeKey(ctx, w.admin, k.ID))
		list, err := w.c.Keys(ctx, w.admin, "")
		if err != nil || len(list) != 1 || list[0].RevokedAt == nil || list[0].Hash != nil {
			t.Errorf("%+v %v", list, err)
		}
		if err := w.c.RevokeKey(ctx, w.admin, w.admin.KeyID); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
			t.Errorf("its own key: %v", err)
		}
	})
}

func TestTemplates(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		tpl, _, err := w.c.Import(ctx, w.user, strings.NewReader("tar"), sandbox.RuntimeConfig{}, "mine:1")
		if err != nil || !slices.Equal(tpl.Releases, []string{"base:latest", "mine:1"}) {
			t.Errorf("%+v %v", tpl, err)
		}
		r, err := w.c.Tag(ctx, w.user, "mine:1", "mine:2")
		if err != nil || r.Digest != digestA {
			t.Errorf("%+v %v", r, err)
		}
		w.must(w.c.Untag(ctx, w.user, "mine:1"))
		sb := w.running()
		if err := w.c.DeleteTemplate(ctx, w.user, "mine:2"); sandbox.AsError(err).Code != "template_in_use" {
			t.Errorf("in use: %v", err)
		}
		w.ended(w.del(sb.ID))
		w.must(w.c.DeleteTemplate(ctx, w.user, "mine:2"))
		if !slices.Equal(w.builder.removed, []string{digestA}) {
			t.Errorf("removed %v", w.builder.removed)
		}
		list, err := w.c.Templates(ctx, w.user)
		if err != nil || len(list) != 0 {
			t.Errorf("%v %v", list, err)
		}
	})
}

// TestFilesStayWhileTheSameIsMade: a template is deleted while a build makes
// the same files again.
func TestFilesStayWhileTheSameIsMade(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		gate := make(chan struct{})
		w.builder.debian = func(_ context.Context, progress func(string)) (sandbox.Built, error) {
			progress("unpacking")
			<-gate
			return sandbox.Built{Digest: digestA}, nil
		}
		op, _, err := w.c.Build(ctx, w.admin, sandbox.BaseTemplate, sandbox.Idempotency{})
		w.must(err)
		time.Sleep(2 * time.Second)
		if got := w.op(op.ID); got.Step != "unpacking" || got.State != sandbox.OpRunning {
			t.Errorf("meanwhile: %+v", got)
		}
		w.must(w.c.DeleteTemplate(ctx, w.user, "base"))
		if len(w.builder.removed) != 0 {
			t.Error("the files went")
		}
		close(gate)
		got := w.ended(op)
		if got.State != sandbox.OpSucceeded || got.Template != digestA {
			t.Errorf("%+v", got)
		}
		synctest.Wait()
		if len(w.builder.removed) != 0 {
			t.Error("the files of a living template went")
		}
	})
}

func TestBuildFailsAndResumes(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		w.builder.debian = func(context.Context, func(string)) (sandbox.Built, error) {
			return sandbox.Built{}, sandbox.Errorf(sandbox.Invalid, "no_such_package", "there is no such package")
		}
		op, _, err := w.c.Build(ctx, w.admin, sandbox.BaseTemplate, sandbox.Idempotency{})
		w.must(err)
		w.wants(w.ended(op), sandbox.OpFailed, "no_such_package")
		w.builder.debian = func(ctx context.Context, _ func(string)) (sandbox.Built, error) {
			<-ctx.Done()
			return sandbox.Built{}, ctx.Err()
		}
		op, _, err = w.c.Build(ctx, w.admin, sandbox.BaseTemplate, sandbox.Idempotency{})
		w.must(err)
		synctest.Wait()
		w.stop()
		w.builder.debian = func(context.Context, func(string)) (sandbox.Built, error) { return sandbox.Built{Digest: digestA}, nil }
		w.start()
		w.wants(w.ended(op), sandbox.OpSucceeded, "")
	})
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errors.New("the client went away") }

var _ io.Reader = brokenReader{}

func TestImportFails(t *testing.T) {
	bubble(t, func(w *world) {
		if _, _, err := w.c.Import(w.t.Context(), w.user, brokenReader{}, sandbox.RuntimeConfig{}, ""); err == nil {
			t.Error("a broken upload became a template")
		}
	})
}

func TestEvents(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		sb := w.running()
		list, err := w.c.Events(ctx, w.user, 0, 100, 0)
		w.must(err)
		var got []string
		for _, e := range list {
			if e.Sandbox != sb.ID {
				continue
			}
			var d struct{ From, To string }
			w.must(json.Unmarshal(e.Data, &d))
			got = append(got, d.From+">"+d.To)
		}
		if d := cmp.Diff([]string{">creating", "creating>running"}, got); d != "" {
			t.Error(d)
		}
		after := list[len(list)-1].Seq
		time.AfterFunc(5*time.Second, func() { w.node.end(sb.ID, sandbox.EndOOM) })
		start := time.Now()
		list, err = w.c.Events(ctx, w.user, after, 100, time.Minute)
		if err != nil || len(list) != 1 || !strings.Contains(string(list[0].Data), `"oom"`) || time.Since(start) != 5*time.Second {
			t.Errorf("%+v %v after %s", list, err, time.Since(start))
		}
	})
}

func TestRequestsAreValidated(t *testing.T) {
	long := strings.Repeat("x", 70)
	many := func(n int) map[string]string {
		m := map[string]string{}
		for i := range n {
			m["k"+strings.Repeat("x", i%50)+string(rune('a'+i%26))+string(rune('a'+i/26%26))+string(rune('a'+i/676%26))] = "v"
		}
		return m
	}
	bubble(t, func(w *world) {
		for code, reqs := range map[string][]control.CreateRequest{
			"bad_template": {{Template: "UPPER"}, {Template: "a//b"}, {Template: "../x"}, {Template: "-a"}},
			"bad_release":  {{Template: "a:"}, {Template: ":b"}, {Template: "a:b:c"}, {Template: "a:-b"}},
			"bad_digest":   {{Template: "sha256:abc"}, {Template: "sha256:" + strings.Repeat("G", 64)}},
			"bad_labels": {
				{Template: "base", Labels: map[string]string{"": "v"}},
				{Template: "base", Labels: map[string]string{long: "v"}},
				{Template: "base", Labels: map[string]string{"a b": "v"}},
				{Template: "base", Labels: map[string]string{"a": "x\ny"}},
				{Template: "base", Labels: map[string]string{"a": strings.Repeat("v", 257)}},
				{Template: "base", Labels: many(65)},
				{Template: "base", Labels: map[string]string{"a": "\xff"}},
			},
			"bad_env": {
				{Template: "base", Env: map[string]string{"A=B": ""}},
				{Template: "base", Env: map[string]string{"1A": ""}},
				{Template: "base", Env: map[string]string{"A": "\x00"}},
				{Template: "base", Env: map[string]string{"A": strings.Repeat("v", 129<<10)}},
				{Template: "base", Env: many(257)},
			},
			"resources_out_of_range": {{Template: "base", Resources: sandbox.Resources{MemoryMiB: 1}}, {Template: "base", Resources: sandbox.Resources{DiskMiB: -1}}},
			"bad_ttl":                {{Template: "base", TTL: -1}, {Template: "base", TTL: time.Millisecond}, {Template: "base", TTL: 400 * 24 * time.Hour}},
		} {
			for _, req := range reqs {
				_, _, _, err := w.c.CreateSandbox(w.t.Context(), w.user, req, sandbox.Idempotency{})
				if e := sandbox.AsError(err); e == nil || e.Class != sandbox.Invalid || e.Code != code {
					t.Errorf("%+v: %v, want %s", req, err, code)
				} else if len(e.Message) > 400 {
					t.Errorf("a message of %d bytes", len(e.Message))
				}
			}
		}
		_, _, _, err := w.c.CreateSandbox(w.t.Context(), w.user, control.CreateRequest{Template: "base"}, sandbox.Idempotency{Key: "\n"})
		if !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("idempotency key: %v", err)
		}
		_, _, err = w.c.List(w.t.Context(), w.user, sandbox.SandboxFilter{States: []sandbox.State{"wild"}}, sandbox.Page{})
		if !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("state: %v", err)
		}
	})
	for name, p := range map[string]sandbox.Process{
		"no command": {}, "empty command": {Args: []string{""}}, "NUL": {Args: []string{"a\x00"}},
		"long": {Args: []string{strings.Repeat("x", 129<<10)}}, "many": {Args: make([]string, 5000)},
		"relative cwd": {Args: []string{"a"}, Cwd: "x"}, "user": {Args: []string{"a"}, User: "a b"},
		"timeout": {Args: []string{"a"}, Timeout: -1}, "tty": {Args: []string{"a"}, TTY: &sandbox.WindowSize{}},
	} {
		if err := control.ValidateProcess(p); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("process %s: %v", name, err)
		}
	}
	ok := sandbox.Process{Args: []string{"sh", "-c", ""}, Cwd: "/", User: "1000:1000", TTY: &sandbox.WindowSize{Rows: 24, Cols: 80}}
	if err := control.ValidateProcess(ok); err != nil {
		t.Error(err)
	}
	for _, good := range []string{"base:latest", "a/b-c_d.e:1.0-rc_1"} {
		if err := control.ValidateRelease(good); err != nil {
			t.Error(err)
		}
	}
}

// TestNodeSpeaksPlainValues: everything that crosses sandbox.Node survives
// JSON, so that it can be an RPC.
func TestNodeSpeaksPlainValues(t *testing.T) {
	node := reflect.TypeFor[sandbox.Node]()
	plain := map[reflect.Type]bool{reflect.TypeFor[context.Context](): true, reflect.TypeFor[error](): true}
	for i := range node.NumMethod() {
		m := node.Method(i)
		for j := range m.Type.NumIn() {
			checkPlain(t, m.Name, m.Type.In(j), plain)
		}
		for j := range m.Type.NumOut() {
			checkPlain(t, m.Name, m.Type.Out(j), plain)
		}
	}
}

func checkPlain(t *testing.T, method string, typ reflect.Type, skip map[reflect.Type]bool) {
	t.Helper()
	if skip[typ] {
		return
	}
	v := reflect.New(typ).Elem()
	fill(t, method, v, 0)
	b, err := json.Marshal(v.Interface())
	if err != nil {
		t.Fatalf("%s: %s does not encode: %v", method, typ, err)
	}
	back := reflect.New(typ)
	if err := json.Unmarshal(b, back.Interface()); err != nil {
		t.Fatalf("%s: %s does not decode: %v", method, typ, err)
	}
	if d := cmp.Diff(v.Interface(), back.Elem().Interface()); d != "" {
		t.Errorf("%s: %s loses something on the way:\n%s", method, typ, d)
	}
}

// fill gives every field of v a value that is not zero, and fails on what is
// not plain.
func fill(t *testing.T, at string, v reflect.Value, depth int) {
	t.Helper()
	if depth > 8 {
		t.Fatalf("%s: too deep", at)
	}
	if v.Type() == reflect.TypeFor[time.Time]() {
		v.Set(reflect.ValueOf(time.Unix(1_700_000_000, 5).UTC()))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint64, reflect.Uint8:
		v.SetUint(7)
	case reflect.Int, reflect.Int64, reflect.Int32:
		v.SetInt(7)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(t, at+"."+v.Type().Field(i).Name, v.Field(i), depth+1)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range v.Len() {
			fill(t, at, v.Index(i), depth+1)
		}
	case reflect.Map:
		k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(t, at, k, depth+1)
		fill(t, at, e, depth+1)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(k, e)
	case reflect.Pointer:
		// An optional part, decoded into its own copy.
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, at, v.Elem(), depth+1)
	default:
		t.Fatalf("%s is a %s, which is no plain value", at, v.Type())
	}
}
