// Package sys is the only importer of golang.org/x/sys/unix outside the guest
// and the engine: what Cloche asks of the kernel and of files beyond the
// standard library, one file for each topic.
//
// It knows nothing of sandboxes. Every function says what it needs of the host
// and fails with an error that names it; none keeps state of its own.
package sys
