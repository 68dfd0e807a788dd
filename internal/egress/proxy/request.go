package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/inject"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
)

// exchange is one request and its answer.
type exchange struct {
	p    *Proxy
	c    *httpConn
	live *Live
	in   *http.Request
	w    *answer

	query    policy.Request
	decision policy.Decision
	plan     *plan
	applied  *inject.Applied
	ctx      context.Context
	end      context.CancelCauseFunc

	mu   sync.Mutex
	rec  audit.Record
	over bool // the handler is about to return: its connection isn't ours any more
}

// set changes the record, which several goroutines know.
func (x *exchange) set(f func(*audit.Record)) {
	x.mu.Lock()
	f(&x.rec)
	x.mu.Unlock()
}

// handle decides one request, sends it on, and makes its record.
func (p *Proxy) handle(rw http.ResponseWriter, r *http.Request) {
	c, ok := r.Context().Value(connKey{}).(*httpConn)
	if !ok {
		panic(http.ErrAbortHandler)
	}
	c.handled.Add(1)
	x := &exchange{p: p, c: c, in: r, live: p.live.Load(), rec: c.newRecord()}
	x.rec.Verdict, x.rec.Method, x.rec.Path = audit.Allowed, r.Method, r.URL.EscapedPath()
	x.w = &answer{ResponseWriter: rw, x: x, rc: http.NewResponseController(rw)}
	// What ends the connection ends the exchange, with the same cause.
	x.ctx, x.end = context.WithCancelCause(r.Context())
	stop := context.AfterFunc(c.g.ctx, func() { x.end(context.Cause(c.g.ctx)) })
	defer x.finish()
	defer stop()
	x.w.patience()

	if n := p.active.Add(1); n > sandbox.MaxEgressConnections { // each may have a connection of its own to a server
		defer p.active.Add(-1)
		x.refuse(denied(reasonTooMany))
		return
	}
	defer p.active.Add(-1)
	if refused := x.decide(); refused != nil {
		x.refuse(refused)
		return
	}
	done := p.track(&flow{complies: x.complies, cut: x.cut}, x.live)
	defer done()
	if x.wasCut() != "" {
		panic(http.ErrAbortHandler)
	}
	p.forward(x)
}

// finish makes the record. A panic (the answer was cut short) goes on.
func (x *exchange) finish() {
	v := recover()
	x.mu.Lock()
	rec := x.rec
	x.over = true
	x.mu.Unlock()
	if v != nil && v != http.ErrAbortHandler { //nolint:errorlint // a panic's value, which is no error to be unwrapped
		x.p.log.Error("egress: a request panicked", "panic", v)
		failed(reasonInternal).apply(&rec)
	}
	if reason := x.wasCut(); reason != "" && rec.Verdict == audit.Allowed {
		cutVerdict(reason).apply(&rec)
	}
	x.p.emit(rec, x.live)
	x.end(nil)
	if v != nil {
		panic(http.ErrAbortHandler)
	}
}

// wasCut tells why this package ended the request, "" where it didn't.
func (x *exchange) wasCut() string {
	if reason := cutOf(x.c.g.ctx); reason != "" {
		return reason // x.ctx learns of it a little later
	}
	return cutOf(x.ctx)
}

// deadline calls f, which sets one, unless the exchange is over or was cut.
func (x *exchange) deadline(f func(time.Time) error, t time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.over && x.ctx.Err() == nil {
		_ = f(t)
	}
}

// complies asks another policy about a request that runs.
func (x *exchange) complies(live *Live) bool {
	return live.Policy != nil && passes(live.Policy, x.query, x.plan.addrs)
}

// cut ends a request that runs: its stream, or where it has none its connection.
func (x *exchange) cut(reason string) {
	if x.c.one != nil {
		x.c.g.cut(reason)
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.end(cutError{reason})
	if !x.over { // a stream that isn't read by the sandbox waits in a write
		_ = x.w.rc.SetWriteDeadline(time.Unix(1, 0))
	}
}

// decide finds out what is asked for and what the policy says. Whatever can't
// be told for sure is refused.
func (x *exchange) decide() *refusal {
	if x.live.Policy == nil {
		return denied(reasonNoPolicy)
	}
	name, port := splitHost(x.in.Host)
	x.rec.Host = name
	host, err := policy.CanonicalHost(name)
	if err != nil {
		return denied(reasonBadHost)
	}
	x.rec.Host = host
	dialled := x.c.g.dialled.Port()
	if port != "" && port != strconv.Itoa(int(dialled)) {
		return denied(reasonHostMismatch)
	}
	if x.c.sni != "" && x.c.sni != host {
		return denied(reasonHostMismatch)
	}
	path, err := policy.CanonicalPath(x.in.URL.EscapedPath())
	if err != nil {
		return denied(reasonBadPath)
	}
	x.rec.Path = path
	x.query = policy.Request{Scheme: x.c.scheme(), Host: host, Port: dialled, Method: x.in.Method, Path: path}
	addrs, d, refused := x.p.addresses(x.ctx, x.live, x.query)
	if refused != nil {
		return refused
	}
	x.decision = d
	x.rec.WouldDeny, x.rec.Rule, x.rec.Reason = d.WouldDeny, d.Rule, d.Reason
	x.plan = &plan{scheme: x.c.scheme(), host: host, port: dialled, addrs: addrs, onlyH1: x.in.Header.Get("Upgrade") != ""}
	return nil
}

// splitHost splits a Host into name and port, "" where it has none.
func splitHost(s string) (name, port string) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 || strings.HasSuffix(s, "]") {
		return s, ""
	}
	if s[i+1:] == "" {
		return s, "" // "host:" is no name either
	}
	return s[:i], s[i+1:]
}

// refuse answers a request that isn't sent on, or whose answer can't be
// passed on.
func (x *exchange) refuse(r *refusal) {
	x.set(func(rec *audit.Record) { r.apply(rec) })
	if x.w.began {
		panic(http.ErrAbortHandler)
	}
	status, code := http.StatusForbidden, "egress_denied"
	if r.verdict == audit.Failed {
		status, code = http.StatusBadGateway, "egress_failed"
	}
	body, err := json.Marshal(struct {
		Code   string `json:"code"`
		Reason string `json:"reason"`
	}{code, r.reason})
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	h := x.w.Header()
	clear(h)
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	if x.c.one != nil {
		h.Set("Connection", "close")
	}
	x.w.own = true
	x.w.WriteHeader(status)
	_, _ = x.w.Write(body)
}

// outgoing writes the request anew from what was decided.
func (x *exchange) outgoing(out *http.Request) {
	in := x.in
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := in.Header[name]; ok {
			out.Header[name] = append([]string(nil), v...)
		}
	}
	for name := range out.Header {
		if _, ok := cutPrefixFold(name, "Proxy-"); ok {
			delete(out.Header, name)
		}
	}
	delete(out.Header, "Host")
	delete(out.Header, "Content-Length") // the transport's, by out.ContentLength
	delete(out.Header, "Transfer-Encoding")
	out.Host = x.plan.authority()
	out.URL = &url.URL{Scheme: x.plan.scheme, Host: out.Host, RawPath: x.query.Path, RawQuery: in.URL.RawQuery, ForceQuery: in.URL.ForceQuery}
	out.Trailer = in.Trailer // filled when the body has been read
	if out.Body != nil {
		out.Body = &requestBody{ReadCloser: out.Body, x: x}
	}
}

// send is the transport of the reverse proxy: it puts the secrets in, and
// sends the request to where it was decided to go.
func (x *exchange) send(out *http.Request) (*http.Response, error) {
	path, err := url.PathUnescape(x.query.Path)
	if out.URL.Path = path; err != nil || out.URL.EscapedPath() != x.query.Path {
		return nil, denied(reasonBadPath) // what is sent would differ from what was decided
	}
	if list := x.decision.Inject; len(list) > 0 {
		if x.live.Injector == nil {
			return nil, denied("secret_missing")
		}
		applied, err := x.live.Injector.Apply(out, x.plan.host, x.plan.port, list)
		if err != nil {
			return nil, refusalOf(err, "secret_missing")
		}
		x.applied = applied
		x.set(func(rec *audit.Record) { rec.Injected = applied.Names() })
	}
	ctx := context.WithValue(out.Context(), planKey{}, x.plan)
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) {
			at := remote(info.Conn)
			x.set(func(rec *audit.Record) { rec.Upstream = at })
		},
		// Called before the reverse proxy's own: what it passes on is clean.
		Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
			x.applied.ScrubHeader(http.Header(h))
			return nil
		},
	})
	out = out.WithContext(ctx)
	out.URL.Host = x.plan.pool()
	resp, err := x.p.up.rt.RoundTrip(out)
	if err != nil {
		return nil, err
	}
	resp.Body = watched(resp.Body, x)
	return resp, nil
}

// received is called with an answer before it is passed on.
func (x *exchange) received(resp *http.Response) error {
	switch switches := resp.StatusCode == http.StatusSwitchingProtocols; {
	case switches && !x.plan.onlyH1:
		return failed(reasonUpstreamFailed)
	case !switches && x.plan.onlyH1:
		resp.Header.Set("Connection", "close") // the guard awaits a WebSocket, and nothing else
	}
	resp.Header.Del("Alt-Svc") // it leads to QUIC, which is dropped, and to other hosts
	for name := range resp.Header {
		if _, ok := cutPrefixFold(name, "Proxy-"); ok {
			delete(resp.Header, name)
		}
	}
	return x.applied.Scrub(resp)
}

// failed is called where there is no answer to pass on.
func (x *exchange) failed(err error) {
	switch {
	case x.wasCut() != "":
		panic(http.ErrAbortHandler)
	case x.in.Context().Err() != nil:
		x.refuse(failed(reasonClientGone))
	default:
		x.refuse(refusalOf(err, reasonUpstreamFailed))
	}
}

// requestBody counts a request's body, and bounds how long it stays silent.
type requestBody struct {
	io.ReadCloser
	x *exchange
}

// Read implements io.Reader.
func (b *requestBody) Read(p []byte) (int, error) {
	b.x.deadline(b.x.w.rc.SetReadDeadline, time.Now().Add(b.x.p.times.idle))
	n, err := b.ReadCloser.Read(p)
	b.x.deadline(b.x.w.rc.SetReadDeadline, time.Time{}) // the answer may take its time
	b.x.set(func(rec *audit.Record) { rec.Sent += int64(n) })
	return n, err
}

// watched notes where a server ends in the middle of its answer. The body of
// an answer that switched protocols stays one that can be written to.
func watched(body io.ReadCloser, x *exchange) io.ReadCloser {
	w := &responseBody{ReadCloser: body, x: x}
	if rw, ok := body.(io.ReadWriteCloser); ok {
		return struct {
			io.ReadCloser
			io.Writer
		}{w, rw}
	}
	return w
}

type responseBody struct {
	io.ReadCloser
	x *exchange
}

// Read implements io.Reader.
func (b *responseBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) && b.x.ctx.Err() == nil && b.x.status() != http.StatusSwitchingProtocols {
		b.x.set(func(rec *audit.Record) { failed(reasonUpstreamCut).apply(rec) })
	}
	return n, err
}

func (x *exchange) status() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.rec.Status
}
