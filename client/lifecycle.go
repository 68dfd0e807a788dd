package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"cloche.dev/cloche/api"
)

// The verbs below return when the request is recorded; Wait tells, of the
// operation in the answer, when it is done. What a sandbox's state does not allow
// is an Error of the class failed_precondition.

// verb asks for one that needs nothing but its sandbox.
func (c *Client) verb(ctx context.Context, id, name string, q url.Values) (a api.AcceptedSandbox, err error) {
	err = c.do(ctx, call{method: http.MethodPost, path: sandboxPath(id) + "/" + name, query: q, creates: true}, &a)
	return a, err
}

// Pause asks for every process of a sandbox to stop where it is. Its memory
// stays in RAM.
func (c *Client) Pause(ctx context.Context, id string) (api.AcceptedSandbox, error) {
	return c.verb(ctx, id, "pause", nil)
}

// Resume asks for a paused sandbox to go on.
func (c *Client) Resume(ctx context.Context, id string) (api.AcceptedSandbox, error) {
	return c.verb(ctx, id, "resume", nil)
}

// Suspend asks for a sandbox's memory and disk to be saved, and for everything
// that it has on the host to be freed.
func (c *Client) Suspend(ctx context.Context, id string) (api.AcceptedSandbox, error) {
	return c.verb(ctx, id, "suspend", nil)
}

// Restore asks for a suspended sandbox to go on where it stood.
func (c *Client) Restore(ctx context.Context, id string) (api.AcceptedSandbox, error) {
	return c.verb(ctx, id, "restore", nil)
}

// Stop asks for a sandbox's disk to be saved and its machine to end. Commands
// get SIGTERM and so long to end (whole seconds; 0 asks none of them, less than 0 is
// the daemon's default).
func (c *Client) Stop(ctx context.Context, id string, grace time.Duration) (api.AcceptedSandbox, error) {
	q := url.Values{}
	if grace >= 0 {
		q.Set("grace_seconds", strconv.FormatInt(int64(grace/time.Second), 10))
	}
	return c.verb(ctx, id, "stop", q)
}

// Start asks for a stopped or failed sandbox to boot from its disk.
func (c *Client) Start(ctx context.Context, id string) (api.AcceptedSandbox, error) {
	return c.verb(ctx, id, "start", nil)
}

// Wake asks for whichever of resume, restore and start a sandbox's state needs.
func (c *Client) Wake(ctx context.Context, id string) (api.AcceptedSandbox, error) {
	return c.verb(ctx, id, "wake", nil)
}

// Fork asks for children of a running sandbox, which goes on at once. Each
// child has an operation of its own.
func (c *Client) Fork(ctx context.Context, id string, req api.ForkRequest) (f api.Forked, err error) {
	err = c.do(ctx, call{method: http.MethodPost, path: sandboxPath(id) + "/fork", json: req, creates: true}, &f)
	return f, err
}

// Rollback asks for a sandbox to go back to an earlier snapshot of its past.
func (c *Client) Rollback(ctx context.Context, id, snapshot string) (a api.AcceptedSandbox, err error) {
	k := call{method: http.MethodPost, path: sandboxPath(id) + "/rollback", json: api.RollbackRequest{Snapshot: snapshot}, creates: true}
	err = c.do(ctx, k, &a)
	return a, err
}

// TakeSnapshot asks for a snapshot of a sandbox, which goes on at once. It is
// kept until it is deleted.
func (c *Client) TakeSnapshot(ctx context.Context, id string, req api.SnapshotRequest) (a api.AcceptedSnapshot, err error) {
	err = c.do(ctx, call{method: http.MethodPost, path: sandboxPath(id) + "/snapshots", json: req, creates: true}, &a)
	return a, err
}

// Snapshots returns the snapshots that were asked for, newest first, or, where
// a sandbox is named, all that were taken of it.
func (c *Client) Snapshots(ctx context.Context, sandbox string) ([]api.Snapshot, error) {
	return pages(query("sandbox", sandbox), 0, func(q url.Values) ([]api.Snapshot, string, error) {
		var l api.SnapshotList
		err := c.do(ctx, call{method: http.MethodGet, path: "/v1/snapshots", query: q}, &l)
		return l.Items, l.NextPageToken, err
	})
}

// Snapshot returns one snapshot.
func (c *Client) Snapshot(ctx context.Context, id string) (s api.Snapshot, err error) {
	err = c.do(ctx, call{method: http.MethodGet, path: "/v1/snapshots/" + seg(id)}, &s)
	return s, err
}

// DeleteSnapshot gives a snapshot up. It is refused while a sandbox lives on it.
func (c *Client) DeleteSnapshot(ctx context.Context, id string) (s api.Snapshot, err error) {
	err = c.do(ctx, call{method: http.MethodDelete, path: "/v1/snapshots/" + seg(id)}, &s)
	return s, err
}
