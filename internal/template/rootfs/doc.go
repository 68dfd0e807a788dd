// Package rootfs reads the tar of a root filesystem into a tree in memory, with
// the files' data spooled to one anonymous file, for package erofs to write as
// an image. Package template calls it.
//
// The tar is hostile. Nothing of it is ever unpacked on the host: names exist
// only as strings in the tree, so there is nothing to escape from. Within the
// tree, names resolve as they would under chroot(2).
//
// Invariants: memory, disk and the bytes read are bounded by Limits, however
// the tar lies about itself; the same tar gives the same tree; what an image
// can't hold (device nodes, extended attributes) is counted, never dropped in
// silence. What is refused is a *sandbox.Error of class invalid whose code
// starts with "tar_".
package rootfs
