// Package api is Cloche's native HTTP contract: openapi.yaml, and the Go types
// generated from it. The public client and both HTTP rooms (httpapi for the
// control half, dataplane for the data half) are written against it; it knows
// no server and no client.
//
// Change openapi.yaml first, then run `go generate ./api ./internal/httpapi
// ./internal/dataplane`.
package api

import _ "embed"

//go:generate go tool -modfile=../tools/go.mod oapi-codegen -config types.cfg.yaml openapi.yaml

// Spec is the text of openapi.yaml, against which servers validate requests.
//
//go:embed openapi.yaml
var Spec []byte
