package guestapi

import (
	"context"
	"errors"
	"strings"
	"unicode"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/sandbox"
)

// codeHeader carries the stable code of a *sandbox.Error beside the RPC code.
const codeHeader = "Cloche-Code"

const (
	maxErrorText = 1024
	maxCode      = 64
)

var classes = []struct {
	class sandbox.Class
	code  connect.Code
}{
	{sandbox.NotFound, connect.CodeNotFound},
	{sandbox.Conflict, connect.CodeAlreadyExists},
	{sandbox.FailedPrecondition, connect.CodeFailedPrecondition},
	{sandbox.Invalid, connect.CodeInvalidArgument},
	{sandbox.Denied, connect.CodePermissionDenied},
	{sandbox.Quota, connect.CodeResourceExhausted},
	{sandbox.Unavailable, connect.CodeUnavailable},
	{sandbox.Internal, connect.CodeInternal},
}

// ToRPC turns an error of the guest into what its RPC answers.
func ToRPC(err error) error {
	if err == nil {
		return nil
	}
	var rpc *connect.Error
	if errors.As(err, &rpc) {
		return err
	}
	e := sandbox.AsError(err)
	code := connect.CodeInternal
	for _, c := range classes {
		if c.class == e.Class {
			code = c.code
		}
	}
	out := connect.NewError(code, errors.New(clean(e.Message)))
	out.Meta().Set(codeHeader, e.Code)
	return out
}

// FromRPC turns what an RPC to a guest failed with into a *sandbox.Error; it is
// the only place that does. The text and the code may come from a hostile
// guest: they are cut to size, and control characters are taken out. What a
// guest can't know (who may do what, what is wrong with Cloche) it can't say: such
// answers are "guest_failed". A connection that ended is "guest_unreachable".
func FromRPC(err error) error {
	if err == nil {
		return nil
	}
	var own *sandbox.Error
	if errors.As(err, &own) {
		return own
	}
	code := connect.CodeOf(err)
	switch {
	case code == connect.CodeDeadlineExceeded, errors.Is(err, context.DeadlineExceeded):
		return sandbox.Errorf(sandbox.Unavailable, "deadline_exceeded", "the sandbox's agent did not answer in time")
	case code == connect.CodeCanceled, errors.Is(err, context.Canceled):
		return sandbox.Errorf(sandbox.Unavailable, "canceled", "the request to the sandbox's agent was cancelled")
	}
	var rpc *connect.Error
	// A method that an agent has never heard of is a status of HTTP, not an answer.
	if !errors.As(err, &rpc) || !connect.IsWireError(err) && code != connect.CodeUnimplemented {
		return sandbox.Errorf(sandbox.Unavailable, "guest_unreachable", "the connection to the sandbox's agent failed: %s", clean(err.Error()))
	}
	return said(rpc)
}

// said classes what a guest answered.
func said(rpc *connect.Error) error {
	text := clean(rpc.Message())
	switch rpc.Code() {
	case connect.CodePermissionDenied, connect.CodeUnauthenticated, connect.CodeInternal:
		return failed(text)
	case connect.CodeOutOfRange:
		return sandbox.Errorf(sandbox.Invalid, "guest_out_of_range", "the sandbox refused: %s", text)
	case connect.CodeUnimplemented:
		return sandbox.Errorf(sandbox.FailedPrecondition, "guest_unimplemented", "the sandbox's agent can't do this: %s", text).
			WithHint("the sandbox was made by another version of Cloche")
	}
	code := rpc.Meta().Get(codeHeader)
	if !validCode(code) {
		code = "guest_" + rpc.Code().String()
	}
	for _, c := range classes {
		if c.code == rpc.Code() {
			return sandbox.Errorf(c.class, code, "in the sandbox: %s", text)
		}
	}
	return failed(text)
}

// failed is the fault of an agent. To ask again is not known to help.
func failed(text string) error {
	e := sandbox.Errorf(sandbox.Unavailable, "guest_failed", "the sandbox's agent failed: %s", text)
	e.Retryable = false
	return e
}

func validCode(s string) bool {
	if s == "" || len(s) > maxCode {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			return false
		}
	}
	return true
}

// clean makes s safe to show: valid UTF-8, no control characters, bounded.
func clean(s string) string {
	if len(s) > maxErrorText {
		s = s[:maxErrorText]
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}
