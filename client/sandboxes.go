package client

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"cloche.dev/cloche/api"
)

// Health returns nil when the daemon is ready. It needs no key.
func (c *Client) Health(ctx context.Context) error {
	return c.do(ctx, call{method: http.MethodGet, path: "/healthz", window: -1}, nil)
}

// Version returns the daemon's version.
func (c *Client) Version(ctx context.Context) (v api.Version, err error) {
	err = c.do(ctx, call{method: http.MethodGet, path: "/v1/version"}, &v)
	return v, err
}

// CreateSandbox asks for a sandbox. It returns when the request is recorded;
// Wait tells when the sandbox is ready.
func (c *Client) CreateSandbox(ctx context.Context, req api.CreateSandboxRequest) (a api.AcceptedSandbox, err error) {
	err = c.do(ctx, call{method: http.MethodPost, path: "/v1/sandboxes", json: req, creates: true}, &a)
	return a, err
}

// Sandbox returns one sandbox.
func (c *Client) Sandbox(ctx context.Context, id string) (s api.Sandbox, err error) {
	err = c.do(ctx, call{method: http.MethodGet, path: sandboxPath(id)}, &s)
	return s, err
}

// SandboxFilter narrows a list; empty fields match everything.
type SandboxFilter struct {
	States []api.SandboxState
	Labels map[string]string // all must match
}

// Sandboxes returns all sandboxes that match, newest first, page by page.
func (c *Client) Sandboxes(ctx context.Context, f SandboxFilter) ([]api.Sandbox, error) {
	q := url.Values{}
	for _, s := range f.States {
		q.Add("state", string(s))
	}
	for k, v := range f.Labels {
		q.Add("label", k+"="+v)
	}
	return pages(q, 0, func(q url.Values) ([]api.Sandbox, string, error) {
		var l api.SandboxList
		err := c.do(ctx, call{method: http.MethodGet, path: "/v1/sandboxes", query: q}, &l)
		return l.Items, l.NextPageToken, err
	})
}

// maxPages bounds a listing against a daemon whose pages never end.
const maxPages = 10_000

// pages collects a list, at most `most` rows where most is not 0.
func pages[T any](q url.Values, most int, get func(url.Values) ([]T, string, error)) ([]T, error) {
	var all []T
	limit := 1000
	if most > 0 {
		limit = min(limit, most)
	}
	q.Set("limit", strconv.Itoa(limit))
	for range maxPages {
		items, next, err := get(q)
		if err != nil {
			return nil, err
		}
		all = append(all, items...)
		if most > 0 && len(all) >= most {
			return all[:most], nil
		}
		if next == "" {
			return all, nil
		}
		q.Set("page_token", next)
	}
	return nil, errors.New("the list does not end")
}

// Change is what UpdateSandbox changes. Nil fields stay as they are.
type Change struct {
	Labels *map[string]string // replaces all labels
	TTL    *time.Duration     // from now; 0 clears it
	Policy *api.PolicyRequest // of which what is missing stays as it is
}

// UpdateSandbox changes a sandbox's labels, TTL or policy.
func (c *Client) UpdateSandbox(ctx context.Context, id string, ch Change) (s api.Sandbox, err error) {
	// The generated request type can say neither "no labels" nor "no TTL".
	body := map[string]any{}
	if ch.Labels != nil {
		labels := *ch.Labels
		if labels == nil {
			labels = map[string]string{}
		}
		body["labels"] = labels
	}
	if ch.TTL != nil {
		body["ttl_seconds"] = nil
		if *ch.TTL > 0 {
			body["ttl_seconds"] = max(1, int64(ch.TTL.Seconds()))
		}
	}
	if ch.Policy != nil {
		body["policy"] = ch.Policy
	}
	err = c.do(ctx, call{method: http.MethodPatch, path: sandboxPath(id), json: body}, &s)
	return s, err
}

// DeleteSandbox asks for a sandbox to be deleted, whatever it does.
func (c *Client) DeleteSandbox(ctx context.Context, id string) (op api.Operation, err error) {
	err = c.do(ctx, call{method: http.MethodDelete, path: sandboxPath(id), creates: true}, &op)
	return op, err
}

// AccessToken makes a token for a sandbox's files or ports.
func (c *Client) AccessToken(ctx context.Context, sandbox string, purpose api.AccessPurpose, ttl time.Duration) (t api.AccessToken, err error) {
	req := api.CreateAccessTokenRequest{Purpose: purpose, TtlSeconds: int64(ttl.Seconds())}
	err = c.do(ctx, call{method: http.MethodPost, path: sandboxPath(sandbox) + "/tokens", json: req}, &t)
	return t, err
}

// Operation returns one operation, at once.
func (c *Client) Operation(ctx context.Context, id string) (op api.Operation, err error) {
	err = c.do(ctx, call{method: http.MethodGet, path: "/v1/operations/" + seg(id)}, &op)
	return op, err
}

// OperationFilter narrows a list; empty fields match everything.
type OperationFilter struct {
	Sandbox string
	States  []api.OperationState
	Most    int // rows; 0 is all
}

// Operations returns the operations that match, newest first.
func (c *Client) Operations(ctx context.Context, f OperationFilter) ([]api.Operation, error) {
	q := query("sandbox", f.Sandbox)
	for _, s := range f.States {
		q.Add("state", string(s))
	}
	return pages(q, f.Most, func(q url.Values) ([]api.Operation, string, error) {
		var l api.OperationList
		err := c.do(ctx, call{method: http.MethodGet, path: "/v1/operations", query: q}, &l)
		return l.Items, l.NextPageToken, err
	})
}

// How long one poll waits: the first ones are short, so that progress is told
// of what takes seconds.
var polls = []int{1, 2, 5, 20}

// Wait waits for an operation to end, through polls that the daemon holds
// open; a daemon that goes away meanwhile is waited for as Options.Reconnect
// says. progress (which may be nil) is called with every answer. It returns
// the ended operation, and an *Error where that failed.
func (c *Client) Wait(ctx context.Context, id string, progress func(api.Operation)) (api.Operation, error) {
	for i := 0; ; i++ {
		var op api.Operation
		started := time.Now()
		q := query("wait_seconds", strconv.Itoa(polls[min(i, len(polls)-1)]))
		err := c.do(ctx, call{method: http.MethodGet, path: "/v1/operations/" + seg(id), query: q, window: c.reconnect}, &op)
		if err != nil {
			return op, err
		}
		if progress != nil {
			progress(op)
		}
		switch op.State {
		case api.OperationSucceeded:
			return op, nil
		case api.OperationFailed:
			return op, FromBody(op.Error)
		}
		if time.Since(started) < 100*time.Millisecond { // it did not wait: do not hammer it
			if err := sleep(ctx, 200*time.Millisecond); err != nil {
				return op, err
			}
		}
	}
}

// CreateAndWait creates a sandbox and waits until it is ready. When that fails
// or ctx ends, the answer still names the sandbox, where there is one.
func (c *Client) CreateAndWait(ctx context.Context, req api.CreateSandboxRequest, progress func(api.Operation)) (api.Sandbox, error) {
	a, err := c.CreateSandbox(ctx, req)
	if err != nil {
		return api.Sandbox{}, err
	}
	if _, err := c.Wait(ctx, a.Operation.Id, progress); err != nil {
		return a.Sandbox, err
	}
	s, err := c.Sandbox(ctx, a.Sandbox.Id)
	if err != nil {
		return a.Sandbox, err
	}
	return s, nil
}

func sandboxPath(id string) string { return "/v1/sandboxes/" + seg(id) }

// Ended tells whether a sandbox in this state will never run again by itself.
func Ended(s api.SandboxState) bool {
	return slices.Contains([]api.SandboxState{api.SandboxDeleting, api.SandboxDeleted, api.SandboxFailed}, s)
}
