package sandbox

import "time"

// Durability says what of a sandbox's disk outlives its machine's sudden end.
type Durability string

// The durabilities.
const (
	DurabilitySnapshot Durability = "snapshot" // what the last image holds (gVisor)
	DurabilityCrash    Durability = "crash"    // what the guest had synced (Firecracker)
)

// Reaction is what a policy does to a sandbox.
type Reaction string

// The reactions.
const (
	ReactNone    Reaction = "none"
	ReactSuspend Reaction = "suspend"
	ReactStop    Reaction = "stop"
	ReactDelete  Reaction = "delete"
	ReactStart   Reaction = "start" // of OnCrash only: start again from the recovery point
)

// Verb is the verb that carries the reaction out, "" for none.
func (r Reaction) Verb() Verb {
	if r == ReactNone {
		return ""
	}
	return Verb(r)
}

// Policy is what Cloche does to a sandbox on its own.
type Policy struct {
	// Idle is done when nothing has touched the sandbox for a while. A touch is
	// an attach (for as long as it is open), stdin, a call on its files, a
	// tunnelled connection (for as long as it is open) and every lifecycle verb;
	// looking at it is none.
	Idle IdlePolicy `json:"idle"`
	// OnExpiry is delete, suspend or stop: what the end of the TTL does.
	OnExpiry Reaction `json:"on_expiry"`
	// OnCrash is none or start: what follows when the machine ended by itself.
	OnCrash Reaction `json:"on_crash"`
	// WakeOnAccess lets a data-plane call that needs the machine (not a GET
	// but for tunnels) wake the sandbox and wait for it.
	WakeOnAccess bool `json:"wake_on_access,omitempty"`
	// Checkpoint is how often the disk of a running sandbox is saved if
	// something may have changed, where Durability is "snapshot"; 0 is never.
	Checkpoint time.Duration `json:"checkpoint"`
}

// IdlePolicy is what happens to a sandbox that nothing touches.
type IdlePolicy struct {
	After  time.Duration `json:"after"`
	Action Reaction      `json:"action"` // suspend, stop, delete or none
}

// DefaultPolicy is what a create gets where it names nothing.
var DefaultPolicy = Policy{
	Idle:     IdlePolicy{After: 6 * time.Hour, Action: ReactSuspend},
	OnExpiry: ReactDelete, OnCrash: ReactNone, Checkpoint: 5 * time.Minute,
}

// The bounds of policies.
const (
	MinIdle, MaxIdle             = 10 * time.Second, 365 * 24 * time.Hour
	MinCheckpoint, MaxCheckpoint = time.Second, 7 * 24 * time.Hour
)
