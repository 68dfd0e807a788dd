package sandbox

import (
	"context"
	"io"
)

// DebianSource says what a Debian template is built from.
type DebianSource struct {
	Suite    string   `json:"suite"`              // e.g. "bookworm"; "" is the host's own
	Packages []string `json:"packages,omitempty"` // beside the minimal base; checked against Debian's grammar
	// Users are made in the image, each with a home and, where Sudo, with
	// passwordless sudo.
	Users []TemplateUser `json:"users,omitempty"`
}

// TemplateUser is a user made while a Debian template is built.
type TemplateUser struct {
	Name string `json:"name"`
	Sudo bool   `json:"sudo,omitempty"`
}

// BuildRequest is the stored input of a build operation.
type BuildRequest struct {
	Debian  DebianSource  `json:"debian"`
	Config  RuntimeConfig `json:"config"`
	Release string        `json:"release,omitempty"` // "name:tag" that shall point to the result
}

// Built is a finished template's content, before it has a row.
type Built struct {
	Digest    string           `json:"digest"`
	SizeBytes int64            `json:"size_bytes"`
	Entries   int              `json:"entries"`
	Dropped   map[string]int64 `json:"dropped,omitempty"` // what the image can't hold, by kind ("xattr", "device")
}

// Builder makes templates and keeps their files, by digest.
type Builder interface {
	// ImportTar reads a root filesystem tar (optionally gzip or zstd) to its
	// end. It never unpacks on the host.
	ImportTar(ctx context.Context, tar io.Reader, cfg RuntimeConfig) (Built, error)
	// BuildDebian builds from the host's own apt sources. progress gets short
	// lines for people, from the calling goroutine's children.
	BuildDebian(ctx context.Context, src DebianSource, cfg RuntimeConfig, progress func(string)) (Built, error)
	// Image returns the path of a template's image; NotFound when its files
	// are not on this host, and Internal when they are not what they were.
	Image(ctx context.Context, digest string) (string, error)
	// Digests lists the templates whose files are on this host.
	Digests(ctx context.Context) ([]string, error)
	// Remove deletes a template's files. Idempotent.
	Remove(ctx context.Context, digest string) error
}

// BaseTemplate is the default template, "base".
var BaseTemplate = BuildRequest{
	Debian: DebianSource{
		Packages: []string{"bash", "ca-certificates", "curl", "git", "python3", "sudo"},
		Users:    []TemplateUser{{Name: "user", Sudo: true}},
	},
	Config:  RuntimeConfig{User: "user", Workdir: "/home/user", Command: []string{"/bin/bash"}, Env: map[string]string{"LANG": "C.UTF-8"}},
	Release: "base:latest",
}
