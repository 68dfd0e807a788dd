// Package auth knows who calls and what a token is good for.
//
// An API key's text is its id and a 256-bit secret; the store has the secret's
// SHA-256. Tokens of sessions and of sandboxes' data plane are message
// authentication codes under a key of their own (STATE/token.key), so that
// nothing has to be stored for them and a replayed request can answer the same
// one.
//
// Invariants: secrets are compared in constant time; neither a key's text nor
// a token stands in an error, a log or the store; a revoked key is refused
// from the next call on (nothing is cached).
//
// internal/server makes a Verifier, Tokens and the first key; the faces and
// the data plane call them; control gets Mint.
package auth

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base32"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// Caller is who calls.
type Caller = sandbox.Caller

// keyPrefix begins the text of an API key, so that scanners can find lost ones.
const keyPrefix = "cloche_"

// The lengths of what follows, in characters of lower-case base32.
const (
	idLen     = 20 // of an id without its kind
	secretLen = 52 // of 256 bits
)

var text32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// KeyStore is what a Verifier asks.
type KeyStore interface {
	KeyByID(ctx context.Context, id string) (sandbox.Key, error)
}

// Mint makes the text of the key with this id, and the hash to store.
func Mint(id string) (text string, hash []byte) {
	var secret [32]byte
	rand.Read(secret[:]) // never fails (crypto/rand documents that it crashes instead)
	s := text32.EncodeToString(secret[:])
	return keyPrefix + strings.TrimPrefix(id, sandbox.KindKey) + "_" + s, hashSecret(s)
}

func hashSecret(secret string) []byte {
	sum := sha256.Sum256([]byte(secret))
	return sum[:]
}

// parseKey takes a key's text apart.
func parseKey(text string) (id, secret string, ok bool) {
	rest, ok := strings.CutPrefix(text, keyPrefix)
	if !ok || len(rest) != idLen+1+secretLen || rest[idLen] != '_' {
		return "", "", false
	}
	id, secret = sandbox.KindKey+rest[:idLen], rest[idLen+1:]
	if !sandbox.ValidID(sandbox.KindKey, id) || !base32Text(secret) {
		return "", "", false
	}
	return id, secret, true
}

func base32Text(s string) bool {
	return strings.Trim(s, "abcdefghijklmnopqrstuvwxyz234567") == ""
}

// Verifier finds out who calls.
type Verifier struct{ keys KeyStore }

// NewVerifier makes a Verifier over keys.
func NewVerifier(keys KeyStore) *Verifier { return &Verifier{keys} }

// Verify returns the caller whose key's text this is. Whatever is wrong with
// it, the error is the same: Denied, code "unauthenticated".
func (v *Verifier) Verify(ctx context.Context, bearer string) (Caller, error) {
	id, secret, ok := parseKey(bearer)
	if !ok {
		return Caller{}, unauthenticated()
	}
	k, err := v.keys.KeyByID(ctx, id)
	if err != nil && !sandbox.IsClass(err, sandbox.NotFound) {
		return Caller{}, err
	}
	// An unknown key is compared too (its hash is empty), and fails.
	same := subtle.ConstantTimeCompare(k.Hash, hashSecret(secret)) == 1
	if !same || k.RevokedAt != nil {
		return Caller{}, unauthenticated()
	}
	return Caller{KeyID: k.ID, Project: k.Project, Role: k.Role}, nil
}

func unauthenticated() error {
	return sandbox.Errorf(sandbox.Denied, "unauthenticated", "this needs a valid API key").
		WithHint("send `Authorization: Bearer KEY`; on the same host the key stands in STATE/admin.key")
}

// Bearer takes the credential out of an Authorization header's value; "" where
// there is none.
func Bearer(header string) string {
	scheme, rest, ok := strings.Cut(header, " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(rest)
}
