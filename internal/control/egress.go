package control

import (
	"context"
	"slices"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Egress is what control needs for egress. All of it is needed.
type Egress struct {
	Vault Vault
	// Check says whether a profile means something (policy.Compile).
	Check func(sandbox.EgressProfile) error
	// Preset answers a preset by its name (policy.Preset).
	Preset func(name string) (sandbox.EgressProfile, bool)
	// NewCA makes a project's authority (ca.Generate).
	NewCA func(project string) (sandbox.Authority, error)
	// Token fetches a short-lived token (oauth.Fetch): rotated, where it is not
	// nil, is the credential from then on.
	Token func(ctx context.Context, s sandbox.SecretSource, credential []byte) (token []byte, expires time.Time, rotated []byte, err error)
	Audit sandbox.EgressAudit
}

// Vault seals what may not stand in the store in clear. What was sealed for one
// project and id opens for no other.
type Vault interface {
	Seal(ctx context.Context, project, id string, plain []byte) ([]byte, error)
	Open(ctx context.Context, project, id string, sealed []byte) ([]byte, error)
}

// egressFor checks the role, and that there is a gateway at all.
func (c *Control) egressFor(who sandbox.Caller, a sandbox.Action) error {
	if err := who.Can(a); err != nil {
		return err
	}
	if c.o.Egress == nil {
		return noEgress()
	}
	return nil
}

func noEgress() error {
	e := sandbox.Errorf(sandbox.Unavailable, "egress_unavailable", "this daemon has no egress gateway, and no sandbox reaches anything")
	e.Retryable = false
	return e.WithHint("the daemon's log says at its start why there is none")
}

// validateEgress checks the name of a profile that a sandbox shall have.
func (c *Control) validateEgress(name string) error {
	switch {
	case name == "" || name == sandbox.PresetNone:
		return nil
	case c.o.Egress == nil:
		return noEgress()
	}
	return validateEgressName("profile", name)
}

// validateEgressName checks the form of a profile's or secret's name.
func validateEgressName(what, name string) error {
	if name == "" || len(name) > MaxName || !only(name, "._-") || !alnum(name[0]) {
		return invalid("bad_name", "%s is no name of a %s", quote(name), what).
			WithHint("1 to %d letters, digits and any of . _ - where the first is a letter or digit", MaxName)
	}
	return nil
}

// validateProfile checks a profile that shall be kept.
func (c *Control) validateProfile(p sandbox.EgressProfile) error {
	if err := validateEgressName("profile", p.Name); err != nil {
		return err
	}
	if sandbox.IsPreset(p.Name) {
		return presetFixed(p.Name)
	}
	if len(p.Rules) > sandbox.MaxEgressRules {
		return invalid("too_many_rules", "a profile may have %d rules, not %d", sandbox.MaxEgressRules, len(p.Rules))
	}
	return c.o.Egress.Check(p)
}

func presetFixed(name string) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "preset_fixed", "the profile %s is Cloche's own and can't be made, changed or deleted", name).
		WithHint("make a profile of another name")
}

// CreateProfile makes an egress profile of the caller's project.
func (c *Control) CreateProfile(ctx context.Context, who sandbox.Caller, p sandbox.EgressProfile, idem sandbox.Idempotency) (sandbox.EgressProfile, bool, error) {
	err := c.egressFor(who, sandbox.ActChange)
	if err == nil {
		idem, err = stamp(idem, p)
	}
	if err == nil {
		p.ID, p.Project, p.CreatedAt = sandbox.NewID(sandbox.KindPolicy), who.Project, c.now().UTC()
		err = c.validateProfile(p)
	}
	if err != nil {
		return sandbox.EgressProfile{}, false, err
	}
	p, replayed, err := c.store.CreateEgressProfile(ctx, p, idem)
	c.bell.ring("")
	return p, replayed, err
}

// Profile answers a profile of the caller's project, or a preset.
func (c *Control) Profile(ctx context.Context, who sandbox.Caller, name string) (sandbox.EgressProfile, error) {
	if err := c.egressFor(who, sandbox.ActSee); err != nil {
		return sandbox.EgressProfile{}, err
	}
	if p, ok := c.o.Egress.Preset(name); ok {
		p.Project = who.Project
		return p, nil
	}
	return c.store.EgressProfile(ctx, who.Project, name)
}

// Profiles lists the profiles of the caller's project behind the presets.
func (c *Control) Profiles(ctx context.Context, who sandbox.Caller) (list []sandbox.EgressProfile, err error) {
	if err := c.egressFor(who, sandbox.ActSee); err != nil {
		return nil, err
	}
	for _, name := range []string{sandbox.PresetNone, sandbox.PresetPackages, sandbox.PresetPublic} {
		if p, ok := c.o.Egress.Preset(name); ok {
			p.Project = who.Project
			list = append(list, p)
		}
	}
	own, err := c.store.EgressProfiles(ctx, who.Project)
	return append(list, own...), err
}

// ReplaceProfile puts p in place of the version that it names. Sandboxes that
// have it follow within a second.
func (c *Control) ReplaceProfile(ctx context.Context, who sandbox.Caller, p sandbox.EgressProfile) (sandbox.EgressProfile, error) {
	err := c.egressFor(who, sandbox.ActChange)
	if err == nil {
		p.Project, p.UpdatedAt = who.Project, c.now().UTC()
		err = c.validateProfile(p)
	}
	if err != nil {
		return sandbox.EgressProfile{}, err
	}
	if p, err = c.store.ReplaceEgressProfile(ctx, p); err != nil {
		return sandbox.EgressProfile{}, err
	}
	c.egressChanged(ctx, p.Project, p.Name, "")
	return p, nil
}

// DeleteProfile removes a profile that no sandbox has.
func (c *Control) DeleteProfile(ctx context.Context, who sandbox.Caller, name string) error {
	if err := c.egressFor(who, sandbox.ActChange); err != nil {
		return err
	}
	if sandbox.IsPreset(name) {
		return presetFixed(name)
	}
	err := c.store.DeleteEgressProfile(ctx, who.Project, name)
	c.bell.ring("")
	return err
}

// SetSandboxEgress gives a sandbox another profile. Where it has a machine, that
// is in force when it answers, or soon after.
func (c *Control) SetSandboxEgress(ctx context.Context, who sandbox.Caller, id, profile string) (sandbox.Sandbox, error) {
	err := c.allowed(who, sandbox.ActChange, sandbox.KindSandbox, "sandbox", id)
	if err == nil && c.o.Egress == nil {
		err = noEgress()
	}
	if err == nil {
		err = validateEgressName("profile", profile)
	}
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	sb, err := c.store.SetSandboxEgress(ctx, who.Scope(), id, profile)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	c.bell.ring("")
	if takesEgress(sb.State) && attempt(ctx, egressWait, func(ctx context.Context) error { return c.assign(ctx, id, c.opener()) }) != nil {
		c.pushes.add(c.now(), id)
	}
	return seen(who, sb), nil
}

// SecretRequest asks for a secret.
type SecretRequest struct {
	Name   string
	Hosts  []string
	Value  []byte // with Source the client secret or refresh token
	Source *sandbox.SecretSource
}

// CreateSecret makes a secret of the caller's project. Its hosts and its source
// can't be changed, so that who may rotate it can't send it elsewhere.
func (c *Control) CreateSecret(ctx context.Context, who sandbox.Caller, req SecretRequest) (s sandbox.Secret, err error) {
	if err := c.egressFor(who, sandbox.ActChange); err != nil {
		return s, err
	}
	s = sandbox.Secret{
		ID: sandbox.NewID(sandbox.KindSecret), Project: who.Project, Name: req.Name, Source: req.Source, CreatedAt: c.now().UTC(),
	}
	if s.Hosts, err = validateSecret(req); err != nil {
		return sandbox.Secret{}, err
	}
	if s.Sealed, err = c.o.Egress.Vault.Seal(ctx, s.Project, s.ID, req.Value); err != nil {
		return sandbox.Secret{}, err
	}
	if s, err = c.store.CreateSecret(ctx, s); err != nil {
		return sandbox.Secret{}, err
	}
	c.egressChanged(ctx, s.Project, "", s.Name)
	return unsealed(s), nil
}

// unsealed is s as a face gets it: without its value, sealed or not.
func unsealed(s sandbox.Secret) sandbox.Secret {
	s.Sealed = nil
	return s
}

// Secret answers one secret, without its value.
func (c *Control) Secret(ctx context.Context, who sandbox.Caller, name string) (sandbox.Secret, error) {
	if err := c.egressFor(who, sandbox.ActSee); err != nil {
		return sandbox.Secret{}, err
	}
	s, err := c.store.Secret(ctx, who.Project, name)
	return unsealed(s), err
}

// Secrets lists the secrets of the caller's project, without their values.
func (c *Control) Secrets(ctx context.Context, who sandbox.Caller) ([]sandbox.Secret, error) {
	if err := c.egressFor(who, sandbox.ActSee); err != nil {
		return nil, err
	}
	list, err := c.store.Secrets(ctx, who.Project)
	for i := range list {
		list[i] = unsealed(list[i])
	}
	return list, err
}

// ReplaceSecret gives a secret another value; version 0 is whatever it has.
// Sandboxes use it within a second.
func (c *Control) ReplaceSecret(ctx context.Context, who sandbox.Caller, name string, version int64, value []byte) (sandbox.Secret, error) {
	if err := c.egressFor(who, sandbox.ActChange); err != nil {
		return sandbox.Secret{}, err
	}
	if err := validateValue(value); err != nil {
		return sandbox.Secret{}, err
	}
	s, err := c.store.Secret(ctx, who.Project, name)
	if err != nil {
		return sandbox.Secret{}, err
	}
	if err := validateKind(s.Source, value); err != nil {
		return sandbox.Secret{}, err
	}
	sealed, err := c.o.Egress.Vault.Seal(ctx, s.Project, s.ID, value)
	if err != nil {
		return sandbox.Secret{}, err
	}
	if s, err = c.store.ReplaceSecret(ctx, s.Project, s.ID, version, sealed, c.now().UTC()); err != nil {
		return sandbox.Secret{}, err
	}
	c.egressChanged(ctx, s.Project, "", s.Name)
	return unsealed(s), nil
}

// DeleteSecret removes a secret. What it would be injected into then fails.
func (c *Control) DeleteSecret(ctx context.Context, who sandbox.Caller, name string) error {
	if err := c.egressFor(who, sandbox.ActChange); err != nil {
		return err
	}
	if err := c.store.DeleteSecret(ctx, who.Project, name); err != nil {
		return err
	}
	c.egressChanged(ctx, who.Project, "", name)
	return nil
}

// EgressRecords answers the newest of what the gateway decided about the
// sandboxes of the caller's project, oldest first, to who may read output: it
// tells what commands do. last is the sequence before which it looked.
func (c *Control) EgressRecords(ctx context.Context, who sandbox.Caller, f sandbox.EgressAuditFilter) (list []sandbox.EgressRecord, last int64, err error) {
	if err := c.validateAudit(who, &f); err != nil {
		return nil, 0, err
	}
	last = c.o.Egress.Audit.LastEgress()
	list, err = c.o.Egress.Audit.EgressRecords(ctx, f)
	if n := len(list); n > 0 {
		last = max(last, list[n-1].Seq)
	}
	return list, last, err
}

// FollowEgress tells of decisions behind f.After, and then as they come, until
// ctx ends or tell fails.
func (c *Control) FollowEgress(ctx context.Context, who sandbox.Caller, f sandbox.EgressAuditFilter, tell func(sandbox.EgressRecord) error) error {
	if err := c.validateAudit(who, &f); err != nil {
		return err
	}
	return c.o.Egress.Audit.FollowEgress(ctx, f, tell)
}

// validateAudit checks what is asked of the audit and confines it to what the
// caller may see.
func (c *Control) validateAudit(who sandbox.Caller, f *sandbox.EgressAuditFilter) error {
	if err := c.egressFor(who, sandbox.ActData); err != nil {
		return err
	}
	if f.Sandbox != "" && !sandbox.ValidID(sandbox.KindSandbox, f.Sandbox) {
		return invalid("bad_id", "%s is no id of a sandbox", quote(f.Sandbox))
	}
	if f.Verdict != "" && !slices.Contains([]string{"allowed", "denied", "failed"}, f.Verdict) {
		return invalid("bad_verdict", "there is no verdict %s", quote(f.Verdict)).WithHint("allowed, denied or failed")
	}
	if f.Kind != "" && !slices.Contains([]string{"dns", "tcp", "tls", "http", "packet"}, f.Kind) {
		return invalid("bad_kind", "there is no kind %s", quote(f.Kind)).WithHint("dns, tcp, tls, http or packet")
	}
	f.Project = who.Scope()
	return nil
}

// takesEgress tells whether a sandbox in this state has a machine, or may get
// one by the operation under way (EgressStateStore.EgressUsers).
func takesEgress(s sandbox.State) bool {
	switch s {
	case sandbox.StateSuspended, sandbox.StateStopped, sandbox.StateFailed, sandbox.StateDeleting, sandbox.StateDeleted:
		return false
	}
	return true
}
