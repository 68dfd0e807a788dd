// Package oauth fetches the short-lived tokens that secrets with a source
// consist of (RFC 6749, sections 4.4 and 6). What holds: a credential goes to
// the source's own address only, over TLS, and along no redirect; and nothing that a
// server answers but its error code is repeated in an error.
//
// internal/server hands Fetch to internal/control. The token address is a
// project's choice, so the client must dial as the gateway does, with closed
// ranges refused (internal/egress/dial), and through no proxy.
package oauth

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// The kinds of source.
const (
	ClientCredentials = "client_credentials"
	RefreshToken      = "refresh_token"
)

const (
	timeout     = 30 * time.Second
	maxAnswer   = 256 << 10
	defaultLife = time.Hour // of a token whose server doesn't say
	maxLife     = 366 * 24 * time.Hour
)

// errorCode is what an error of RFC 6749 may be; anything else isn't repeated.
var errorCode = regexp.MustCompile(`^[a-z][a-z_.-]{0,63}$`)

// Fetch fetches one token. credential is the client's secret or the refresh
// token, by s.Kind; rotated, where it isn't nil, replaces it from now on, and
// must be kept before the token is used. An error of class Unavailable is
// worth another try; FailedPrecondition wants somebody to look at it.
func Fetch(ctx context.Context, client *http.Client, s sandbox.SecretSource, credential []byte) (token []byte, expires time.Time, rotated []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := request(ctx, s, credential)
	if err != nil {
		return nil, time.Time{}, nil, err
	}
	c := *client
	c.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	c.Jar = nil
	began := time.Now()
	resp, err := c.Do(req)
	if err != nil {
		return nil, time.Time{}, nil, unreachable(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, time.Time{}, nil, unreachable(err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, time.Time{}, nil, refused(resp, body)
	}
	a, err := parse(resp, body)
	if err != nil {
		return nil, time.Time{}, nil, err
	}
	if s.Kind == RefreshToken && a.Refresh != "" && a.Refresh != string(credential) {
		rotated = []byte(a.Refresh)
	}
	return []byte(a.Access), began.Add(a.life), rotated, nil
}

// request is section 4.4.2's or 6's.
func request(ctx context.Context, s sandbox.SecretSource, credential []byte) (*http.Request, error) {
	u, err := url.Parse(s.TokenURL)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || u.Fragment != "" {
		return nil, invalid("the token_url is no plain https address")
	}
	if len(credential) == 0 || s.ClientID == "" {
		return nil, invalid("it needs a client_id and a value")
	}
	form := url.Values{"grant_type": {s.Kind}}
	if len(s.Scopes) > 0 {
		form.Set("scope", strings.Join(s.Scopes, " "))
	}
	switch s.Kind {
	case ClientCredentials:
	case RefreshToken: // of a public client, which has no secret
		form.Set("refresh_token", string(credential))
		form.Set("client_id", s.ClientID)
	default:
		return nil, invalid("its kind is " + ClientCredentials + " or " + RefreshToken)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.TokenURL, strings.NewReader(form.Encode()))
	if err != nil {
		return nil, invalid("the token_url is no plain https address")
	}
	req.GetBody = nil // it is sent once
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "cloche")
	if s.Kind == ClientCredentials { // section 2.3.1: both are form-encoded first
		req.SetBasicAuth(url.QueryEscape(s.ClientID), url.QueryEscape(string(credential)))
	}
	return req, nil
}

func invalid(text string) error {
	return sandbox.Errorf(sandbox.Invalid, "bad_secret_source", "the secret's source can't be used: %s", text)
}

// unreachable tells of a server that gave no answer. What net/http says may
// quote the server, which was told a secret: only the kind of failure is kept.
func unreachable(err error) error {
	text := "it can't be reached, or its answer can't be read"
	var closed *sandbox.Error
	switch {
	case errors.As(err, &closed):
		return sandbox.Errorf(closed.Class, closed.Code, "the token server can't be asked: %s", closed.Message).WithHint("%s", closed.Hint)
	case errors.Is(err, context.Canceled):
		text = "the request was cancelled"
	case errors.Is(err, context.DeadlineExceeded):
		text = "it took too long"
	}
	return sandbox.Errorf(sandbox.Unavailable, "token_unavailable", "the token server gave no token: %s", text)
}

func refused(resp *http.Response, body []byte) error {
	var a struct {
		Error string `json:"error"`
	}
	// Without a code that can be read the status alone is told.
	if json.Unmarshal(body, &a) != nil || !errorCode.MatchString(a.Error) {
		a.Error = "no error code"
	}
	if resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusRequestTimeout {
		e := sandbox.Errorf(sandbox.Unavailable, "token_unavailable", "the token server gave no token: status %d, %s", resp.StatusCode, a.Error)
		if n, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && n > 0 && n <= 3600 {
			e = e.WithRetry(time.Duration(n) * time.Second)
		}
		return e
	}
	e := sandbox.Errorf(sandbox.FailedPrecondition, "token_refused", "the token server refused: status %d, %s", resp.StatusCode, a.Error)
	switch {
	case resp.StatusCode/100 == 3:
		return e.WithHint("redirects are not followed: name the address that answers")
	case a.Error == "invalid_grant":
		return e.WithHint("the refresh token has ended or was revoked: set the secret anew")
	}
	return e.WithHint("check the source's client_id, scopes and value")
}

// answer is section 5.1's.
type answer struct {
	Access  string      `json:"access_token"`
	Type    string      `json:"token_type"`
	Expires json.Number `json:"expires_in"`
	Refresh string      `json:"refresh_token"`

	life time.Duration
}

func parse(resp *http.Response, body []byte) (answer, error) {
	var a answer
	bad := func(text string) (answer, error) {
		return answer{}, sandbox.Errorf(sandbox.FailedPrecondition, "token_malformed", "the token server's answer can't be used: %s", text)
	}
	if len(body) > maxAnswer {
		return bad("it is too large")
	}
	if kind, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || kind != "application/json" {
		return bad("it isn't JSON")
	}
	if err := json.NewDecoder(bytes.NewReader(body)).Decode(&a); err != nil {
		return bad("it isn't JSON as it should be")
	}
	if a.Type != "" && !strings.EqualFold(a.Type, "bearer") {
		return bad("the token is not a bearer token")
	}
	if !visible(a.Access) || a.Access == "" || a.Refresh != "" && !visible(a.Refresh) {
		return bad("it has no token, or one that is too long or has strange characters")
	}
	a.life = defaultLife
	if a.Expires != "" {
		seconds, err := a.Expires.Float64()
		if err != nil || !(seconds > 0) {
			return bad("expires_in is no time to come")
		}
		a.life = time.Duration(min(seconds, maxLife.Seconds()) * float64(time.Second))
	}
	return a, nil
}

// visible tells whether s is a token by RFC 6749's appendix A.12, and no longer than a secret.
func visible(s string) bool {
	if len(s) > sandbox.MaxSecretBytes {
		return false
	}
	for _, c := range []byte(s) {
		if c < ' ' || c > '~' {
			return false
		}
	}
	return true
}
