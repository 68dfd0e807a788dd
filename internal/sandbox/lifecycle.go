package sandbox

// State is where a sandbox stands in its life.
type State string

// The states. Those in -ing are transitional: exactly one operation is under
// way and no other verb but delete is accepted.
const (
	StateNone       State = "" // before create; no row
	StateCreating   State = "creating"
	StateRunning    State = "running"
	StatePausing    State = "pausing"
	StatePaused     State = "paused" // memory stays in RAM
	StateResuming   State = "resuming"
	StateSuspending State = "suspending"
	StateSuspended  State = "suspended" // memory and disk in a snapshot, nothing on the host
	StateRestoring  State = "restoring"
	StateStopping   State = "stopping"
	StateStopped    State = "stopped" // disk kept, no memory
	StateStarting   State = "starting"
	StateForking    State = "forking"
	StateSnapping   State = "snapshotting"
	StateRolling    State = "rolling_back"
	StateDeleting   State = "deleting"
	StateDeleted    State = "deleted"
	StateFailed     State = "failed" // it has no machine, and End says why
)

// States lists every state a row can be in.
var States = []State{
	StateCreating, StateRunning, StatePausing, StatePaused, StateResuming, StateSuspending, StateSuspended, StateRestoring,
	StateStopping, StateStopped, StateStarting, StateForking, StateSnapping, StateRolling, StateDeleting, StateDeleted, StateFailed,
}

// Verb is something that a user (or Cloche for a user) asks of a sandbox.
type Verb string

// The verbs. Exit is not a request but an observation: the machine ended.
// Build is the verb of operations on templates and has no row in the table.
const (
	VerbCreate   Verb = "create"
	VerbDelete   Verb = "delete"
	VerbStop     Verb = "stop"
	VerbStart    Verb = "start"
	VerbPause    Verb = "pause"
	VerbResume   Verb = "resume"
	VerbSuspend  Verb = "suspend"
	VerbRestore  Verb = "restore"
	VerbWake     Verb = "wake"
	VerbFork     Verb = "fork"
	VerbSnapshot Verb = "snapshot"
	VerbRollback Verb = "rollback"
	VerbExit     Verb = "exit"
	VerbBuild    Verb = "build"
)

// Guard is a condition that a transition needs beside its from-state.
type Guard string

// The guards.
const (
	Always         Guard = ""
	HasDisk        Guard = "has_disk"         // the sandbox's Image is ready
	HasSnapshot    Guard = "has_snapshot"     // the snapshot asked for is ready, and of this sandbox's past
	HasSuspendedAs Guard = "has_suspended_as" // the sandbox's Image is ready, and a memory snapshot
)

// Transition is one row of the table: in state From, Verb (when Guard holds)
// leads through Via to To when it succeeds and to Else when it fails.
type Transition struct {
	From  State
	Verb  Verb
	Guard Guard
	Via   State
	To    State
	Else  State
}

// Transitions is the only place that knows the lifecycle. What is not in it
// is refused with FailedPrecondition. Delete is valid from every state that
// still has a row that is not being deleted, the transitional ones included:
// it supersedes what is under way by raising the generation.
//
// Wake has three rows with the effect of resume, restore and start.
var Transitions = []Transition{
	{StateNone, VerbCreate, Always, StateCreating, StateRunning, StateFailed},

	{StateRunning, VerbPause, Always, StatePausing, StatePaused, StateRunning},
	{StatePaused, VerbResume, Always, StateResuming, StateRunning, StatePaused},
	{StatePaused, VerbWake, Always, StateResuming, StateRunning, StatePaused},

	{StateRunning, VerbSuspend, Always, StateSuspending, StateSuspended, StateRunning},
	{StatePaused, VerbSuspend, Always, StateSuspending, StateSuspended, StatePaused},
	{StateSuspended, VerbRestore, HasSuspendedAs, StateRestoring, StateRunning, StateSuspended},
	{StateSuspended, VerbWake, HasSuspendedAs, StateRestoring, StateRunning, StateSuspended},

	{StateRunning, VerbStop, Always, StateStopping, StateStopped, StateRunning},
	{StatePaused, VerbStop, Always, StateStopping, StateStopped, StatePaused},
	{StateStopped, VerbStart, HasDisk, StateStarting, StateRunning, StateStopped},
	{StateStopped, VerbWake, HasDisk, StateStarting, StateRunning, StateStopped},
	{StateFailed, VerbStart, HasDisk, StateStarting, StateRunning, StateFailed},

	{StateRunning, VerbSnapshot, Always, StateSnapping, StateRunning, StateRunning},
	{StatePaused, VerbSnapshot, Always, StateSnapping, StatePaused, StatePaused},
	{StateRunning, VerbFork, Always, StateForking, StateRunning, StateRunning},
	{StateRunning, VerbRollback, HasSnapshot, StateRolling, StateRunning, StateRunning},
	{StatePaused, VerbRollback, HasSnapshot, StateRolling, StateRunning, StatePaused},
	{StateSuspended, VerbRollback, HasSnapshot, StateRolling, StateRunning, StateSuspended},
	{StateStopped, VerbRollback, HasSnapshot, StateRolling, StateRunning, StateStopped},
	{StateFailed, VerbRollback, HasSnapshot, StateRolling, StateRunning, StateFailed},

	// Observations: the machine ended without being asked to.
	{StateRunning, VerbExit, Always, StateFailed, StateFailed, StateFailed},
	{StatePaused, VerbExit, Always, StateFailed, StateFailed, StateFailed},

	{StateCreating, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateRunning, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StatePausing, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StatePaused, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateResuming, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateSuspending, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateSuspended, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateRestoring, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateStopping, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateStopped, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateStarting, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateForking, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateSnapping, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateRolling, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
	{StateFailed, VerbDelete, Always, StateDeleting, StateDeleted, StateDeleting},
}

// Find returns the row for verb in state from, whatever its guard.
func Find(from State, verb Verb) (Transition, bool) {
	for _, t := range Transitions {
		if t.From == from && t.Verb == verb {
			return t, true
		}
	}
	return Transition{}, false
}

// HasMachine tells whether a sandbox in state s has a machine when no operation
// is under way.
func (s State) HasMachine() bool { return s == StateRunning || s == StatePaused }

// Serves tells whether a sandbox in state s can be spoken to: it runs, or does
// so but for the instant in which a snapshot of it is taken. (One that was paused
// before is refused by its node.)
func (s State) Serves() bool {
	return s == StateRunning || s == StateSnapping || s == StateForking
}

// Leads tells whether the table lets verb, under way in via, end in to. What
// the table keeps in a transitional state when it fails (delete) can't end so: it
// is tried until it succeeds. lost: the machine ended meanwhile.
func Leads(via State, verb Verb, to State, failed, lost bool) bool {
	for _, t := range Transitions {
		if t.Via != via || t.Verb != verb {
			continue
		}
		switch {
		case !failed && t.To == to,
			failed && t.Else == to && !to.Transitional(),
			failed && lost && to == StateFailed && t.Else.HasMachine():
			return true
		}
	}
	return false
}

// Refuse is the error for a verb that the table does not have in state from.
func Refuse(from State, verb Verb) *Error {
	e := Errorf(FailedPrecondition, "wrong_state", "a sandbox that is %s can't be asked to %s", from, verb)
	if from.Transitional() {
		return e.WithHint("wait for its operation to end, then try again").WithRetry(0)
	}
	return e
}

// Transitional tells whether an operation is under way in state s.
func (s State) Transitional() bool {
	for _, t := range Transitions {
		if t.Via == s && t.Via != t.To {
			return true
		}
	}
	return false
}
