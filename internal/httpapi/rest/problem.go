package rest

import (
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/sandbox"
)

// statusOf is the one mapping of error classes to statuses.
var statusOf = map[sandbox.Class]int{
	sandbox.NotFound:           http.StatusNotFound,
	sandbox.Conflict:           http.StatusConflict,
	sandbox.FailedPrecondition: http.StatusConflict,
	sandbox.Invalid:            http.StatusBadRequest,
	sandbox.Denied:             http.StatusForbidden,
	sandbox.Quota:              http.StatusTooManyRequests,
	sandbox.NoCapacity:         http.StatusServiceUnavailable,
	sandbox.Unavailable:        http.StatusServiceUnavailable,
	sandbox.Internal:           http.StatusInternalServerError,
}

// statusError is an error whose status HTTP knows better than its class.
type statusError struct {
	status int
	err    *sandbox.Error
}

func (e *statusError) Error() string { return e.err.Error() }
func (e *statusError) Unwrap() error { return e.err }

// WithStatus returns err with a status of its own (405, 406, 413, 415, 416,
// 426: those that are about HTTP and not about the thing asked for).
func WithStatus(status int, err *sandbox.Error) error { return &statusError{status, err} }

// Unauthenticated is the answer to who shows no key or token, or one that is
// good for nothing.
func Unauthenticated(err error) error {
	return WithStatus(http.StatusUnauthorized, sandbox.AsError(err))
}

// TooLarge is the answer to a body beyond limit bytes.
func TooLarge(limit int64) error {
	return WithStatus(http.StatusRequestEntityTooLarge,
		sandbox.Errorf(sandbox.Invalid, "body_too_large", "the body is larger than %d bytes", limit))
}

// Status tells which status Fail answers for err.
func Status(err error) int {
	var s *statusError
	if errors.As(err, &s) {
		return s.status
	}
	if status, ok := statusOf[sandbox.AsError(err).Class]; ok {
		return status
	}
	return http.StatusInternalServerError
}

// Body is an error as the API shows it within other answers. What an internal
// error says is for the log alone.
func Body(err error) *api.ErrorBody {
	e := sandbox.AsError(err)
	if e == nil {
		return nil
	}
	b := &api.ErrorBody{Class: api.ErrorClass(e.Class), Code: e.Code, Message: e.Message, Hint: e.Hint, Retryable: e.Retryable}
	if e.Class == sandbox.Internal {
		b.Message = "Cloche failed to do this"
		if b.Hint == "" {
			b.Hint = "the daemon's log says why"
		}
	}
	return b
}

// Fail answers err as problem+json. After the answer has begun it can't, and
// cuts the connection, so that the peer does not take what it has for all.
func Fail(w http.ResponseWriter, r *http.Request, err error) {
	rec := recordOf(r)
	rec.err = err
	if rec.began() {
		panic(http.ErrAbortHandler)
	}
	e, status, body := sandbox.AsError(err), Status(err), Body(err)
	p := api.Problem{
		Type: "urn:cloche:error:" + body.Code, Title: http.StatusText(status), Status: status, Detail: body.Message,
		Instance: "urn:cloche:request:" + rec.id, Class: body.Class, Code: body.Code, Hint: body.Hint, Retryable: body.Retryable,
	}
	h := w.Header()
	if e.Retryable && (status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests) {
		p.RetryAfterSeconds = int(math.Ceil(max(e.RetryAfter, time.Second).Seconds()))
		h.Set("Retry-After", strconv.Itoa(p.RetryAfterSeconds))
	}
	if status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="cloche"`)
	}
	for _, name := range []string{"Content-Range", "Content-Length", "Accept-Ranges", "Last-Modified"} {
		if status != http.StatusRequestedRangeNotSatisfiable || name != "Content-Range" {
			h.Del(name)
		}
	}
	write(w, r, status, "application/problem+json", p)
}

// JSON answers v.
func JSON(w http.ResponseWriter, r *http.Request, status int, v any) {
	write(w, r, status, "application/json", v)
}

// NoContent answers 204.
func NoContent(w http.ResponseWriter) { w.WriteHeader(http.StatusNoContent) }

func write(w http.ResponseWriter, r *http.Request, status int, contentType string, v any) {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		recordOf(r).err = err
		status, contentType = http.StatusInternalServerError, "application/problem+json"
		b.Reset()
		b.WriteString(`{"type":"urn:cloche:error:internal","title":"Internal Server Error","status":500,` +
			`"detail":"Cloche failed to do this","class":"internal","code":"internal","retryable":false}` + "\n")
	}
	h := w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(b.Len()))
	w.WriteHeader(status)
	if _, err := w.Write([]byte(b.String())); err != nil {
		recordOf(r).gone = err
	}
}
