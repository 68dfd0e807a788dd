package storetest

import (
	"slices"

	"cloche.dev/cloche/internal/sandbox"
)

func (e *env) newProfile(project, name string, injects ...string) sandbox.EgressProfile {
	p := sandbox.EgressProfile{
		ID: sandbox.NewID(sandbox.KindPolicy), Project: project, Name: name, Default: sandbox.EgressDeny, CreatedAt: e.tick(),
		Rules:  []sandbox.EgressRule{{Name: "a", Action: sandbox.EgressAllow, Hosts: []string{"*.example.com"}, Methods: []string{"GET"}}},
		Limits: sandbox.EgressLimits{Connections: 7},
	}
	for _, s := range injects {
		p.Rules = append(p.Rules, sandbox.EgressRule{
			Action: sandbox.EgressInject, Hosts: []string{"api.example.com"}, Inject: []sandbox.Injection{{Secret: s, Kind: sandbox.InjectHeader}},
		})
	}
	return p
}

func (e *env) profile(name string, injects ...string) sandbox.EgressProfile {
	e.Helper()
	p, _, err := e.s.CreateEgressProfile(e.ctx, e.newProfile(e.project, name, injects...), sandbox.Idempotency{})
	e.must(err)
	return p
}

func (e *env) withEgress(profile string) (sandbox.Sandbox, sandbox.Operation, error) {
	sb := newSandbox(e.project, "base", e.tick())
	sb.Egress = profile
	sb, op, _, err := e.s.CreateSandbox(e.ctx, sb, e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{})
	return sb, op, err
}

func egressProfiles(e *env) {
	in := e.newProfile(e.project, "web")
	idem := sandbox.Idempotency{Key: "k"}
	p, replayed, err := e.s.CreateEgressProfile(e.ctx, in, idem)
	e.must(err)
	if replayed || p.Version != 1 || p.ID != in.ID || len(p.Rules) != 1 || p.Rules[0].Hosts[0] != "*.example.com" || p.Limits.Connections != 7 ||
		!p.CreatedAt.Equal(in.CreatedAt) || !p.UpdatedAt.Equal(in.CreatedAt) || p.Default != sandbox.EgressDeny {
		e.Fatalf("%+v %v", p, replayed)
	}
	again := e.newProfile(e.project, "web")
	if got, replayed, err := e.s.CreateEgressProfile(e.ctx, again, idem); err != nil || !replayed || got.ID != p.ID {
		e.Errorf("%+v %v %v", got, replayed, err)
	}
	_, _, err = e.s.CreateEgressProfile(e.ctx, again, sandbox.Idempotency{})
	e.wants(err, sandbox.Conflict, "profile_exists")
	_, _, err = e.s.CreateEgressProfile(e.ctx, e.newProfile(sandbox.NewID(sandbox.KindProject), "x"), sandbox.Idempotency{})
	e.wants(err, sandbox.NotFound, "project_not_found")

	// Another project's is not there, nor for who names no project.
	other := e.newProject("other")
	for _, project := range []string{other, ""} {
		_, err = e.s.EgressProfile(e.ctx, project, "web")
		e.wants(err, sandbox.NotFound, "profile_not_found")
		e.wants(e.s.DeleteEgressProfile(e.ctx, project, "web"), sandbox.NotFound, "profile_not_found")
	}
	_, _, err = e.s.CreateEgressProfile(e.ctx, e.newProfile(other, "web"), sandbox.Idempotency{})
	e.must(err)

	next := in
	next.Version, next.DryRun, next.Default, next.UpdatedAt = 1, true, sandbox.EgressAllow, e.tick()
	next.Rules = nil
	p, err = e.s.ReplaceEgressProfile(e.ctx, next)
	e.must(err)
	if p.Version != 2 || !p.DryRun || p.Default != sandbox.EgressAllow || len(p.Rules) != 0 || !p.UpdatedAt.Equal(next.UpdatedAt) || !p.CreatedAt.Equal(in.CreatedAt) {
		e.Errorf("%+v", p)
	}
	_, err = e.s.ReplaceEgressProfile(e.ctx, next)
	e.wants(err, sandbox.Conflict, "version_mismatch")
	next.Name = "none such"
	_, err = e.s.ReplaceEgressProfile(e.ctx, next)
	e.wants(err, sandbox.NotFound, "profile_not_found")

	e.profile("a-first")
	list, err := e.s.EgressProfiles(e.ctx, e.project)
	e.must(err)
	if len(list) != 2 || list[0].Name != "a-first" || list[1].Version != 2 {
		e.Errorf("%+v", list)
	}
	for len(list) < sandbox.MaxEgressProfiles {
		list = append(list, e.profile(sandbox.NewID("p")))
	}
	_, _, err = e.s.CreateEgressProfile(e.ctx, e.newProfile(e.project, "one-more"), sandbox.Idempotency{})
	e.wants(err, sandbox.Quota, "too_many_profiles")
	e.must(e.s.DeleteEgressProfile(e.ctx, e.project, "web"))
	_, err = e.s.EgressProfile(e.ctx, e.project, "web")
	e.wants(err, sandbox.NotFound, "profile_not_found")
}

func egressOfSandboxes(e *env) {
	_, _, err := e.withEgress("web")
	e.wants(err, sandbox.NotFound, "profile_not_found")
	e.profile("web")
	sb, op, err := e.withEgress("web")
	e.must(err)
	e.finish(op)
	if e.get(sb.ID).Egress != "web" {
		e.Errorf("%+v", e.get(sb.ID))
	}
	e.wants(e.s.DeleteEgressProfile(e.ctx, e.project, "web"), sandbox.FailedPrecondition, "profile_in_use")

	_, err = e.s.SetSandboxEgress(e.ctx, e.project, sb.ID, "nothing")
	e.wants(err, sandbox.NotFound, "profile_not_found")
	_, err = e.s.SetSandboxEgress(e.ctx, e.newProject("other"), sb.ID, "web")
	e.wants(err, sandbox.NotFound, "sandbox_not_found")

	// Children and what is made of a snapshot have it too, unless others are named.
	fork := e.bring(sandbox.VerbFork)
	fork.Children = children(2, e.clock)
	fork.Children[1].Sandbox.Egress = sandbox.PresetPublic
	e.finish(e.beginWith(sb.ID, sandbox.VerbFork, fork))
	for i, want := range []string{"web", sandbox.PresetPublic} {
		if got := e.get(fork.Children[i].Sandbox.ID).Egress; got != want {
			e.Errorf("child %d has %q", i, got)
		}
	}
	fork = e.bring(sandbox.VerbFork)
	fork.Children[0].Sandbox.Egress = "nothing"
	_, _, _, err = e.s.BeginVerb(e.ctx, e.project, sb.ID, sandbox.VerbFork, fork, sandbox.Idempotency{})
	e.wants(err, sandbox.NotFound, "profile_not_found")
	snap := e.do(sb.ID, sandbox.VerbSnapshot).Snapshot
	from := func(profile string) (sandbox.Sandbox, error) {
		n := newSandbox(e.project, "", e.tick())
		n.Source, n.Egress = snap, profile
		n, _, _, err := e.s.CreateSandbox(e.ctx, n, e.newOp(sandbox.VerbCreate), sandbox.Capacity{}, sandbox.Idempotency{})
		return n, err
	}
	for _, c := range [][2]string{{"", "web"}, {sandbox.PresetNone, sandbox.PresetNone}} {
		n, err := from(c[0])
		e.must(err)
		if n.Egress != c[1] {
			e.Errorf("with %q it has %q", c[0], n.Egress)
		}
		e.deleted(n.ID)
	}

	got, err := e.s.SetSandboxEgress(e.ctx, e.project, sb.ID, sandbox.PresetPackages)
	e.must(err)
	if got.Egress != sandbox.PresetPackages || e.get(sb.ID).Egress != sandbox.PresetPackages {
		e.Errorf("%+v", got)
	}
	e.wants(e.s.DeleteEgressProfile(e.ctx, e.project, "web"), sandbox.FailedPrecondition, "profile_in_use") // the child
	list, _, err := e.s.Sandboxes(e.ctx, e.project, sandbox.SandboxFilter{}, sandbox.Page{})
	e.must(err)
	for _, n := range list {
		if n.Egress == "web" && n.State != sandbox.StateDeleted {
			e.deleted(n.ID)
		}
	}
	e.must(e.s.DeleteEgressProfile(e.ctx, e.project, "web"))
	_, err = from("")
	e.wants(err, sandbox.FailedPrecondition, "profile_gone")
	e.deleted(sb.ID)
	_, err = e.s.SetSandboxEgress(e.ctx, e.project, sb.ID, sandbox.PresetNone)
	e.wants(err, sandbox.FailedPrecondition, "wrong_state")
}

func (e *env) newSecret(name string) sandbox.Secret {
	return sandbox.Secret{
		ID: sandbox.NewID(sandbox.KindSecret), Project: e.project, Name: name, Hosts: []string{"api.example.com"}, Sealed: []byte("sealed " + name),
		Source:    &sandbox.SecretSource{Kind: "client_credentials", TokenURL: "https://auth.example.com/t", ClientID: "c", Scopes: []string{"s"}},
		CreatedAt: e.tick(),
	}
}

func (e *env) secret(name string) sandbox.Secret {
	e.Helper()
	s, err := e.s.CreateSecret(e.ctx, e.newSecret(name))
	e.must(err)
	return s
}

func secrets(e *env) {
	in := e.newSecret("KEY")
	s, err := e.s.CreateSecret(e.ctx, in)
	e.must(err)
	if s.Version != 1 || s.ID != in.ID || string(s.Sealed) != "sealed KEY" || s.Hosts[0] != "api.example.com" || s.Source == nil || s.Source.Scopes[0] != "s" ||
		!s.UpdatedAt.Equal(in.CreatedAt) {
		e.Errorf("%+v", s)
	}
	_, err = e.s.CreateSecret(e.ctx, e.newSecret("KEY"))
	e.wants(err, sandbox.Conflict, "secret_exists")
	at := e.tick()
	s, err = e.s.ReplaceSecret(e.ctx, e.project, in.ID, 1, []byte("two"), at)
	e.must(err)
	if s.Version != 2 || string(s.Sealed) != "two" || !s.UpdatedAt.Equal(at) || s.Hosts[0] != "api.example.com" {
		e.Errorf("%+v", s)
	}
	_, err = e.s.ReplaceSecret(e.ctx, e.project, in.ID, 1, []byte("three"), at)
	e.wants(err, sandbox.Conflict, "version_mismatch")
	s, err = e.s.ReplaceSecret(e.ctx, e.project, in.ID, 0, []byte("three"), at)
	e.must(err)
	if s.Version != 3 {
		e.Errorf("%+v", s)
	}
	other := e.newProject("other")
	_, err = e.s.ReplaceSecret(e.ctx, other, in.ID, 0, []byte("x"), at)
	e.wants(err, sandbox.NotFound, "secret_not_found")
	_, err = e.s.Secret(e.ctx, other, "KEY")
	e.wants(err, sandbox.NotFound, "secret_not_found")
	e.wants(e.s.DeleteSecret(e.ctx, other, "KEY"), sandbox.NotFound, "secret_not_found")
	e.secret("A")
	list, err := e.s.Secrets(e.ctx, e.project)
	e.must(err)
	if len(list) != 2 || list[0].Name != "A" || string(list[1].Sealed) != "three" {
		e.Errorf("%+v", list)
	}
	for n := len(list); n < sandbox.MaxSecrets; n++ {
		e.secret(sandbox.NewID("s"))
	}
	_, err = e.s.CreateSecret(e.ctx, e.newSecret("one-more"))
	e.wants(err, sandbox.Quota, "too_many_secrets")
	e.must(e.s.DeleteSecret(e.ctx, e.project, "KEY"))
	_, err = e.s.Secret(e.ctx, e.project, "KEY")
	e.wants(err, sandbox.NotFound, "secret_not_found")
}

// egressStates: every change that an assignment is made of raises its revision,
// and what it is made of is of one instant.
func egressStates(e *env) {
	e.profile("web", "KEY", "OTHER")
	sb, op, err := e.withEgress("web")
	e.must(err)
	var last int64
	raised := func(what string) sandbox.EgressState {
		e.Helper()
		st, err := e.s.EgressState(e.ctx, sb.ID)
		e.must(err)
		if st.Revision <= last {
			e.Errorf("%s did not raise the revision", what)
		}
		last = st.Revision
		return st
	}
	st := raised("nothing")
	if st.Sandbox.ID != sb.ID || st.Profile == nil || st.Profile.Version != 1 || len(st.Secrets) != 0 || len(st.CA.Cert) != 0 {
		e.Fatalf("%+v", st)
	}
	key := e.secret("KEY")
	e.secret("UNUSED")
	if st = raised("a secret"); len(st.Secrets) != 1 || string(st.Secrets[0].Sealed) != "sealed KEY" {
		e.Errorf("%+v", st.Secrets)
	}
	_, err = e.s.ReplaceSecret(e.ctx, e.project, key.ID, 0, []byte("two"), e.tick())
	e.must(err)
	if st = raised("a rotation"); st.Secrets[0].Version != 2 {
		e.Errorf("%+v", st.Secrets)
	}
	next := *st.Profile
	next.Rules = next.Rules[:1]
	_, err = e.s.ReplaceEgressProfile(e.ctx, next)
	e.must(err)
	if st = raised("a profile"); len(st.Secrets) != 0 || st.Profile.Version != 2 {
		e.Errorf("%+v", st)
	}
	ca, err := e.s.PutAuthority(e.ctx, e.project, sandbox.Authority{Cert: []byte("c"), Key: []byte("k")})
	e.must(err)
	if st = raised("an authority"); string(ca.Cert) != "c" || string(st.CA.Cert) != "c" || string(st.CA.Key) != "k" {
		e.Errorf("%+v %+v", ca, st.CA)
	}
	if ca, err = e.s.PutAuthority(e.ctx, e.project, sandbox.Authority{Cert: []byte("d"), Key: []byte("l")}); err != nil || string(ca.Cert) != "c" {
		e.Errorf("the first authority gave way: %+v %v", ca, err)
	}
	e.must(e.s.RaiseEgressRevision(e.ctx))
	raised("asking")
	_, err = e.s.SetSandboxEgress(e.ctx, e.project, sb.ID, sandbox.PresetPublic)
	e.must(err)
	if st = raised("another profile"); st.Profile != nil || st.Sandbox.Egress != sandbox.PresetPublic {
		e.Errorf("%+v", st)
	}
	e.must(e.s.DeleteSecret(e.ctx, e.project, "KEY"))
	raised("a deletion")
	_, err = e.s.EgressState(e.ctx, sandbox.NewID(sandbox.KindSandbox))
	e.wants(err, sandbox.NotFound, "sandbox_not_found")
	_, err = e.s.PutAuthority(e.ctx, sandbox.NewID(sandbox.KindProject), ca)
	e.wants(err, sandbox.NotFound, "project_not_found")
	e.finish(op)
}

func egressUsers(e *env) {
	e.profile("web", "KEY")
	e.profile("plain")
	web, op, err := e.withEgress("web")
	e.must(err)
	plain, _, err := e.withEgress("plain") // it is being created
	e.must(err)
	e.finish(op)
	none := e.running()
	quiet, op, err := e.withEgress("web")
	e.must(err)
	e.finish(op)
	e.do(quiet.ID, sandbox.VerbSuspend)
	wants := func(project, profile, secret string, want ...string) {
		e.Helper()
		got, err := e.s.EgressUsers(e.ctx, project, profile, secret)
		e.must(err)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			e.Errorf("%q %q %q: %v, want %v", project, profile, secret, got, want)
		}
	}
	other := e.newProject("other")
	wants("", "", "", web.ID, plain.ID, none.ID)
	wants(e.project, "", "", web.ID, plain.ID, none.ID)
	wants(other, "", "")
	wants(e.project, "web", "", web.ID)
	wants(other, "web", "")
	wants(e.project, "", "KEY", web.ID)
	wants(e.project, "", "OTHER")
	e.begin(quiet.ID, sandbox.VerbRestore)
	wants(e.project, "web", "", web.ID, quiet.ID)
	e.begin(web.ID, sandbox.VerbDelete)
	wants(e.project, "web", "", quiet.ID)
}
