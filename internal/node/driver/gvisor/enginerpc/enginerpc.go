// Package enginerpc is what the gVisor driver and an engine's control process
// say to each other: HTTP with JSON over a unix socket that only root reaches.
//
//	GET    /v1/about           → About
//	GET    /v1/machines        → []Machine
//	PUT    /v1/machines/{id}   CreateRequest → Machine; closing the connection cancels it
//	GET    /v1/machines/{id}   → Machine
//	DELETE /v1/machines/{id}   → 204; ends the machine and forgets it
//	POST   /v1/kill/{id}       → 204; ends the machine and remembers how
//	POST   /v1/pause/{id}      → 204; its processes stand still. Idempotent
//	POST   /v1/resume/{id}     → 204; they go on. Idempotent
//	POST   /v1/snapshot/{id}   SnapshotRequest → Snapshot; the machine is then as it was
//	POST   /v1/quit            → 204; ends the control process if it has no machines, else 409
//
// Every error is a *sandbox.Error in the body. A machine lives and dies with
// the engine that made it, so a daemon of a later release speaks to control
// processes of earlier ones: fields are only ever added here, and what is
// absent keeps its old meaning.
package enginerpc

import (
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Limits of what is read from the other side.
const (
	MaxRequest = 1 << 20
	MaxAnswer  = 16 << 20
)

// The files that a control process keeps in its run directory.
const (
	SocketName = "control.sock"
	LockName   = "control.lock" // held while the process lives
	RootName   = "root"         // gVisor's own state
)

// The files of a machine's directory, beside the overlay's directory.
const (
	RecordName  = "machine.json" // a Machine: who its processes are, and its end once it is known
	BundleName  = "bundle"
	OverlayName = "overlay"
	PanicName   = "panic.log"   // what the engine's own runtime wrote when it crashed
	ConsoleName = "console.log" // the beginning and the end of what PID 1 wrote to stdout and stderr
	FifoName    = "console"
	LockedName  = "create.lock"  // held by the create child while it lives
	RequestName = "request.json" // the CreateRequest that made it; also a file of each memory image
)

// What a snapshot holds.
const (
	Memory = "memory" // every process, and the disk
	Disk   = "disk"   // what was written over the image, and nothing of /run, /dev/shm and the like
)

// About describes a control process.
type About struct {
	Engine   string `json:"engine"` // version of the engine
	PID      int    `json:"pid"`
	Machines int    `json:"machines"`
}

// CreateRequest asks for a machine. All paths are absolute.
type CreateRequest struct {
	ID       string `json:"id"`
	Dir      string `json:"dir"` // the machine's own directory; exists and is empty
	Image    string `json:"image"`
	NetNS    string `json:"netns"`
	Hostname string `json:"hostname"`
	Cgroup   string `json:"cgroup"` // below the root of each hierarchy

	Args  []string `json:"args"`
	Env   []string `json:"env"`
	Binds []Bind   `json:"binds"` // all read-only; at least one
	Tmpfs []Tmpfs  `json:"tmpfs"`

	MemoryBytes   int64 `json:"memory_bytes"`   // what the guest sees
	OverheadBytes int64 `json:"overhead_bytes"` // what its host processes may use beside it
	DiskBytes     int64 `json:"disk_bytes"`
	MilliCPU      int   `json:"milli_cpu"`
	MaxProcs      int   `json:"max_procs"` // processes of each guest user but root
	MaxTasks      int   `json:"max_tasks"` // host processes and threads

	// Restore is the directory of an image that the machine is made from, and
	// RestoreKind what that holds. A memory image has frozen Args, Env, Tmpfs,
	// Binds' targets, MemoryBytes, DiskBytes, MilliCPU and MaxProcs: those of the
	// request that it holds are taken, whatever stands here.
	Restore     string `json:"restore,omitempty"`
	RestoreKind string `json:"restore_kind,omitempty"`
}

// SnapshotRequest asks for an image.
type SnapshotRequest struct {
	Dir  string `json:"dir"` // absolute; exists and is empty
	Kind string `json:"kind"`
}

// Snapshot is what was written.
type Snapshot struct {
	Engine     string `json:"engine"` // version
	StoodNanos int64  `json:"stood_nanos"`
}

// Bind shows a file or directory of the host to the guest, read-only.
type Bind struct {
	Source string `json:"source"`
	Target string `json:"target"`
}

// Tmpfs is a filesystem in the guest's memory.
type Tmpfs struct {
	Target string `json:"target"`
	Bytes  int64  `json:"bytes"`
	Mode   string `json:"mode"` // octal
}

// Machine is what a control process knows about one machine.
type Machine struct {
	ID     string       `json:"id"`
	Engine string       `json:"engine"` // version
	Cgroup string       `json:"cgroup"`
	Sentry sys.Process  `json:"sentry"`
	Gofer  sys.Process  `json:"gofer"`
	Live   bool         `json:"live"` // the sentry runs, and answered just now
	End    *sandbox.End `json:"end,omitempty"`
	// Pause is where the machine stands between running ("") and paused. It is
	// written before and after each change, so that a control process that died
	// between is found out.
	Pause string `json:"pause,omitempty"`
}

// The values of Machine.Pause.
const (
	Pausing  = "pausing"
	Paused   = "paused"
	Resuming = "resuming"
)
