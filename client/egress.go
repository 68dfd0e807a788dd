package client

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"cloche.dev/cloche/api"
)

// EgressProfiles returns the presets and the project's egress profiles.
func (c *Client) EgressProfiles(ctx context.Context) ([]api.EgressProfile, error) {
	var l api.EgressProfileList
	err := c.do(ctx, call{method: http.MethodGet, path: "/v1/egress/profiles"}, &l)
	return l.Items, err
}

// EgressProfile returns one egress profile or preset.
func (c *Client) EgressProfile(ctx context.Context, name string) (p api.EgressProfile, err error) {
	err = c.do(ctx, call{method: http.MethodGet, path: profilePath(name)}, &p)
	return p, err
}

// CreateEgressProfile makes an egress profile.
func (c *Client) CreateEgressProfile(ctx context.Context, req api.CreateEgressProfileRequest) (p api.EgressProfile, err error) {
	err = c.do(ctx, call{method: http.MethodPost, path: "/v1/egress/profiles", json: req, creates: true}, &p)
	return p, err
}

// ReplaceEgressProfile changes an egress profile, if it still has the version
// that req names. Sandboxes that have it follow within a second.
func (c *Client) ReplaceEgressProfile(ctx context.Context, name string, req api.ReplaceEgressProfileRequest) (p api.EgressProfile, err error) {
	// Once: said twice, the second would find the version that the first has made.
	err = c.do(ctx, call{method: http.MethodPut, path: profilePath(name), json: req, once: true}, &p)
	return p, err
}

// DeleteEgressProfile deletes an egress profile that no sandbox has.
func (c *Client) DeleteEgressProfile(ctx context.Context, name string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: profilePath(name)}, nil)
}

// SetEgress gives a sandbox another egress profile.
func (c *Client) SetEgress(ctx context.Context, id, profile string) (s api.Sandbox, err error) {
	err = c.do(ctx, call{method: http.MethodPut, path: sandboxPath(id) + "/egress", json: api.SetEgressRequest{Profile: profile}}, &s)
	return s, err
}

func profilePath(name string) string { return "/v1/egress/profiles/" + seg(name) }

// Secrets returns the project's secrets, without their values.
func (c *Client) Secrets(ctx context.Context) ([]api.Secret, error) {
	var l api.SecretList
	err := c.do(ctx, call{method: http.MethodGet, path: "/v1/secrets"}, &l)
	return l.Items, err
}

// Secret returns one secret, without its value.
func (c *Client) Secret(ctx context.Context, name string) (s api.Secret, err error) {
	err = c.do(ctx, call{method: http.MethodGet, path: "/v1/secrets/" + seg(name)}, &s)
	return s, err
}

// CreateSecret makes a secret. Where the answer got lost it may be there all the
// same, since such a request has no idempotency key.
func (c *Client) CreateSecret(ctx context.Context, req api.CreateSecretRequest) (s api.Secret, err error) {
	err = c.do(ctx, call{method: http.MethodPost, path: "/v1/secrets", json: req, once: true}, &s)
	return s, err
}

// RotateSecret gives a secret another value.
func (c *Client) RotateSecret(ctx context.Context, name string, req api.RotateSecretRequest) (s api.Secret, err error) {
	k := call{method: http.MethodPut, path: "/v1/secrets/" + seg(name), json: req, once: req.Version != 0}
	err = c.do(ctx, k, &s)
	return s, err
}

// DeleteSecret deletes a secret.
func (c *Client) DeleteSecret(ctx context.Context, name string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: "/v1/secrets/" + seg(name)}, nil)
}

// EgressFilter narrows what the egress gateway decided; empty fields match
// everything.
type EgressFilter struct {
	Sandbox   string
	Kind      api.EgressKind
	Verdict   api.EgressVerdict
	WouldDeny bool // beside those of Verdict those too that a dry run let through
	Since     time.Time
	After     *int64 // only records behind this sequence
}

func (f EgressFilter) query() url.Values {
	q := query("sandbox", f.Sandbox, "kind", string(f.Kind), "verdict", string(f.Verdict))
	if f.WouldDeny {
		q.Set("would_deny", "true")
	}
	if !f.Since.IsZero() {
		q.Set("since", f.Since.UTC().Format(time.RFC3339Nano))
	}
	if f.After != nil {
		q.Set("after", strconv.FormatInt(*f.After, 10))
	}
	return q
}

// EgressRecords returns the newest records that match, at most limit, oldest
// first. The answer says where a stream goes on.
func (c *Client) EgressRecords(ctx context.Context, f EgressFilter, limit int) (l api.EgressRecordList, err error) {
	q := f.query()
	q.Set("limit", strconv.Itoa(limit))
	err = c.do(ctx, call{method: http.MethodGet, path: "/v1/egress/audit", query: q, header: accept("application/json")}, &l)
	return l, err
}

// EgressStream is what the egress gateway decides, in order. When its
// connection breaks, Next connects again and goes on behind the last record
// that it returned. It belongs to one goroutine.
type EgressStream struct {
	feed
	filter EgressFilter
}

// EgressTail streams the records that match: behind f.After, or where that is
// nil those from the first call of Next on. interrupted and resumed, which may be
// nil, are as of StreamOptions.
func (c *Client) EgressTail(f EgressFilter, interrupted func(error), resumed func()) *EgressStream {
	return &EgressStream{feed: newFeed(c, "/v1/egress/audit", interrupted, resumed), filter: f}
}

// Next returns the next record. ctx bounds the whole call, reconnecting included.
func (s *EgressStream) Next(ctx context.Context) (r api.EgressRecord, err error) {
	err = s.next(ctx, s.begin, func(kind string, data []byte) (bool, error) {
		if kind != "decision" {
			return false, nil
		}
		r = api.EgressRecord{}
		if err := json.Unmarshal(data, &r); err != nil {
			return false, badEvent(err)
		}
		if r.Seq <= *s.filter.After { // told before the break
			return false, nil
		}
		s.filter.After = &r.Seq
		return true, nil
	})
	return r, err
}

// begin says where the stream begins; now is asked for first, so that a
// connection that breaks before the first record loses none.
func (s *EgressStream) begin(ctx context.Context) (url.Values, error) {
	if s.filter.After == nil {
		l, err := s.c.EgressRecords(ctx, s.filter, 1)
		if err != nil {
			return nil, err
		}
		s.filter.After = &l.NextAfter
	}
	return s.filter.query(), nil
}
