package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"cloche.dev/cloche/api"
)

// Error is what a daemon answered instead of a result, or why it could not be
// asked (then Status is 0).
type Error struct {
	Status     int            // of HTTP; 0 when no answer came
	Class      api.ErrorClass // what can be done about it
	Code       string         // stable; for programs
	Message    string
	Hint       string        // the next step, where there is one
	Retryable  bool          // the same call may succeed later
	RetryAfter time.Duration // a suggestion; 0 when there is none
	RequestID  string        // as in the daemon's log
	cause      error
}

// Codes of errors that the client itself makes.
const (
	CodeUnreachable = "daemon_unreachable" // no connection, or it was cut
	CodeBadAnswer   = "bad_answer"         // what answered does not speak this API
	CodePortClosed  = "port_closed"        // nothing listens on a sandbox's port
	CodeStdinTaken  = "stdin_taken"        // somebody else wrote to the same standard input
)

// Codes of errors of the daemon that the client acts on.
const (
	codeNotRunning = "sandbox_not_running"
	codeHeld       = "machine_held" // it was suspended a moment ago
)

// Error returns the message, and the hint where there is one.
func (e *Error) Error() string {
	if e.Hint == "" {
		return e.Message
	}
	return e.Message + " (" + e.Hint + ")"
}

// Unwrap returns what made the call fail when no answer came.
func (e *Error) Unwrap() error { return e.cause }

// IsClass tells whether err is an *Error of class c.
func IsClass(err error, c api.ErrorClass) bool {
	var e *Error
	return errors.As(err, &e) && e.Class == c
}

// FromBody makes an Error of the error in an operation or a stream.
func FromBody(b *api.ErrorBody) *Error {
	if b == nil {
		return &Error{Class: api.ClassInternal, Code: CodeBadAnswer, Message: "it failed, and the daemon does not say why"}
	}
	return &Error{Class: b.Class, Code: b.Code, Message: b.Message, Hint: b.Hint, Retryable: b.Retryable}
}

// maxProblem bounds how much of an error's body is read.
const maxProblem = 64 << 10

// problemOf reads a refusing answer and closes it.
func problemOf(resp *http.Response) *Error {
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	e := &Error{Status: resp.StatusCode, RetryAfter: retryAfter(resp.Header.Get("Retry-After"))}
	var p api.Problem
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if kind == "application/problem+json" && json.Unmarshal(body, &p) == nil && p.Class != "" {
		e.Class, e.Code, e.Message, e.Hint, e.Retryable, e.RequestID = p.Class, p.Code, p.Detail, p.Hint, p.Retryable, p.Instance
		if e.RetryAfter == 0 {
			e.RetryAfter = time.Duration(p.RetryAfterSeconds) * time.Second
		}
		if e.Message == "" {
			e.Message = p.Title
		}
		return e
	}
	e.Class, e.Code = classOf(resp.StatusCode), CodeBadAnswer
	e.Retryable = resp.StatusCode == http.StatusServiceUnavailable || resp.StatusCode == http.StatusTooManyRequests ||
		resp.StatusCode == http.StatusBadGateway || resp.StatusCode == http.StatusGatewayTimeout
	e.Message = fmt.Sprintf("the answer was %q, which is not of a Cloche daemon", resp.Status)
	e.Hint = "check the URL (--url, CLOCHE_URL), and any proxy between"
	return e
}

// classOf is the class of a status whose body says none.
func classOf(status int) api.ErrorClass {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden:
		return api.ClassDenied
	case http.StatusNotFound:
		return api.ClassNotFound
	case http.StatusConflict:
		return api.ClassConflict
	case http.StatusTooManyRequests:
		return api.ClassQuota
	case http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout:
		return api.ClassUnavailable
	}
	if status < 500 {
		return api.ClassInvalid
	}
	return api.ClassInternal
}

func retryAfter(s string) time.Duration {
	if n, err := strconv.Atoi(s); err == nil && n > 0 && n < 1<<20 {
		return time.Duration(n) * time.Second
	}
	return 0
}

// unreachable makes an Error of a failure of the transport. What the caller
// cancelled stays what it is.
func (c *Client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	e := &Error{Class: api.ClassUnavailable, Code: CodeUnreachable, Retryable: true, cause: err}
	e.Message = fmt.Sprintf("the daemon at %s can't be reached: %s", c.base, plain(err))
	if refused(err) {
		e.Hint = "start it with `sudo cloche serve`, or name another one with --url or CLOCHE_URL"
	}
	return e
}

// refused tells whether err is a failure to connect, so that the daemon has
// seen nothing of the request.
func refused(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// plain says a transport's error without the request that net/http puts before.
func plain(err error) string {
	var op *net.OpError
	if errors.As(err, &op) && op.Err != nil {
		return strings.TrimPrefix(op.Err.Error(), "connect: ")
	}
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return "the connection was cut"
	}
	for u := errors.Unwrap(err); u != nil; u = errors.Unwrap(err) {
		err = u
	}
	return err.Error()
}
