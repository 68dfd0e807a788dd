package sandbox

import "time"

// MaxChildren bounds one fork.
const MaxChildren = 20

// SnapshotKind is what a snapshot holds.
type SnapshotKind string

// The kinds. A memory snapshot holds the disk too.
const (
	SnapshotMemory SnapshotKind = "memory"
	SnapshotDisk   SnapshotKind = "disk"
)

// SnapshotPurpose is why a snapshot was taken. Named ones live until they are
// deleted; the others go when no sandbox's Image is one of them any more.
type SnapshotPurpose string

// The purposes.
const (
	PurposeNamed      SnapshotPurpose = "named"
	PurposeSuspend    SnapshotPurpose = "suspend"
	PurposeStop       SnapshotPurpose = "stop"
	PurposeFork       SnapshotPurpose = "fork"
	PurposeCheckpoint SnapshotPurpose = "checkpoint" // automatic
)

// SnapshotState is how far a snapshot is.
type SnapshotState string

// The snapshot states.
const (
	SnapshotCreating SnapshotState = "creating"
	SnapshotReady    SnapshotState = "ready"
	SnapshotFailed   SnapshotState = "failed"   // nothing of it is kept; the row goes with its operation's
	SnapshotDeleting SnapshotState = "deleting" // its files are being removed
)

// Snapshot is the row of one snapshot. Its files are at the node that took it.
type Snapshot struct {
	ID        string          `json:"id"`
	Project   string          `json:"project"`
	Sandbox   string          `json:"sandbox"` // what it was taken of; that sandbox may be gone
	Name      string          `json:"name,omitempty"`
	Kind      SnapshotKind    `json:"kind"`
	Purpose   SnapshotPurpose `json:"purpose"`
	State     SnapshotState   `json:"state"`
	Parent    string          `json:"parent,omitempty"` // named snapshot before it on its timeline; "" is the template
	Template  string          `json:"template"`
	Digest    string          `json:"digest"` // of the template
	Driver    string          `json:"driver"`
	Resources Resources       `json:"resources"`
	Egress    string          `json:"egress,omitempty"` // the sandbox's profile; a sandbox that is created from it gets that
	Needs     Needs           `json:"needs"`
	SizeBytes int64           `json:"size_bytes"` // on the host's disk
	Operation string          `json:"operation,omitempty"`
	CreatedAt time.Time       `json:"created_at"`
	TakenAt   *time.Time      `json:"taken_at,omitempty"` // the instant that it holds
}

// Needs is what a snapshot can be restored with, and with nothing else.
type Needs struct {
	Format int    `json:"format"`           // of the snapshot's directory
	Driver string `json:"driver"`           // name
	Engine string `json:"engine,omitempty"` // version; of memory snapshots
	// EngineHash and Guest are artifacts, by hash; of memory snapshots.
	EngineHash string `json:"engine_hash,omitempty"`
	Guest      string `json:"guest,omitempty"`
	// CPU are the features of the processor that the guest may rely on; of
	// memory snapshots, sorted.
	CPU    []string `json:"cpu,omitempty"`
	Digest string   `json:"digest"` // of the template
}
