// Package erofs writes EROFS images: the read-only root filesystems that every
// sandbox starts from. It is called by package template with a tree that
// package rootfs read from a tar.
//
// The images are plain on purpose, since three kinds of reader must agree on
// them (the Linux kernel, the gVisor sentry, fsck.erofs): 4096-byte blocks,
// uncompressed, one flat extent per inode and never data beside an inode (the
// sentry can't map that), no extended attributes, and only extended inodes, so
// that owners are 32 bits wide and modification times keep their nanoseconds.
//
// Invariants: the same tree and data give the same bytes; an image is written
// front to back in one pass, hashed on the way, with memory that depends on
// the number of entries and not on their data; runs of zeros become holes in
// the image file but count in its size.
package erofs
