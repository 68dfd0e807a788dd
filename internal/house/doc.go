// Package house holds the rules of this repository as tests: which room may
// import which (the arrows of docs/architecture.md, as one table), that every
// package says in its comment what it is for, and that files stay short and
// carry no marks of unfinished work.
//
// It has no code outside its tests and nothing imports it. The tests parse
// import clauses and comments only, so they need no build and no network, and
// take well under a second.
package house
