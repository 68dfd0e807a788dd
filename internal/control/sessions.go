package control

import (
	"cmp"
	"context"

	"cloche.dev/cloche/internal/sandbox"
)

// CreateSession makes the identity of one command in a running sandbox. It
// starts nothing: attaching does. The user and the working directory default to
// the template's.
func (c *Control) CreateSession(ctx context.Context, who sandbox.Caller, sb string, p sandbox.Process, idem sandbox.Idempotency) (ses sandbox.Session, replayed bool, err error) {
	if err := c.allowed(who, sandbox.ActData, sandbox.KindSandbox, "sandbox", sb); err != nil {
		return ses, false, err
	}
	if err := ValidateProcess(p); err != nil {
		return ses, false, err
	}
	if idem, err = stamp(idem, p); err != nil {
		return ses, false, err
	}
	row, err := c.store.Sandbox(ctx, who.Scope(), sb)
	if err != nil {
		return ses, false, err
	}
	tpl, err := c.store.Template(ctx, row.Project, row.Digest)
	if err != nil {
		return ses, false, err
	}
	p.User = cmp.Or(p.User, tpl.Config.User)
	p.Cwd = cmp.Or(p.Cwd, tpl.Config.Workdir)
	return c.store.CreateSession(ctx, sandbox.Session{
		ID: sandbox.NewID(sandbox.KindSession), Project: row.Project, Sandbox: sb, Process: p,
		Generation: 1, Key: who.KeyID, CreatedAt: c.now().UTC(),
	}, idem)
}

// Session returns a session's identity.
func (c *Control) Session(ctx context.Context, who sandbox.Caller, sb, id string) (sandbox.Session, error) {
	if err := c.allowed(who, sandbox.ActSee, sandbox.KindSandbox, "sandbox", sb); err != nil {
		return sandbox.Session{}, err
	}
	if err := validateID(sandbox.KindSession, "session", id); err != nil {
		return sandbox.Session{}, err
	}
	ses, err := c.store.Session(ctx, who.Scope(), sb, id)
	return seenSession(who, ses), err
}

// Sessions lists a sandbox's sessions, newest first.
func (c *Control) Sessions(ctx context.Context, who sandbox.Caller, sb string, p sandbox.Page) ([]sandbox.Session, string, error) {
	if err := c.allowed(who, sandbox.ActSee, sandbox.KindSandbox, "sandbox", sb); err != nil {
		return nil, "", err
	}
	list, next, err := c.store.Sessions(ctx, who.Scope(), sb, p)
	for i := range list {
		list[i] = seenSession(who, list[i])
	}
	return list, next, err
}

// seenSession is ses as the caller may see it: see seen.
func seenSession(who sandbox.Caller, ses sandbox.Session) sandbox.Session {
	if !who.May(sandbox.ActData) {
		ses.Process.Env = nil
	}
	return ses
}
