// Package rest is what the two halves of the native HTTP API share: the router
// that knows every operation of api.Spec, checks each request against it and
// answers everything else; strict JSON; problem+json (the only place that maps
// an error class to a status); request ids and the access log.
//
// Invariants: a handler runs only for a request whose caller is known (the
// half's Guard) and whose parameters satisfy the contract; a pattern that is
// not in the contract can't be registered; tokens, command lines, paths inside
// a sandbox and bodies are never logged; a peer that stops reading or sending
// holds nothing but its own connection, and that not for long.
//
// Called by internal/httpapi (the control half), internal/dataplane (the data
// half) and internal/server, which makes one Router for both.
package rest
