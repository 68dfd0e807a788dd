package dataplane

import (
	"context"
	"net/http"
	"strings"
	"time"

	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/sandbox"
)

// Keys verifies API keys (an auth.Verifier).
type Keys interface {
	// Verify returns whose key this is; an error of the class Denied where it
	// is none, or was revoked.
	Verify(ctx context.Context, key string) (sandbox.Caller, error)
}

// The prefixes by which tokens are told from keys.
const (
	sessionPrefix = "cst_"
	accessPrefix  = "cat_"
)

// scope says who may call an operation: keys whose role permits act, and
// tokens made for it.
type scope struct {
	act     sandbox.Action
	session bool         // a session token of the session in the path
	purpose auth.Purpose // an access token of this purpose
}

// scopes has every operation of the data half.
var scopes = map[string]scope{
	"listSessions":  {act: sandbox.ActSee},
	"createSession": {act: sandbox.ActData},
	"getSession":    {act: sandbox.ActSee, session: true},
	"followSession": {act: sandbox.ActData, session: true},
	"attachSession": {act: sandbox.ActData, session: true},
	"writeStdin":    {act: sandbox.ActData, session: true},
	"signalSession": {act: sandbox.ActData, session: true},
	"resizeSession": {act: sandbox.ActData, session: true},
	"openPty":       {act: sandbox.ActData, session: true},
	"execCommand":   {act: sandbox.ActData},
	"readFile":      {act: sandbox.ActData, purpose: auth.PurposeFiles},
	"writeFile":     {act: sandbox.ActData, purpose: auth.PurposeFiles},
	"removeFile":    {act: sandbox.ActData, purpose: auth.PurposeFiles},
	"statFile":      {act: sandbox.ActData, purpose: auth.PurposeFiles},
	"listFiles":     {act: sandbox.ActData, purpose: auth.PurposeFiles},
	"makeDirectory": {act: sandbox.ActData, purpose: auth.PurposeFiles},
	"moveFile":      {act: sandbox.ActData, purpose: auth.PurposeFiles},
	"readArchive":   {act: sandbox.ActData, purpose: auth.PurposeFiles},
	"writeArchive":  {act: sandbox.ActData, purpose: auth.PurposeFiles},
	"openTunnel":    {act: sandbox.ActData, purpose: auth.PurposePorts},
}

type callerKey struct{}

// callerOf is who the guard let in; the zero Caller may do nothing.
func callerOf(ctx context.Context) sandbox.Caller {
	c, _ := ctx.Value(callerKey{}).(sandbox.Caller)
	return c
}

// guard lets in who may call the operation: an API key by its role, a token by
// what it was made for.
func (p *Plane) guard(r *http.Request, operation, token string) (*http.Request, string, error) {
	s, ok := scopes[operation]
	if !ok {
		return nil, "", sandbox.Errorf(sandbox.Internal, "no_scope", "the operation %s has no scope", operation)
	}
	caller, err := p.caller(r, s, token)
	if err != nil {
		return nil, "", err
	}
	if err := caller.Can(s.act); err != nil {
		return nil, caller.KeyID, err
	}
	return r.WithContext(context.WithValue(r.Context(), callerKey{}, caller)), caller.KeyID, nil
}

func (p *Plane) caller(r *http.Request, s scope, token string) (sandbox.Caller, error) {
	switch {
	case token == "":
		return sandbox.Caller{}, sandbox.Errorf(sandbox.Denied, "no_credentials", "this call needs a key or a token").
			WithHint("send Authorization: Bearer KEY")
	case strings.HasPrefix(token, sessionPrefix):
		return p.bySession(r, s, token)
	case strings.HasPrefix(token, accessPrefix):
		return p.byAccess(r, s, token)
	}
	return p.o.Keys.Verify(r.Context(), token)
}

func (p *Plane) bySession(r *http.Request, s scope, token string) (sandbox.Caller, error) {
	if !s.session {
		return sandbox.Caller{}, outOfScope("a session token is good for its session alone")
	}
	claim, err := p.o.Tokens.VerifySession(token)
	if err != nil || claim.Session != r.PathValue("session") {
		return sandbox.Caller{}, badToken()
	}
	c := sandbox.Caller{KeyID: claim.Session, Project: claim.Project, Role: sandbox.RoleProject}
	row, err := p.o.Identities.Session(r.Context(), c, r.PathValue("sandbox"), claim.Session)
	if sandbox.IsClass(err, sandbox.NotFound) || err == nil && row.Generation != claim.Generation {
		return sandbox.Caller{}, badToken()
	}
	return c, err
}

func (p *Plane) byAccess(r *http.Request, s scope, token string) (sandbox.Caller, error) {
	if s.purpose == "" {
		return sandbox.Caller{}, outOfScope("an access token is good for the files or the ports of its sandbox alone")
	}
	claim, err := p.o.Tokens.VerifyAccess(token, s.purpose, time.Now())
	if err != nil || claim.Sandbox != r.PathValue("sandbox") {
		return sandbox.Caller{}, badToken()
	}
	return sandbox.Caller{KeyID: "access token", Project: claim.Project, Role: sandbox.RoleProject}, nil
}

func outOfScope(why string) error {
	return sandbox.Errorf(sandbox.Denied, "forbidden", "this token may not do this: %s", why).WithHint("use an API key")
}

// badToken says the same of every token that is not good, whatever is wrong.
func badToken() error {
	return sandbox.Errorf(sandbox.Denied, "bad_token", "the token is not good for this, has expired or was revoked").
		WithHint("get a new one with an API key")
}
