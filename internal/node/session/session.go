// Package session is the node's recorder: it pulls the events of sessions out
// of guests into an append-only log per session (package log), and lets any
// number of readers follow those logs.
//
// Invariants: a guest is told that output was taken only after write(2), and
// that an exit was taken only after fsync, so that a kill of this process
// loses and doubles nothing; offsets never change and what is gone is told
// with its exact range; a reader never stalls a command, a full disk does and
// says so; a command is asked of the guest at most once per session (the guest
// is idempotent by session and the intent is on disk before the question);
// everything a guest says is checked and bounded.
//
// Sessions outlive machines in two ways. One that is held waits until its machine
// is restored, and goes on. One that a machine on a new timeline brought along
// is inherited: it is another session, with an id of its own, whose log begins
// where the guest's memory of it does; the guest goes on knowing it by the id
// that it was started under, its alias here.
//
// Package node calls it for machines (MachineReady, MachineEnded, MachineHeld,
// Barrier, Living, Inherit, Terminate, Active, DeleteSandbox), the data plane
// for users. It identifies sessions by id alone:
// callers check projects.
package session

import (
	"context"
	"log/slog"
	"time"

	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

// Ref names a session.
type Ref struct {
	Sandbox string
	Session string
}

// Guests finds the live agent of a sandbox. It fails when there is none (it
// may wait for one within ctx).
type Guests interface {
	Client(ctx context.Context, sandboxID string) (guestv1connect.GuestClient, error)
}

// Options configures a Manager. Zero values take the defaults named.
type Options struct {
	Dir          string        // STATE/sessions; made if missing
	Guests       Guests        // required
	Quota        int64         // bytes of one session's log on disk: 256 MiB
	ProjectQuota int64         // bytes of all logs of a project: 20 GiB
	Retention    time.Duration // how long an ended session's log is kept: 7 days
	Expiry       time.Duration // how long a session waits to be started: 10 minutes
	// Retire is called before a session past its retention is removed, and
	// again at each sweep while it fails. It may be nil.
	Retire func(ctx context.Context, ref Ref) error
	Clock  func() time.Time
	Log    *slog.Logger
}

func (o *Options) setDefaults() {
	if o.Quota <= 0 {
		o.Quota = 256 << 20
	}
	if o.ProjectQuota <= 0 {
		o.ProjectQuota = 20 << 30
	}
	if o.Retention <= 0 {
		o.Retention = 7 * 24 * time.Hour
	}
	if o.Expiry <= 0 {
		o.Expiry = 10 * time.Minute
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
}

// Status is how far a session is.
type Status string

// The statuses. Starting means that the guest was asked and has not answered:
// the command may run.
const (
	Created  Status = "created"
	Starting Status = "starting"
	Running  Status = "running"
	Exited   Status = "exited"
	Lost     Status = "lost"    // it ended without an exit that we know
	Expired  Status = "expired" // nobody started it in time
)

// Ended tells whether nothing more will happen.
func (s Status) Ended() bool { return s == Exited || s == Lost || s == Expired }

// Start tells that the command started.
type Start struct {
	PID int64     `json:"pid"` // inside
	At  time.Time `json:"at"`
}

// Exit tells how the command ended.
type Exit struct {
	Code    int       `json:"code"`             // 0-255; 128+signal after a signal
	Signal  int       `json:"signal,omitempty"` // 0 when it exited by itself
	Reason  string    `json:"reason"`           // "exited", "signaled", "timeout", "start_failed"
	Message string    `json:"message,omitempty"`
	At      time.Time `json:"at"`
}

// Loss tells why a session ended without an exit. Reason is an end reason of
// the machine, or one of the reasons below.
type Loss struct {
	Reason string    `json:"reason"`
	Detail string    `json:"detail,omitempty"`
	At     time.Time `json:"at"`
}

// Reasons of a Loss that are not the machine's.
const (
	ReasonProtocol = "guest_protocol"  // the guest broke the protocol
	ReasonUnknown  = "session_unknown" // the guest does not know the session any more
)

// State is what is known of a session.
type State struct {
	Session  sandbox.Session `json:"session"`
	Status   Status          `json:"status"`
	Start    *Start          `json:"start,omitempty"`
	Exit     *Exit           `json:"exit,omitempty"`
	Loss     *Loss           `json:"loss,omitempty"`
	EndedAt  *time.Time      `json:"ended_at,omitempty"`
	First    uint64          `json:"first"`          // first offset that is kept
	End      uint64          `json:"end"`            // offset behind the output so far
	LogBytes int64           `json:"log_bytes"`      // on disk
	Held     bool            `json:"held,omitempty"` // its machine was suspended; it goes on once that is restored
	Problem  string          `json:"problem,omitempty"`
}

// Kind is what an Event tells.
type Kind string

// The kinds of event.
const (
	KindStarted Kind = "started"
	KindStdout  Kind = "stdout"
	KindStderr  Kind = "stderr"
	KindGap     Kind = "gap"
	KindExit    Kind = "exit"
	KindLost    Kind = "lost"
)

// Event is one event of a session's log. Only the field of its kind is set.
type Event struct {
	Kind   Kind
	Offset uint64 // output bytes before it
	Data   []byte // stdout, stderr: at most 64 KiB, valid until the next call of Next
	To     uint64 // gap: output from Offset up to To is gone
	Start  *Start
	Exit   *Exit
	Loss   *Loss
}

// Next is the offset behind the event, from which a reader resumes.
func (e Event) Next() uint64 {
	if e.Kind == KindGap {
		return e.To
	}
	return e.Offset + uint64(len(e.Data))
}

func notFound(ref Ref) error {
	return sandbox.Errorf(sandbox.NotFound, "session_not_found", "there is no session %s in sandbox %s", ref.Session, ref.Sandbox)
}

func expired(ref Ref) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "session_expired", "session %s expired before it was attached", ref.Session).
		WithHint("make a new session")
}
