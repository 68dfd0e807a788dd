// Package egress is the daemon's side of the egress gateway: it starts the
// gateway's process or adopts the one that an earlier daemon left, brings to it
// the sandboxes' sockets and assignments, starts it again when it ends, and
// keeps what it records.
//
// What holds: assignments, which have secrets in clear, are in memory only. A
// sandbox that the node attached is attached to every gateway that comes later,
// until the node detaches it, and but for the moment of a handover only one
// takes its new connections. One without an assignment is attached with everything denied. A
// gateway that doesn't answer is ended: so what no gateway says it has, none
// has. A gateway of another build or configuration takes no new connections
// once its sandboxes have gone to the present one, and ends with those that it
// still has.
//
// internal/node attaches, resets and detaches; control's assignments come
// through the node too; internal/server makes the Manager and runs it.
package egress

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/egress/gatewayrpc"
	"cloche.dev/cloche/internal/sandbox"
)

// Networks opens sockets in the sandboxes' gateway namespaces and counts what
// was dropped there.
type Networks interface {
	Sockets(ctx context.Context, id string) (proxy, dnsTCP, dnsUDP *os.File, err error)
	Counters(ctx context.Context, id string) (map[string]uint64, error)
}

// Options make a Manager.
type Options struct {
	RunDir     string   // sockets of gateways lie below it
	StateDir   string   // the audit lies below it
	Program    []string // what starts a gateway; arguments follow it
	Networks   Networks
	Open       []netip.Prefix   // what the operator opened within closed ranges
	Resolvers  []netip.AddrPort // none: the host's, as they are when a gateway starts
	RootsFile  string           // of the certificates that upstream servers are verified by; "": the host's
	AuditBytes int64            // 0: audit.DefaultBytes
	Build      string           // of this program: a gateway of another one is replaced
	Log        *slog.Logger
}

// The bounds of time.
const (
	startTimeout = 10 * time.Second // until a new gateway answers
	meetTimeout  = 5 * time.Second  // until one that lives already does
	callTimeout  = 30 * time.Second // until one that lives has answered
	waitTimeout  = 15 * time.Second // for a gateway to come
	healEvery    = 2 * time.Second
	countEvery   = 10 * time.Second
	workers      = 8
)

// Manager runs the gateway.
type Manager struct {
	o      Options
	config gatewayrpc.Config
	name   string // of the gateway for this build and config
	audit  *audit.Store
	now    func() time.Time

	mu       sync.Mutex
	boxes    map[string]*box
	current  *gateway // nil while there is none
	old      []*gateway
	settled  bool          // what lived before this Manager is known
	failure  error         // why there is none, of the last try
	stopped  bool          // Run has ended: the gateway lives, and is another daemon's to ask
	changed  chan struct{} // closed and replaced when current, settled or failure changes
	restarts int

	counting sync.Mutex // one look at the counters at a time
}

// box is one sandbox.
type box struct {
	id   string
	turn chan struct{} // one change at a time

	// Guarded by the Manager's lock.
	assignment *sandbox.EgressAssignment
	wanted     bool                      // attached by the node
	on         *gateway                  // that has its sockets
	told       *sandbox.EgressAssignment // that on was told; nil: what that has is not known
	listed     gatewayrpc.Sandbox        // what an adopted gateway said of it
	counts     map[string]uint64         // of dropped packets; nil: they were not looked at yet
}

// New makes a Manager. Nothing happens before Run.
func New(o Options) (*Manager, error) {
	m := &Manager{
		o: o, boxes: map[string]*box{}, changed: make(chan struct{}), now: time.Now,
		config: gatewayrpc.Config{Build: o.Build, Open: o.Open, Resolvers: o.Resolvers},
	}
	if o.RootsFile != "" {
		var err error
		if m.config.Roots, err = os.ReadFile(o.RootsFile); err != nil {
			return nil, fmt.Errorf("read the root certificates for egress: %w", err)
		}
	}
	data, err := json.Marshal(m.config)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(data)
	m.name = hex.EncodeToString(sum[:6])
	for _, dir := range []string{m.dir(), m.root()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("make the gateway's directory: %w", err)
		}
	}
	m.audit, err = audit.Open(audit.Options{Dir: filepath.Join(o.StateDir, "audit"), Bytes: o.AuditBytes})
	return m, err
}

func (m *Manager) dir() string { return filepath.Join(m.o.RunDir, "egress") }

// root is an empty directory: all that a gateway sees of the file system.
func (m *Manager) root() string { return filepath.Join(m.dir(), "root") }

// Audit returns the store of what the gateway records. Run closes it.
func (m *Manager) Audit() *audit.Store { return m.audit }

// Close closes the audit of a Manager that Run was never called of.
func (m *Manager) Close() error { return m.audit.Close() }

// wake tells who waits that something has changed. The lock is held.
func (m *Manager) wake() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// lock takes the turn of a sandbox, whose box it makes where there is none. The
// function that it returns gives the turn back, and forgets a box that holds
// nothing.
func (m *Manager) lock(ctx context.Context, id string) (*box, func(), error) {
	for {
		m.mu.Lock()
		b := m.boxes[id]
		if b == nil {
			b = &box{id: id, turn: make(chan struct{}, 1)}
			m.boxes[id] = b
		}
		m.mu.Unlock()
		select {
		case b.turn <- struct{}{}:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
		m.mu.Lock()
		same := m.boxes[id] == b
		m.mu.Unlock()
		if same {
			return b, func() { m.unlock(b) }, nil
		}
		<-b.turn
	}
}

func (m *Manager) unlock(b *box) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.release(b)
}

// release is unlock with the lock held.
func (m *Manager) release(b *box) {
	if b.assignment == nil && !b.wanted && b.on == nil {
		delete(m.boxes, b.id)
	}
	<-b.turn
}

// Set makes a the assignment of its sandbox unless a newer one is known, and
// returns when it is in force where the sandbox is attached.
func (m *Manager) Set(ctx context.Context, a sandbox.EgressAssignment) error {
	b, unlock, err := m.lock(ctx, a.Sandbox)
	if err != nil {
		return err
	}
	defer unlock()
	m.mu.Lock()
	if b.assignment != nil && a.Revision < b.assignment.Revision {
		m.mu.Unlock()
		return nil
	}
	b.assignment = &a
	attached := b.wanted || b.on != nil || !m.settled
	m.mu.Unlock()
	if !attached {
		return nil // a gateway that gets its sockets gets it with them
	}
	return m.ensure(ctx, b)
}

// Attach hands a sandbox's sockets to the gateway, unless that has them. It
// stays attached, to later gateways too, until Detach, also where this fails
// for anything but the lack of a network.
func (m *Manager) Attach(ctx context.Context, id string) error {
	b, unlock, err := m.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	m.mu.Lock()
	b.wanted = true
	m.mu.Unlock()
	err = m.ensure(ctx, b)
	if sandbox.IsClass(err, sandbox.FailedPrecondition) {
		m.mu.Lock()
		b.wanted = false
		m.mu.Unlock()
	}
	return err
}

// Reset ends every connection of a sandbox with a reset.
func (m *Manager) Reset(ctx context.Context, id string) error {
	b, unlock, err := m.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	return m.everywhere(ctx, b, gatewayrpc.OpReset)
}

// Detach has every gateway close a sandbox's sockets and connections.
func (m *Manager) Detach(ctx context.Context, id string) error {
	b, unlock, err := m.lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	m.mu.Lock()
	b.wanted = false
	on := b.on != nil
	m.mu.Unlock()
	if on {
		m.count(ctx, b) // what was dropped since the last look
	}
	if err := m.everywhere(ctx, b, gatewayrpc.OpDetach); err != nil {
		return err
	}
	m.mu.Lock()
	b.on, b.told, b.counts = nil, nil, nil
	m.mu.Unlock()
	return nil
}

// Forget drops what is known of a sandbox, its secrets above all.
func (m *Manager) Forget(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.boxes[id]
	if b == nil {
		return
	}
	b.assignment, b.listed = nil, gatewayrpc.Sandbox{}
	select {
	case b.turn <- struct{}{}:
		m.release(b)
	default: // whoever has the turn forgets the box
	}
}

// CA returns the certificate of a sandbox's authority in PEM, nil where it is
// not known or there is none.
func (m *Manager) CA(id string) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.boxes[id]
	switch {
	case b == nil:
		return nil
	case b.assignment != nil:
		return b.assignment.CA.Cert
	}
	return b.listed.CA
}

// everywhere asks every gateway that may have a sandbox for the same. A gateway
// that is gone has nothing any more.
func (m *Manager) everywhere(ctx context.Context, b *box, op gatewayrpc.Op) error {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	for {
		m.mu.Lock()
		settled, stopped, changed := m.settled, m.stopped, m.changed
		all := slices.Clone(m.old)
		if b.on != nil && !slices.Contains(all, b.on) {
			all = append(all, b.on)
		}
		m.mu.Unlock()
		if stopped {
			return m.unavailable(errStopped)
		}
		gone := !settled
		for _, g := range all {
			_, err := m.call(ctx, g, gatewayrpc.Request{Op: op, Sandbox: b.id})
			if err != nil && !gatewayrpc.Gone(err) {
				return err
			}
			gone = gone || err != nil
		}
		if !gone {
			return nil
		}
		if err := m.await(ctx, changed); err != nil {
			return err
		}
	}
}

// errStopped is why nothing is asked any more.
var errStopped = errors.New("this daemon ends")

// await waits for a change.
func (m *Manager) await(ctx context.Context, changed <-chan struct{}) error {
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return m.unavailable(ctx.Err())
	}
}

func (m *Manager) unavailable(why error) error {
	m.mu.Lock()
	if m.failure != nil {
		why = m.failure
	}
	m.mu.Unlock()
	return sandbox.Errorf(sandbox.Unavailable, "egress_gateway_down", "the egress gateway is not there: %w", why).
		WithHint("the daemon starts it again by itself; its log says why it ended")
}

// ensure brings to the gateway what it is to have of a sandbox, waiting for a
// gateway where there is none. The caller has the sandbox's turn.
func (m *Manager) ensure(ctx context.Context, b *box) error {
	ctx, cancel := context.WithTimeout(ctx, waitTimeout)
	defer cancel()
	for {
		m.mu.Lock()
		g, failure, changed := m.current, m.failure, m.changed
		nothing := m.settled && !b.wanted && b.on == nil
		m.mu.Unlock()
		if nothing {
			return nil
		}
		if g == nil && failure != nil {
			return m.unavailable(failure)
		}
		if g != nil {
			err := m.bring(ctx, g, b)
			if !gatewayrpc.Gone(err) && !errors.Is(err, errOther) {
				return err
			}
		}
		if err := m.await(ctx, changed); err != nil {
			return err
		}
	}
}

// errOther is bring's error where the gateway is another one by now.
var errOther = errors.New("the gateway was replaced meanwhile")

// call asks a gateway. The caller's ctx doesn't end a question that is under
// way: its answer has to be read, and comes soon. A gateway from which none
// comes is ended.
func (m *Manager) call(ctx context.Context, g *gateway, r gatewayrpc.Request, files ...*os.File) (gatewayrpc.Answer, error) {
	if err := ctx.Err(); err != nil {
		return gatewayrpc.Answer{}, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
	defer cancel()
	return g.client.Call(ctx, r, files...)
}

// Stats are what the gateways do now and did since they began.
type Stats struct {
	gatewayrpc.Stats
	Up       bool   `json:"up"`
	PID      int    `json:"pid,omitempty"`
	Build    string `json:"build,omitempty"`
	Draining int    `json:"draining"` // gateways of before
	Restarts int    `json:"restarts"` // of the gateway since the daemon began
}

// Stats asks the gateways. Where there is none it says so and is no error.
func (m *Manager) Stats(ctx context.Context) (Stats, error) {
	m.mu.Lock()
	s := Stats{Draining: len(m.old), Restarts: m.restarts}
	all := slices.Clone(m.old)
	if g := m.current; g != nil {
		s.Up, s.PID, s.Build = true, g.process.PID, g.build
		all = append(all, g)
	}
	m.mu.Unlock()
	for _, g := range all {
		a, err := m.call(ctx, g, gatewayrpc.Request{Op: gatewayrpc.OpStats})
		if gatewayrpc.Gone(err) {
			continue
		}
		if err != nil {
			return s, err
		}
		if a.Stats != nil {
			s.Sandboxes += a.Stats.Sandboxes
			s.Open += a.Stats.Open
			s.Total += a.Stats.Total
			s.Sent += a.Stats.Sent
			s.Received += a.Stats.Received
			s.Lost += a.Stats.Lost
		}
	}
	return s, nil
}
