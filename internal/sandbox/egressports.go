package sandbox

import (
	"context"
	"net/netip"
	"time"
)

// The interfaces and values by which egress crosses rooms, beside ports.go.

// IsPreset tells whether name is that of a preset. No profile of a project can
// have it.
func IsPreset(name string) bool {
	return name == PresetNone || name == PresetPublic || name == PresetPackages
}

// How many profiles and secrets a project may have.
const (
	MaxEgressProfiles = 200
	MaxSecrets        = 200
)

// EgressSetter is the part of Node that brings assignments to the gateway.
type EgressSetter interface {
	// SetEgress makes a the assignment of its sandbox, whether that has a machine
	// yet or not, and returns when it is in force where it has one. An assignment
	// of an older Revision than the newest seen changes nothing and is no error.
	// The node forgets it with the machine (DeleteMachine).
	SetEgress(ctx context.Context, a EgressAssignment) error
}

// EgressStore keeps profiles, secrets and authorities. A profile or secret is
// found by its project and name; project "" is never any, since names are not
// unique over projects.
type EgressStore interface {
	EgressProfileStore
	SecretStore
	EgressStateStore
}

// EgressProfileStore keeps the projects' own profiles; presets have no rows.
type EgressProfileStore interface {
	// CreateEgressProfile inserts p with version 1: Conflict ("profile_exists")
	// where the name is taken, Quota ("too_many_profiles") at MaxEgressProfiles.
	CreateEgressProfile(ctx context.Context, p EgressProfile, idem Idempotency) (created EgressProfile, replayed bool, err error)
	EgressProfile(ctx context.Context, project, name string) (EgressProfile, error)
	// EgressProfiles lists them by name.
	EgressProfiles(ctx context.Context, project string) ([]EgressProfile, error)
	// ReplaceEgressProfile puts p (Project, Name, Rules, Default, DryRun, Limits,
	// UpdatedAt) in place of the version p.Version, which then grows by one; where
	// it is another by now, Conflict ("version_mismatch").
	ReplaceEgressProfile(ctx context.Context, p EgressProfile) (EgressProfile, error)
	// DeleteEgressProfile: FailedPrecondition ("profile_in_use") while a sandbox
	// that is not deleted has it.
	DeleteEgressProfile(ctx context.Context, project, name string) error
}

// SecretStore keeps secrets; the values are sealed before they come here.
type SecretStore interface {
	// CreateSecret inserts s with version 1: Conflict ("secret_exists"), Quota
	// ("too_many_secrets").
	CreateSecret(ctx context.Context, s Secret) (Secret, error)
	Secret(ctx context.Context, project, name string) (Secret, error)
	// Secrets lists them by name.
	Secrets(ctx context.Context, project string) ([]Secret, error)
	// ReplaceSecret puts sealed in place of the value of this version (0 is
	// whatever it is), which grows by one; Conflict ("version_mismatch"). It goes by
	// the id, for which the value was sealed.
	ReplaceSecret(ctx context.Context, project, id string, version int64, sealed []byte, at time.Time) (Secret, error)
	DeleteSecret(ctx context.Context, project, name string) error
}

// EgressState is what an assignment is made of, as of one instant.
type EgressState struct {
	Sandbox Sandbox
	// Profile is the sandbox's own project's, nil where Sandbox.Egress is a preset.
	Profile *EgressProfile
	// Secrets are those that Profile injects and that there are.
	Secrets []Secret
	// CA is the project's authority with its key still sealed; without Cert it
	// has none yet.
	CA Authority
	// Revision grows with every write that may change a state.
	Revision int64
}

// EgressStateStore answers and changes what assignments are made of.
type EgressStateStore interface {
	// SetSandboxEgress gives a sandbox another profile: NotFound
	// ("profile_not_found") where its project has none of that name.
	SetSandboxEgress(ctx context.Context, project, id, profile string) (Sandbox, error)
	// EgressState reads what the assignment of a sandbox is made of.
	EgressState(ctx context.Context, sandbox string) (EgressState, error)
	// EgressUsers names the sandboxes that have a machine or may get one by an
	// operation under way: those with a profile that injects the secret, where
	// secret is not "", else those with the profile, else ("" both) all of the
	// project, and with project "" of every one.
	EgressUsers(ctx context.Context, project, profile, secret string) ([]string, error)
	// RaiseEgressRevision makes the next states newer than all before, for what
	// changed outside the store.
	RaiseEgressRevision(ctx context.Context) error
	// PutAuthority keeps a project's authority (its key sealed) unless there is
	// one, and answers the one that is there.
	PutAuthority(ctx context.Context, project string, a Authority) (Authority, error)
}

// EgressRecord is one decision of the gateway as callers see it: audit.Record
// with its place in the order of all.
type EgressRecord struct {
	Seq       int64          `json:"seq"` // grows by one with each record on this host
	At        time.Time      `json:"at"`  // when it began
	Sandbox   string         `json:"sandbox"`
	Project   string         `json:"project"`
	Profile   string         `json:"profile"`
	Version   int64          `json:"version"`
	Kind      string         `json:"kind"`    // dns, tcp, tls, http or packet
	Verdict   string         `json:"verdict"` // allowed, denied or failed
	WouldDeny bool           `json:"would_deny,omitempty"`
	Rule      string         `json:"rule,omitempty"`
	Reason    string         `json:"reason,omitempty"`
	Host      string         `json:"host,omitempty"`
	Dialled   netip.AddrPort `json:"dialled,omitzero"`
	Upstream  netip.AddrPort `json:"upstream,omitzero"`
	Scheme    string         `json:"scheme,omitempty"`
	Method    string         `json:"method,omitempty"`
	Path      string         `json:"path,omitempty"`
	Status    int            `json:"status,omitempty"`
	Injected  []string       `json:"injected,omitempty"`
	Sent      int64          `json:"sent"`
	Received  int64          `json:"received"`
	Duration  time.Duration  `json:"duration"`
	Count     uint64         `json:"count,omitempty"`
}

// EgressAuditFilter narrows what is asked of the audit. Empty fields match
// everything.
type EgressAuditFilter struct {
	Project, Sandbox string
	Kind, Verdict    string
	WouldDeny        bool // those too that a dry run let through, beside those of Verdict
	Since            time.Time
	After            int64 // sequences beyond it
	Limit            int   // of a list
}

// EgressAudit answers what the gateway decided.
type EgressAudit interface {
	// EgressRecords answers the newest records that match, at most f.Limit,
	// oldest first.
	EgressRecords(ctx context.Context, f EgressAuditFilter) ([]EgressRecord, error)
	// FollowEgress tells of the records that match, oldest first, and then of new
	// ones as they come, until ctx ends (which is an error) or tell fails. What is
	// no longer kept when its turn comes is not told.
	FollowEgress(ctx context.Context, f EgressAuditFilter, tell func(EgressRecord) error) error
	// LastEgress is the sequence of the newest record, 0 where there is none.
	LastEgress() int64
}
