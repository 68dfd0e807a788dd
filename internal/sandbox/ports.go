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
}

// MachineStatus is what a node observes of one machine.
type MachineStatus struct {
	Sandbox    string `json:"sandbox"`
	Generation int64  `json:"generation"`
	Driver     string `json:"driver"`
	Ready      bool   `json:"ready"` // the agent has said hello
	End        *End   `json:"end,omitempty"`
}

// NodeChanges is one answer of Node.Observe.
type NodeChanges struct {
	Cursor   int64           `json:"cursor"`
	Machines []MachineStatus `json:"machines"`
}

// Node carries machines. Control calls it; nothing else does.
type Node interface {
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
	SessionStore
	TemplateStore
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

// SandboxStore keeps sandboxes, operations and events.
type SandboxStore interface {
	// CreateSandbox inserts the sandbox (state creating), its operation and an
	// event. It resolves and pins the template in the same transaction
	// (sb.Template is the name or digest asked for; the answer has Digest): so a
	// template can't be deleted between. A replayed key answers the first
	// call's rows.
	CreateSandbox(ctx context.Context, sb Sandbox, op Operation, idem Idempotency) (Sandbox, Operation, bool, error)
	Sandbox(ctx context.Context, project, id string) (Sandbox, error)
	Sandboxes(ctx context.Context, project string, f SandboxFilter, p Page) (list []Sandbox, next string, err error)
	// SetLabels replaces a sandbox's labels.
	SetLabels(ctx context.Context, project, id string, labels map[string]string) (Sandbox, error)
	// SetExpiry sets or (nil) clears the TTL.
	SetExpiry(ctx context.Context, project, id string, at *time.Time) (Sandbox, error)
	// BeginVerb moves a sandbox by the transition table: checks From, sets Via,
	// raises the generation, inserts op (its Generation is set) and an event.
	// An operation still under way is ended as failed (code "superseded").
	BeginVerb(ctx context.Context, project, id string, verb Verb, op Operation, idem Idempotency) (Sandbox, Operation, bool, error)
	// FinishOperation ends op and moves its sandbox to `to`, unless the
	// sandbox's generation has moved on or op has ended already (then Conflict,
	// code "stale_generation", and nothing changes). A delete can't end as
	// failed: it is tried until it succeeds.
	FinishOperation(ctx context.Context, op string, to State, end *End, failure *Error) error
	// SetDriver records the driver that a machine was made with; Conflict, code
	// "stale_generation", where the sandbox's generation has moved on.
	SetDriver(ctx context.Context, id string, generation int64, driver string) error
	// Observed records that a running machine of this generation ended; false
	// when the row had moved on.
	Observed(ctx context.Context, id string, generation int64, end End) (bool, error)

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
	// ExpiredSandboxes lists sandboxes whose TTL has passed and that are not
	// being deleted.
	ExpiredSandboxes(ctx context.Context, now time.Time, limit int) ([]Sandbox, error)
	// Prune removes what is past its keeping: rows of sandboxes deleted before
	// `deleted` (their sessions with them), operations that ended and events
	// before `ended`, idempotency records before `idem`.
	Prune(ctx context.Context, deleted, ended, idem time.Time) error

	// Events lists events after seq, oldest first, at most limit.
	Events(ctx context.Context, project string, after int64, limit int) ([]Event, error)
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
