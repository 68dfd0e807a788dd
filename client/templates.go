package client

import (
	"context"
	"io"
	"net/http"

	"cloche.dev/cloche/api"
)

// Templates returns all templates of the key's project.
func (c *Client) Templates(ctx context.Context) ([]api.Template, error) {
	var l api.TemplateList
	err := c.do(ctx, call{method: http.MethodGet, path: "/v1/templates"}, &l)
	return l.Items, err
}

// Template returns one template, by release ("name" or "name:tag") or digest.
func (c *Client) Template(ctx context.Context, ref string) (t api.Template, err error) {
	err = c.do(ctx, call{method: http.MethodGet, path: "/v1/templates/" + seg(ref)}, &t)
	return t, err
}

// ImportTemplate makes a template of a root filesystem's tar, which is read to
// its end while it is sent. release may be "".
func (c *Client) ImportTemplate(ctx context.Context, tar io.Reader, cfg api.RuntimeConfig, release string) (t api.Template, err error) {
	q := query("release", release, "user", cfg.User, "workdir", cfg.Workdir)
	for k, v := range cfg.Env {
		q.Add("env", k+"="+v)
	}
	for _, a := range cfg.Command {
		q.Add("command", a)
	}
	err = c.do(ctx, call{method: http.MethodPost, path: "/v1/templates", query: q, stream: tar, kind: "application/x-tar"}, &t)
	return t, err
}

// BuildTemplate builds a template from Debian packages on the daemon's host;
// Wait tells when it is done, and the operation then names the digest.
func (c *Client) BuildTemplate(ctx context.Context, req api.BuildRequest) (op api.Operation, err error) {
	err = c.do(ctx, call{method: http.MethodPost, path: "/v1/template-builds", json: req, creates: true}, &op)
	return op, err
}

// DeleteTemplate deletes a template and its releases. It is refused while a
// sandbox uses it.
func (c *Client) DeleteTemplate(ctx context.Context, ref string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: "/v1/templates/" + seg(ref)}, nil)
}

// Tag makes a release ("name:tag") point to a template.
func (c *Client) Tag(ctx context.Context, ref, release string) (r api.Release, err error) {
	err = c.do(ctx, call{method: http.MethodPut, path: "/v1/releases/" + seg(release), json: api.PutReleaseRequest{Template: ref}}, &r)
	return r, err
}

// Untag removes a release; its template stays.
func (c *Client) Untag(ctx context.Context, release string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: "/v1/releases/" + seg(release)}, nil)
}

// Keys returns all API keys, without their secrets.
func (c *Client) Keys(ctx context.Context) ([]api.Key, error) {
	var l api.KeyList
	err := c.do(ctx, call{method: http.MethodGet, path: "/v1/keys"}, &l)
	return l.Items, err
}

// CreateKey makes an API key. Its secret is in this answer and nowhere else.
func (c *Client) CreateKey(ctx context.Context, req api.CreateKeyRequest) (k api.CreatedKey, err error) {
	err = c.do(ctx, call{method: http.MethodPost, path: "/v1/keys", json: req, creates: true}, &k)
	return k, err
}

// RevokeKey makes an API key good for nothing.
func (c *Client) RevokeKey(ctx context.Context, id string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: "/v1/keys/" + seg(id)}, nil)
}
