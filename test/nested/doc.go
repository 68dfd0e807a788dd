// Package nested runs test binaries on a machine that has a working KVM and
// cgroup v2, whatever this one has: L1, a Debian kernel with a small initial
// file system under QEMU's emulation of an AMD processor with SVM. In it the
// real Firecracker boots real guests (L2). It is for `make e2e-firecracker`,
// whose command is test/nested/run, and for any other suite that needs such a
// machine.
//
// Invariants: L1 is made anew for each job and keeps nothing; it has no network
// and no disk, everything is in its memory; what it tells by its first serial
// port (kernel, signs of life, the EXIT line) never mixes with the output of
// the tests, which has the second; a run without an EXIT line proves nothing
// about the tests and is told apart (ErrNoExit); what can't be had here is an
// error that names it (Missing) and never a pass.
//
// Emulation makes everything 10 to 60 times slower and nothing wrong. One
// processor in L1, since two now and then froze it with QEMU 7.2.
package nested
