package inject_test

import (
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/egress/inject"
	"cloche.dev/cloche/internal/sandbox"
)

var noon = time.Date(2015, 8, 30, 12, 36, 0, 0, time.UTC)

func at(t time.Time) func() time.Time { return func() time.Time { return t } }

func value(name, v string) sandbox.SecretValue {
	return sandbox.SecretValue{Name: name, Hosts: []string{"api.example.com"}, Value: []byte(v)}
}

func request(t testing.TB, method, url string, body io.Reader) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func codeOf(err error) string {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return ""
	}
	if e.Class != sandbox.Denied {
		return "class " + string(e.Class)
	}
	return e.Code
}

func header(name string) sandbox.Injection {
	return sandbox.Injection{Secret: name, Kind: sandbox.InjectHeader, Prefix: "Bearer "}
}

// TestPlaces: each kind puts the value where it belongs and removes what the
// sandbox had there, in whatever spelling.
func TestPlaces(t *testing.T) {
	inj := inject.New([]sandbox.SecretValue{value("key", "s3cr3t/v+lue&x")}, at(noon))
	for _, c := range []struct {
		name string
		in   sandbox.Injection
		url  string
		give http.Header
		want http.Header
		out  string
	}{
		{
			"header", header("key"), "https://api.example.com/",
			http.Header{"Authorization": {"Bearer mine", "Basic x"}, "authorization": {"raw"}, "X-Other": {"stays"}, "Accept-Encoding": {"gzip, br"}},
			http.Header{"Authorization": {"Bearer s3cr3t/v+lue&x"}, "X-Other": {"stays"}, "Accept-Encoding": {"identity"}},
			"https://api.example.com/",
		},
		{
			"named header",
			sandbox.Injection{Secret: "key", Kind: sandbox.InjectHeader, Name: "x-api-key"},
			"https://api.example.com/",
			http.Header{"X_api_key": {"a"}, "X-Api_Key": {"b"}, "Authorization": {"Bearer mine"}, "Sec-Websocket-Extensions": {"permessage-deflate"}},
			http.Header{"X-Api-Key": {"s3cr3t/v+lue&x"}, "Authorization": {"Bearer mine"}, "Accept-Encoding": {"identity"}},
			"https://api.example.com/",
		},
		{
			"basic",
			sandbox.Injection{Secret: "key", Kind: sandbox.InjectBasic, User: "x-token"},
			"https://api.example.com/",
			http.Header{"Authorization": {"Basic bWluZTptaW5l"}},
			http.Header{"Authorization": {"Basic " + base64.StdEncoding.EncodeToString([]byte("x-token:s3cr3t/v+lue&x"))}, "Accept-Encoding": {"identity"}},
			"https://api.example.com/",
		},
		{
			"query",
			sandbox.Injection{Secret: "key", Kind: sandbox.InjectQuery, Name: "api.key"},
			"https://api.example.com/?a=1&api.key=x&API%2Ekey=y;api_key=z&b=%20+2&api.key[]=1&api.key[k]=2&+api.key=3&api.key%00x=4&key&",
			http.Header{},
			http.Header{"Accept-Encoding": {"identity"}},
			"https://api.example.com/?a=1&b=%20+2&key&api.key=s3cr3t%2Fv%2Blue%26x",
		},
		{
			"query alone",
			sandbox.Injection{Secret: "key", Kind: sandbox.InjectQuery, Name: "k"},
			"https://api.example.com/?k",
			http.Header{},
			http.Header{"Accept-Encoding": {"identity"}},
			"https://api.example.com/?k=s3cr3t%2Fv%2Blue%26x",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := request(t, "GET", c.url, nil)
			r.Header = c.give
			a, err := inj.Apply(r, "api.example.com", 443, []sandbox.Injection{c.in})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(a.Names(), []string{"key"}) || r.URL.String() != c.out {
				t.Errorf("%v %s", a.Names(), r.URL)
			}
			if len(r.Header) != len(c.want) {
				t.Errorf("%v", r.Header)
			}
			for k, v := range c.want {
				if !slices.Equal(r.Header[k], v) {
					t.Errorf("%s: %q", k, r.Header[k])
				}
			}
		})
	}
}

// TestRefused: whatever is not as it has to be is refused, with its reason.
func TestRefused(t *testing.T) {
	expired := value("expired", "0123456789")
	end := noon
	expired.ExpiresAt = &end
	inj := inject.New([]sandbox.SecretValue{
		value("key", "0123456789"), value("empty", ""), expired, value("lines", "a\r\nX: y"), value("aws", "AKID"), value("ends", "token\n"),
	}, at(noon))
	good := header("key")
	for _, c := range []struct {
		name, url, hostHeader, host string
		port                        uint16
		in                          sandbox.Injection
		want                        string
	}{
		{"good", "https://api.example.com/", "", "api.example.com", 443, good, ""},
		{"port named", "https://api.example.com:8443/", "", "api.example.com", 8443, good, ""},
		{"unknown", "https://api.example.com/", "", "api.example.com", 443, header("nothing"), "secret_missing"},
		{"empty", "https://api.example.com/", "", "api.example.com", 443, header("empty"), "secret_missing"},
		{"expired", "https://api.example.com/", "", "api.example.com", 443, header("expired"), "secret_expired"},
		{"http", "http://api.example.com/", "", "api.example.com", 8080, good, "secret_needs_tls"},
		{"port 80", "https://api.example.com:80/", "", "api.example.com", 80, good, "secret_needs_tls"},
		{"other host", "https://evil.example.com/", "", "evil.example.com", 443, good, "secret_host"},
		{"below", "https://x.api.example.com/", "", "x.api.example.com", 443, good, "secret_host"},
		{"other Host header", "https://api.example.com/", "evil.example.com", "api.example.com", 443, good, "secret_host"},
		{"line break", "https://api.example.com/", "", "api.example.com", 443, header("lines"), "secret_unusable"},
		{"trailing newline", "https://api.example.com/", "", "api.example.com", 443, header("ends"), "secret_unusable"},
		{"host header", "https://api.example.com/", "", "api.example.com", 443, sandbox.Injection{Secret: "key", Kind: sandbox.InjectHeader, Name: "host"}, "secret_unusable"},
		{"proxy header", "https://api.example.com/", "", "api.example.com", 443, sandbox.Injection{Secret: "key", Kind: sandbox.InjectHeader, Name: "Proxy-Authorization"}, "secret_unusable"},
		{"bad header", "https://api.example.com/", "", "api.example.com", 443, sandbox.Injection{Secret: "key", Kind: sandbox.InjectHeader, Name: "a b"}, "secret_unusable"},
		{"bad user", "https://api.example.com/", "", "api.example.com", 443, sandbox.Injection{Secret: "key", Kind: sandbox.InjectBasic, User: "a:b"}, "secret_unusable"},
		{"no parameter", "https://api.example.com/", "", "api.example.com", 443, sandbox.Injection{Secret: "key", Kind: sandbox.InjectQuery}, "secret_unusable"},
		{"bad query", "https://api.example.com/?%zz=1", "", "api.example.com", 443, sandbox.Injection{Secret: "key", Kind: sandbox.InjectQuery, Name: "k"}, "secret_query"},
		{"unknown kind", "https://api.example.com/", "", "api.example.com", 443, sandbox.Injection{Secret: "key", Kind: "cookie"}, "secret_unusable"},
		{"no AWS key", "https://api.example.com/", "", "api.example.com", 443, sandbox.Injection{Secret: "aws", Kind: sandbox.InjectSigV4, Region: "r", Service: "s"}, "secret_unusable"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := request(t, "GET", c.url, nil)
			r.Host = c.hostHeader
			_, err := inj.Apply(r, c.host, c.port, []sandbox.Injection{c.in})
			if codeOf(err) != c.want || err != nil && strings.Contains(err.Error(), "0123456789") {
				t.Errorf("%v", err)
			}
			// With one that is good before it: all or nothing.
			if _, err := inj.Apply(request(t, "GET", c.url, nil), c.host, c.port, []sandbox.Injection{good, c.in}); c.want != "" && c.hostHeader == "" && err == nil {
				t.Error("went out with the first alone")
			}
		})
	}
}

func TestNothingToInject(t *testing.T) {
	r := request(t, "GET", "http://other.example.com/", nil)
	r.Header.Set("Accept-Encoding", "gzip")
	a, err := inject.New(nil, nil).Apply(r, "other.example.com", 80, nil)
	if err != nil || r.Header.Get("Accept-Encoding") != "gzip" || len(a.Names()) != 0 {
		t.Fatal(a, err)
	}
	resp := &http.Response{Header: http.Header{"Content-Encoding": {"gzip"}}, Body: io.NopCloser(strings.NewReader("x"))}
	if err := a.Scrub(resp); err != nil {
		t.Error(err)
	}
	if err := (*inject.Applied)(nil).Scrub(resp); err != nil || (*inject.Applied)(nil).Names() != nil {
		t.Error(err)
	}
}

// TestTrailers: a trailer can't bring back what was removed from the headers.
func TestTrailers(t *testing.T) {
	r := request(t, "POST", "https://api.example.com/", nil)
	r.Trailer = http.Header{"Authorization": nil, "X-Sum": nil}
	late := &lateTrailer{Reader: strings.NewReader("body"), r: r}
	r.Body = late
	inj := inject.New([]sandbox.SecretValue{value("key", "0123456789")}, at(noon))
	if _, err := inj.Apply(r, "api.example.com", 443, []sandbox.Injection{header("key")}); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(r.Body); string(b) != "body" || err != nil {
		t.Fatal(string(b), err)
	}
	if len(r.Trailer) != 1 || r.Trailer.Get("X-Sum") != "1" {
		t.Errorf("%v", r.Trailer)
	}
	if err := r.Body.Close(); err != nil || !late.closed {
		t.Error(err, late.closed)
	}
}

type lateTrailer struct {
	io.Reader
	r      *http.Request
	closed bool
}

func (l *lateTrailer) Read(p []byte) (int, error) {
	n, err := l.Reader.Read(p)
	if err != nil {
		l.r.Trailer.Set("Authorization", "mine")
		l.r.Trailer.Set("X-Sum", "1")
	}
	return n, err
}

func (l *lateTrailer) Close() error {
	l.closed = true
	return nil
}
