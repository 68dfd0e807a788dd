package dataplane

//go:generate go tool -modfile=../../tools/go.mod oapi-codegen -config server.cfg.yaml ../../api/openapi.yaml
