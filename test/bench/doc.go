// Package bench measures Cloche beside floors: the same work without Cloche,
// done on the same machine in the same minutes. Figures are medians of
// interleaved pairs, printed with the load average.
//
// The floor of everything about machines is the bare engine: the benchmark
// starts the engine's control process itself, asks it for a machine with the
// very request that the driver makes (same image file, overlay, quota, tmpfs,
// binds, cgroup limits, an own network namespace, the guest as PID 1, and no
// more creations at once than the node allows itself), and runs commands over
// the guest's connection. What it leaves out is what Cloche adds: the HTTP
// API, operations, store, journal, session log and recorder.
//
// `make bench` runs it. A goal of the project that is missed fails the test.
package bench
