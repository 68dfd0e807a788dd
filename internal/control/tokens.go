package control

import (
	"context"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Tokens: values of secrets that come from elsewhere and don't last. They are in
// memory only; the credential that they are fetched with is in the store.

const (
	tokenWait    = 2 * time.Second  // how long an assignment waits for the first one
	tokenTimeout = 30 * time.Second // of one fetch
	tokenLife    = 30 * time.Minute // of one that does not say how long it lasts
	tokenLeast   = 10 * time.Second // between two fetches, however short they last
	tokenRetry   = 5 * time.Second  // after a failure, doubling up to
	tokenPause   = 5 * time.Minute
)

// tokens are those that are known, by secret.
type tokens struct {
	mu sync.Mutex
	of map[string]*token
}

type token struct {
	project, name string // of the secret
	version       int64  // of the credential that it was fetched with
	value         []byte // nil: none yet
	expires       time.Time
	renew         time.Time     // when to fetch again
	wait          time.Duration // after the last failure; 0 where there was none
	fetching      chan struct{} // closed when the fetch under way has ended
	// rotated is a credential that took the place of the stored one and that the
	// store could not be told yet: without it the secret would be lost.
	rotated []byte
}

// usable tells whether t may be used now for a secret of this version.
func (t *token) usable(version int64, now time.Time) bool {
	return t.value != nil && t.version == version && (t.expires.IsZero() || now.Before(t.expires))
}

// token is the present value of a secret that has a source, nil where there is
// none. The first is waited for, but not for long.
func (c *Control) token(ctx context.Context, s sandbox.Secret) (value []byte, expires *time.Time) {
	c.tokens.mu.Lock()
	t := c.tokens.of[s.ID]
	if t == nil || t.version < s.Version && t.fetching == nil {
		t = &token{project: s.Project, name: s.Name, version: s.Version}
		c.tokens.of[s.ID] = t
	}
	if !t.usable(s.Version, c.now()) && (t.fetching != nil || !c.now().Before(t.renew)) {
		fetching := c.fetchToken(s.ID, t)
		c.tokens.mu.Unlock()
		wait, cancel := context.WithTimeout(ctx, tokenWait)
		select {
		case <-fetching:
		case <-wait.Done():
		}
		cancel()
		c.tokens.mu.Lock()
		t = c.tokens.of[s.ID]
	}
	defer c.tokens.mu.Unlock()
	// A credential that rotated has raised the version: the token is newer then.
	if t == nil || t.version < s.Version || !t.usable(t.version, c.now()) {
		return nil, nil
	}
	if !t.expires.IsZero() {
		at := t.expires
		expires = &at
	}
	return t.value, expires
}

// fetchToken fetches t in the background unless that is under way, and returns
// what closes at its end. It is called under the lock.
func (c *Control) fetchToken(id string, t *token) <-chan struct{} {
	if t.fetching != nil {
		return t.fetching
	}
	done := make(chan struct{})
	t.fetching = done
	if !c.spawn("token "+id, func(ctx context.Context) {
		defer close(done)
		c.fetch(ctx, id, t)
	}) {
		t.fetching = nil
		close(done)
	}
	return done
}

// fetch fetches one token and has it sent to whom it concerns.
func (c *Control) fetch(ctx context.Context, id string, t *token) {
	ctx, cancel := context.WithTimeout(ctx, tokenTimeout)
	defer cancel()
	had := t.value != nil
	err := c.fetchOnce(ctx, id, t)
	gone := sandbox.IsClass(err, sandbox.NotFound)

	c.tokens.mu.Lock()
	t.fetching = nil
	switch {
	case gone && c.tokens.of[id] == t:
		delete(c.tokens.of, id)
	case err != nil:
		t.wait = min(max(2*t.wait, tokenRetry), tokenPause)
		t.renew = c.now().Add(t.wait)
	default:
		t.wait = 0
	}
	c.tokens.mu.Unlock()
	if err != nil {
		if !gone {
			c.logErr(ctx, "can't fetch a secret's token", err, "project", t.project, "name", t.name, "has_one", had)
		}
		return
	}
	if err := c.store.RaiseEgressRevision(ctx); err != nil {
		c.logErr(ctx, "can't raise the revision of assignments; all are sent again", err)
		c.pushes.everything() // which raises it
		return
	}
	c.egressChanged(ctx, t.project, "", t.name)
}

// fetchOnce fetches with the credential that is there now and puts what came
// into t.
func (c *Control) fetchOnce(ctx context.Context, id string, t *token) error {
	if err := c.keepRotated(ctx, id, t); err != nil {
		return err
	}
	s, err := c.store.Secret(ctx, t.project, t.name)
	if err == nil && (s.ID != id || s.Source == nil) {
		err = sandbox.Errorf(sandbox.NotFound, "secret_not_found", "the secret is another one by now")
	}
	if err != nil {
		return err
	}
	credential, err := c.o.Egress.Vault.Open(ctx, s.Project, s.ID, s.Sealed)
	if err != nil {
		return err
	}
	value, expires, rotated, err := c.o.Egress.Token(ctx, *s.Source, credential)
	if err != nil {
		return err
	}
	now := c.now()
	life := tokenLife
	if !expires.IsZero() {
		life = expires.Sub(now)
	}
	c.tokens.mu.Lock()
	t.version, t.value, t.expires, t.rotated = s.Version, value, expires, rotated
	t.renew = now.Add(max(life*4/5, tokenLeast))
	c.tokens.mu.Unlock()
	if err := c.keepRotated(ctx, id, t); err != nil {
		c.logErr(ctx, "can't store a credential that was rotated; it is tried again", err, "project", t.project, "name", t.name)
	}
	return nil
}

// keepRotated stores a credential that took the place of the one that t was
// fetched with. Where somebody has set another meanwhile, or has deleted the
// secret, that counts.
func (c *Control) keepRotated(ctx context.Context, id string, t *token) error {
	c.tokens.mu.Lock()
	rotated, version := t.rotated, t.version
	c.tokens.mu.Unlock()
	if rotated == nil {
		return nil
	}
	sealed, err := c.o.Egress.Vault.Seal(ctx, t.project, id, rotated)
	if err != nil {
		return err
	}
	s, err := c.store.ReplaceSecret(ctx, t.project, id, version, sealed, c.now().UTC())
	if err != nil && !sandbox.IsClass(err, sandbox.Conflict) && !sandbox.IsClass(err, sandbox.NotFound) {
		return err
	}
	c.tokens.mu.Lock()
	defer c.tokens.mu.Unlock()
	t.rotated = nil
	if err == nil {
		t.version = s.Version
	}
	return nil
}

// renewTokens fetches those that are due and still needed, forgets the others,
// and stores credentials that could not be stored.
func (c *Control) renewTokens(ctx context.Context) {
	now := c.now()
	c.tokens.mu.Lock()
	due, rotated := map[string]*token{}, map[string]*token{}
	for id, t := range c.tokens.of {
		switch {
		case t.fetching != nil:
		case t.rotated != nil:
			rotated[id] = t
		case !now.Before(t.renew):
			due[id] = t
		}
	}
	c.tokens.mu.Unlock()
	for id, t := range rotated {
		// A fetch would be refused without it, so that it comes first.
		if err := c.keepRotated(ctx, id, t); err != nil {
			c.logErr(ctx, "can't store a credential that was rotated yet", err, "project", t.project, "name", t.name)
		}
	}
	for id, t := range due {
		users, err := c.store.EgressUsers(ctx, t.project, "", t.name)
		c.tokens.mu.Lock()
		switch {
		case err != nil || c.tokens.of[id] != t:
		case len(users) == 0:
			delete(c.tokens.of, id)
		default:
			c.fetchToken(id, t)
		}
		c.tokens.mu.Unlock()
	}
}
