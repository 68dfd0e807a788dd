package node

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// fakeHost is everything else that a Node needs.
type fakeHost struct {
	d        *fakeDriver
	at       *gate
	mu       sync.Mutex
	networks map[string]bool
	ready    map[string]int
	ended    map[string]sandbox.End
	held     map[string]bool
	over     map[string]bool // what was told last is the end
	running  map[string][]sandbox.Session
	epochs   map[string]int64 // of what was inherited
	deleted  []string
	barriers int
	fail     error // of Barrier
	current  string
	guest    error // of Path for a guest that is not the current one
}

func (h *fakeHost) Image(_ context.Context, digest string) (string, error) {
	if digest == "sha256:missing" {
		return "", sandbox.Errorf(sandbox.NotFound, "template_files_missing", "not here")
	}
	return "/image", nil
}
func (h *fakeHost) Current() string { return cmp.Or(h.current, "guesthash") }
func (h *fakeHost) Path(hash string) (string, error) {
	if h.guest != nil && hash != h.Current() {
		return "", h.guest
	}
	return "/guest-" + hash, nil
}

func (h *fakeHost) Create(_ context.Context, id string) (string, error) {
	h.at.pass()
	defer h.at.pass()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.networks[id] = true
	return "/netns/" + id, nil
}

func (h *fakeHost) Delete(_ context.Context, id string) error {
	h.at.pass()
	defer h.at.pass()
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
	h.at.pass()
	defer h.at.pass()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.running[id]) > 0 || h.ended[id].Reason == "" { // else it changes nothing
		h.ended[id] = end
	}
	delete(h.running, id)
	delete(h.held, id)
	h.over[id] = true
	return nil
}

func (h *fakeHost) DeleteSandbox(_ context.Context, id string) error {
	h.at.pass()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.deleted = append(h.deleted, id)
	delete(h.running, id)
	return nil
}

// isOver tells whether what was told last of a machine is its end.
func (h *fakeHost) isOver(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.over[id]
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
	more  func(*Options) // of nodes that are started from now on; may be nil
}

func newRig(t *testing.T) *rig {
	d := newFakeDriver(t)
	r := &rig{t: t, state: t.TempDir(), d: d, h: &fakeHost{
		d: d, at: &d.at, networks: map[string]bool{}, ready: map[string]int{}, ended: map[string]sandbox.End{}, held: map[string]bool{}, over: map[string]bool{},
		running: map[string][]sandbox.Session{}, epochs: map[string]int64{},
	}}
	r.start("boot-1")
	t.Cleanup(func() { r.stop() })
	return r
}

// start starts a node; after stop it is the next life of the same daemon.
func (r *rig) start(bootID string) {
	r.t.Helper()
	o := Options{
		StateDir: r.state, Drivers: []driver.Driver{r.d}, Default: "fake", Images: r.h, Networks: r.h, Guests: r.h, Recorder: r.h,
		CPUOvercommit: 2, MemoryShare: 0.5, DiskFloor: 77, Concurrency: 2, HelloWait: 5 * time.Second, MaxProcs: 7, BootID: bootID, Log: slog.New(slog.DiscardHandler),
	}
	if r.more != nil {
		r.more(&o)
	}
	n, err := New(o)
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
