// Package engine is the gVisor engine that cmd/cloche-gvisor runs: the pinned
// gVisor, and a small process around it that the driver speaks to. It is the
// only importer of gVisor.
//
// One binary has these roles, told apart by its first argument:
//
//	start     starts a control process that is nobody's child, and waits until
//	          it serves
//	control   the control process: manages any number of machines over a unix
//	          socket, is the reaper of their processes, and outlives the daemon
//	create    a short-lived child of it that makes and starts one machine
//	version   prints the engine's version
//	--…       gVisor's own re-execution of itself (boot, gofer, umount)
//
// Invariants. A machine is created in a child of its own, with every
// inherited descriptor closed on exec, since gVisor opens some without that
// flag and what leaks crosses from one sandbox into the next. The control
// process holds nothing that a machine needs to live, so it may be killed and
// started again over living machines: then it learns from a pidfd that a
// machine ended, but not how. How a machine ended is kept in the machine's
// directory until it is discarded.
package engine
