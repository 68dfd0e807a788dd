// Package driver is the seam behind which isolation lives: what a node needs
// of whatever runs machines (gVisor sandboxes, Firecracker microVMs), and no
// more. The conformance suite in drivertest holds every driver to the named
// contract that these comments state.
//
// A driver owns everything on the host that belongs to its machines
// (processes, cgroups, its own directories, jails) and names all of it after
// the machine's id, so that Discard can remove any of it, from any stage,
// knowing the id alone. It owns neither the template's image, nor the guest
// binary, nor the network namespace: those are handed to it.
package driver

import (
	"context"
	"net"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Driver makes machines and finds them again. All methods may be called
// concurrently; calls for one id are serialised by the caller.
type Driver interface {
	// Name is the driver's stable name ("gvisor", "firecracker").
	Name() string

	// Probe tells whether machines can run on this host, by running one part
	// of a machine for real where that is the only way to know. It respects
	// ctx's deadline.
	Probe(ctx context.Context) Capability

	// Create makes a machine and starts it. When it returns nil the machine
	// runs and its guest's PID 1 has been started, though it need not have
	// dialled yet. When it returns an error nothing of the machine is left.
	// A ctx that ends early makes it clean up and return ctx's error.
	Create(ctx context.Context, spec Spec) (Machine, error)

	// Adopt takes up a machine that an earlier process of this driver made.
	// It returns an error of class not_found when no live machine has this
	// id: liveness is an answer of the machine's own control plus a live
	// process, never a state file. Where the control may still be writing an
	// image, and so can't answer yet, the process alone is enough; the machine's
	// methods then wait for that answer. One that is known to have ended is *Ended.
	Adopt(ctx context.Context, id string) (Machine, error)

	// List names every machine that has left any trace on this host (process,
	// cgroup, directory), alive or not.
	List(ctx context.Context) ([]string, error)

	// Discard removes every trace of a machine, killing it first if need be.
	// It is idempotent, and succeeds for an id that never existed.
	Discard(ctx context.Context, id string) error

	Restorer
}

// Restorer is the part of a Driver that makes machines from images.
type Restorer interface {
	// Traits tells what holds for every machine of this driver on this host.
	Traits() Traits

	// Missing tells why this host can't restore an image that needs these
	// things, nil when it can: a FailedPrecondition whose code names the thing
	// ("needs_driver", "needs_engine", "needs_format", "needs_cpu"). Artifacts
	// and templates are the caller's to look for.
	Missing(needs sandbox.Needs) error

	// Restore makes a machine from an image that Snapshot wrote, whose files
	// the caller has verified. When it returns, what the machine still reads of
	// them is open, so that they may be unlinked. Of a memory
	// image: with every process where it stood, whatever spec.ID is. Of a disk
	// image: as Create does, with that disk. spec is the new machine's own
	// (id, name, namespace, socket); Image, Guest and Resources must be what they
	// were for a memory image. For the rest it is as Create.
	Restore(ctx context.Context, spec Spec, image Image) (Machine, error)
}

// Salvager is the part of a Driver whose machines' disks outlive them
// (Durability "crash"); other drivers don't have it.
type Salvager interface {
	// Halt ends what still lives of a machine, as Discard does, and keeps its
	// disk. It succeeds where nothing does.
	Halt(ctx context.Context, id string) error

	// Salvage writes what is left of the disk of a machine that has ended into
	// dir, as Snapshot writes a disk image: with all that the guest had synced.
	// It works after a restart of the host, too, and leaves what the machine left
	// as it is, so that it can be tried again; where it can, it makes a hard link
	// of the disk, which nobody writes to any more. The caller has halted the
	// machine. The error is not_found where there is no disk of this id.
	Salvage(ctx context.Context, id, dir string) (Image, error)
}

// Machine is one machine that was created, restored or adopted.
type Machine interface {
	Living
	Pauser
	Snapshotter
}

// Pauser is the part of a Machine that stands still in memory. Both calls are
// idempotent. A paused machine stays paused when the daemon or the driver's
// helpers end, and can be adopted, killed and discarded.
type Pauser interface {
	// Pause returns when no process of the guest runs any more. The guest's
	// connections stay open.
	Pause(ctx context.Context) error
	// Resume lets them go on.
	Resume(ctx context.Context) error
	// Paused tells which of the two holds.
	Paused(ctx context.Context) (bool, error)
}

// Snapshotter is the part of a Machine that writes images of it.
type Snapshotter interface {
	// Snapshot writes an image into dir, an empty directory of the caller's,
	// and returns what it needs to be restored. The machine stands still while its
	// state is taken and is then as it was: running, or paused. What it wrote is
	// neither synced nor hashed: the caller does that, and removes dir on an error.
	//
	// A memory image ends every connection that the agent has dialled, if only
	// in the machine itself, so that the caller closes its ends first; it keeps the
	// listener, and the agent dials again. A disk image ends none.
	Snapshot(ctx context.Context, dir string, kind sandbox.SnapshotKind) (Image, error)
}

// Image is what Snapshot wrote.
type Image struct {
	Dir   string // absolute; the files in it are the driver's own business
	Kind  sandbox.SnapshotKind
	Needs sandbox.Needs // Format and Digest are the caller's
	Stood time.Duration // how long the machine stood still
}

// Traits are what a driver's machines have in common.
type Traits struct {
	Durability sandbox.Durability
	// CachesDisk: what a guest has written may be in its own memory alone until it
	// syncs, so a disk image holds it only if the guest is asked for that before.
	CachesDisk bool
	// OwnKernel: guests have a kernel of their own, whose generator of random
	// numbers goes on from a memory image as it stood: they are frozen before it.
	OwnKernel bool
}

// Living is the part of a Machine that every use of it needs.
type Living interface {
	// ID is the sandbox's id.
	ID() string

	// Guest returns the listener on which this machine's agent dials the
	// host. Whoever can reach it from inside can dial it, so a connection
	// proves nothing about its sender. The machine keeps one listener;
	// closing it ends Accept, and the next call to Guest listens anew.
	Guest() (net.Listener, error)

	// Stats tells what the machine uses now.
	Stats(ctx context.Context) (Stats, error)

	// Kill ends the machine at once, without asking the guest, and returns
	// when no process of it is left. It keeps what Discard would remove.
	// Killing an ended machine succeeds.
	Kill(ctx context.Context) error

	// Exited is closed when the machine has ended, for whatever reason.
	Exited() <-chan struct{}

	// End tells why the machine ended; it is the zero End before Exited is
	// closed. A machine that ended while no process watched it has reason
	// "unknown", or "oom" where the kernel's own counters show it.
	End() sandbox.End
}

// Spec is what a machine is made from. All paths are absolute.
type Spec struct {
	ID         string
	Image      string // EROFS image, read-only, shared by many machines
	Guest      string // static guest binary (supervisor and agent)
	NetNS      string // path of the network namespace that is the machine's
	Hostname   string
	Resources  sandbox.Resources
	MaxProcs   int               // processes that the guest may have; 0 is the driver's default
	Supervisor map[string]string // environment of PID 1; holds no secret
}

// Stats is what a machine uses.
type Stats struct {
	MemoryBytes int64         // charged to the machine on the host, all its processes together
	CPU         time.Duration // consumed since it was made
	Processes   int           // host processes and threads
	DiskBytes   int64         // host bytes of its writable disk; -1 where it can't be known
}

// Capability is Probe's answer.
type Capability struct {
	OK     bool
	Reason string   // why not, or what was proven; one sentence
	Hint   string   // how to mend it
	Checks []string // what was looked at, one line each
}

// Ended is Adopt's error for a machine that the driver knows and that has
// ended: End says why, as far as anybody watched. Its class is not_found.
type Ended struct{ End sandbox.End }

// Error implements error.
func (e *Ended) Error() string {
	return "the machine has ended: " + string(e.End.Reason) + " " + e.End.Detail
}

// Unwrap gives it its class.
func (e *Ended) Unwrap() error {
	return sandbox.Errorf(sandbox.NotFound, "machine_ended", "the machine has ended")
}
