package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Class sorts errors by what the caller can do about them. Each face maps a
// class to its own status once (HTTP status, CLI exit code, E2B body).
type Class string

// The error classes.
const (
	NotFound           Class = "not_found"           // no such thing in this project
	Conflict           Class = "conflict"            // somebody else's change is in the way
	FailedPrecondition Class = "failed_precondition" // the thing is in the wrong state for this
	Invalid            Class = "invalid"             // the request is malformed
	Denied             Class = "denied"              // no key, a wrong key, or a role that may not
	Quota              Class = "quota"               // a limit of the project
	NoCapacity         Class = "no_capacity"         // a limit of the host
	Unavailable        Class = "unavailable"         // try again later
	Internal           Class = "internal"            // a fault of Cloche
)

// Error is the error that crosses rooms and reaches users.
type Error struct {
	Class      Class         `json:"class"`
	Code       string        `json:"code"`    // stable, snake_case; for programs
	Message    string        `json:"message"` // one sentence; for people
	Hint       string        `json:"hint,omitempty"`
	Retryable  bool          `json:"retryable"`
	RetryAfter time.Duration `json:"retry_after,omitempty"` // a suggestion; 0 when there is none
	cause      error
}

// Errorf makes an Error. A %w verb in format keeps its operand as the cause
// for errors.Is and errors.As.
func Errorf(class Class, code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{
		Class: class, Code: code, Message: err.Error(),
		Retryable: class == Unavailable || class == NoCapacity,
		cause:     errors.Unwrap(err),
	}
}

// WithHint returns e with a hint that names the next step.
func (e *Error) WithHint(format string, args ...any) *Error {
	c := *e
	c.Hint = fmt.Sprintf(format, args...)
	return &c
}

// WithRetry returns e marked retryable, after d where d is not 0.
func (e *Error) WithRetry(d time.Duration) *Error {
	c := *e
	c.Retryable, c.RetryAfter = true, d
	return &c
}

// Error returns the message, and the hint where there is one.
func (e *Error) Error() string {
	if e.Hint == "" {
		return e.Message
	}
	return e.Message + " (" + e.Hint + ")"
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.cause }

// AsError returns err as an *Error. What is not one already becomes
// Unavailable when a deadline or a cancellation ended it and Internal
// otherwise; nil stays nil.
func AsError(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return Errorf(Unavailable, "deadline_exceeded", "it took too long: %w", err)
	}
	if errors.Is(err, context.Canceled) {
		return Errorf(Unavailable, "canceled", "the request was cancelled: %w", err)
	}
	return Errorf(Internal, "internal", "%w", err)
}

// IsClass tells whether err is an *Error of class c.
func IsClass(err error, c Class) bool {
	var e *Error
	return errors.As(err, &e) && e.Class == c
}
