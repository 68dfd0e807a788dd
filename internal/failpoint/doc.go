// Package failpoint names the instants at which the chaos suite kills Cloche,
// and the precautions that it leaves out to prove that it notices. Only a build
// with the tag "clochefaults" can be killed or made careless, through the
// environment variables below, and only there can the clock be made to jump; in
// every other build Hit and Skip do nothing and the compiler drops them.
//
// A name is ROOM.STEP, a step lies between two effects that a crash could tear
// apart, and every name is hit at least once by the chaos suite; the Firecracker
// driver's, which are made of its steps, by the nested run (test/nested/life).
// Whoever has such steps calls it: internal/node and its rooms,
// internal/control, internal/store, internal/server.
package failpoint

// The environment of a build with the tag.
const (
	// EnvKill is NAME or NAME@N: the process kills itself (SIGKILL) when the
	// failpoint is hit for the N-th time, counted from 1.
	EnvKill = "CLOCHE_KILL_AT"
	// EnvSkip lists precautions to leave out, separated by commas.
	EnvSkip = "CLOCHE_SKIP"
	// EnvHits is a file that each hit's name is appended to, one a line.
	EnvHits = "CLOCHE_HITS"
	// EnvClock is a file that holds by how much the clock has jumped, as
	// time.ParseDuration reads it.
	EnvClock = "CLOCHE_CLOCK"
)

// The precautions that Skip knows.
const (
	SkipFence  = "fence"  // the node takes calls of older generations
	SkipUndo   = "undo"   // a failed bring-up is not undone
	SkipRename = "rename" // a snapshot is written in place, under its final name
	SkipFsync  = "fsync"  // a snapshot's files are not synced
)
