package sandbox

import (
	"context"
	"time"
)

// The interfaces that control and the faces declare for what they need.
// Everything that crosses them is a plain value, so that the same interface
// can be a function call on one host and an RPC on many (a test encodes and
// decodes every argument and answer).

// MachineRequest asks a node for a machine. It is idempotent by (Sandbox,
// Generation); an older generation than the node has seen is a Conflict.
type MachineRequest struct {
	Project    string            `json:"project"`
	Sandbox    string            `json:"sandbox"`
	Generation int64             `json:"generation"`
	Driver     string            `json:"driver"` // "" is the node's default
	Digest     string            `json:"digest"` // of the template
	Config     RuntimeConfig     `json:"config"` // of the template
	Env        map[string]string `json:"env,omitempty"`
	Hostname   string            `json:"hostname"`
	Resources  Resources         `json:"resources"`
	Source     *Source           `json:"source,omitempty"` // nil: a fresh machine of the template
}

// Source is the image that a machine is made from.
type Source struct {
	Snapshot string       `json:"snapshot"`
	Kind     SnapshotKind `json:"kind"`
	// Continue: the machine goes on where the snapshot's sandbox stood and is the
	// same sandbox on the same timeline, so that its sessions go on. Otherwise
	// what lives in a memory snapshot goes on as new sessions.
	Continue bool `json:"continue"`
	// Replace ends the sandbox's present machine, whose sessions end with
	// reason "rolled_back".
	Replace bool `json:"replace,omitempty"`
}

// MachineStatus is what a node observes of one machine.
type MachineStatus struct {
	Sandbox    string     `json:"sandbox"`
	Generation int64      `json:"generation"` // of the request that made it: the row's Epoch
	Driver     string     `json:"driver"`
	Durability Durability `json:"durability,omitempty"`
	Ready      bool       `json:"ready"` // the agent has said hello
	End        *End       `json:"end,omitempty"`
	// Sessions are what goes on from another timeline, in CreateMachine's
	// answer only: their ids are new, Parent and ParentOffset are set.
	Sessions []Session `json:"sessions,omitempty"`
}

// NodeChanges is one answer of Node.Observe.
type NodeChanges struct {
	Cursor   int64           `json:"cursor"`
	Machines []MachineStatus `json:"machines"`
}

// SnapshotRequest asks a node for a snapshot of a machine. It is idempotent by
// Snapshot: once it is there, it is the answer, machine or not.
type SnapshotRequest struct {
	Sandbox    string       `json:"sandbox"`
	Generation int64        `json:"generation"`
	Snapshot   string       `json:"snapshot"` // its id
	Kind       SnapshotKind `json:"kind"`
	// Hold leaves the machine paused when the snapshot is there, since it is to
	// be released next. A failure leaves it as it was.
	Hold bool `json:"hold,omitempty"`
	// Grace, where it is more than 0, asks every session to end (SIGTERM) and
	// waits at most so long before the snapshot is taken.
	Grace time.Duration `json:"grace,omitempty"`
	// Wait bounds how long a memory snapshot waits for tunnels and transfers to
	// end before it cuts them; 0 cuts at once.
	Wait time.Duration `json:"wait,omitempty"`
}

// SnapshotStatus tells what a node's snapshot is.
type SnapshotStatus struct {
	Snapshot  string       `json:"snapshot"`
	Sandbox   string       `json:"sandbox"`
	Kind      SnapshotKind `json:"kind"`
	SizeBytes int64        `json:"size_bytes"`
	Needs     Needs        `json:"needs"`
	TakenAt   time.Time    `json:"taken_at"`
	// Stood is how long the machine stood still for it.
	Stood time.Duration `json:"stood"`
	// Unchanged: nothing can have changed since the sandbox's last snapshot, so
	// that no new one was taken. Only CheckpointMachine answers it.
	Unchanged bool `json:"unchanged,omitempty"`
}

// Node carries machines and keeps snapshots. Control calls it; nothing else
// does. Every call for a sandbox is fenced by its generation: one older than
// the newest seen is a Conflict ("stale_generation"), a newer one cancels what is
// under way.
type Node interface {
	Machines
	MachineVerbs
	Snapshots
	EgressSetter
}

// Machines is the part of Node that makes, removes and watches machines.
type Machines interface {
	// CreateMachine returns when the machine is ready, or undoes all it did.
	CreateMachine(ctx context.Context, req MachineRequest) (MachineStatus, error)
	// DeleteMachine ends the machine and removes all of it, its sessions'
	// logs included. Idempotent. generation fences as in CreateMachine.
	DeleteMachine(ctx context.Context, sandbox string, generation int64) error
	// Observe returns what changed after cursor, waiting until something
	// does or ctx ends (then it answers the same cursor and no machine).
	// Cursor 0 answers at once with every machine the node has.
	Observe(ctx context.Context, cursor int64) (NodeChanges, error)
	// Queue tells how many creations run and wait now.
	Queue(ctx context.Context) (running, waiting int, err error)
	// Capacity tells what the host lends.
	Capacity(ctx context.Context) (Capacity, error)
}

// MachineVerbs is the part of Node for machines that are there. Each is
// idempotent; the error is FailedPrecondition, "no_machine", where there is none.
type MachineVerbs interface {
	// PauseMachine stops every process of the guest where it is.
	PauseMachine(ctx context.Context, sandbox string, generation int64) error
	ResumeMachine(ctx context.Context, sandbox string, generation int64) error
	// ReleaseMachine ends the machine and frees all that it holds on the host
	// (it succeeds where there is none). With reason "suspended" its sessions
	// wait for a restore; with any other they end with it. Logs stay.
	ReleaseMachine(ctx context.Context, sandbox string, generation int64, end End) error
}

// Snapshots is the part of Node for snapshots.
type Snapshots interface {
	// SnapshotMachine takes a snapshot. When it returns nil it is durable and
	// was verified; on an error nothing of it is left and the machine is as before.
	// Of a machine that has ended and whose disk outlives it (durability "crash")
	// it takes that disk, until the next machine is made.
	SnapshotMachine(ctx context.Context, req SnapshotRequest) (SnapshotStatus, error)
	// CheckpointMachine is SnapshotMachine for a disk snapshot of a running
	// machine that nobody asked for: it gives way to every other call of the
	// same generation by ending with Unavailable ("superseded"), and answers
	// Unchanged where nothing can have changed since the last image.
	CheckpointMachine(ctx context.Context, req SnapshotRequest) (SnapshotStatus, error)
	// DeleteSnapshot removes a snapshot's files. Idempotent.
	DeleteSnapshot(ctx context.Context, id string) error
	// ListSnapshots names every snapshot that has files here.
	ListSnapshots(ctx context.Context) ([]string, error)
}

// Page asks for part of a list, ordered by creation, newest first. Token is
// opaque: what the answer before returned as next.
type Page struct {
	Limit int
	Token string
}

// SandboxFilter narrows a list of sandboxes. Empty fields match everything.
type SandboxFilter struct {
	States []State
	Labels map[string]string // all must match
}

// OperationFilter narrows a list of operations.
type OperationFilter struct {
	Sandbox string
	States  []OperationState
}

// Idempotency is a client's key on a call that creates a row. Request is a
// hash of the request's content: the same key with another request is a
// Conflict.
type Idempotency struct {
	Key     string // "" is none; at most 255 bytes of printable ASCII
	Request [32]byte
}

// Store keeps rows. Every method takes the project and treats another
// project's id as NotFound; project "" (internal callers and admin keys) means
// any. One call is one transaction: state, operation, idempotency record and
// event together. Names that are methods' nouns are in DESIGN.md.
type Store interface {
	ProjectStore
	SandboxStore
	LifecycleStore
	SnapshotStore
	SessionStore
	TemplateStore
	EgressStore
	// Backup writes a consistent copy of all rows to a new file.
	Backup(ctx context.Context, path string) error
	Close() error
}

// ProjectStore keeps projects and keys.
type ProjectStore interface {
	CreateProject(ctx context.Context, p Project) error
	Projects(ctx context.Context) ([]Project, error)
	CreateKey(ctx context.Context, k Key, idem Idempotency) (created Key, replayed bool, err error)
	KeyByID(ctx context.Context, id string) (Key, error)
	Keys(ctx context.Context, project string) ([]Key, error)
	RevokeKey(ctx context.Context, project, id string, at time.Time) error
}

// Begin is what a verb brings beside its operation: rows that are written in
// the same transaction.
type Begin struct {
	Op Operation // ID, Key, CreatedAt, Input
	// Snapshot is inserted in state creating (suspend, stop, snapshot, fork).
	// Its Sandbox, Template, Digest, Driver, Resources and Parent are the
	// sandbox's; Op.Snapshot becomes its id.
	Snapshot *Snapshot
	// To is the snapshot that a rollback goes back to: it must be ready, and
	// one of this sandbox or of one that it descends from.
	To string
	// Children are inserted in state creating with their operations (fork): their
	// Source is Snapshot, their Parent the sandbox, all else the sandbox's but ID,
	// Labels, Env, Egress and CreatedAt where they are set.
	Children []NewSandbox
	// Capacity bounds what the transition may take of the host.
	Capacity Capacity
}

// NewSandbox is a sandbox and the operation that creates it.
type NewSandbox struct {
	Sandbox   Sandbox
	Operation Operation
}

// Outcome is how an operation ended.
type Outcome struct {
	To      State
	End     *End // set where the machine ended
	Failure *Error
	// Epoch, where not 0, becomes the sandbox's: a machine was brought up.
	Epoch int64
	// Snapshot, where not nil, makes the operation's snapshot ready. With a
	// Failure the operation's snapshot becomes failed.
	Snapshot *SnapshotStatus
	// Image, where not nil, becomes the sandbox's Image ("" is none), taken at ImageAt.
	Image   *string
	ImageAt *time.Time
	// Base, where not nil, becomes the sandbox's Base.
	Base *string
	// Driver, where not "", becomes the sandbox's.
	Driver string
	// Sessions are inserted; one that is there already is left alone. Where
	// Process is empty it is that of their Parent's row, if that is there still.
	Sessions []Session
}

// SandboxStore keeps sandboxes.
type SandboxStore interface {
	// CreateSandbox inserts the sandbox (state creating), its operation and an
	// event. It resolves and pins the template in the same transaction
	// (sb.Template is the name or digest asked for; the answer has Digest): so a
	// template can't be deleted between. With sb.Source the template, driver and
	// resources are the snapshot's, which must be ready (code "snapshot_not_ready"),
	// and its egress profile too where sb.Egress is "". A profile that the project
	// does not have is NotFound ("profile_not_found").
	// The project's quotas (class Quota, code "quota_NAME"), the host's capacity
	// (class NoCapacity, code "no_capacity_NAME") and the driver asked for (see
	// FindDriver) are checked in it. A replayed key answers the first call's rows.
	CreateSandbox(ctx context.Context, sb Sandbox, op Operation, host Capacity, idem Idempotency) (Sandbox, Operation, bool, error)
	Sandbox(ctx context.Context, project, id string) (Sandbox, error)
	Sandboxes(ctx context.Context, project string, f SandboxFilter, p Page) (list []Sandbox, next string, err error)
	// SetLabels replaces a sandbox's labels.
	SetLabels(ctx context.Context, project, id string, labels map[string]string) (Sandbox, error)
	// SetExpiry sets or (nil) clears the TTL.
	SetExpiry(ctx context.Context, project, id string, at *time.Time) (Sandbox, error)
	SetPolicy(ctx context.Context, project, id string, p Policy) (Sandbox, error)
	// Touch notes when sandboxes were last touched; it never goes back.
	Touch(ctx context.Context, at map[string]time.Time) error
	// ExpiredSandboxes lists sandboxes whose TTL has passed and that the verb
	// of their OnExpiry can be asked of now (delete: that are not being deleted).
	ExpiredSandboxes(ctx context.Context, now time.Time, limit int) ([]Sandbox, error)
	// IdleSandboxes lists running and paused sandboxes that were last touched
	// longer ago than their policy's After, and whose Action is not none.
	IdleSandboxes(ctx context.Context, now time.Time, limit int) ([]Sandbox, error)
}

// LifecycleStore moves sandboxes by the transition table and keeps operations.
type LifecycleStore interface {
	// BeginVerb moves a sandbox by the transition table: checks From and the
	// guard, sets Via, inserts the operation and what else b brings, raises the
	// generation, touches the sandbox, ends what the verb supersedes (delete
	// only), appends events. Guards: HasDisk and HasSuspendedAs are a ready
	// Image (code "has_disk" or "has_suspended_as" where it fails), HasSnapshot is b.To.
	BeginVerb(ctx context.Context, project, id string, verb Verb, b Begin, idem Idempotency) (Sandbox, Operation, bool, error)
	// FinishOperation ends an operation and moves its sandbox as o says, which
	// the table must allow. It changes nothing and returns Conflict
	// ("stale_generation") when the sandbox's generation has moved on.
	FinishOperation(ctx context.Context, op string, o Outcome) error
	// Observed records that a running or paused machine of this epoch ended;
	// false when the row had moved on.
	Observed(ctx context.Context, id string, epoch int64, end End) (bool, error)

	Operation(ctx context.Context, project, id string) (Operation, error)
	Operations(ctx context.Context, project string, f OperationFilter, p Page) (list []Operation, next string, err error)
	// CreateOperation inserts an operation that has no sandbox (build).
	CreateOperation(ctx context.Context, op Operation, idem Idempotency) (Operation, bool, error)
	// UpdateOperation sets State (accepted or running), Step and Delay, and
	// StartedAt where it is nil. It does not touch ended ones.
	UpdateOperation(ctx context.Context, id string, state OperationState, step string, delay *Delay) error
	// EndBuild ends a build operation.
	EndBuild(ctx context.Context, op string, template string, failure *Error) error
	// Unfinished lists operations that have not ended, oldest first.
	Unfinished(ctx context.Context) ([]Operation, error)
	// Prune removes what is past its keeping: rows of sandboxes deleted before
	// `deleted` (their sessions with them), operations that ended and events
	// before `ended`, idempotency records before `idem`.
	Prune(ctx context.Context, deleted, ended, idem time.Time) error
	// Events lists events after seq, oldest first, at most limit. Pruned ones
	// are not told; Oldest is the first that is kept.
	Events(ctx context.Context, project string, after int64, limit int) ([]Event, error)
}

// SnapshotFilter narrows a list of snapshots. Empty fields match everything.
type SnapshotFilter struct {
	Sandbox  string
	Purposes []SnapshotPurpose
	States   []SnapshotState
}

// SnapshotStore keeps the rows of snapshots.
type SnapshotStore interface {
	Snapshot(ctx context.Context, project, id string) (Snapshot, error)
	Snapshots(ctx context.Context, project string, f SnapshotFilter, p Page) (list []Snapshot, next string, err error)
	// BeginCheckpoint inserts the row of an automatic snapshot of a running or
	// failed sandbox of this generation; Conflict ("stale_generation") if it has moved on.
	BeginCheckpoint(ctx context.Context, sandbox string, generation int64, s Snapshot) error
	// FinishCheckpoint makes it ready and, where the sandbox still has this
	// epoch, its Image; with a failure, or when the epoch has moved on, it becomes failed.
	FinishCheckpoint(ctx context.Context, id string, epoch int64, status *SnapshotStatus, failure *Error) error
	// DeleteSnapshot moves a named snapshot to deleting, and its children to
	// its parent. FailedPrecondition ("snapshot_in_use") while a sandbox that is
	// not deleted has it as its Image, or an operation under way needs it.
	DeleteSnapshot(ctx context.Context, project, id string) (Snapshot, error)
	// GarbageSnapshots moves to deleting every snapshot that failed, and every
	// one that is not named, is ready and is no sandbox's Image nor the Source of
	// one that is being created; it lists those that are deleting.
	GarbageSnapshots(ctx context.Context, limit int) ([]Snapshot, error)
	// RemoveSnapshot removes the row of a snapshot whose files are gone.
	RemoveSnapshot(ctx context.Context, id string) error
	// SetQuotas replaces a project's quotas; UsageOf sums what it has ("" is
	// every project together).
	SetQuotas(ctx context.Context, project string, q Quotas) (Project, error)
	UsageOf(ctx context.Context, project string) (Usage, error)
}

// SessionStore keeps sessions' identities.
type SessionStore interface {
	CreateSession(ctx context.Context, s Session, idem Idempotency) (Session, bool, error)
	Session(ctx context.Context, project, sandbox, id string) (Session, error)
	Sessions(ctx context.Context, project, sandbox string, p Page) (list []Session, next string, err error)
	DeleteSession(ctx context.Context, id string) error
}

// TemplateStore keeps templates and releases.
type TemplateStore interface {
	// PutTemplate inserts a template (again: no change) and, where release is
	// not "", moves the release to it.
	PutTemplate(ctx context.Context, t Template, release string) (Template, error)
	// Template resolves "name:tag", "name" (tag latest) or a digest.
	Template(ctx context.Context, project, ref string) (Template, error)
	Templates(ctx context.Context, project string) ([]Template, error)
	// Tag moves or creates a release.
	Tag(ctx context.Context, project, ref, release string) (Release, error)
	Untag(ctx context.Context, project, release string) error
	// DeleteTemplate removes a template and its releases; FailedPrecondition
	// (code "template_in_use") while a sandbox that is not deleted uses it.
	// last is true when no project has a template of this digest any more, so
	// that its files can go.
	DeleteTemplate(ctx context.Context, project, digest string) (last bool, err error)
	// HasTemplate tells whether any project has this digest.
	HasTemplate(ctx context.Context, digest string) (bool, error)
}
