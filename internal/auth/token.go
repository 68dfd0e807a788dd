package auth

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"strconv"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Purpose is what an access token is good for.
type Purpose string

// The purposes of access tokens.
const (
	PurposeFiles Purpose = "files"
	PurposePorts Purpose = "ports"
)

const (
	sessionPrefix  = "cst_"
	accessPrefix   = "cat_"
	sessionPurpose = "session"
	maxToken       = 256
)

// Session is what a session token says. Whoever checks one compares Project
// and Generation with the session's row: raising that generation revokes it.
type Session struct {
	Project    string
	Session    string
	Generation int64
}

// Access is what an access token says.
type Access struct {
	Purpose Purpose
	Project string
	Sandbox string
	Expires time.Time // whole seconds
}

// Tokens makes and verifies tokens under one key.
type Tokens struct{ key []byte }

// NewTokens makes Tokens under key (see LoadTokenKey).
func NewTokens(key []byte) *Tokens { return &Tokens{append([]byte(nil), key...)} }

// Session is the token of a session: always the same for the same claim. The
// ids must be valid ones.
func (t *Tokens) Session(s Session) string {
	return t.text(sessionPrefix, sessionPurpose, bare(s.Project), bare(s.Session), strconv.FormatInt(s.Generation, 36))
}

// VerifySession returns what a session token says, once its code is right.
func (t *Tokens) VerifySession(token string) (Session, error) {
	f, ok := t.open(sessionPrefix, token, func([]string) string { return sessionPurpose }, 3)
	if !ok {
		return Session{}, badToken()
	}
	s := Session{Project: sandbox.KindProject + f[0], Session: sandbox.KindSession + f[1]}
	gen, err := strconv.ParseInt(f[2], 36, 64)
	if err != nil || gen < 0 || !sandbox.ValidID(sandbox.KindProject, s.Project) || !sandbox.ValidID(sandbox.KindSession, s.Session) {
		return Session{}, badToken()
	}
	s.Generation = gen
	return s, nil
}

// Access is a token for a sandbox's data plane until it expires.
func (t *Tokens) Access(a Access) string {
	return t.text(accessPrefix, string(a.Purpose), string(a.Purpose), bare(a.Project), bare(a.Sandbox), strconv.FormatInt(a.Expires.Unix(), 36))
}

// VerifyAccess returns what an access token says, once its code is right, it
// is for this purpose and it has not expired at now.
func (t *Tokens) VerifyAccess(token string, purpose Purpose, now time.Time) (Access, error) {
	f, ok := t.open(accessPrefix, token, func(f []string) string { return f[0] }, 4)
	if !ok || f[0] != string(purpose) {
		return Access{}, badToken()
	}
	a := Access{Purpose: purpose, Project: sandbox.KindProject + f[1], Sandbox: sandbox.KindSandbox + f[2]}
	sec, err := strconv.ParseInt(f[3], 36, 64)
	if err != nil || !sandbox.ValidID(sandbox.KindProject, a.Project) || !sandbox.ValidID(sandbox.KindSandbox, a.Sandbox) {
		return Access{}, badToken()
	}
	a.Expires = time.Unix(sec, 0).UTC()
	if !now.Before(a.Expires) {
		return Access{}, sandbox.Errorf(sandbox.Denied, "token_expired", "the access token has expired").WithHint("ask for a new one")
	}
	return a, nil
}

func badToken() error {
	return sandbox.Errorf(sandbox.Denied, "bad_token", "the token is not valid for this").
		WithHint("use the token that the creation of the session, or of the access, answered")
}

// bare is an id without its kind.
func bare(id string) string {
	_, rest, _ := strings.Cut(id, "_")
	return rest
}

// text is prefix, the fields and the code of purpose and fields.
func (t *Tokens) text(prefix, purpose string, fields ...string) string {
	return prefix + strings.Join(fields, ".") + "." + text32.EncodeToString(t.code(purpose, fields))
}

// open takes n fields out of a token, where its code is right.
func (t *Tokens) open(prefix, token string, purposeOf func([]string) string, n int) ([]string, bool) {
	rest, ok := strings.CutPrefix(token, prefix)
	if !ok || len(token) > maxToken {
		return nil, false
	}
	f := strings.Split(rest, ".")
	if len(f) != n+1 || len(f[n]) != secretLen {
		return nil, false
	}
	fields := f[:n]
	// The texts are compared: two texts may decode to the same bytes.
	want := text32.EncodeToString(t.code(purposeOf(fields), fields))
	return fields, hmac.Equal([]byte(want), []byte(f[n]))
}

// code authenticates purpose and fields, each with its length before it, so
// that no two lists run together.
func (t *Tokens) code(purpose string, fields []string) []byte {
	m := hmac.New(sha256.New, t.key)
	for _, s := range append([]string{purpose}, fields...) {
		var n [4]byte
		binary.BigEndian.PutUint32(n[:], uint32(len(s)))
		m.Write(n[:])
		m.Write([]byte(s))
	}
	return m.Sum(nil)
}
