// Package sandbox is Cloche's vocabulary: what a sandbox, an operation, a
// session, a template, a key and a project are, which states a sandbox can be
// in, which verbs move it between them (the transition table, the only place
// that knows the lifecycle), how errors are classed, how ids look, and the
// interfaces that control declares for what it needs (a store, a node,
// templates).
//
// It imports nothing of ours, and every other room may import it.
package sandbox
