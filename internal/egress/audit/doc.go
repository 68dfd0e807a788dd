// Package audit is the record of what sandboxes tried to reach and how each of
// it was decided: the Record itself, its form as a line of JSON after the Open
// Cybersecurity Schema Framework (OCSF), and the Store, a bounded row of files
// in the daemon's state directory that can be queried and followed.
//
// Everything in a Record may come from inside a sandbox, or from a gateway that
// one has taken over: the Store bounds each string again, and a line is one
// JSON document whatever is in it. An entry's id grows by one with each entry
// of a Store, over restarts too, so that a reader who names the last one that
// it saw misses nothing and is told what was rotated away.
//
// internal/egress makes Records, internal/node/egress keeps the Store, and
// control reads it through an interface of its own.
package audit
