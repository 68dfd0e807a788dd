package rest

import (
	"crypto/sha256"
	"encoding/json"
	"net/http"

	"cloche.dev/cloche/internal/sandbox"
)

// defaultLimit is the contract's default of limit.
const defaultLimit = 100

// Page is what the parameters limit and page_token ask for.
func Page(limit int, token string) sandbox.Page {
	if limit == 0 {
		limit = defaultLimit
	}
	return sandbox.Page{Limit: limit, Token: token}
}

// Idempotency is the request's key with a hash of what is asked: the call, its
// path and its decoded body. body's encoding must not depend on chance, which
// holds for the contract's types (maps are encoded by key).
func Idempotency(r *http.Request, key string, body any) sandbox.Idempotency {
	if key == "" {
		return sandbox.Idempotency{}
	}
	b, err := json.Marshal(struct {
		Method, Path string
		Body         any
	}{r.Method, r.URL.Path, body})
	if err != nil {
		// A type that can't be encoded was not decoded either.
		panic(err)
	}
	return sandbox.Idempotency{Key: key, Request: sha256.Sum256(b)}
}
