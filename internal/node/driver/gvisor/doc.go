// Package gvisor is the driver that runs machines as gVisor sandboxes. It
// speaks to the control process of the pinned engine (cmd/cloche-gvisor) and
// imports no gVisor package: a machine is created and controlled only by the
// engine that made it, which a later release of Cloche may not be built with.
//
// What a machine leaves on the host, and Discard removes by its id alone:
//
//	STATE/machines/ID/gvisor        its record, overlay and logs
//	RUN/m/ID                        the socket that its agent dials
//	RUN/gvisor/ENGINE/machines/ID   the control process's link to it
//	RUN/gvisor/ENGINE/root          gVisor's own state
//	the cgroup /cloche-INSTANCE/ID  with all of its processes
//
// INSTANCE comes from the state directory, so that several daemons on one host
// don't take each other's machines for lost ones.
//
// Memory. The guest sees its limit as its RAM. Half of it may be in /dev/shm
// and an eighth in /run, since what is in a tmpfs belongs to the sentry and is
// freed by no process's death; /tmp is on the disk. The host's limit is higher
// by what the sentry, the gofer and the stub processes need. When it is
// reached, the kernel takes the guest's processes first, the one with the most
// memory before the others, its PID 1 after all of them, and the sentry last.
//
// The node calls it; the engine implements the other side of enginerpc.
package gvisor
