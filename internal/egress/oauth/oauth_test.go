package oauth_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/egress/oauth"
	"cloche.dev/cloche/internal/sandbox"
)

const credential = "cr3d:ential/+ "

// server answers each request by handle, over TLS.
func server(t *testing.T, handle http.HandlerFunc) (*http.Client, string) {
	t.Helper()
	s := httptest.NewTLSServer(handle)
	t.Cleanup(s.Close)
	return s.Client(), s.URL + "/token?tenant=1"
}

func says(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}
}

// TestRequests: what is asked is what RFC 6749 says.
func TestRequests(t *testing.T) {
	for _, c := range []struct {
		kind string
		form url.Values
		auth bool
	}{
		{oauth.ClientCredentials, url.Values{"grant_type": {"client_credentials"}, "scope": {"a b"}}, true},
		{oauth.RefreshToken, url.Values{"grant_type": {"refresh_token"}, "scope": {"a b"}, "refresh_token": {credential}, "client_id": {"the:client"}}, false},
	} {
		t.Run(c.kind, func(t *testing.T) {
			client, address := server(t, func(w http.ResponseWriter, r *http.Request) {
				if err := r.ParseForm(); err != nil || r.Method != "POST" || r.PostForm.Encode() != c.form.Encode() || r.URL.RawQuery != "tenant=1" {
					t.Errorf("%s %v %v", r.Method, r.PostForm, err)
				}
				id, secret, ok := r.BasicAuth()
				if ok != c.auth || c.auth && (id != "the%3Aclient" || secret != url.QueryEscape(credential)) {
					t.Errorf("%q %q", id, secret)
				}
				says(200, `{"access_token":"tok","token_type":"Bearer","expires_in":600,"refresh_token":"next"}`)(w, r)
			})
			before := time.Now()
			token, expires, rotated, err := oauth.Fetch(t.Context(), client, sandbox.SecretSource{Kind: c.kind, TokenURL: address, ClientID: "the:client", Scopes: []string{"a", "b"}}, []byte(credential))
			if err != nil || string(token) != "tok" {
				t.Fatal(string(token), err)
			}
			if expires.Before(before.Add(600*time.Second)) || expires.After(time.Now().Add(600*time.Second)) {
				t.Error(expires)
			}
			if (string(rotated) == "next") != (c.kind == oauth.RefreshToken) {
				t.Errorf("%q", rotated)
			}
		})
	}
}

func TestAnswers(t *testing.T) {
	for _, c := range []struct {
		name   string
		status int
		body   string
		code   string // "": a token
		life   time.Duration
	}{
		{"no life", 200, `{"access_token":"t"}`, "", time.Hour},
		{"life as text", 200, `{"access_token":"t","token_type":"BEARER","expires_in":"90"}`, "", 90 * time.Second},
		{"endless", 200, `{"access_token":"t","expires_in":1e300}`, "", 366 * 24 * time.Hour},
		{"same refresh token", 200, `{"access_token":"t","refresh_token":"` + credential + `"}`, "", time.Hour},
		{"over", 200, `{"access_token":"t","expires_in":0}`, "token_malformed", 0},
		{"negative", 200, `{"access_token":"t","expires_in":-5}`, "token_malformed", 0},
		{"not a number", 200, `{"access_token":"t","expires_in":"soon ` + credential + `"}`, "token_malformed", 0},
		{"no token", 200, `{}`, "token_malformed", 0},
		{"line break", 200, `{"access_token":"a\nb"}`, "token_malformed", 0},
		{"odd refresh token", 200, `{"access_token":"a","refresh_token":"a\u0000"}`, "token_malformed", 0},
		{"long", 200, `{"access_token":"` + strings.Repeat("x", sandbox.MaxSecretBytes+1) + `"}`, "token_malformed", 0},
		{"mac", 200, `{"access_token":"t","token_type":"mac"}`, "token_malformed", 0},
		{"huge", 200, `{"access_token":"t","x":"` + strings.Repeat("x", 300<<10) + `"}`, "token_malformed", 0},
		{"not JSON", 200, `access_token=t`, "token_malformed", 0},
		{"refused", 400, `{"error":"invalid_grant","error_description":"` + credential + `"}`, "token_refused", 0},
		{"odd error", 401, `{"error":"` + credential + `"}`, "token_refused", 0},
		{"no body", 403, ``, "token_refused", 0},
		{"created", 201, `{"access_token":"t"}`, "token_refused", 0},
		{"broken", 503, `{"error":"temporarily_unavailable"}`, "token_unavailable", 0},
		{"too many", 429, ``, "token_unavailable", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			client, address := server(t, says(c.status, c.body))
			source := sandbox.SecretSource{Kind: oauth.RefreshToken, TokenURL: address, ClientID: "c"}
			token, expires, rotated, err := oauth.Fetch(t.Context(), client, source, []byte(credential))
			var e *sandbox.Error
			if c.code == "" {
				if err != nil || string(token) != "t" || rotated != nil || time.Until(expires.Add(-c.life)).Abs() > 10*time.Second {
					t.Error(string(token), expires, rotated, err)
				}
				return
			}
			if !errors.As(err, &e) || e.Code != c.code || strings.Contains(err.Error(), "cr3d") || token != nil {
				t.Errorf("%v", err)
			}
			if want := c.code == "token_unavailable"; e != nil && e.Retryable != want {
				t.Errorf("%+v", e)
			}
		})
	}
}

// TestRedirect: the credential is not taken elsewhere, nor are cookies.
func TestRedirect(t *testing.T) {
	client, address := server(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/token" {
			t.Error("followed to", r.URL)
		}
		http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
	})
	_, _, _, err := oauth.Fetch(t.Context(), client, sandbox.SecretSource{Kind: oauth.ClientCredentials, TokenURL: address, ClientID: "c"}, []byte(credential))
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Code != "token_refused" || !strings.Contains(e.Hint, "redirects") {
		t.Error(err)
	}
}

// TestUnreachable: what goes wrong on the way is told without quoting anything.
func TestUnreachable(t *testing.T) {
	source := func(address string) sandbox.SecretSource {
		return sandbox.SecretSource{Kind: oauth.ClientCredentials, TokenURL: address, ClientID: "c"}
	}
	client, address := server(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err == nil {
			_, _ = conn.Write([]byte("HTTP/1.1 " + credential + "\r\n\r\n"))
			_ = conn.Close()
		}
	})
	closed := sandbox.Errorf(sandbox.Denied, "closed_range", "10.0.0.1 is in a closed range")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	dials := &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return nil, closed }}}
	for _, c := range []struct {
		name   string
		ctx    context.Context
		client *http.Client
		url    string
		code   string
	}{
		{"malformed", t.Context(), client, address, "token_unavailable"},
		{"untrusted", t.Context(), &http.Client{Transport: &http.Transport{}}, address, "token_unavailable"},
		{"cancelled", ended, client, address, "token_unavailable"},
		{"closed range", t.Context(), dials, "https://internal.example/", "closed_range"},
		{"plain http", t.Context(), client, "http://example.com/", "bad_secret_source"},
		{"user info", t.Context(), client, "https://u:p@example.com/", "bad_secret_source"},
		{"no host", t.Context(), client, "https:///x", "bad_secret_source"},
		{"no address", t.Context(), client, ":", "bad_secret_source"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, _, _, err := oauth.Fetch(c.ctx, c.client, source(c.url), []byte(credential))
			var e *sandbox.Error
			if !errors.As(err, &e) || e.Code != c.code || strings.Contains(err.Error(), "cr3d") {
				t.Errorf("%v", err)
			}
		})
	}
	for _, s := range []sandbox.SecretSource{{Kind: "password", TokenURL: address, ClientID: "c"}, {Kind: oauth.RefreshToken, TokenURL: address}} {
		if _, _, _, err := oauth.Fetch(t.Context(), client, s, []byte(credential)); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Error(err)
		}
	}
	if _, _, _, err := oauth.Fetch(t.Context(), client, source(address), nil); !sandbox.IsClass(err, sandbox.Invalid) {
		t.Error(err)
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add(`{"access_token":"t","expires_in":1}`)
	f.Add(`{"access_token":"t","expires_in":"NaN"}`)
	f.Add(`[]`)
	f.Fuzz(func(t *testing.T, body string) {
		client := &http.Client{Transport: roundTrip(func(*http.Request) (*http.Response, error) {
			w := httptest.NewRecorder()
			says(200, body)(w, nil)
			return w.Result(), nil
		})}
		source := sandbox.SecretSource{Kind: oauth.RefreshToken, TokenURL: "https://example.com/", ClientID: "c"}
		token, expires, _, err := oauth.Fetch(t.Context(), client, source, []byte("x"))
		if err == nil && (len(token) == 0 || strings.ContainsAny(string(token), "\r\n\x00") || !expires.After(time.Now().Add(-time.Minute))) {
			t.Errorf("%q %v", token, expires)
		}
		if err == nil && !json.Valid([]byte(strings.TrimSpace(body))) && !strings.HasPrefix(strings.TrimSpace(body), "{") {
			t.Errorf("%q is a token", body)
		}
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
