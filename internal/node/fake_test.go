package node

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// fakeDriver's machines are a socket and a goroutine that speaks as an agent.
// They outlive a Node, as real ones do.
type fakeDriver struct {
	dir string

	mu        sync.Mutex
	machines  map[string]*fakeMachine
	fail      error         // of Create
	hang      chan struct{} // Create waits for it or for ctx
	silent    bool          // machines' agents never dial
	discarded []string
	ends      map[string]sandbox.End // of machines that ended; Adopt tells
	missing   error                  // what Missing answers
	restore   error                  // what Restore fails with
	fails     map[string]error       // what the next pause or snapshot fails with
	block     chan struct{}          // snapshots wait for it
	begun     chan struct{}          // closed when one waits
	size      int                    // bytes that an image has beside what it holds
	at        gate
	caches    bool                        // guests keep what they write until they sync
	sync      func(context.Context) error // what Sync does; nil: it syncs
	kernel    bool                        // guests have one of their own
	old       bool                        // agents have never heard of Sync and Freeze
	restless  bool                        // agents can't freeze what runs
	adopts    func(context.Context) error // what Adopt does first
	late      map[string]chan struct{}    // machines that can't be asked to pause or resume before this is closed
}

func newFakeDriver(t *testing.T) *fakeDriver {
	dir, err := os.MkdirTemp("", "fk")
	if err != nil {
		t.Fatal(err)
	}
	d := &fakeDriver{dir: dir, machines: map[string]*fakeMachine{}, ends: map[string]sandbox.End{}, fails: map[string]error{}}
	t.Cleanup(func() {
		for _, m := range d.machines {
			m.end(sandbox.EndKilled)
		}
		_ = os.RemoveAll(dir)
	})
	return d
}

func (d *fakeDriver) Name() string                            { return "fake" }
func (d *fakeDriver) Probe(context.Context) driver.Capability { return driver.Capability{OK: true} }

func (d *fakeDriver) Create(ctx context.Context, spec driver.Spec) (driver.Machine, error) {
	d.mu.Lock()
	fail, hang, silent := d.fail, d.hang, d.silent
	d.mu.Unlock()
	if hang != nil {
		select {
		case <-hang:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if fail != nil {
		return nil, fail
	}
	return d.boot(spec, fakeImage{}, silent), nil
}

// boot starts a machine with what an image holds.
func (d *fakeDriver) boot(spec driver.Spec, img fakeImage, silent bool) *fakeMachine {
	d.at.pass()
	defer d.at.pass()
	m := &fakeMachine{d: d, id: spec.ID, path: filepath.Join(d.dir, spec.ID+".sock"), spec: spec, exited: make(chan struct{}), fakeImage: img}
	if !silent {
		m.agent.Add(1)
		go m.runAgent()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.machines[spec.ID] != nil {
		panic("two machines of one sandbox")
	}
	d.machines[spec.ID] = m
	return m
}

func (d *fakeDriver) Adopt(ctx context.Context, id string) (driver.Machine, error) {
	if d.adopts != nil {
		if err := d.adopts(ctx); err != nil {
			return nil, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if m := d.machines[id]; m != nil {
		return m, nil
	}
	if end, ok := d.ends[id]; ok {
		return nil, &driver.Ended{End: end}
	}
	return nil, sandbox.Errorf(sandbox.NotFound, "machine_not_found", "no such machine")
}

func (d *fakeDriver) List(context.Context) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var ids []string
	for id := range d.machines {
		ids = append(ids, id)
	}
	return ids, nil
}

func (d *fakeDriver) Discard(_ context.Context, id string) error {
	d.at.pass()
	defer d.at.pass()
	d.mu.Lock()
	m := d.machines[id]
	delete(d.machines, id)
	d.discarded = append(d.discarded, id)
	d.mu.Unlock()
	if m != nil {
		m.end(sandbox.EndKilled)
	}
	return nil
}

func (d *fakeDriver) has(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.machines[id] != nil
}

func (d *fakeDriver) machine(id string) *fakeMachine {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.machines[id]
}

type fakeMachine struct {
	d        *fakeDriver
	id, path string
	spec     driver.Spec
	exited   chan struct{}
	agent    sync.WaitGroup
	once     sync.Once
	why      sandbox.End
	setup    *guestv1.SetupRequest

	mu     sync.Mutex
	conns  int
	paused bool
	others uint64
	cached []string // written and not on the disk yet
	syncs  int
	frozen bool
	saw    []bool // whether it was frozen, at each snapshot
	fakeImage
}

func (m *fakeMachine) ID() string { return m.id }

func (m *fakeMachine) Guest() (net.Listener, error) {
	_ = os.Remove(m.path)
	return net.Listen("unix", m.path)
}
func (m *fakeMachine) Stats(context.Context) (driver.Stats, error) { return driver.Stats{}, nil }
func (m *fakeMachine) Kill(context.Context) error                  { m.end(sandbox.EndKilled); return nil }
func (m *fakeMachine) Exited() <-chan struct{}                     { return m.exited }
func (m *fakeMachine) End() sandbox.End                            { return m.why }

func (m *fakeMachine) end(r sandbox.EndReason) {
	m.once.Do(func() {
		m.why = sandbox.End{Reason: r}
		close(m.exited)
	})
	m.agent.Wait()
}

// runAgent dials until the machine ends.
func (m *fakeMachine) runAgent() {
	defer m.agent.Done()
	for {
		select {
		case <-m.exited:
			return
		default:
		}
		if !m.isPaused() {
			if conn, err := net.Dial("unix", m.path); err == nil {
				m.serve(conn, guestapi.PurposeControl, "")
			}
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (m *fakeMachine) serve(conn net.Conn, purpose, ticket string) {
	defer conn.Close()
	m.count(1)
	defer m.count(-1)
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
	hello := &guestv1.Hello{MinVersion: guestapi.MinVersion, MaxVersion: guestapi.MinVersion, Purpose: purpose, Ticket: ticket}
	if key := m.key(); key != nil {
		hello.Proof = guestapi.Proof(key, nonce, purpose, ticket)
	}
	if guestapi.WriteHello(conn, hello) != nil {
		return
	}
	answer, err := guestapi.ReadAnswer(conn)
	if err != nil || !answer.Ok {
		return
	}
	if len(answer.Key) > 0 {
		m.mu.Lock()
		m.Key = answer.Key
		m.mu.Unlock()
	}
	mux := http.NewServeMux()
	path, guest := guestv1connect.NewGuestHandler(fakeGuest{m: m})
	mux.Handle(path, guest)
	if m.d.old {
		mux.Handle(guestv1connect.GuestSyncProcedure, http.NotFoundHandler())
		mux.Handle(guestv1connect.GuestFreezeProcedure, http.NotFoundHandler())
	}
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second, Protocols: new(http.Protocols)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	l := &oneListener{conn: conn, gone: make(chan struct{})}
	srv.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			_ = l.Close()
		}
	}
	_ = srv.Serve(l)
}

// oneListener accepts one connection and then waits to be closed.
type oneListener struct {
	conn net.Conn
	once sync.Once
	gone chan struct{}
	took bool
}

func (l *oneListener) Accept() (net.Conn, error) {
	if !l.took {
		l.took = true
		return l.conn, nil
	}
	<-l.gone
	return nil, net.ErrClosed
}
func (l *oneListener) Close() error   { l.once.Do(func() { close(l.gone) }); return nil }
func (l *oneListener) Addr() net.Addr { return l.conn.LocalAddr() }

type fakeGuest struct {
	guestv1connect.UnimplementedGuestHandler
	m *fakeMachine
}

func (g fakeGuest) Setup(_ context.Context, r *connect.Request[guestv1.SetupRequest]) (*connect.Response[guestv1.SetupResponse], error) {
	g.m.mu.Lock()
	g.m.setup, g.m.frozen = r.Msg, false
	g.m.mu.Unlock()
	return connect.NewResponse(&guestv1.SetupResponse{}), nil
}
