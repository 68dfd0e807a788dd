// Package inject puts secrets into requests that have been decided to get
// them, and takes them out of the answers again. What holds: a secret goes only
// to one of its own hosts and only over TLS; the value that the sandbox itself
// put in that place is removed; a request that can't be given every secret of
// its rule is refused, never sent without; and an answer that can't be read is
// refused too, since nothing could be taken out of it.
//
// An answer is searched for each value that its request was given and that has
// at least 8 bytes: as it is, in base64 (both alphabets, wherever it begins in
// the encoded text), in percent escapes (any part of it, either case), and as
// JSON or HTML escape it. The headers' and trailers' values, the body as a
// stream, and WebSocket frames that carry text as it is are all searched. What
// is found is overwritten by "[redacted]" and stars, in its own length, so that
// Content-Length and frames stay true. Not covered are other transforms (hex, reversed,
// compressed or encrypted by the application, broken into lines) and what a
// server that is asked for ranges sends of it piece by piece.
//
// internal/egress/proxy calls it, for each request.
package inject

import (
	"bytes"
	"encoding/base64"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Injector holds the secrets that one sandbox's profile injects. It is for use
// by many goroutines.
type Injector struct {
	now      func() time.Time
	values   map[string]*secret
	buffered atomic.Int64 // bytes of bodies that are held to be signed
}

// secret is one value and what an answer is searched for on its account.
type secret struct {
	sandbox.SecretValue
	patterns func() []*pattern
}

// New makes an Injector of values. A nil now is time.Now.
func New(values []sandbox.SecretValue, now func() time.Time) *Injector {
	if now == nil {
		now = time.Now
	}
	i := &Injector{now: now, values: make(map[string]*secret, len(values))}
	for _, v := range values {
		i.values[v.Name] = &secret{SecretValue: v, patterns: sync.OnceValue(func() []*pattern { return patternsOf(v.Value) })}
	}
	return i
}

// Applied is what one request was given. A nil one was given nothing.
type Applied struct {
	names    []string
	patterns []*pattern
	shortest int // the length of the shortest value that is searched for
}

// Names are the names of the secrets, in the order of the rule.
func (a *Applied) Names() []string {
	if a == nil {
		return nil
	}
	return a.names
}

// search adds what an answer is to be searched for.
func (a *Applied) search(value []byte, patterns []*pattern) {
	if len(value) < minScrub {
		return
	}
	a.patterns = append(a.patterns, patterns...)
	if a.shortest == 0 || len(value) < a.shortest {
		a.shortest = len(value)
	}
}

// Apply puts the secrets of list into r, the outgoing request, whose scheme is
// in its URL. host is the canonical name that the gateway decided about and
// connects to. After an error (of class Denied) r may be half changed and must
// not be sent.
func (i *Injector) Apply(r *http.Request, host string, port uint16, list []sandbox.Injection) (*Applied, error) {
	a := new(Applied)
	if len(list) == 0 {
		return a, nil
	}
	secrets := make([]*secret, len(list))
	for n, in := range list {
		s, err := i.find(r, host, port, in)
		if err != nil {
			return nil, err
		}
		secrets[n] = s
		if !slices.Contains(a.names, s.Name) {
			a.names = append(a.names, s.Name)
		}
	}
	// The answer has to be readable.
	removeHeader(r.Header, "Accept-Encoding", "Sec-Websocket-Extensions")
	r.Header.Set("Accept-Encoding", "identity")
	var names []string // of headers that are ours alone
	for n, in := range list {
		if in.Kind == sandbox.InjectSigV4 {
			continue
		}
		name, err := a.put(r, secrets[n], in)
		if err != nil {
			return nil, err
		}
		names = append(names, name)
	}
	for n, in := range list { // a signature covers what the others put in
		if in.Kind != sandbox.InjectSigV4 {
			continue
		}
		if err := i.sign(r, a, secrets[n], in); err != nil {
			return nil, err
		}
		names = append(names, sigV4Headers...)
	}
	guardTrailers(r, names)
	return a, nil
}

// find is the secret of in, if r may have it.
func (i *Injector) find(r *http.Request, host string, port uint16, in sandbox.Injection) (*secret, error) {
	s := i.values[in.Secret]
	switch {
	case s == nil || len(s.Value) == 0:
		return nil, denied("secret_missing", in, "has no value").WithHint("set it: cloche secret set %s", in.Secret)
	case s.ExpiresAt != nil && !i.now().Before(*s.ExpiresAt):
		return nil, denied("secret_expired", in, "has expired").WithHint("wait for its renewal, or set it anew")
	case !slices.Contains(s.Hosts, host) || !strings.EqualFold(sentHost(r), host):
		return nil, denied("secret_host", in, "is not for %s", host).WithHint("a secret goes only to the hosts it was created with")
	case r.URL.Scheme != "https" || port == 80:
		return nil, denied("secret_needs_tls", in, "goes only over TLS").WithHint("use https")
	}
	return s, nil
}

// sentHost is the name in the Host that will be sent.
func sentHost(r *http.Request) string {
	host := r.Host
	if host == "" {
		host = r.URL.Host
	}
	name, _, _ := strings.Cut(host, ":")
	return name
}

// put does what is not a signature. It returns the header that it set.
func (a *Applied) put(r *http.Request, s *secret, in sandbox.Injection) (header string, err error) {
	a.search(s.Value, s.patterns())
	name := in.Name
	if name == "" || in.Kind == sandbox.InjectBasic {
		name = "Authorization"
	}
	value := in.Prefix + string(s.Value)
	switch in.Kind {
	case sandbox.InjectQuery:
		if in.Name == "" {
			return "", denied("secret_unusable", in, "has no parameter to go to")
		}
		if err := setQuery(r.URL, in.Name, value); err != nil {
			return "", denied("secret_query", in, "can't be put into this query: %w", err)
		}
		return "", nil
	case sandbox.InjectBasic:
		if strings.Contains(in.User, ":") {
			return "", denied("secret_unusable", in, "has a user name with a colon")
		}
		token := base64.StdEncoding.EncodeToString([]byte(in.User + ":" + string(s.Value)))
		a.search([]byte(token), patternsOf([]byte(token)))
		value = "Basic " + token
	case sandbox.InjectHeader:
	default:
		return "", denied("secret_unusable", in, "has the unknown kind %q", in.Kind)
	}
	if !headerName(name) || !headerValue(value) {
		return "", denied("secret_unusable", in, "can't stand in the header %q", name).WithHint("a value has no line breaks or other control characters, and Cloche's own headers can't be injected")
	}
	removeHeader(r.Header, name)
	r.Header.Set(name, value)
	return name, nil
}

// removeHeader removes names in whatever spelling: of a server that is handed
// headers as variables (CGI), "x_api_key" would be "X-Api-Key".
func removeHeader(h http.Header, names ...string) {
	for k := range h {
		for _, name := range names {
			if sameName(k, name) {
				delete(h, k)
			}
		}
	}
}

func sameName(a, b string) bool {
	return strings.EqualFold(strings.ReplaceAll(a, "_", "-"), strings.ReplaceAll(b, "_", "-"))
}

// notInjected are headers that the gateway or the transport speaks by.
var notInjected = []string{
	"Host", "Content-Length", "Transfer-Encoding", "Connection", "Upgrade", "Trailer", "TE", "Expect", "Keep-Alive", "Accept-Encoding", "Content-Encoding",
}

func headerName(s string) bool {
	for _, name := range notInjected {
		if sameName(s, name) {
			return false
		}
	}
	const marks = "!#$%&'*+-.^_`|~"
	for _, c := range []byte(s) {
		letter, digit := 'a' <= c|0x20 && c|0x20 <= 'z', '0' <= c && c <= '9'
		if !letter && !digit && strings.IndexByte(marks, c) < 0 {
			return false
		}
	}
	return s != "" && len(s) <= 128 && !strings.HasPrefix(strings.ToLower(s), "proxy-")
}

// headerValue tells whether s arrives as it is: nothing that ends a line, and
// no white space at its ends, which is cut off on the way.
func headerValue(s string) bool {
	for _, c := range []byte(s) {
		if c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return strings.Trim(s, " \t") == s
}

// guardTrailers keeps a request's trailers from bringing what was removed from
// its headers. They are known only when the body has been read.
func guardTrailers(r *http.Request, names []string) {
	if r.Trailer == nil {
		return
	}
	removeHeader(r.Trailer, names...)
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &guarded{ReadCloser: r.Body, trailer: r.Trailer, names: names}
	}
}

type guarded struct {
	io.ReadCloser
	trailer http.Header
	names   []string
}

// Read implements io.Reader.
func (g *guarded) Read(p []byte) (int, error) {
	n, err := g.ReadCloser.Read(p)
	if err != nil {
		removeHeader(g.trailer, g.names...)
	}
	return n, err
}

// maxHeld bounds the bodies that a sandbox's requests under way have us hold
// to be signed, each and all together.
const (
	maxHeld    = 16 << 20
	maxHeldAll = 64 << 20
)

// held is a body that was read to be signed.
type held struct {
	*bytes.Reader
	release func()
}

// Close implements io.Closer.
func (h *held) Close() error {
	h.release()
	return nil
}

// hold reads r's body whole.
func (i *Injector) hold(r *http.Request, in sandbox.Injection) ([]byte, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return nil, nil
	}
	tooLarge := denied("secret_body", in, "signs a body of at most %d MiB, and %d MiB at once", maxHeld>>20, maxHeldAll>>20)
	if r.ContentLength > maxHeld {
		return nil, tooLarge
	}
	var (
		buf   bytes.Buffer
		taken int64
		body  = r.Body
	)
	release := sync.OnceFunc(func() { i.buffered.Add(-taken) })
	for {
		const step = 64 << 10
		if i.buffered.Add(step) > maxHeldAll || buf.Len() > maxHeld {
			taken += step
			release()
			return nil, tooLarge
		}
		taken += step
		n, err := io.CopyN(&buf, body, step)
		if n < step && err != io.EOF { //nolint:errorlint // CopyN returns it as it is
			release()
			return nil, denied("secret_body", in, "signs the body, which can't be read: %w", err)
		}
		if err != nil {
			break
		}
	}
	_ = body.Close() // it has been read to its end
	b := buf.Bytes()
	r.Body, r.GetBody, r.ContentLength, r.TransferEncoding = &held{bytes.NewReader(b), release}, nil, int64(len(b)), nil
	if len(b) == 0 {
		r.Body = http.NoBody
		release()
	}
	return b, nil
}

// denied is an error about in's secret.
func denied(code string, in sandbox.Injection, format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.Denied, code, "the secret %q "+format, append([]any{in.Secret}, args...)...)
}
