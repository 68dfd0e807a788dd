package dataplane

import (
	"context"
	"io"
	"log/slog"
	"time"

	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
)

// Identities are the rows that the data plane acts on (control). Every call
// asks the caller's role and keeps to the caller's scope.
type Identities interface {
	Get(ctx context.Context, c sandbox.Caller, id string) (sandbox.Sandbox, error)
	CreateSession(ctx context.Context, c sandbox.Caller, sandboxID string, p sandbox.Process, idem sandbox.Idempotency) (s sandbox.Session, replayed bool, err error)
	Session(ctx context.Context, c sandbox.Caller, sandboxID, id string) (sandbox.Session, error)
	Sessions(ctx context.Context, c sandbox.Caller, sandboxID string, page sandbox.Page) (list []sandbox.Session, next string, err error)
	Users
}

// Users hears who uses a sandbox (control): what its policy does while nobody
// does, and when somebody wants to, is decided there.
type Users interface {
	// Touch tells that a sandbox was used now.
	Touch(sandboxID string)
	// Hold tells that it is used until release is called, which may be called
	// more than once.
	Hold(sandboxID string) (release func())
	// Access wakes a sandbox where its policy says so and waits until it runs.
	// nil does not mean that it does.
	Access(ctx context.Context, project, sandboxID string) error
}

// Recorder keeps the sessions' logs and reaches their commands (a
// session.Manager, by way of Recorded).
type Recorder interface {
	Register(ctx context.Context, s sandbox.Session) error
	Start(ctx context.Context, ref session.Ref) (session.State, error)
	State(ref session.Ref) (session.State, error)
	Reader(ref session.Ref, offset uint64) (Events, error)
	Input
}

// Input reaches a running command.
type Input interface {
	Stdin(ctx context.Context, ref session.Ref, offset uint64, data []byte, closing bool) (accepted uint64, err error)
	Signal(ctx context.Context, ref session.Ref, signal int) error
	Resize(ctx context.Context, ref session.Ref, size sandbox.WindowSize) error
}

// Events is a cursor in a session's log.
type Events interface {
	Next(ctx context.Context) (session.Event, error)
	Close() error
}

// Recorded makes a Recorder of a session.Manager.
func Recorded(m *session.Manager) Recorder { return recorded{m} }

type recorded struct{ *session.Manager }

func (r recorded) Reader(ref session.Ref, offset uint64) (Events, error) {
	reader, err := r.Manager.Reader(ref, offset)
	if err != nil {
		return nil, err
	}
	return reader, nil
}

// Options make a Plane. All but Log are needed.
type Options struct {
	Identities Identities
	Recorder   Recorder
	Guests     Guests
	Keys       Keys
	Tokens     *auth.Tokens
	Log        *slog.Logger
}

// Plane answers the data half of the API.
type Plane struct {
	o         Options
	log       *slog.Logger
	inputs    inputs
	places    places
	heartbeat time.Duration
}

var _ ServerInterface = (*Plane)(nil)

// New makes a Plane.
func New(o Options) *Plane {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Plane{
		o: o, log: o.Log, heartbeat: heartbeat,
		inputs: inputs{open: map[session.Ref]*input{}}, places: places{taken: map[string]int{}},
	}
}

// Register puts the operations of the data half into the router.
func (p *Plane) Register(router *rest.Router) {
	HandlerWithOptions(p, StdHTTPServerOptions{BaseRouter: router.Half(p.guard), ErrorHandlerFunc: rest.BadParam})
}

// close lets go of something of which only the log hears when that fails.
func (p *Plane) close(c io.Closer) {
	if err := c.Close(); err != nil {
		p.log.Debug("a stream did not close cleanly", "error", err)
	}
}
