package node

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
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
}

func newFakeDriver(t *testing.T) *fakeDriver {
	dir, err := os.MkdirTemp("", "fk")
	if err != nil {
		t.Fatal(err)
	}
	d := &fakeDriver{dir: dir, machines: map[string]*fakeMachine{}, ends: map[string]sandbox.End{}}
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
	m := &fakeMachine{id: spec.ID, path: filepath.Join(d.dir, spec.ID+".sock"), exited: make(chan struct{})}
	if !silent {
		m.agent.Add(1)
		go m.runAgent()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.machines[spec.ID] = m
	return m, nil
}

func (d *fakeDriver) Adopt(_ context.Context, id string) (driver.Machine, error) {
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

type fakeMachine struct {
	id, path string
	exited   chan struct{}
	agent    sync.WaitGroup
	once     sync.Once
	why      sandbox.End
	key      []byte
	setup    *guestv1.SetupRequest
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
		if conn, err := net.Dial("unix", m.path); err == nil {
			m.serve(conn)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (m *fakeMachine) serve(conn net.Conn) {
	defer conn.Close()
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
	if m.key != nil {
		hello.Proof = guestapi.Proof(m.key, nonce, hello.Purpose, "")
	}
	if guestapi.WriteHello(conn, hello) != nil {
		return
	}
	answer, err := guestapi.ReadAnswer(conn)
	if err != nil || !answer.Ok {
		return
	}
	if len(answer.Key) > 0 {
		m.key = answer.Key
	}
	mux := http.NewServeMux()
	mux.Handle(guestv1connect.NewGuestHandler(fakeGuest{m: m}))
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
	g.m.setup = r.Msg
	return connect.NewResponse(&guestv1.SetupResponse{}), nil
}

// fakeHost is everything else that a Node needs.
type fakeHost struct {
	mu       sync.Mutex
	networks map[string]bool
	ready    map[string]int
	ended    map[string]sandbox.End
	deleted  []string
}

func (h *fakeHost) Image(_ context.Context, digest string) (string, error) {
	if digest == "sha256:missing" {
		return "", sandbox.Errorf(sandbox.NotFound, "template_files_missing", "not here")
	}
	return "/image", nil
}
func (h *fakeHost) Current() string             { return "guesthash" }
func (h *fakeHost) Path(string) (string, error) { return "/guest", nil }

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

func (h *fakeHost) MachineReady(_ context.Context, id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ready[id]++
	return nil
}

func (h *fakeHost) MachineEnded(_ context.Context, id string, end sandbox.End) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ended[id] = end
	return nil
}

func (h *fakeHost) DeleteSandbox(_ context.Context, id string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deleted = append(h.deleted, id)
	return nil
}

func (h *fakeHost) endOf(id string) sandbox.End {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ended[id]
}

// rig is a node over fakes, with a state directory that outlives it.
type rig struct {
	t     *testing.T
	state string
	d     *fakeDriver
	h     *fakeHost
	n     *Node
	stop  func()
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, state: t.TempDir(), d: newFakeDriver(t), h: &fakeHost{networks: map[string]bool{}, ready: map[string]int{}, ended: map[string]sandbox.End{}}}
	r.start("boot-1")
	t.Cleanup(func() { r.stop() })
	return r
}

// start starts a node; after stop it is the next life of the same daemon.
func (r *rig) start(bootID string) {
	r.t.Helper()
	n, err := New(Options{
		StateDir: r.state, Drivers: []driver.Driver{r.d}, Default: "fake", Images: r.h, Networks: r.h, Guests: r.h, Recorder: r.h,
		Concurrency: 2, HelloWait: 5 * time.Second, MaxProcs: 7, BootID: bootID, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := n.Run(ctx); err != nil {
			r.t.Errorf("Run: %v", err)
		}
	}()
	r.n = n
	r.stop = sync.OnceFunc(func() { cancel(); <-done })
}

func request(generation int64) sandbox.MachineRequest {
	return sandbox.MachineRequest{
		Project: "prj", Sandbox: sandbox.NewID(sandbox.KindSandbox), Generation: generation, Digest: "sha256:ok",
		Hostname: "h", Resources: sandbox.DefaultResources,
		Config: sandbox.RuntimeConfig{Env: map[string]string{"A": "template", "B": "template"}}, Env: map[string]string{"B": "sandbox"},
	}
}

func (r *rig) create(req sandbox.MachineRequest) sandbox.MachineStatus {
	r.t.Helper()
	st, err := r.n.CreateMachine(context.Background(), req)
	if err != nil {
		r.t.Fatal(err)
	}
	return st
}

// nothingOf demands that nothing of a sandbox is left anywhere.
func (r *rig) nothingOf(id string) {
	r.t.Helper()
	if r.d.has(id) {
		r.t.Errorf("the driver still has %s", id)
	}
	if ids, _ := r.h.List(context.Background()); slices.Contains(ids, id) {
		r.t.Errorf("the namespace of %s is left", id)
	}
	if _, err := os.Stat(r.n.dir(id)); !errors.Is(err, os.ErrNotExist) {
		r.t.Errorf("the journal of %s is left (%v)", id, err)
	}
}

func code(err error) string {
	var e *sandbox.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}
