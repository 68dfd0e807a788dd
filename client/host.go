package client

import (
	"context"
	"net/http"
	"time"

	"cloche.dev/cloche/api"
)

// Usage returns what the key's project has, and may have.
func (c *Client) Usage(ctx context.Context) (u api.ProjectUsage, err error) {
	err = c.do(ctx, call{method: http.MethodGet, path: "/v1/usage"}, &u)
	return u, err
}

// SetQuotas replaces a project's quotas; a 0 is no bound.
func (c *Client) SetQuotas(ctx context.Context, project string, q api.Quotas) (p api.Project, err error) {
	err = c.do(ctx, call{method: http.MethodPut, path: "/v1/projects/" + seg(project) + "/quotas", json: q}, &p)
	return p, err
}

// Drain suspends everything that has a machine, or saves its disk, and tells
// what it could not within the time. The call lasts as long.
func (c *Client) Drain(ctx context.Context, within time.Duration) (r api.DrainReport, err error) {
	req := api.DrainRequest{WithinSeconds: max(1, int(within/time.Second))}
	err = c.do(ctx, call{method: http.MethodPost, path: "/v1/host/drain", json: req}, &r)
	return r, err
}
