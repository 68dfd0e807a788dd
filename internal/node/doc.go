// Package node is what is: it carries machines on this host. Bring-up is a
// list of reversible steps whose names derive from the sandbox's id; the
// journal of a machine (one small file) says what was intended and whether it
// was done, so that after any kill a machine is either adopted or undone.
// What no journal roots is collected.
//
// Control talks to it through sandbox.Node, in plain values. The data plane
// reaches guests through Client and Extra.
//
// Invariants: calls for one sandbox are serialised; a generation older than
// the newest seen is refused; a machine is ready only after its agent has
// proved itself and taken its identity.
package node
