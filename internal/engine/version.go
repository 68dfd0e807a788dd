package engine

import (
	_ "unsafe" // for go:linkname
)

// gvisorVersion is the module version in go.mod; a test holds them equal.
const gvisorVersion = "v0.0.0-20260905035102-160fafc42237"

// patchLevel counts our own changes to how machines are made that a snapshot
// can feel: raise it with each. The test of an upgrade sets it with the linker.
var patchLevel = "1"

// Version is the engine's version. A memory snapshot is restored only by an
// engine with the same one.
var Version = gvisorVersion + "+cloche." + patchLevel

// runscVersion is gVisor's own idea of its version, which it writes into
// snapshots and compares before a restore. It is meant to be set by the
// linker; setting it here makes that independent of how we are built.
//
//go:linkname runscVersion gvisor.dev/gvisor/runsc/version.version
var runscVersion string

func init() { runscVersion = Version }
