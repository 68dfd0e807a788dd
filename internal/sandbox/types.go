package sandbox

import (
	"encoding/json"
	"time"
)

// Resources bound one sandbox. Zero values are replaced by DefaultResources
// before anything is stored.
type Resources struct {
	MilliCPU  int `json:"milli_cpu"`  // 1000 is one core
	MemoryMiB int `json:"memory_mib"` // what the sandbox sees as its RAM
	DiskMiB   int `json:"disk_mib"`   // what it may write over its template
}

// DefaultResources are used where a create names none.
var DefaultResources = Resources{MilliCPU: 2000, MemoryMiB: 1024, DiskMiB: 8192}

// The bounds of Resources.
const (
	MinMilliCPU, MaxMilliCPU   = 50, 256_000
	MinMemoryMiB, MaxMemoryMiB = 64, 1 << 20
	MinDiskMiB, MaxDiskMiB     = 16, 1 << 24
)

// Validate checks r against the bounds.
func (r Resources) Validate() error {
	for _, f := range []struct {
		name          string
		v, least, top int
	}{
		{"cpu (thousandths of a core)", r.MilliCPU, MinMilliCPU, MaxMilliCPU},
		{"memory (MiB)", r.MemoryMiB, MinMemoryMiB, MaxMemoryMiB},
		{"disk (MiB)", r.DiskMiB, MinDiskMiB, MaxDiskMiB},
	} {
		if f.v < f.least || f.v > f.top {
			return Errorf(Invalid, "resources_out_of_range", "%s must lie between %d and %d, not %d", f.name, f.least, f.top, f.v)
		}
	}
	return nil
}

// Project is the tenant. Every row below belongs to exactly one.
type Project struct {
	ID        string    `json:"id"`
	Name      string    `json:"name"`
	Quotas    Quotas    `json:"quotas"`
	CreatedAt time.Time `json:"created_at"`
}

// Role is what an API key may do.
type Role string

// The roles. Admin may do everything in every project, including building
// Debian templates and managing keys; Project everything in its own project
// but manage keys; Read sees metadata of its project, no output and no files.
const (
	RoleAdmin   Role = "admin"
	RoleProject Role = "project"
	RoleRead    Role = "read"
)

// Key is an API key without its secret.
type Key struct {
	ID        string     `json:"id"`
	Project   string     `json:"project"`
	Name      string     `json:"name"`
	Role      Role       `json:"role"`
	Hash      []byte     `json:"-"` // SHA-256 of the secret part
	CreatedAt time.Time  `json:"created_at"`
	RevokedAt *time.Time `json:"revoked_at,omitempty"`
}

// Sandbox is the row of one sandbox: what should be, and what was last
// observed.
type Sandbox struct {
	ID         string            `json:"id"`
	Project    string            `json:"project"`
	Template   string            `json:"template"` // as asked for: name:tag or digest
	Digest     string            `json:"digest"`   // what it resolved to, "sha256:" + hex
	Driver     string            `json:"driver"`
	State      State             `json:"state"`
	Generation int64             `json:"generation"` // grows with each operation; fences stale answers
	Epoch      int64             `json:"epoch"`      // generation of the operation that brought its machine up; 0 before the first
	Labels     map[string]string `json:"labels,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	Resources  Resources         `json:"resources"`
	Policy     Policy            `json:"policy"`
	Egress     string            `json:"egress,omitempty"` // its egress profile's name; "" is PresetNone
	CreatedAt  time.Time         `json:"created_at"`
	UpdatedAt  time.Time         `json:"updated_at"`
	TouchedAt  time.Time         `json:"touched_at"`           // see Policy.Idle
	ExpiresAt  *time.Time        `json:"expires_at,omitempty"` // TTL: Policy.OnExpiry is done at this time
	End        *End              `json:"end,omitempty"`        // why the last machine ended, where nobody asked for it
	Operation  string            `json:"operation,omitempty"`  // the one under way, if any

	// Image is the snapshot that holds what outlives the machine: of a
	// suspended sandbox its memory and disk, of a stopped one its disk, of any
	// other the recovery point. "" is none: then it is the template.
	Image string `json:"image,omitempty"`
	// ImageAt is when Image was taken: what was written later is lost with the machine.
	ImageAt *time.Time `json:"image_at,omitempty"`
	// Base is the named snapshot that the sandbox's timeline last passed
	// through: the parent of the next one. "" is its template.
	Base string `json:"base,omitempty"`
	// Source is the snapshot that it was created from, Parent the sandbox that
	// it was forked from.
	Source string `json:"source,omitempty"`
	Parent string `json:"parent,omitempty"`
}

// EndReason is why a machine or sandbox ended.
type EndReason string

// The end reasons.
const (
	EndDeleted      EndReason = "deleted"       // a user deleted it
	EndExpired      EndReason = "expired"       // its TTL ran out
	EndIdle         EndReason = "idle"          // its idle policy ended it
	EndExited       EndReason = "exited"        // PID 1 of the guest ended (root inside can do that)
	EndOOM          EndReason = "oom"           // the host's memory limit killed the machine
	EndKilled       EndReason = "killed"        // somebody on the host killed the machine
	EndCrashed      EndReason = "crashed"       // the machine ended by a fault
	EndHostRestart  EndReason = "host_restart"  // the host went down with the machine
	EndCreateFailed EndReason = "create_failed" // it never became ready
	EndUnknown      EndReason = "unknown"       // it ended while nobody watched
	EndSuspended    EndReason = "suspended"     // on request; it goes on when restored
	EndStopped      EndReason = "stopped"       // on request: memory is gone, the disk is kept
	EndRolledBack   EndReason = "rolled_back"   // its timeline was abandoned for an earlier snapshot
)

// End tells why and when something ended.
type End struct {
	Reason EndReason `json:"reason"`
	Detail string    `json:"detail,omitempty"`
	At     time.Time `json:"at"`
	// Loses: with the machine went what its disk was given since the sandbox's
	// recovery point. That may still move, by a checkpoint that was under way,
	// so it is put into words only when it is told.
	Loses bool `json:"loses,omitempty"`
}

// Told is e as people are told, of a sandbox whose recovery point is of then;
// nil is none.
func (e End) Told(then *time.Time) End {
	if !e.Loses {
		return e
	}
	loss := "its disk is lost"
	if then != nil {
		loss = "what its disk was given after " + then.UTC().Format(time.RFC3339) + " is lost"
	}
	if e.Detail != "" {
		loss = e.Detail + "; " + loss
	}
	e.Detail, e.Loses = loss, false
	return e
}

// OperationState is how far an operation is.
type OperationState string

// The operation states. Accepted and running ones may also carry a Delay:
// delayed is not failed.
const (
	OpAccepted  OperationState = "accepted"
	OpRunning   OperationState = "running"
	OpSucceeded OperationState = "succeeded"
	OpFailed    OperationState = "failed"
)

// Done tells whether the operation has ended.
func (s OperationState) Done() bool { return s == OpSucceeded || s == OpFailed }

// Delay says what an operation waits for, and since when.
type Delay struct {
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
}

// Operation is the durable record of one asynchronous request.
type Operation struct {
	ID         string          `json:"id"`
	Project    string          `json:"project"`
	Verb       Verb            `json:"verb"`
	Sandbox    string          `json:"sandbox,omitempty"`
	From       State           `json:"from,omitempty"`     // where the sandbox was when it began; Store.BeginVerb sets it
	Template   string          `json:"template,omitempty"` // a build's result digest, once known
	State      OperationState  `json:"state"`
	Step       string          `json:"step,omitempty"` // what it does now; for people
	Delay      *Delay          `json:"delay,omitempty"`
	Error      *Error          `json:"error,omitempty"`
	Snapshot   string          `json:"snapshot,omitempty"` // what the verb makes or goes back to
	Children   []string        `json:"children,omitempty"` // of a fork
	Key        string          `json:"key"`                // id of the key that asked, or "system"
	Generation int64           `json:"generation"`
	LeaseUntil time.Time       `json:"-"`
	Input      json.RawMessage `json:"-"` // the request, for resuming after a restart
	CreatedAt  time.Time       `json:"created_at"`
	StartedAt  *time.Time      `json:"started_at,omitempty"`
	EndedAt    *time.Time      `json:"ended_at,omitempty"`
}

// Process is what a session runs.
type Process struct {
	Args    []string          `json:"args"`
	Env     map[string]string `json:"env,omitempty"`
	Cwd     string            `json:"cwd,omitempty"`
	User    string            `json:"user,omitempty"` // name or "uid[:gid]", resolved inside
	Stdin   bool              `json:"stdin,omitempty"`
	TTY     *WindowSize       `json:"tty,omitempty"`
	Timeout time.Duration     `json:"timeout,omitempty"` // 0: none; then SIGTERM and, 5 s later, SIGKILL to the group
}

// WindowSize is a terminal's size in characters.
type WindowSize struct {
	Rows int `json:"rows"`
	Cols int `json:"cols"`
}

// Session is the row of one command in a sandbox: its identity. How far it is
// and what it printed is in its log, at the node.
type Session struct {
	ID         string    `json:"id"`
	Project    string    `json:"project"`
	Sandbox    string    `json:"sandbox"`
	Process    Process   `json:"process"`
	Generation int64     `json:"generation"` // of its attach token
	Key        string    `json:"key"`
	CreatedAt  time.Time `json:"created_at"`
	// Parent is the session that this one goes on from on a new timeline (fork,
	// rollback, create from a snapshot), and ParentOffset the offset of that
	// one's output where it begins.
	Parent       string `json:"parent,omitempty"`
	ParentOffset uint64 `json:"parent_offset,omitempty"`
}

// RuntimeConfig is a template's part that is not files.
type RuntimeConfig struct {
	Env     map[string]string `json:"env,omitempty"`
	User    string            `json:"user,omitempty"` // default user of sessions; "" is root
	Workdir string            `json:"workdir,omitempty"`
	Command []string          `json:"command,omitempty"`
}

// Template is one immutable template.
type Template struct {
	Digest    string        `json:"digest"` // "sha256:" + hex of the manifest
	Project   string        `json:"project"`
	Config    RuntimeConfig `json:"config"`
	SizeBytes int64         `json:"size_bytes"` // of the image
	Source    string        `json:"source"`     // "tar" or "debian:SUITE"
	CreatedAt time.Time     `json:"created_at"`
	Releases  []string      `json:"releases,omitempty"` // "name:tag" that point here
}

// Release is a movable name for a template.
type Release struct {
	Project   string    `json:"project"`
	Name      string    `json:"name"` // "name:tag"
	Digest    string    `json:"digest"`
	UpdatedAt time.Time `json:"updated_at"`
}

// Event is one change, in the order it happened in its project's store.
type Event struct {
	Seq       int64           `json:"seq"`
	Project   string          `json:"project"`
	At        time.Time       `json:"at"`
	Type      string          `json:"type"` // e.g. "sandbox.state"
	Sandbox   string          `json:"sandbox,omitempty"`
	Operation string          `json:"operation,omitempty"`
	Data      json.RawMessage `json:"data,omitempty"`
}

// What stands in Operation.Key for what Cloche does on its own.
const (
	SystemKey = "system"        // the TTL ran out
	IdleKey   = "system-idle"   // the idle policy
	CrashKey  = "system-crash"  // the crash policy
	DrainKey  = "system-drain"  // the host goes down
	AccessKey = "system-access" // wake on access
)
