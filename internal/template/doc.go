// Package template makes templates and keeps their files. It implements
// sandbox.Builder; control calls it, and so does the node for a template's
// image.
//
// A template is a directory STATE/templates/<hex> with three files: image.erofs
// (the root filesystem), manifest.json (what it is; its SHA-256 is the digest),
// and seal.json (which file, on this host, was found to have the manifest's
// hash; it spares hashing again and is no part of the template).
//
// Invariants: a template's directory appears complete or not at all, by one
// rename of what was synced before; nothing in it is written again; the same tar
// and runtime config give the same digest; what a tar holds is never unpacked
// on the host. Only a Debian build has a filesystem on disk for a while, under
// an identity that is nobody on this host (see debian.go).
package template

import "cloche.dev/cloche/internal/sandbox"

var _ sandbox.Builder = (*Store)(nil)
