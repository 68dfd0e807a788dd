package control

import (
	"context"

	"cloche.dev/cloche/internal/sandbox"
)

// CreateKey makes an API key. secret is its text, which is told once: a
// replayed call leaves it out. project "" is the caller's own.
func (c *Control) CreateKey(ctx context.Context, who sandbox.Caller, project, name string, role sandbox.Role, idem sandbox.Idempotency) (k sandbox.Key, secret string, replayed bool, err error) {
	if err := who.Can(sandbox.ActKeys); err != nil {
		return k, "", false, err
	}
	if project == "" {
		project = who.Project
	}
	if err := validateID(sandbox.KindProject, "project", project); err != nil {
		return k, "", false, err
	}
	if name == "" || len(name) > MaxName || !printable(name) {
		return k, "", false, invalid("bad_name", "a key's name is 1 to %d bytes of printable text", MaxName)
	}
	if !role.Valid() {
		return k, "", false, invalid("bad_role", "there is no role %s", quote(string(role))).WithHint("admin, project or read")
	}
	if idem, err = stamp(idem, []string{project, name, string(role)}); err != nil {
		return k, "", false, err
	}
	id := sandbox.NewID(sandbox.KindKey)
	text, hash := c.o.MintKey(id)
	k = sandbox.Key{ID: id, Project: project, Name: name, Role: role, Hash: hash, CreatedAt: c.now().UTC()}
	k, replayed, err = c.store.CreateKey(ctx, k, idem)
	if err != nil || replayed {
		text = ""
	}
	k.Hash = nil
	return k, text, replayed, err
}

// Keys lists the keys of a project; "" is every project.
func (c *Control) Keys(ctx context.Context, who sandbox.Caller, project string) ([]sandbox.Key, error) {
	if err := who.Can(sandbox.ActKeys); err != nil {
		return nil, err
	}
	list, err := c.store.Keys(ctx, project)
	for i := range list {
		list[i].Hash = nil
	}
	return list, err
}

// RevokeKey ends a key. The caller's own is refused, so that nobody locks
// himself out by a slip.
func (c *Control) RevokeKey(ctx context.Context, who sandbox.Caller, id string) error {
	if err := c.allowed(who, sandbox.ActKeys, sandbox.KindKey, "key", id); err != nil {
		return err
	}
	if id == who.KeyID {
		return sandbox.Errorf(sandbox.FailedPrecondition, "own_key", "a key can't revoke itself").WithHint("use another admin key")
	}
	return c.store.RevokeKey(ctx, who.Scope(), id, c.now().UTC())
}
