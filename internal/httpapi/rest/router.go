package rest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"runtime/debug"
	"strings"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/sandbox"
)

// Guard finds out who sends r, whose bearer token is token ("" where it shows
// none), and returns r with that in its context. operation is the contract's
// id; actor is who it is, for the log. An error means 401 unless it has another
// status, the code forbidden or a class other than Denied.
type Guard func(r *http.Request, operation, token string) (known *http.Request, actor string, err error)

// Router serves the operations of the contract that were registered in it.
type Router struct {
	contract *contract
	mux      *http.ServeMux
	log      *slog.Logger
	observe  func(status int, took time.Duration, err *sandbox.Error)
}

// NewRouter makes a Router that serves nothing yet.
func NewRouter(log *slog.Logger) (*Router, error) {
	c, err := loadContract(api.Spec)
	if err != nil {
		return nil, err
	}
	return &Router{contract: c, mux: http.NewServeMux(), log: log}, nil
}

// Observe has f called after each request, for measuring: with the status that
// was answered, and the error, which is nil where there was none. Call it
// before the router serves.
func (rt *Router) Observe(f func(status int, took time.Duration, err *sandbox.Error)) { rt.observe = f }

// Half is where one half of the API registers its handlers (the generated
// code's BaseRouter); guard goes before each of them.
type Half struct {
	router *Router
	guard  Guard
}

// Half returns a place to register handlers behind guard.
func (rt *Router) Half(guard Guard) *Half { return &Half{rt, guard} }

// HandleFunc registers the handler of an operation. It panics when the
// contract doesn't have it: generated code that doesn't match the contract it
// was generated from is a build that must not start.
func (h *Half) HandleFunc(pattern string, handler func(http.ResponseWriter, *http.Request)) {
	op, err := h.router.contract.operation(pattern)
	if err != nil {
		panic(err)
	}
	h.router.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		rec := recordOf(r)
		rec.op, rec.pattern = op, pattern
		if !op.open {
			known, actor, err := h.guard(r, op.id, Bearer(r))
			rec.actor = actor
			if err != nil {
				Fail(w, r, guardError(err))
				return
			}
			r = known
		}
		if err := op.check(r); err != nil {
			Fail(w, r, err)
			return
		}
		handler(w, r)
	})
}

// ServeHTTP makes Half a ServeMux as generated code wants it.
func (h *Half) ServeHTTP(w http.ResponseWriter, r *http.Request) { h.router.ServeHTTP(w, r) }

// guardError makes a refusal without a status of its own a 401.
func guardError(err error) error {
	var s *statusError
	if errors.As(err, &s) || !sandbox.IsClass(err, sandbox.Denied) {
		return err
	}
	if sandbox.AsError(err).Code == "forbidden" {
		return err
	}
	return Unauthenticated(err)
}

// Bearer returns the token that r shows: in Authorization, or where a browser's
// WebSocket can't set that, as the subprotocol "bearer.TOKEN".
func Bearer(r *http.Request) string {
	if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(token)
	}
	for _, list := range r.Header.Values("Sec-WebSocket-Protocol") {
		for p := range strings.SplitSeq(list, ",") {
			if token, ok := strings.CutPrefix(strings.TrimSpace(p), "bearer."); ok {
				return token
			}
		}
	}
	return ""
}

// ServeHTTP serves r, and logs it once.
func (rt *Router) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	rec := &record{id: requestID(), ResponseWriter: w, start: time.Now()}
	rc := http.NewResponseController(w)
	// What an earlier request on this connection left is taken back, and what
	// is still buffered when the handler returns has a bound to leave in.
	_ = rc.SetWriteDeadline(time.Time{}) // not every writer of a test can
	r = r.WithContext(context.WithValue(r.Context(), recordKey{}, rec))
	h := w.Header()
	h.Set("X-Request-Id", rec.id)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	defer func() {
		cut := rt.recovered(rec, r, recover())
		rt.access(rec, r)
		if cut {
			panic(http.ErrAbortHandler)
		}
		if !rec.hijacked {
			_ = rc.SetWriteDeadline(time.Now().Add(writeTimeout))
		}
	}()
	if escaped := r.URL.EscapedPath(); escaped == "*" || path.Clean(escaped) != escaped {
		Fail(rec, r, noRoute(r))
		return
	}
	handler, pattern := rt.mux.Handler(r)
	if pattern == "" {
		rt.unrouted(rec, r, handler)
		return
	}
	rt.mux.ServeHTTP(rec, r)
}

// recovered turns a panic into a 500; it is true when all that is left is to
// cut the connection.
func (rt *Router) recovered(rec *record, r *http.Request, p any) (cut bool) {
	if p == nil {
		return false
	}
	if err, ok := p.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		return true
	}
	rt.log.Error("a handler panicked", "request", rec.id, "route", rec.pattern, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
	if rec.began() {
		return true
	}
	Fail(rec, r, sandbox.Errorf(sandbox.Internal, "internal", "a handler panicked"))
	return false
}

// unrouted answers what no pattern matches: 405 where another method would,
// 404 elsewhere.
func (rt *Router) unrouted(w http.ResponseWriter, r *http.Request, handler http.Handler) {
	probe := &probeWriter{header: http.Header{}}
	handler.ServeHTTP(probe, r)
	if probe.status != http.StatusMethodNotAllowed {
		Fail(w, r, noRoute(r))
		return
	}
	allow := probe.header.Get("Allow")
	w.Header().Set("Allow", allow)
	e := sandbox.Errorf(sandbox.Invalid, "method_not_allowed", "%s is not a method of this path", clip(r.Method, 20))
	Fail(w, r, WithStatus(http.StatusMethodNotAllowed, e.WithHint("it takes %s", allow)))
}

func noRoute(r *http.Request) error {
	return sandbox.Errorf(sandbox.NotFound, "no_such_path", "there is no such path").WithHint("the API's paths begin with /v1")
}

// probeWriter learns what ServeMux would have answered.
type probeWriter struct {
	header http.Header
	status int
}

func (p *probeWriter) Header() http.Header         { return p.header }
func (p *probeWriter) WriteHeader(status int)      { p.status = status }
func (p *probeWriter) Write(b []byte) (int, error) { return len(b), nil }

// BadParam is the generated code's error handler: what the contract let
// through and the binding didn't.
func BadParam(w http.ResponseWriter, r *http.Request, err error) {
	Fail(w, r, sandbox.Errorf(sandbox.Invalid, "invalid_parameter", "a parameter is malformed: %s", clip(err.Error(), 200)))
}

func requestID() string {
	var b [9]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
