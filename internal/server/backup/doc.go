// Package backup copies a state directory while its daemon runs, and checks such
// copies. `cloche backup` calls it, on the daemon's host; the daemon takes no
// part in it.
//
// Invariants: the copy has the layout of a state directory, so that restoring
// is putting it in the place of one; every file that the copied rows need is in
// it, or is told to be missing; it has its name only when it is complete and
// durable. Secrets stay out unless they are asked for: the admin key, the key
// of tokens, and memory snapshots, whose manifests hold their guests' keys.
// Machines are never in it: they can't outlive their host. Files that never
// change (images, snapshots, artifacts) are hard links where the filesystem
// allows, and never written to; all others are copies.
package backup
