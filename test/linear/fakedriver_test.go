package linear_test

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/node"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// fakeDriver's machines are goroutines that speak as an agent over pipes. It
// is slow, and fails at random in every way that its contract allows.
type fakeDriver struct {
	mu       sync.Mutex
	rng      *rand.Rand
	faults   float64
	machines map[string]*machine
}

// step takes a call's time and tells how it shall fail.
func (d *fakeDriver) step(ctx context.Context) (fault string, err error) {
	d.mu.Lock()
	wait := time.Duration(d.rng.IntN(5000)) * time.Microsecond
	if d.rng.Float64() < d.faults {
		fault = []string{"before", "after"}[d.rng.IntN(2)]
	}
	d.mu.Unlock()
	select {
	case <-time.After(wait):
		return fault, nil
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

var errFake = errors.New("the fake failed")

func (d *fakeDriver) Name() string                            { return "fake" }
func (d *fakeDriver) Probe(context.Context) driver.Capability { return driver.Capability{OK: true} }
func (d *fakeDriver) Traits() driver.Traits                   { return driver.Traits{} }
func (d *fakeDriver) Missing(sandbox.Needs) error             { return nil }

func (d *fakeDriver) Create(ctx context.Context, spec driver.Spec) (driver.Machine, error) {
	return d.boot(ctx, spec, nil)
}

func (d *fakeDriver) Restore(ctx context.Context, spec driver.Spec, image driver.Image) (driver.Machine, error) {
	var key []byte
	data, err := os.ReadFile(filepath.Join(image.Dir, "image"))
	if err == nil {
		err = json.Unmarshal(data, &key)
	}
	if err != nil {
		return nil, err
	}
	return d.boot(ctx, spec, key)
}

func (d *fakeDriver) boot(ctx context.Context, spec driver.Spec, key []byte) (driver.Machine, error) {
	switch fault, err := d.step(ctx); {
	case err != nil:
		return nil, err
	case fault != "":
		return nil, errFake
	}
	m := &machine{d: d, id: spec.ID, key: key, exited: make(chan struct{}), changed: make(chan struct{})}
	d.mu.Lock()
	if d.machines[spec.ID] != nil {
		d.mu.Unlock()
		return nil, errors.New("there is a machine of this id")
	}
	d.machines[spec.ID] = m
	d.mu.Unlock()
	m.agent.Go(m.run)
	return m, nil
}

func (d *fakeDriver) Adopt(_ context.Context, id string) (driver.Machine, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m := d.machines[id]; m != nil {
		return m, nil
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "machine_not_found", "no such machine")
}

func (d *fakeDriver) List(context.Context) (ids []string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for id := range d.machines {
		ids = append(ids, id)
	}
	return ids, nil
}

func (d *fakeDriver) Discard(ctx context.Context, id string) error {
	if _, err := d.step(ctx); err != nil {
		return err
	}
	d.mu.Lock()
	m := d.machines[id]
	delete(d.machines, id)
	d.mu.Unlock()
	if m != nil {
		m.end(sandbox.EndKilled)
	}
	return nil
}

// machine is one fake machine.
type machine struct {
	d      *fakeDriver
	id     string
	exited chan struct{}
	once   sync.Once
	why    sandbox.End
	agent  sync.WaitGroup

	mu      sync.Mutex
	key     []byte
	paused  bool
	failed  bool // its last call: the next pause or resume, which undoes that, succeeds
	ln      *listener
	changed chan struct{} // closed and replaced when the listener or paused changes
}

// listener hands the host the agent's pipes.
type listener struct {
	dials chan net.Conn
	gone  chan struct{}
	once  sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.dials:
		return c, nil
	case <-l.gone:
		return nil, net.ErrClosed
	}
}
func (l *listener) Close() error   { l.once.Do(func() { close(l.gone) }); return nil }
func (l *listener) Addr() net.Addr { return &net.UnixAddr{Name: "fake", Net: "unix"} }

func (m *machine) change(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *machine) ID() string                                  { return m.id }
func (m *machine) Stats(context.Context) (driver.Stats, error) { return driver.Stats{}, nil }
func (m *machine) Exited() <-chan struct{}                     { return m.exited }
func (m *machine) End() sandbox.End                            { return m.why }
func (m *machine) Kill(context.Context) error                  { m.end(sandbox.EndKilled); return nil }

func (m *machine) Guest() (net.Listener, error) {
	l := &listener{dials: make(chan net.Conn), gone: make(chan struct{})}
	m.change(func() { m.ln = l })
	return l, nil
}

func (m *machine) end(r sandbox.EndReason) {
	m.once.Do(func() {
		m.why = sandbox.End{Reason: r, At: time.Now()}
		close(m.exited)
	})
	m.agent.Wait()
}

// step is the driver's, but that a machine that can neither do a thing nor undo
// it is beyond what can be asked of a node.
func (m *machine) step(ctx context.Context, undoes bool) (string, error) {
	fault, err := m.d.step(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed && undoes {
		fault = ""
	}
	m.failed = fault != ""
	return fault, err
}

func (m *machine) hold(ctx context.Context, paused bool) error {
	fault, err := m.step(ctx, true)
	if err != nil {
		return err
	}
	if fault != "before" {
		m.change(func() { m.paused = paused })
	}
	if fault != "" {
		return errFake
	}
	return nil
}

func (m *machine) Pause(ctx context.Context) error  { return m.hold(ctx, true) }
func (m *machine) Resume(ctx context.Context) error { return m.hold(ctx, false) }

func (m *machine) Paused(context.Context) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.paused, nil
}

func (m *machine) Snapshot(ctx context.Context, dir string, kind sandbox.SnapshotKind) (driver.Image, error) {
	switch fault, err := m.step(ctx, false); {
	case err != nil:
		return driver.Image{}, err
	case fault != "":
		return driver.Image{}, errFake
	}
	select {
	case <-m.exited:
		return driver.Image{}, errors.New("the machine has ended")
	default:
	}
	m.mu.Lock()
	key := m.key
	m.mu.Unlock()
	needs := sandbox.Needs{Driver: "fake"}
	if kind == sandbox.SnapshotDisk {
		key = nil
	} else {
		needs.Engine = "1"
	}
	data, err := json.Marshal(key)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "image"), data, 0o600)
	}
	return driver.Image{Dir: dir, Kind: kind, Needs: needs, Stood: time.Millisecond}, err
}

// run is the agent: it dials again and again until the machine ends.
func (m *machine) run() {
	for {
		m.mu.Lock()
		l, paused, changed := m.ln, m.paused, m.changed
		m.mu.Unlock()
		if l != nil && !paused {
			ours, theirs := net.Pipe()
			select {
			case l.dials <- theirs:
				m.serve(ours)
			case <-l.gone:
			case <-m.exited:
				return
			case <-changed:
			}
			_ = ours.Close()
			select {
			case <-time.After(2 * time.Millisecond):
			case <-m.exited:
				return
			}
			select {
			case <-l.gone: // until somebody listens again
			default:
				continue
			}
			m.mu.Lock()
			same := m.ln == l
			changed = m.changed
			m.mu.Unlock()
			if !same {
				continue
			}
		}
		select {
		case <-changed:
		case <-m.exited:
			return
		}
	}
}

// serve proves who it is and then answers the host until the connection ends.
func (m *machine) serve(conn net.Conn) {
	done := make(chan struct{})
	defer close(done)
	go func() {
		select {
		case <-m.exited:
			_ = conn.Close()
		case <-done:
		}
	}()
	nonce, err := guestapi.ReadChallenge(conn)
	if err != nil {
		return
	}
	hello := &guestv1.Hello{MinVersion: guestapi.MinVersion, MaxVersion: guestapi.MinVersion, Purpose: guestapi.PurposeControl}
	m.mu.Lock()
	if m.key != nil {
		hello.Proof = guestapi.Proof(m.key, nonce, hello.Purpose, "")
	}
	m.mu.Unlock()
	if guestapi.WriteHello(conn, hello) != nil {
		return
	}
	answer, err := guestapi.ReadAnswer(conn)
	if err != nil || !answer.Ok {
		return
	}
	if len(answer.Key) > 0 {
		m.mu.Lock()
		m.key = answer.Key
		m.mu.Unlock()
	}
	mux := http.NewServeMux()
	mux.Handle(guestv1connect.NewGuestHandler(guest{}))
	srv := &http.Server{Handler: mux, Protocols: new(http.Protocols), ReadHeaderTimeout: time.Minute}
	srv.Protocols.SetUnencryptedHTTP2(true)
	l := &listener{dials: make(chan net.Conn, 1), gone: make(chan struct{})}
	l.dials <- conn
	srv.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			_ = l.Close()
		}
	}
	_ = srv.Serve(l)
}

// guest answers what a node without sessions asks.
type guest struct {
	guestv1connect.UnimplementedGuestHandler
}

func (guest) Setup(context.Context, *connect.Request[guestv1.SetupRequest]) (*connect.Response[guestv1.SetupResponse], error) {
	return connect.NewResponse(&guestv1.SetupResponse{}), nil
}

func (guest) Sessions(context.Context, *connect.Request[guestv1.SessionsRequest]) (*connect.Response[guestv1.SessionsResponse], error) {
	return connect.NewResponse(&guestv1.SessionsResponse{}), nil
}

// fakeHost is everything else that a node needs: images, networks, agents, and
// a recorder of no sessions.
type fakeHost struct {
	mu       sync.Mutex
	networks map[string]bool
}

func (*fakeHost) Image(context.Context, string) (string, error) { return "/image", nil }
func (*fakeHost) Current() string                               { return "guest" }
func (*fakeHost) Path(string) (string, error)                   { return "/guest", nil }

func (h *fakeHost) Create(_ context.Context, id string) (string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.networks[id] = true
	return "/netns/" + id, nil
}

func (h *fakeHost) Delete(_ context.Context, id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.networks, id)
	return nil
}

func (h *fakeHost) List(context.Context) (ids []string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range h.networks {
		ids = append(ids, id)
	}
	return ids, nil
}

func (*fakeHost) MachineReady(context.Context, string) error              { return nil }
func (*fakeHost) MachineEnded(context.Context, string, sandbox.End) error { return nil }
func (*fakeHost) MachineHeld(context.Context, string) error               { return nil }
func (*fakeHost) MachineBack(string)                                      {}
func (*fakeHost) DeleteSandbox(context.Context, string) error             { return nil }
func (*fakeHost) Barrier(context.Context, string) error                   { return nil }
func (*fakeHost) Terminate(context.Context, string, time.Duration) error  { return nil }
func (*fakeHost) Active(string) int                                       { return 0 }

func (*fakeHost) Living(context.Context, string) ([]sandbox.Session, error) { return nil, nil }

func (*fakeHost) Inherit(context.Context, string, string, int64, []sandbox.Session) ([]sandbox.Session, error) {
	return nil, nil
}

// realNode is the node over the fake driver.
type realNode struct {
	*node.Node
	d    *fakeDriver
	h    *fakeHost
	stop func()
}

func newRealNode(dir string, rng *rand.Rand, faults float64) (*realNode, error) {
	d := &fakeDriver{rng: rng, faults: faults, machines: map[string]*machine{}}
	h := &fakeHost{networks: map[string]bool{}}
	n, err := node.New(node.Options{
		StateDir: dir, Drivers: []driver.Driver{d}, Default: "fake", Images: h, Networks: h, Guests: h, Recorder: h,
		Concurrency: 4, HelloWait: 10 * time.Second, MaxProcs: 10, BootID: "boot", Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = n.Run(ctx)
	}()
	return &realNode{Node: n, d: d, h: h, stop: func() { cancel(); <-done }}, nil
}

// Stop ends the node and what is left of its machines.
func (n *realNode) Stop() {
	n.stop()
	for _, m := range n.d.machines {
		m.end(sandbox.EndKilled)
	}
}

// Crash implements below.
func (n *realNode) Crash(id string) {
	n.d.mu.Lock()
	m := n.d.machines[id]
	n.d.mu.Unlock()
	if m != nil {
		m.end(sandbox.EndKilled)
	}
}

func (n *realNode) is(id string) string {
	n.d.mu.Lock()
	m := n.d.machines[id]
	n.d.mu.Unlock()
	if m == nil {
		return ""
	}
	select {
	case <-m.exited:
		return ""
	default:
	}
	if paused, _ := m.Paused(context.Background()); paused {
		return "paused"
	}
	return "running"
}
