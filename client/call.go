package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net/http"
	"net/url"
	"time"

	"cloche.dev/cloche/api"
)

// call is one request, in a form that can be sent again.
type call struct {
	method string
	path   string // escaped, below the daemon's URL
	query  url.Values
	header http.Header
	token  string // bearer; "" is the client's key

	json   any       // body, or
	raw    []byte    // body, or
	stream io.Reader // body that can be sent only once
	kind   string    // content type of raw and stream

	creates bool          // makes a row: gets an idempotency key
	once    bool          // must not be repeated once the daemon may have seen it
	window  time.Duration // for how long to repeat; 0 is the client's Retry
}

// do sends a call and decodes a 2xx answer's JSON into out, which may be nil.
func (c *Client) do(ctx context.Context, k call, out any) error {
	resp, err := c.send(ctx, k)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil || resp.StatusCode == http.StatusNoContent {
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxProblem))
		return nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return c.unreachable(ctx, err)
	}
	if err := json.Unmarshal(body, out); err != nil {
		return &Error{
			Status: resp.StatusCode, Class: api.ClassInternal, Code: CodeBadAnswer, cause: err,
			Message: fmt.Sprintf("the answer to %s %s can't be understood: %v", k.method, k.path, err),
			Hint:    "is this a Cloche daemon, and as new as this client?",
		}
	}
	return nil
}

// maxAnswer bounds a JSON answer: the largest are 10 000 directory entries and
// the output of an exec call.
const maxAnswer = 64 << 20

// send sends a call, again where that is safe and useful, and returns the
// first 2xx answer with its body unread.
func (c *Client) send(ctx context.Context, k call) (*http.Response, error) {
	if k.creates {
		k.header = withHeader(k.header, "Idempotency-Key", newKey())
	}
	if k.json != nil {
		b, err := json.Marshal(k.json)
		if err != nil {
			return nil, err
		}
		k.raw, k.kind = b, "application/json"
	}
	window := k.window
	if window == 0 {
		window = c.retry
	}
	end := time.Now().Add(window)
	for attempt := 0; ; attempt++ {
		resp, err := c.sendOnce(ctx, k)
		if err == nil {
			return resp, nil
		}
		wait, again := c.again(k, err, attempt)
		if !again || time.Now().Add(wait).After(end) {
			return nil, err
		}
		if sleep(ctx, wait) != nil {
			return nil, err
		}
	}
}

// again tells whether to repeat a call that failed, and after how long.
func (c *Client) again(k call, err error, attempt int) (time.Duration, bool) {
	var e *Error
	if !errors.As(err, &e) || !e.Retryable || k.stream != nil {
		return 0, false
	}
	switch {
	case e.Status == 0:
		if k.once && !refused(err) {
			return 0, false
		}
	case e.Status == http.StatusConflict: // a wait for an operation is the caller's
		return 0, false
	case e.Status >= 500 && e.Status != http.StatusServiceUnavailable && k.once:
		return 0, false
	}
	return max(backoff(attempt), e.RetryAfter), true
}

// backoff grows from about 0.1 s to about 3 s, with jitter so that many clients
// of a daemon that comes back do not come in step.
func backoff(attempt int) time.Duration {
	d := min(100*time.Millisecond<<min(attempt, 5), 3*time.Second)
	return d/2 + time.Duration(mrand.Int64N(int64(d))) //nolint:gosec // jitter is no secret
}

// sleep waits, or returns ctx's error.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

func (c *Client) sendOnce(ctx context.Context, k call) (*http.Response, error) {
	req, err := c.request(ctx, k)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	if resp.StatusCode/100 != 2 {
		return nil, problemOf(resp)
	}
	return resp, nil
}

func (c *Client) request(ctx context.Context, k call) (*http.Request, error) {
	u := c.base.String() + k.path
	if len(k.query) > 0 {
		u += "?" + k.query.Encode()
	}
	var body io.Reader
	switch {
	case k.stream != nil:
		body = io.NopCloser(k.stream)
	case k.raw != nil:
		body = bytes.NewReader(k.raw)
	}
	req, err := http.NewRequestWithContext(ctx, k.method, u, body)
	if err != nil {
		return nil, err
	}
	for name, v := range k.header {
		req.Header[name] = v
	}
	if k.kind != "" {
		req.Header.Set("Content-Type", k.kind)
	}
	if k.stream != nil {
		req.Header.Set("Expect", "100-continue") // so that a refusal comes before the body is sent
	}
	if req.Header.Get("Accept") == "" {
		req.Header.Set("Accept", "application/json, application/problem+json")
	}
	c.authorize(req.Header, k.token)
	return req, nil
}

func (c *Client) authorize(h http.Header, token string) {
	h.Set("User-Agent", c.userAgent)
	if token == "" {
		token = c.key
	}
	if token != "" {
		h.Set("Authorization", "Bearer "+token)
	}
}

// newKey makes an idempotency key.
func newKey() string { return rand.Text() }

func withHeader(h http.Header, name, value string) http.Header {
	h = h.Clone()
	if h == nil {
		h = http.Header{}
	}
	h.Set(name, value)
	return h
}

// seg escapes one segment of a path.
func seg(s string) string { return url.PathEscape(s) }

// query makes a query of pairs, leaving out those with an empty value.
func query(pairs ...string) url.Values {
	q := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			q.Set(pairs[i], pairs[i+1])
		}
	}
	return q
}
