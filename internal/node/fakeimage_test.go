package node

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// fakeImage is what a fake machine keeps: its disk, and in memory its key and
// what its only process has counted.
type fakeImage struct {
	Disk   []string
	Key    []byte
	Memory string
}

// gate stops whoever passes it for the n-th time, as a kill at that instant
// would: the caller is never heard of again before the test ends.
type gate struct {
	mu     sync.Mutex
	passed int
	at     int // 0: nobody is stopped
	frozen chan struct{}
	thaw   chan struct{}
}

func (g *gate) arm(at int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.passed, g.at, g.frozen, g.thaw = 0, at, make(chan struct{}), make(chan struct{})
}

func (g *gate) disarm() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.at = 0
}

func (g *gate) pass() {
	g.mu.Lock()
	g.passed++
	stop := g.at != 0 && g.passed == g.at
	frozen, thaw := g.frozen, g.thaw
	g.mu.Unlock()
	if stop {
		close(frozen)
		<-thaw
		runtime.Goexit() // what was killed has no effect any more
	}
}

func (m *fakeMachine) count(by int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.conns += by
}

func (m *fakeMachine) isPaused() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.paused
}

func (m *fakeMachine) key() []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Key
}

func (m *fakeMachine) set(paused bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = paused
}

func (m *fakeMachine) remember(what string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.Memory = what
}

func (m *fakeMachine) identity() *guestv1.SetupRequest {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.setup
}

// look returns what the machine holds now, on its disk or not yet.
func (m *fakeMachine) look() fakeImage {
	m.mu.Lock()
	defer m.mu.Unlock()
	img := m.fakeImage
	img.Disk = slices.Concat(img.Disk, m.cached)
	return img
}

func (m *fakeMachine) onDisk() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.Disk)
}

// answers waits until the machine can be asked.
func (m *fakeMachine) answers(ctx context.Context) error {
	m.d.mu.Lock()
	late := m.d.late[m.id]
	m.d.mu.Unlock()
	if late == nil {
		return nil
	}
	select {
	case <-late:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (m *fakeMachine) Pause(ctx context.Context) error {
	if err := m.answers(ctx); err != nil {
		return err
	}
	m.d.at.pass()
	defer m.d.at.pass()
	m.set(true)
	return m.d.failing("pause")
}

func (m *fakeMachine) Resume(ctx context.Context) error {
	if err := m.answers(ctx); err != nil {
		return err
	}
	m.d.at.pass()
	defer m.d.at.pass()
	m.set(false)
	return nil
}

func (m *fakeMachine) Paused(ctx context.Context) (bool, error) {
	return m.isPaused(), m.answers(ctx)
}

// Snapshot demands what the contract says: connections are closed before a
// memory image is taken.
func (m *fakeMachine) Snapshot(ctx context.Context, dir string, kind sandbox.SnapshotKind) (driver.Image, error) {
	m.d.at.pass()
	defer m.d.at.pass()
	if err := m.d.failing("snapshot"); err != nil {
		_ = os.WriteFile(filepath.Join(dir, "half"), nil, 0o600)
		return driver.Image{}, err
	}
	if err := m.d.waiting(ctx); err != nil {
		return driver.Image{}, err
	}
	for deadline := time.Now().Add(2 * time.Second); kind == sandbox.SnapshotMemory; time.Sleep(time.Millisecond) {
		m.mu.Lock()
		conns := m.conns
		m.mu.Unlock()
		if conns == 0 {
			break
		}
		if time.Now().After(deadline) {
			return driver.Image{}, errors.New("a connection is open while a memory image is taken")
		}
	}
	m.mu.Lock()
	m.saw = append(m.saw, m.frozen)
	m.mu.Unlock()
	img := m.look()
	if kind == sandbox.SnapshotDisk {
		img.Disk = m.onDisk()
	}
	needs := sandbox.Needs{Driver: "fake"}
	if kind == sandbox.SnapshotDisk {
		img.Key, img.Memory = nil, ""
	} else {
		needs.Engine, needs.CPU = "1", []string{"sse2"}
	}
	data, err := json.Marshal(img)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "image"), data, 0o600)
	}
	if err == nil && m.d.size > 0 {
		err = os.WriteFile(filepath.Join(dir, "pages"), make([]byte, m.d.size), 0o600)
	}
	return driver.Image{Dir: dir, Kind: kind, Needs: needs, Stood: time.Millisecond}, err
}

func (d *fakeDriver) Traits() driver.Traits {
	return driver.Traits{Durability: sandbox.DurabilitySnapshot, CachesDisk: d.caches, OwnKernel: d.kernel}
}

func (d *fakeDriver) Missing(needs sandbox.Needs) error {
	if needs.Driver != "fake" {
		return sandbox.Errorf(sandbox.FailedPrecondition, "needs_driver", "made by %q", needs.Driver)
	}
	return d.missing
}

func (d *fakeDriver) Restore(_ context.Context, spec driver.Spec, image driver.Image) (driver.Machine, error) {
	if d.restore != nil {
		return nil, d.restore
	}
	data, err := os.ReadFile(filepath.Join(image.Dir, "image"))
	if err != nil {
		return nil, err
	}
	var img fakeImage
	if err := json.Unmarshal(data, &img); err != nil {
		return nil, err
	}
	if (image.Kind == sandbox.SnapshotMemory) != (img.Key != nil) {
		return nil, errors.New("an image of another kind")
	}
	return d.boot(spec, img, d.silent), nil
}

// syncs has the guests' Sync do that; nil: it syncs.
func (d *fakeDriver) syncs(do func(context.Context) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sync = do
}

// failing returns once what op is to fail with.
func (d *fakeDriver) failing(op string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.fails[op]
	delete(d.fails, op)
	return err
}

// waiting blocks a snapshot until it is released or cancelled.
func (d *fakeDriver) waiting(ctx context.Context) error {
	d.mu.Lock()
	block, begun := d.block, d.begun
	d.mu.Unlock()
	if block == nil {
		return nil
	}
	close(begun)
	select {
	case <-block:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g fakeGuest) Sessions(context.Context, *connect.Request[guestv1.SessionsRequest]) (*connect.Response[guestv1.SessionsResponse], error) {
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	return connect.NewResponse(&guestv1.SessionsResponse{Others: g.m.others}), nil
}

func (g fakeGuest) OpenExtra(_ context.Context, r *connect.Request[guestv1.OpenExtraRequest]) (*connect.Response[guestv1.OpenExtraResponse], error) {
	conn, err := net.Dial("unix", g.m.path)
	if err != nil {
		return nil, err
	}
	g.m.agent.Add(1)
	go func() { // ends with the connection
		defer g.m.agent.Done()
		g.m.serve(conn, guestapi.PurposeExtra, r.Msg.GetTicket())
	}()
	return connect.NewResponse(&guestv1.OpenExtraResponse{}), nil
}

func (g fakeGuest) Mkdir(_ context.Context, r *connect.Request[guestv1.MkdirRequest]) (*connect.Response[guestv1.MkdirResponse], error) {
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	if g.m.d.caches {
		g.m.cached = append(g.m.cached, r.Msg.GetPath())
	} else {
		g.m.Disk = append(g.m.Disk, r.Msg.GetPath())
	}
	return connect.NewResponse(&guestv1.MkdirResponse{}), nil
}

func (g fakeGuest) Sync(ctx context.Context, _ *connect.Request[guestv1.SyncRequest]) (*connect.Response[guestv1.SyncResponse], error) {
	g.m.d.mu.Lock()
	sync := g.m.d.sync
	g.m.d.mu.Unlock()
	if sync != nil {
		if err := sync(ctx); err != nil {
			return nil, guestapi.ToRPC(err)
		}
	}
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	g.m.syncs++
	g.m.Disk, g.m.cached = append(g.m.Disk, g.m.cached...), nil
	return connect.NewResponse(&guestv1.SyncResponse{}), nil
}

func (g fakeGuest) Freeze(_ context.Context, r *connect.Request[guestv1.FreezeRequest]) (*connect.Response[guestv1.FreezeResponse], error) {
	g.m.mu.Lock()
	defer g.m.mu.Unlock()
	g.m.frozen = !r.Msg.GetThaw() && !g.m.d.restless
	return connect.NewResponse(&guestv1.FreezeResponse{Frozen: g.m.frozen}), nil
}

// The recorder: sessions are a list, and the guest's side of them is not there.

func (h *fakeHost) MachineHeld(_ context.Context, id string) error {
	h.at.pass()
	defer h.at.pass()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held[id] = true
	return nil
}

func (h *fakeHost) MachineBack(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.held, id)
	delete(h.over, id)
}

func (h *fakeHost) Barrier(ctx context.Context, id string) error {
	h.at.pass()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.barriers++
	if m := h.d.machine(id); m != nil && m.isPaused() {
		return errors.New("asked a guest that stands still")
	}
	return errors.Join(h.fail, ctx.Err())
}

func (h *fakeHost) Living(_ context.Context, id string) ([]sandbox.Session, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]sandbox.Session(nil), h.running[id]...), nil
}

func (h *fakeHost) Inherit(_ context.Context, id, project string, epoch int64, from []sandbox.Session) ([]sandbox.Session, error) {
	h.at.pass()
	defer h.at.pass()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.epochs[id] != epoch || len(h.running[id]) == 0 { // those that ended meanwhile are made anew
		if len(h.running[id]) > 0 {
			h.ended[id] = sandbox.End{Reason: sandbox.EndRolledBack}
		}
		h.running[id] = nil
		for _, f := range from {
			h.running[id] = append(h.running[id], sandbox.Session{
				ID: sandbox.NewID(sandbox.KindSession), Project: project, Sandbox: id, Parent: f.ID, ParentOffset: f.ParentOffset,
			})
		}
		h.epochs[id] = epoch
	}
	delete(h.held, id)
	return append([]sandbox.Session(nil), h.running[id]...), nil
}

func (h *fakeHost) Terminate(_ context.Context, id string, _ time.Duration) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.running, id)
	return nil
}

func (h *fakeHost) Active(id string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.running[id])
}

// start puts a session into a sandbox.
func (h *fakeHost) start(id string) sandbox.Session {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := sandbox.Session{ID: sandbox.NewID(sandbox.KindSession), Sandbox: id, ParentOffset: 42}
	h.running[id] = append(h.running[id], s)
	return s
}

func (h *fakeHost) isHeld(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.held[id]
}
