package node

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Recorder is what the node tells about machines, and asks: whoever records the
// output of their sessions.
type Recorder interface {
	Follower
	Timekeeper
}

// Follower is told of machines' lives.
type Follower interface {
	// MachineReady is called at each new connection of a machine's agent.
	MachineReady(ctx context.Context, sandbox string) error
	// MachineEnded is called when the machine has ended. Calling it again
	// changes nothing.
	MachineEnded(ctx context.Context, sandbox string, end sandbox.End) error
	// MachineHeld tells that the machine was released to be restored later: its
	// sessions neither end nor are asked for until MachineReady. Idempotent.
	MachineHeld(ctx context.Context, sandbox string) error
	// MachineBack tells that a machine runs, which need not have answered yet:
	// what is asked of its sessions waits for it from now on.
	MachineBack(sandbox string)
	// DeleteSandbox removes all that was recorded.
	DeleteSandbox(ctx context.Context, sandbox string) error
}

// Timekeeper brings sessions and the images of their machine together.
type Timekeeper interface {
	// Barrier returns once everything that the guest had produced when asked is
	// in the logs, on disk, and acknowledged.
	Barrier(ctx context.Context, sandbox string) error
	// Living lists the sessions that run in the machine now, with ParentOffset
	// the offset up to which the guest has been acknowledged.
	Living(ctx context.Context, sandbox string) ([]sandbox.Session, error)
	// Inherit makes new sessions of those that a machine on a new timeline
	// brought along; from is Living's answer of when its snapshot was taken. It is
	// idempotent by (sandbox, epoch) and called before MachineReady.
	Inherit(ctx context.Context, sandbox, project string, epoch int64, from []sandbox.Session) ([]sandbox.Session, error)
	// Terminate sends SIGTERM to every running session and waits until all have
	// ended, at most grace.
	Terminate(ctx context.Context, sandbox string, grace time.Duration) error
	// Active counts the sandbox's running sessions.
	Active(sandbox string) int
}
