// Package e2e holds the end-to-end tests: they drive the built binary as a
// user would, by CLI and over HTTP, with nothing faked below. Each test has a
// daemon of its own, whose end demands an empty census.
package e2e
