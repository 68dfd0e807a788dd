package control_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
)

// gateway is what control has of egress, in memory.
type gateway struct {
	mu     sync.Mutex
	sealed int
	opened int
	lost   bool // the vault's key
	cas    int
	tokens int // fetched
	// token answers a fetch; credential is what it was asked with.
	token   func(credential string) (token string, expires time.Time, rotated string, err error)
	records []sandbox.EgressRecord
}

// Seal implements control.Vault; it binds project and id, as a real one does.
func (g *gateway) Seal(_ context.Context, project, id string, plain []byte) ([]byte, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sealed++
	return []byte(project + "|" + id + "|" + string(plain)), nil
}

// Open implements control.Vault.
func (g *gateway) Open(_ context.Context, project, id string, sealed []byte) ([]byte, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.opened++
	plain, ok := bytes.CutPrefix(sealed, []byte(project+"|"+id+"|"))
	if !ok || g.lost {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "vault_key", "it was not sealed for this")
	}
	return plain, nil
}

// EgressRecords implements sandbox.EgressAudit.
func (g *gateway) EgressRecords(_ context.Context, f sandbox.EgressAuditFilter) (list []sandbox.EgressRecord, err error) {
	for _, r := range g.records {
		if f.Project == "" || r.Project == f.Project {
			list = append(list, r)
		}
	}
	return list, nil
}

// FollowEgress implements sandbox.EgressAudit.
func (g *gateway) FollowEgress(ctx context.Context, f sandbox.EgressAuditFilter, tell func(sandbox.EgressRecord) error) error {
	list, err := g.EgressRecords(ctx, f)
	for _, r := range list {
		err = errors.Join(err, tell(r))
	}
	return err
}

// LastEgress implements sandbox.EgressAudit.
func (g *gateway) LastEgress() int64 { return 2 }

func (g *gateway) egress() *control.Egress {
	return &control.Egress{
		Vault: g, Audit: g,
		Check: func(p sandbox.EgressProfile) error {
			if p.Default == "" {
				return sandbox.Errorf(sandbox.Invalid, "invalid_egress_profile", "it has no default")
			}
			return nil
		},
		Preset: func(name string) (sandbox.EgressProfile, bool) {
			return sandbox.EgressProfile{Name: name, Default: sandbox.EgressDeny}, sandbox.IsPreset(name)
		},
		NewCA: func(project string) (sandbox.Authority, error) {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.cas++
			return sandbox.Authority{Cert: []byte("cert of " + project), Key: fmt.Appendf(nil, "key %d", g.cas)}, nil
		},
		Token: func(_ context.Context, _ sandbox.SecretSource, credential []byte) ([]byte, time.Time, []byte, error) {
			g.mu.Lock()
			g.tokens++
			f := g.token
			g.mu.Unlock()
			token, expires, rotated, err := f(string(credential))
			if rotated == "" {
				return []byte(token), expires, nil, err
			}
			return []byte(token), expires, []byte(rotated), err
		},
	}
}

func (g *gateway) fetched() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.tokens
}

func withEgress(t *testing.T, f func(w *world, g *gateway)) {
	g := &gateway{}
	bubble(t, func(w *world) { f(w, g) }, func(o *control.Options) { o.Egress = g.egress() })
}

func injects(secrets ...string) (p sandbox.EgressProfile) {
	p.Name, p.Default = "web", sandbox.EgressDeny
	for _, s := range secrets {
		p.Rules = append(p.Rules, sandbox.EgressRule{
			Action: sandbox.EgressInject, Hosts: []string{"api.example.com"}, Inject: []sandbox.Injection{{Secret: s, Kind: sandbox.InjectHeader}},
		})
	}
	return p
}

func (w *world) profile(p sandbox.EgressProfile) sandbox.EgressProfile {
	w.t.Helper()
	p, _, err := w.c.CreateProfile(w.t.Context(), w.user, p, sandbox.Idempotency{})
	w.must(err)
	return p
}

func (w *world) secret(name, value string, source *sandbox.SecretSource) sandbox.Secret {
	w.t.Helper()
	s, err := w.c.CreateSecret(w.t.Context(), w.user, control.SecretRequest{Name: name, Hosts: []string{"API.example.com."}, Value: []byte(value), Source: source})
	w.must(err)
	return s
}

// runs makes a sandbox with a profile and waits until it is there.
func (w *world) runs(profile string) sandbox.Sandbox {
	w.t.Helper()
	sb, op := w.create(control.CreateRequest{Egress: profile})
	w.wants(w.ended(op), sandbox.OpSucceeded, "")
	return w.is(sb.ID, sandbox.StateRunning)
}

// assignment is what the node knows of a sandbox now.
func (n *fakeNode) assignment(id string) sandbox.EgressAssignment {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.egress[id]
}

func valueOf(a sandbox.EgressAssignment, name string) string {
	for _, s := range a.Secrets {
		if s.Name == name {
			return string(s.Value)
		}
	}
	return ""
}

func code(err error) string {
	if e := sandbox.AsError(err); e != nil {
		return e.Code
	}
	return ""
}

// A machine has its assignment before it exists, and a new one within a second
// of every change.
func TestEgressFollowsChanges(t *testing.T) {
	withEgress(t, func(w *world, g *gateway) {
		ctx := w.t.Context()
		w.profile(injects("KEY", "ABSENT"))
		s := w.secret("KEY", "the secret value", nil)
		if len(s.Sealed) != 0 || s.Hosts[0] != "api.example.com" {
			t.Errorf("%+v", s)
		}
		var first sandbox.EgressAssignment
		w.node.set(func(n *fakeNode) {
			n.create = func(_ context.Context, req sandbox.MachineRequest) (sandbox.MachineStatus, error) {
				first = n.assignment(req.Sandbox)
				return sandbox.MachineStatus{}, nil
			}
		})
		sb, plain := w.runs("web"), w.runs("")
		w.node.heals()
		if first.Sandbox != plain.ID || first.Profile.Name != sandbox.PresetNone || first.Project != sb.Project || len(first.Secrets) != 0 {
			t.Errorf("before its machine: %+v", first)
		}
		a := w.node.assignment(sb.ID)
		if valueOf(a, "KEY") != "the secret value" || len(a.Secrets) != 1 || a.Profile.Version != 1 || string(a.CA.Key) != "key 1" || a.CA.Cert == nil || g.cas != 1 {
			t.Errorf("%+v", a)
		}
		soon := func(what string, done func(a sandbox.EgressAssignment) bool) {
			t.Helper()
			time.Sleep(time.Second)
			synctest.Wait()
			if b := w.node.assignment(sb.ID); !done(b) || b.Revision <= a.Revision {
				t.Errorf("%s: %+v", what, b)
			}
			a = w.node.assignment(sb.ID)
		}
		_, err := w.c.ReplaceSecret(ctx, w.user, "KEY", 0, []byte("another value"))
		w.must(err)
		soon("a rotated secret", func(a sandbox.EgressAssignment) bool { return valueOf(a, "KEY") == "another value" })
		next := injects("KEY")
		next.Version, next.DryRun = 1, true
		_, err = w.c.ReplaceProfile(ctx, w.user, next)
		w.must(err)
		soon("a changed profile", func(a sandbox.EgressAssignment) bool { return a.Profile.Version == 2 && a.Profile.DryRun })
		w.must(w.c.DeleteSecret(ctx, w.user, "KEY"))
		soon("a deleted secret", func(a sandbox.EgressAssignment) bool { return len(a.Secrets) == 0 })
		w.secret("KEY", "a third value", nil)
		soon("a new secret", func(a sandbox.EgressAssignment) bool { return valueOf(a, "KEY") == "a third value" })

		assigned := w.node.assigned
		got, err := w.c.SetSandboxEgress(ctx, w.user, sb.ID, sandbox.PresetPublic)
		w.must(err)
		if now := w.node.assignment(sb.ID); got.Egress != sandbox.PresetPublic || now.Profile.Name != sandbox.PresetPublic || len(now.Secrets) != 0 {
			t.Errorf("not in force when it is answered: %+v", now)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if w.node.assigned != assigned+1 {
			t.Errorf("%d assignments for one change", w.node.assigned-assigned)
		}
		// A start tells every sandbox that has a machine, and raises the revision.
		w.stop()
		w.start()
		for _, id := range []string{sb.ID, plain.ID} {
			if b := w.node.assignment(id); b.Revision <= a.Revision {
				t.Errorf("after a start: %+v", b)
			}
		}
		// A sandbox without a machine is told when it gets one.
		w.done(plain, sandbox.VerbSuspend)
		_, err = w.c.SetSandboxEgress(ctx, w.user, plain.ID, sandbox.PresetPublic)
		w.must(err)
		if b := w.node.assignment(plain.ID); b.Profile.Name != sandbox.PresetNone {
			t.Errorf("%+v", b)
		}
		w.done(plain, sandbox.VerbRestore)
		if b := w.node.assignment(plain.ID); b.Profile.Name != sandbox.PresetPublic {
			t.Errorf("%+v", b)
		}
	})
}

// What can't be assigned has no machine; what could not be told is told later.
func TestEgressFailsClosed(t *testing.T) {
	withEgress(t, func(w *world, g *gateway) {
		w.profile(injects("KEY"))
		w.secret("KEY", "the secret value", nil)
		sb := w.runs("web")
		g.lost = true
		_, op := w.create(control.CreateRequest{Egress: "web"})
		w.wants(w.ended(op), sandbox.OpFailed, "vault_key")
		if n := len(w.node.created()); n != 1 {
			t.Errorf("%d machines were made", n)
		}
		g.lost = false
		w.node.fails("egress", errBroken)
		_, op = w.create(control.CreateRequest{})
		w.wants(w.ended(op), sandbox.OpFailed, "engine_broken")
		before := w.node.assignment(sb.ID).Revision
		_, err := w.c.SetSandboxEgress(w.t.Context(), w.user, sb.ID, sandbox.PresetPublic)
		w.must(err)
		time.Sleep(3 * time.Second)
		w.node.heals()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if a := w.node.assignment(sb.ID); a.Revision <= before || a.Profile.Name != sandbox.PresetPublic {
			t.Errorf("%+v", a)
		}
		// One whose assignment hangs keeps no other waiting.
		other := w.runs("web")
		w.node.set(func(n *fakeNode) {
			n.before = func(ctx context.Context, call, id string) error {
				if call == "egress" && id == sb.ID {
					<-ctx.Done()
					return ctx.Err()
				}
				return nil
			}
		})
		_, err = w.c.SetSandboxEgress(w.t.Context(), w.user, sb.ID, "web")
		w.must(err)
		time.Sleep(time.Second)
		next := injects()
		next.Version = 1
		_, err = w.c.ReplaceProfile(w.t.Context(), w.user, next)
		w.must(err)
		time.Sleep(time.Second)
		synctest.Wait()
		if a := w.node.assignment(other.ID); a.Profile.Version != 2 {
			t.Errorf("%+v", a.Profile)
		}
		w.node.heals()
	})
}

func TestEgressRoles(t *testing.T) {
	withEgress(t, func(w *world, g *gateway) {
		ctx := w.t.Context()
		g.records = []sandbox.EgressRecord{{Seq: 1, Project: w.user.Project}, {Seq: 2, Project: "prj_other"}}
		w.profile(injects())
		w.secret("KEY", "the secret value", nil)
		if list, err := w.c.Profiles(ctx, w.reader); err != nil || len(list) != 4 || list[0].Name != sandbox.PresetNone || list[3].Name != "web" {
			t.Errorf("%+v %v", list, err)
		}
		for _, name := range []string{"web", sandbox.PresetPackages} {
			if p, err := w.c.Profile(ctx, w.reader, name); err != nil || p.Project != w.user.Project {
				t.Errorf("%+v %v", p, err)
			}
		}
		if list, err := w.c.Secrets(ctx, w.reader); err != nil || len(list) != 1 || list[0].Sealed != nil {
			t.Errorf("%+v %v", list, err)
		}
		sb := w.running()
		_, _, created := w.c.CreateProfile(ctx, w.reader, injects(), sandbox.Idempotency{})
		_, replaced := w.c.ReplaceProfile(ctx, w.reader, injects())
		_, made := w.c.CreateSecret(ctx, w.reader, control.SecretRequest{})
		_, rotated := w.c.ReplaceSecret(ctx, w.reader, "KEY", 0, []byte("x"))
		_, set := w.c.SetSandboxEgress(ctx, w.reader, sb.ID, "web")
		_, _, audit := w.c.EgressRecords(ctx, w.reader, sandbox.EgressAuditFilter{})
		for i, err := range []error{
			created, replaced, made, rotated, set, audit, w.c.DeleteProfile(ctx, w.reader, "web"), w.c.DeleteSecret(ctx, w.reader, "KEY"),
			w.c.FollowEgress(ctx, w.reader, sandbox.EgressAuditFilter{}, nil),
		} {
			if code(err) != "forbidden" {
				t.Errorf("call %d: %v", i, err)
			}
		}
		if list, last, err := w.c.EgressRecords(ctx, w.user, sandbox.EgressAuditFilter{Project: "prj_other"}); err != nil || len(list) != 1 || last != 2 {
			t.Errorf("%+v %d %v", list, last, err)
		}
		seen := 0
		err := w.c.FollowEgress(ctx, w.admin, sandbox.EgressAuditFilter{}, func(sandbox.EgressRecord) error { seen++; return nil })
		if err != nil || seen != 2 {
			t.Errorf("%d %v", seen, err)
		}
	})
}

func TestEgressRefusals(t *testing.T) {
	withEgress(t, func(w *world, _ *gateway) {
		ctx := w.t.Context()
		long := strings.Repeat("x", 65)
		for name, want := range map[string]string{"": "bad_name", long: "bad_name", "-a": "bad_name", "a b": "bad_name", sandbox.PresetNone: "preset_fixed"} {
			p := injects()
			p.Name = name
			if _, _, err := w.c.CreateProfile(ctx, w.user, p, sandbox.Idempotency{}); code(err) != want {
				t.Errorf("profile %q: %v", name, err)
			}
			if _, err := w.c.ReplaceProfile(ctx, w.user, p); code(err) != want {
				t.Errorf("profile %q: %v", name, err)
			}
		}
		if err := w.c.DeleteProfile(ctx, w.user, sandbox.PresetPublic); code(err) != "preset_fixed" {
			t.Error(err)
		}
		if _, _, err := w.c.CreateProfile(ctx, w.user, sandbox.EgressProfile{Name: "x"}, sandbox.Idempotency{}); code(err) != "invalid_egress_profile" {
			t.Error(err)
		}
		good := func() control.SecretRequest {
			src := *source
			return control.SecretRequest{Name: "KEY", Hosts: []string{"a.example.com"}, Value: []byte("12345678"), Source: &src}
		}
		for name, c := range map[string]struct {
			code   string
			change func(*control.SecretRequest)
		}{
			"no name":        {"bad_name", func(r *control.SecretRequest) { r.Name = "" }},
			"no host":        {"bad_hosts", func(r *control.SecretRequest) { r.Hosts = nil }},
			"many hosts":     {"bad_hosts", func(r *control.SecretRequest) { r.Hosts = make([]string, 33) }},
			"wildcard":       {"bad_hosts", func(r *control.SecretRequest) { r.Hosts = []string{"*.example.com"} }},
			"address":        {"bad_hosts", func(r *control.SecretRequest) { r.Hosts = []string{"127.0.0.1"} }},
			"hex address":    {"bad_hosts", func(r *control.SecretRequest) { r.Hosts = []string{"a.0x7f000001"} }},
			"port":           {"bad_hosts", func(r *control.SecretRequest) { r.Hosts = []string{"example.com:443"} }},
			"single label":   {"bad_hosts", func(r *control.SecretRequest) { r.Hosts = []string{"localhost"} }},
			"other script":   {"bad_hosts", func(r *control.SecretRequest) { r.Hosts = []string{"exämple.com"} }},
			"empty label":    {"bad_hosts", func(r *control.SecretRequest) { r.Hosts = []string{"a..com"} }},
			"empty":          {"bad_value", func(r *control.SecretRequest) { r.Value = nil }},
			"newline":        {"bad_value", func(r *control.SecretRequest) { r.Value = []byte("12345678\n") }},
			"long":           {"bad_value", func(r *control.SecretRequest) { r.Value = bytes.Repeat([]byte("x"), sandbox.MaxSecretBytes+1) }},
			"short":          {"bad_value", func(r *control.SecretRequest) { r.Value, r.Source = []byte("1234567"), nil }},
			"kind":           {"bad_source", func(r *control.SecretRequest) { r.Source.Kind = "password" }},
			"plain URL":      {"bad_source", func(r *control.SecretRequest) { r.Source.TokenURL = "http://auth.example.com" }},
			"URL with user":  {"bad_source", func(r *control.SecretRequest) { r.Source.TokenURL = "https://u:p@auth.example.com" }},
			"no client":      {"bad_source", func(r *control.SecretRequest) { r.Source.ClientID = "" }},
			"a scope of two": {"bad_source", func(r *control.SecretRequest) { r.Source.Scopes = []string{"a b"} }},
		} {
			req := good()
			c.change(&req)
			if _, err := w.c.CreateSecret(ctx, w.user, req); code(err) != c.code {
				t.Errorf("%s: %v", name, err)
			} else if strings.Contains(err.Error(), "12345678") {
				t.Errorf("%s: the error tells the value", name)
			}
		}
		w.must(errOf(w.c.CreateSecret(ctx, w.user, good())))
		if err := errOf(w.c.CreateSecret(ctx, w.user, good())); code(err) != "secret_exists" {
			t.Error(err)
		}
		if err := errOf(w.c.ReplaceSecret(ctx, w.user, "KEY", 9, []byte("12345678"))); code(err) != "version_mismatch" {
			t.Error(err)
		}
		_, _, _, err := w.c.CreateSandbox(ctx, w.user, control.CreateRequest{Template: "base", Egress: "nothing"}, sandbox.Idempotency{})
		if code(err) != "profile_not_found" {
			t.Error(err)
		}
		if _, err := w.c.SetSandboxEgress(ctx, w.user, w.running().ID, ""); code(err) != "bad_name" {
			t.Error(err)
		}
		for _, f := range []sandbox.EgressAuditFilter{{Sandbox: "x"}, {Verdict: "x"}, {Kind: "x"}} {
			if _, _, err := w.c.EgressRecords(ctx, w.user, f); !sandbox.IsClass(err, sandbox.Invalid) {
				t.Error(err)
			}
		}
	})
}

func errOf[T any](_ T, err error) error { return err }

// Without a gateway nothing is assigned, and every call says why.
func TestNoEgress(t *testing.T) {
	bubble(t, func(w *world) {
		ctx := w.t.Context()
		sb := w.runs(sandbox.PresetNone)
		if w.node.assigned != 0 {
			t.Error("something was assigned")
		}
		_, _, created := w.c.CreateProfile(ctx, w.user, injects(), sandbox.Idempotency{})
		_, _, _, made := w.c.CreateSandbox(ctx, w.user, control.CreateRequest{Template: "base", Egress: "web"}, sandbox.Idempotency{})
		_, _, _, forked := w.c.Fork(ctx, w.user, sb.ID, control.ForkRequest{Count: 1, Egress: "web"}, sandbox.Idempotency{})
		_, _, audit := w.c.EgressRecords(ctx, w.user, sandbox.EgressAuditFilter{})
		for i, err := range []error{
			created, made, forked, audit, errOf(w.c.Profiles(ctx, w.user)), errOf(w.c.Secrets(ctx, w.user)),
			errOf(w.c.SetSandboxEgress(ctx, w.user, sb.ID, sandbox.PresetNone)), w.c.DeleteSecret(ctx, w.user, "x"),
		} {
			if e := sandbox.AsError(err); e == nil || e.Code != "egress_unavailable" || e.Retryable {
				t.Errorf("call %d: %v", i, err)
			}
		}
	})
}
