package inject_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"testing/iotest"

	"cloche.dev/cloche/internal/egress/inject"
	"cloche.dev/cloche/internal/sandbox"
)

const theSecret = "sk-Canary/0+1 <x&y>~\"z"

func applied(t testing.TB, value string) *inject.Applied {
	t.Helper()
	inj := inject.New([]sandbox.SecretValue{{Name: "key", Hosts: []string{"api.example.com"}, Value: []byte(value)}}, at(noon))
	a, err := inj.Apply(request(t, "GET", "https://api.example.com/", nil), "api.example.com", 443, []sandbox.Injection{{Secret: "key", Kind: sandbox.InjectQuery, Name: "k"}})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func answer(body io.Reader, length int64) *http.Response {
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(body), ContentLength: length}
}

func percent(s string, format string) string {
	var b strings.Builder
	for _, c := range []byte(s) {
		fmt.Fprintf(&b, format, c)
	}
	return b.String()
}

// forms are the ways in which a server may send a secret back, each with what
// may not be seen of it.
func forms(secret string) map[string]string {
	j, _ := json.Marshal(secret)
	out := map[string]string{
		"raw": secret, "query": url.QueryEscape(secret), "path": url.PathEscape(secret), "every byte": percent(secret, "%%%02X"),
		"lower case": percent(secret, "%%%02x"), "json": string(j[1 : len(j)-1]), "slashes": strings.ReplaceAll(secret, "/", `\/`), "html": html.EscapeString(secret),
	}
	for shift := range 3 {
		text := strings.Repeat("x", shift) + secret + "and more"
		out[fmt.Sprint("base64 ", shift)] = base64.StdEncoding.EncodeToString([]byte(text))
		out[fmt.Sprint("base64url ", shift)] = base64.RawURLEncoding.EncodeToString([]byte(text))
		out[fmt.Sprint("base64 percent ", shift)] = url.QueryEscape(base64.StdEncoding.EncodeToString([]byte(text)))
	}
	return out
}

// TestForms: no form of the secret comes through, in body, header or trailer,
// however the body is cut up, and nothing else is changed.
func TestForms(t *testing.T) {
	a := applied(t, theSecret)
	readers := map[string]func(io.Reader) io.Reader{
		"whole": func(r io.Reader) io.Reader { return r }, "bytes": iotest.OneByteReader, "halves": iotest.HalfReader, "with end": iotest.DataErrReader,
	}
	for form, text := range forms(theSecret) {
		before, after := strings.Repeat("before%", 5000), strings.Repeat("%4after", 5000)
		for way, reader := range readers {
			resp := answer(reader(strings.NewReader(before+text+after)), int64(len(before+text+after)))
			if err := a.Scrub(resp); err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			if err != nil || len(got) != len(before+text+after) || !strings.HasPrefix(string(got), before) || !strings.HasSuffix(string(got), after) {
				t.Fatalf("%s %s: %d bytes, %v", form, way, len(got), err)
			}
			middle := string(got[len(before) : len(got)-len(after)])
			if !strings.Contains(middle, "[redacted]*") || shares(middle, text, 8) {
				t.Errorf("%s %s: %q of %q", form, way, middle, text)
			}
		}
		resp := answer(strings.NewReader(""), 0)
		resp.Header.Set("Location", "https://x/?k="+text+"&x")
		resp.Header[text] = []string{"named"}
		resp.Status = "200 " + text
		resp.Trailer = http.Header{"X-T": {text, "plain"}}
		if err := a.Scrub(resp); err != nil {
			t.Fatal(err)
		}
		if got := resp.Header.Get("Location"); shares(got, text, 8) || !strings.HasPrefix(got, "https://x/?k=") {
			t.Errorf("%s: %q", form, got)
		}
		if form == "raw" && len(resp.Header) != 1 || shares(resp.Status, text, 8) || shares(resp.Trailer.Get("X-T"), text, 8) || resp.Trailer["X-T"][1] != "plain" {
			t.Errorf("%s: %v", form, resp)
		}
	}
}

// shares tells whether got has n bytes of text at the same place or anywhere.
func shares(got, text string, n int) bool {
	for i := 0; i+n <= len(text); i++ {
		piece := text[i : i+n]
		if strings.Contains(got, piece) && strings.Contains(text, theSecret[:4]) {
			return true
		}
	}
	return false
}

// TestLateTrailers: what comes as a trailer after the body is searched too.
func TestLateTrailers(t *testing.T) {
	resp := answer(nil, -1)
	resp.Trailer = http.Header{"X-Late": nil}
	resp.Body = io.NopCloser(io.MultiReader(strings.NewReader("body"), readerFunc(func([]byte) (int, error) {
		resp.Trailer = http.Header{"X-Late": {theSecret}}
		return 0, io.EOF
	})))
	if err := applied(t, theSecret).Scrub(resp); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); string(b) != "body" || err != nil || resp.Trailer.Get("X-Late") != "[redacted]"+strings.Repeat("*", len(theSecret)-10) {
		t.Error(string(b), err, resp.Trailer)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// TestStreams: a message comes as soon as it is sent, also one that ends as a
// secret begins, and a secret still doesn't come through.
func TestStreams(t *testing.T) {
	for _, status := range []int{200, 101} {
		near, far := io.Pipe()
		resp := answer(near, -1)
		resp.StatusCode = status
		sent := new(bytes.Buffer)
		if status == 101 {
			resp.Body = struct {
				io.Reader
				io.Writer
				io.Closer
			}{near, sent, near}
		}
		if err := applied(t, theSecret).Scrub(resp); err != nil {
			t.Fatal(err)
		}
		go func() {
			for _, s := range []string{"data: 1\n\n", "ends in sk-C", theSecret[4:10], theSecret[10:] + "!", "%", "41", "sk-Canary/", "0"} {
				_, _ = far.Write([]byte(s))
			}
			_ = far.Close()
		}()
		buf := make([]byte, 100)
		read := func() string {
			n, err := resp.Body.Read(buf)
			if err != nil {
				return err.Error()
			}
			return string(buf[:n])
		}
		want := []string{"data: 1\n\n", "ends in sk-C", strings.Repeat("*", len(theSecret)-10) + "!"}
		for n, w := range want {
			got := read()
			if n == 2 { // the mark itself began in what was given already
				if strings.Contains(got, "Canary") || !strings.HasSuffix(got, "*!") || len(got) != len(theSecret)-4+1 {
					t.Errorf("%d: %q", status, got)
				}
			} else if got != w {
				t.Errorf("%d: %q, not %q", status, got, w)
			}
		}
		if got := read() + read(); got != "%41" {
			t.Errorf("%q", got)
		}
		// The rest is the beginning of the secret, long enough to be it.
		if got := read(); got != "[redacted]*" {
			t.Errorf("%q", got)
		}
		if got := read(); got != "EOF" {
			t.Errorf("%q", got)
		}
		if status == 101 {
			if _, err := resp.Body.(io.Writer).Write([]byte("up")); err != nil || sent.String() != "up" {
				t.Error(err, sent)
			}
		}
	}
}

// TestAborted: of a body that fails in the middle no part of a secret is given.
func TestAborted(t *testing.T) {
	resp := answer(io.MultiReader(strings.NewReader("text "+theSecret[:12]), broken{}), 1000)
	if err := applied(t, theSecret).Scrub(resp); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(resp.Body); string(b) != "text " || err == nil || err.Error() != "unexpected EOF" {
		t.Errorf("%q %v", b, err)
	}
}

func TestEncoded(t *testing.T) {
	a := applied(t, theSecret)
	for _, c := range []struct {
		method   string
		status   int
		encoding []string
		refused  bool
	}{
		{"GET", 200, []string{"gzip"}, true},
		{"GET", 200, []string{"identity, br"}, true},
		{"GET", 200, []string{"identity", "zstd"}, true},
		{"GET", 200, []string{"x-unknown"}, true},
		{"GET", 200, []string{"identity"}, false},
		{"GET", 200, []string{""}, false},
		{"HEAD", 200, []string{"gzip"}, false},
		{"GET", 304, []string{"gzip"}, false},
	} {
		resp := answer(strings.NewReader("x"), 1)
		resp.StatusCode, resp.Request = c.status, request(t, c.method, "https://api.example.com/", nil)
		resp.Header["Content-Encoding"] = c.encoding
		if got := codeOf(a.Scrub(resp)); (got == "secret_encoded") != c.refused {
			t.Errorf("%+v: %q", c, got)
		}
	}
}

// TestShort: a value too short to be searched for changes nothing, but the
// answer must be readable all the same.
func TestShort(t *testing.T) {
	resp := answer(strings.NewReader("1234567"), 7)
	if err := applied(t, "1234567").Scrub(resp); err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(resp.Body); string(b) != "1234567" {
		t.Errorf("%q", b)
	}
}

// TestBasicAndSigned: what is made of a secret is taken out as well.
func TestBasicAndSigned(t *testing.T) {
	inj := inject.New([]sandbox.SecretValue{awsValue(awsID + ":" + awsSecret + ":session-token")}, at(noon))
	r := request(t, "GET", "https://example.amazonaws.com/", nil)
	a, err := inj.Apply(r, "example.amazonaws.com", 443, append(signed("s3"), sandbox.Injection{Secret: "aws", Kind: sandbox.InjectHeader, Name: "X-Raw"}))
	if err != nil || len(a.Names()) != 1 {
		t.Fatal(a.Names(), err)
	}
	resp := answer(strings.NewReader(fmt.Sprint(r.Header)), -1)
	if err := a.Scrub(resp); err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	for _, s := range []string{awsSecret, "session-token", signature(r)} {
		if bytes.Contains(b, []byte(s)) {
			t.Errorf("%q has %q", b, s)
		}
	}
	r = request(t, "GET", "https://example.amazonaws.com/", nil)
	a, err = inj.Apply(r, "example.amazonaws.com", 443, []sandbox.Injection{{Secret: "aws", Kind: sandbox.InjectBasic, User: "u"}})
	if err != nil {
		t.Fatal(err)
	}
	token := strings.TrimPrefix(r.Header.Get("Authorization"), "Basic ")
	h := http.Header{"X-Echo": {"Basic " + token}}
	a.ScrubHeader(h)
	if h.Get("X-Echo") != "Basic [redacted]"+strings.Repeat("*", len(token)-10) {
		t.Errorf("%q", h)
	}
}

// FuzzScrub: in whatever pieces a body comes, it comes out as long as it was,
// without the secret, otherwise unchanged, and with no less of it covered than
// in one piece. (More may be: a piece that begins within an escape is no escape.)
func FuzzScrub(f *testing.F) {
	f.Add([]byte("xx"+theSecret+"yy"), "abababab", uint8(3))
	f.Add([]byte("abababababababab"), "abababab", uint8(1))
	f.Add([]byte("%61b%61babab%6"), "abababab", uint8(2))
	f.Add([]byte("0000%61babab%0"), "1babab00", uint8(3))
	f.Add([]byte(base64.StdEncoding.EncodeToString([]byte("u:pass-word-1"))), "pass-word-1", uint8(5))
	f.Fuzz(func(t *testing.T, text []byte, secret string, size uint8) {
		if len(secret) < 8 || len(secret) > 64 || len(text) > 4096 || strings.ContainsAny(secret, "*[") {
			return
		}
		a := applied(t, secret)
		run := func(r io.Reader, length int64) []byte {
			resp := answer(r, length)
			if err := a.Scrub(resp); err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(resp.Body)
			if err != nil || len(b) != len(text) {
				t.Fatalf("%d of %d bytes: %v", len(b), len(text), err)
			}
			if bytes.Contains(b, []byte(secret)) {
				t.Fatalf("%q still has %q", b, secret)
			}
			return b
		}
		whole := run(bytes.NewReader(text), int64(len(text)))
		pieces := run(&cut{text, int(size) + 1}, int64(len(text)))
		w, p, plain := stars(whole), stars(pieces), stars(text)
		for n := range text {
			if w[n] == '*' && p[n] != '*' || p[n] != '*' && p[n] != plain[n] {
				t.Fatalf("%q in pieces %q, whole %q", text, pieces, whole)
			}
		}
		run(&cut{text, int(size) + 1}, -1)
	})
}

// stars makes all that a mark has in it stars: how much of one is seen depends
// on the pieces.
func stars(b []byte) []byte {
	out := bytes.Clone(b)
	for n, c := range out {
		if strings.IndexByte("[redacted]", c) >= 0 {
			out[n] = '*'
		}
	}
	return out
}

// cut reads so many bytes at once.
type cut struct {
	b    []byte
	size int
}

func (c *cut) Read(p []byte) (int, error) {
	if len(c.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.b[:min(len(c.b), c.size)])
	c.b = c.b[n:]
	return n, nil
}

func BenchmarkScrub(b *testing.B) {
	a := applied(b, "ghp_0123456789abcdefghijklmnopqrstuvwxyz")
	data := make([]byte, 1<<20)
	for n := range data {
		data[n] = byte(n * 2654435761 >> 13)
	}
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		resp := answer(bytes.NewReader(data), int64(len(data)))
		_ = a.Scrub(resp)
		_, _ = io.Copy(io.Discard, resp.Body)
	}
}
