package control

import (
	"cmp"
	"context"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Assignments: what the gateway is told of a sandbox. One is sent before each
// machine comes up, and again whenever what it is made of has changed.

// The bounds of sending assignments.
const (
	egressEvery   = time.Second      // how often what could not be sent is looked at
	egressTimeout = 10 * time.Second // of one
	egressWait    = time.Second      // how long a call waits for one
	egressAtOnce  = 32
)

// caID is the id under which a project's authority is sealed.
const caID = "ca"

// assign sends a sandbox's assignment. A sandbox that is gone, or that has
// neither a machine nor a prospect of one, has none: it would hold secrets that
// nobody takes back.
func (c *Control) assign(ctx context.Context, id string, open *opener) error {
	st, err := c.store.EgressState(ctx, id)
	if err == nil && len(st.CA.Cert) == 0 {
		// Read again, so that the assignment is of one instant.
		if err = c.newAuthority(ctx, st.Sandbox.Project); err == nil {
			st, err = c.store.EgressState(ctx, id)
		}
	}
	if sandbox.IsClass(err, sandbox.NotFound) && st.Sandbox.ID == "" {
		return nil
	}
	if err != nil || !takesEgress(st.Sandbox.State) {
		return err
	}
	a, err := c.assignment(ctx, st, open)
	if err != nil {
		return err
	}
	return c.node.SetEgress(ctx, a)
}

// assignment opens what st holds sealed.
func (c *Control) assignment(ctx context.Context, st sandbox.EgressState, open *opener) (sandbox.EgressAssignment, error) {
	project := st.Sandbox.Project
	a := sandbox.EgressAssignment{Sandbox: st.Sandbox.ID, Project: project, Revision: st.Revision}
	if st.Profile != nil {
		a.Profile = *st.Profile
	} else {
		name := cmp.Or(st.Sandbox.Egress, sandbox.PresetNone)
		preset, ok := c.o.Egress.Preset(name)
		if !ok {
			return a, sandbox.Errorf(sandbox.Internal, "no_preset", "there is no preset %s", name)
		}
		a.Profile, a.Profile.Project = preset, project
	}
	key, err := open.open(ctx, project, caID, 0, st.CA.Key)
	if err != nil {
		return a, err
	}
	a.CA = sandbox.Authority{Cert: st.CA.Cert, Key: key}
	for _, s := range st.Secrets {
		v := sandbox.SecretValue{Name: s.Name, Hosts: s.Hosts}
		if s.Source == nil {
			v.Value, err = open.open(ctx, project, s.ID, s.Version, s.Sealed)
		} else if v.Value, v.ExpiresAt = c.token(ctx, s); v.Value == nil {
			continue // what it is injected into fails until there is one
		}
		if err != nil {
			return a, err
		}
		a.Secrets = append(a.Secrets, v)
	}
	return a, nil
}

// newAuthority makes a project's authority, unless another was faster.
func (c *Control) newAuthority(ctx context.Context, project string) error {
	a, err := c.o.Egress.NewCA(project)
	if err != nil {
		return err
	}
	if a.Key, err = c.o.Egress.Vault.Seal(ctx, project, caID, a.Key); err != nil {
		return err
	}
	_, err = c.store.PutAuthority(ctx, project, a)
	return err
}

// opener opens each sealed value once, since a vault may have to ask for each.
// It lives no longer than one round of assignments.
type opener struct {
	vault Vault
	mu    sync.Mutex
	plain map[opened][]byte
}

type opened struct {
	project, id string
	version     int64
}

func (c *Control) opener() *opener {
	return &opener{vault: c.o.Egress.Vault, plain: map[opened][]byte{}}
}

func (o *opener) open(ctx context.Context, project, id string, version int64, sealed []byte) ([]byte, error) {
	key := opened{project, id, version}
	o.mu.Lock()
	plain, ok := o.plain[key]
	o.mu.Unlock()
	if ok {
		return plain, nil
	}
	plain, err := o.vault.Open(ctx, project, id, sealed)
	if err == nil {
		o.mu.Lock()
		o.plain[key] = plain
		o.mu.Unlock()
	}
	return plain, err
}

// pushes are the sandboxes whose assignment has to be sent again.
type pushes struct {
	kick kicker
	mu   sync.Mutex
	all  bool // every one that there is: after a start, or when it is not known which
	due  map[string]push
}

// push is when it is to be tried, and how long to wait after it fails again.
type push struct {
	at   time.Time
	wait time.Duration
}

func newPushes() pushes {
	return pushes{kick: newKicker(), all: true, due: map[string]push{}}
}

// add asks for assignments to be sent at once.
func (p *pushes) add(now time.Time, ids ...string) {
	p.mu.Lock()
	for _, id := range ids {
		p.due[id] = push{at: now}
	}
	p.mu.Unlock()
	p.kick.kick()
}

// everything asks for all assignments to be sent.
func (p *pushes) everything() {
	p.mu.Lock()
	p.all = true
	p.mu.Unlock()
	p.kick.kick()
}

// take takes what is due.
func (p *pushes) take(now time.Time) map[string]push {
	p.mu.Lock()
	defer p.mu.Unlock()
	due := map[string]push{}
	for id, d := range p.due {
		if !now.Before(d.at) {
			due[id] = d
			delete(p.due, id)
		}
	}
	return due
}

// later puts back what could not be sent, unless it was asked for anew.
func (p *pushes) later(at time.Time, id string, wait time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, again := p.due[id]; !again {
		p.due[id] = push{at: at, wait: wait}
	}
}

// egressChanged has the assignments sent that a profile (or secret, where that
// is not "") has part in. The change is in the store already, so that the end of
// the caller's ctx must not lose it.
func (c *Control) egressChanged(ctx context.Context, project, profile, secret string) {
	c.bell.ring("")
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), egressTimeout)
	defer cancel()
	ids, err := c.store.EgressUsers(ctx, project, profile, secret)
	if err != nil {
		c.logErr(ctx, "can't list the sandboxes that an egress change concerns; all are told", err)
		c.pushes.everything()
		return
	}
	c.pushes.add(c.now(), ids...)
}

// pushEgress is one round: it sends what is due and renews tokens. A sandbox
// that is slow keeps no other waiting.
func (c *Control) pushEgress(ctx context.Context) {
	if err := c.pushAll(ctx); err != nil {
		c.logErr(ctx, "can't list the sandboxes that need an egress assignment", err)
	}
	open := c.opener()
	for id, was := range c.pushes.take(c.now()) {
		if !c.spawn("egress "+id, func(ctx context.Context) { c.pushOne(ctx, id, was, open) }) {
			c.pushes.later(c.now().Add(egressEvery), id, was.wait) // one is under way, which began before this was asked for
		}
	}
	c.renewTokens(ctx)
}

func (c *Control) pushOne(ctx context.Context, id string, was push, open *opener) {
	if c.egresses.take(ctx, func() {}) != nil {
		return // stopping: the next start sends all
	}
	defer c.egresses.free()
	failure := attempt(ctx, egressTimeout, func(ctx context.Context) error { return c.assign(ctx, id, open) })
	if failure == nil {
		return
	}
	wait := min(max(2*was.wait, firstBackoff), lastBackoff)
	c.pushes.later(c.now().Add(wait), id, wait)
	if was.wait == 0 || wait == lastBackoff {
		c.logErr(ctx, "a sandbox's egress can't be set; it is tried again", failure, "sandbox", id)
	}
}

// pushAll turns "all" into sandboxes. After a start the revision is raised
// first: tokens of before, which this process does not know, have to give way.
func (c *Control) pushAll(ctx context.Context) error {
	c.pushes.mu.Lock()
	all := c.pushes.all
	c.pushes.all = false
	c.pushes.mu.Unlock()
	if !all {
		return nil
	}
	err := c.store.RaiseEgressRevision(ctx)
	var ids []string
	if err == nil {
		ids, err = c.store.EgressUsers(ctx, "", "", "")
	}
	c.pushes.mu.Lock()
	defer c.pushes.mu.Unlock()
	if err != nil {
		c.pushes.all = true
		return err
	}
	for _, id := range ids {
		c.pushes.due[id] = push{at: c.now()}
	}
	return nil
}
