// Package node is what is: it carries machines on this host and keeps the
// snapshots that were taken of them. Every verb is a list of reversible steps
// whose names derive from the sandbox's id; the journal of a machine (one small
// file) says what was intended and whether it was done, so that after any kill a
// machine is either adopted or undone. What no journal roots is collected.
//
// Control talks to it through sandbox.Node, in plain values. The data plane
// reaches guests through Client and Extra, which wait while a snapshot replaces
// the link to the guest.
//
// Invariants: calls for one sandbox are serialised; a generation older than
// the newest seen is refused; a machine is ready only after its agent has
// proved itself and taken its identity. A snapshot that was answered is durable
// and verified, and one that failed left nothing, the machine as it was. A
// machine is ended for another's sake only after all was verified that could be,
// and that it was is on disk before it happens. A machine stands still only
// while its user or the snapshot that it was held for wants it to, or, after a
// restart, until its driver has let it go on; no other machine waits long for that.
// No machine is taken for ended because the node stopped before it had answered.
// Where the node has an egress gateway, a machine's network is the gateway's from
// before the machine is made until after it has ended.
package node
