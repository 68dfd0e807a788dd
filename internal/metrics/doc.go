// Package metrics shows a daemon to Prometheus. What is counted comes from the
// store: gauges are read when somebody scrapes, counters and histograms follow
// the store's events and the operations that those name. So nothing below
// knows that it is measured, and a metric can't disagree with the rows.
//
// Invariants: every label has few values, all of them Cloche's own words; no
// id, name, command line or anything else of a user's stands in one. Rows are
// read at most once every few seconds, however often somebody scrapes, and one
// part that can't be read does not hide the others. Counters begin at the
// daemon's start.
//
// internal/server makes it, gives it its listener and runs it.
package metrics
