// Package httpapi is the control half of the native HTTP API: sandboxes and
// their verbs, snapshots, operations, events, templates, releases, keys, quotas
// and the host's drain. It translates between the contract (package api) and
// control's verbs, and decides nothing.
//
// Invariants: every operation asks an API key and its role before anything
// else; what control refuses is answered as control says it, by the mapping of
// package rest; nothing is written or started here. A stream of events tells
// nothing that happened after its key was revoked, and says what is missing.
//
// internal/server makes one API and registers it in the router, beside the
// data half (internal/dataplane), and serves both with NewServer.
package httpapi

//go:generate go tool -modfile=../../tools/go.mod oapi-codegen -config server.cfg.yaml ../../api/openapi.yaml
