package node

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"cloche.dev/cloche/internal/egress/ca"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

// fakeEgress notes what it is asked, beside how far the machine was then. It
// outlives a Node, as a gateway does.
type fakeEgress struct {
	r    *rig
	cert []byte
	fail error // of Attach

	mu    sync.Mutex
	calls []string
	on    map[string]bool // what is attached
}

func (e *fakeEgress) note(what, id string) {
	e.r.d.at.pass()
	defer e.r.d.at.pass()
	state := " no network"
	if ids, _ := e.r.h.List(context.Background()); slices.Contains(ids, id) {
		state = " network"
	}
	if m := e.r.d.machine(id); m != nil {
		state = " machine"
		if m.isPaused() {
			state = " paused"
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls = append(e.calls, what+state)
	switch what {
	case "attach":
		e.on[id] = true
	case "detach":
		delete(e.on, id)
	}
}

// serves demands that a sandbox is attached if it has a machine.
func (e *fakeEgress) serves(id string) {
	e.r.t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	if m := e.r.d.has(id); m != e.on[id] {
		e.r.t.Errorf("it has a machine: %v, is attached: %v", m, e.on[id])
	}
}

// heard returns what was asked since the last time.
func (e *fakeEgress) heard() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	calls := strings.Join(e.calls, ", ")
	e.calls = nil
	return calls
}

func (e *fakeEgress) Set(_ context.Context, a sandbox.EgressAssignment) error {
	e.note("set", a.Sandbox)
	return nil
}

func (e *fakeEgress) Attach(_ context.Context, id string) error { e.note("attach", id); return e.fail }
func (e *fakeEgress) Reset(_ context.Context, id string) error  { e.note("reset", id); return nil }
func (e *fakeEgress) Detach(_ context.Context, id string) error { e.note("detach", id); return nil }
func (e *fakeEgress) Forget(id string)                          { e.note("forget", id) }
func (e *fakeEgress) CA(string) []byte                          { return e.cert }

var testAuthority = sync.OnceValues(func() (sandbox.Authority, error) { return ca.Generate("test") })

// newEgressRig is a rig whose node has a gateway.
func newEgressRig(t *testing.T) (*rig, *fakeEgress) {
	t.Helper()
	authority, err := testAuthority()
	if err != nil {
		t.Fatal(err)
	}
	roots := filepath.Join(t.TempDir(), "roots.pem")
	if err := os.WriteFile(roots, authority.Cert, 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t)
	e := &fakeEgress{r: r, cert: authority.Cert, on: map[string]bool{}}
	r.more = func(o *Options) { o.Egress, o.RootsFile = e, roots }
	r.restart()
	return r, e
}

func (e *fakeEgress) want(t *testing.T, calls string) {
	t.Helper()
	if got := e.heard(); got != calls {
		t.Errorf("the gateway heard %q, want %q", got, calls)
	}
}

func TestTheGatewayIsThereBeforeTheMachine(t *testing.T) {
	r, e := newEgressRig(t)
	req := request(1)
	r.create(req)
	e.want(t, "detach network, attach network")
	setup := r.d.machine(req.Sandbox).identity()
	if got := setup.GetNameservers(); !slices.Equal(got, []string{"169.254.77.1"}) {
		t.Errorf("nameservers %v", got)
	}
	if block, _ := pem.Decode(setup.GetCaPem()); block == nil || string(setup.GetCaPem()) != string(e.cert) {
		t.Errorf("the guest was given the CA %q", setup.GetCaPem())
	}
	r.must(r.n.ReleaseMachine(background, req.Sandbox, 2, ended(sandbox.EndKilled)))
	e.want(t, "detach network, forget no network")
	r.create(from2(req, 3))
	e.heard()
	r.must(r.n.DeleteMachine(background, req.Sandbox, 4))
	e.want(t, "detach network, forget no network")
	r.nothingOf(req.Sandbox)
}

// from2 is req again, of another generation.
func from2(req sandbox.MachineRequest, generation int64) sandbox.MachineRequest {
	req.Generation = generation
	return req
}

func TestAFailedBringUpLeavesNoGateway(t *testing.T) {
	t.Run("attach", func(t *testing.T) {
		r, e := newEgressRig(t)
		e.fail = errors.New("boom")
		req := request(1)
		if _, err := r.n.CreateMachine(background, req); !errors.Is(err, e.fail) {
			t.Errorf("error %v", err)
		}
		e.want(t, "detach network, attach network, detach network")
		r.nothingOf(req.Sandbox)
	})
	t.Run("create", func(t *testing.T) {
		r, e := newEgressRig(t)
		r.d.fail = errors.New("boom")
		req := request(1)
		if _, err := r.n.CreateMachine(background, req); !errors.Is(err, r.d.fail) {
			t.Errorf("error %v", err)
		}
		e.want(t, "detach network, attach network, detach network")
		r.nothingOf(req.Sandbox)
	})
}

func TestAnAdoptedMachineIsAttachedAgain(t *testing.T) {
	r, e := newEgressRig(t)
	before := request(1)
	with := r.more
	r.more = nil // as an earlier release made it
	r.restart()
	r.create(before)
	r.more = with
	r.restart()
	req := request(1)
	r.create(req)
	e.heard()
	e.cert = nil // what the gateway knew is gone with it
	r.restart()
	e.want(t, "attach machine")
	if _, err := r.n.Client(background, req.Sandbox); err != nil {
		t.Fatal(err)
	}
	if setup := r.d.machine(req.Sandbox).identity(); len(setup.GetCaPem()) == 0 {
		t.Error("an adopted guest was given no CA")
	}
	if _, err := r.n.Client(background, before.Sandbox); err != nil {
		t.Fatal(err)
	}
	if setup := r.d.machine(before.Sandbox).identity(); len(setup.GetNameservers()) > 0 {
		t.Error("a machine without a network was given a name server")
	}
}

func TestConnectionsAreResetBeforeAMemorySnapshot(t *testing.T) {
	r, e := newEgressRig(t)
	req := request(1)
	r.create(req)
	e.heard()
	r.snapshot(snap(req.Sandbox, 2, sandbox.SnapshotDisk))
	e.want(t, "")
	r.snapshot(snap(req.Sandbox, 3, sandbox.SnapshotMemory))
	e.want(t, "reset machine")
	q := snap(req.Sandbox, 4, sandbox.SnapshotMemory)
	q.Hold = true
	r.snapshot(q)
	e.want(t, "reset machine")
	r.must(r.n.ReleaseMachine(background, req.Sandbox, 5, ended(sandbox.EndSuspended)))
	e.heard()
	r.create(from(req, 6, q.Snapshot, sandbox.SnapshotMemory, true))
	e.want(t, "detach network, attach network")
	back := from(req, 7, q.Snapshot, sandbox.SnapshotMemory, true)
	back.Source.Continue, back.Source.Replace = false, true
	r.create(back)
	e.want(t, "detach network, detach network, attach network")
}

func TestSetEgress(t *testing.T) {
	r, e := newEgressRig(t)
	id := request(1).Sandbox
	r.must(r.n.SetEgress(background, sandbox.EgressAssignment{Sandbox: id}))
	e.want(t, "set no network")
	if err := r.n.SetEgress(background, sandbox.EgressAssignment{Sandbox: "../x"}); code(err) != "bad_id" {
		t.Errorf("error %v", err)
	}
	r.more = nil
	r.restart()
	if err := r.n.SetEgress(background, sandbox.EgressAssignment{Sandbox: id}); code(err) != "egress_unavailable" {
		t.Errorf("error %v", err)
	}
}

func TestTrustStoresAreMadeOnceAndBounded(t *testing.T) {
	roots := filepath.Join(t.TempDir(), "roots.pem")
	a, err := ca.Generate("roots")
	if err == nil {
		err = os.WriteFile(roots, a.Cert, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	var stores trusted
	one, err := stores.of(roots, a.Cert)
	if err != nil {
		t.Fatal(err)
	}
	again, err := stores.of(roots, a.Cert)
	if err != nil || len(one.p12) == 0 || &one.p12[0] != &again.p12[0] {
		t.Errorf("the same authority has two stores (%v)", err)
	}
	if _, err := stores.of(filepath.Join(t.TempDir(), "none"), a.Cert); err == nil {
		t.Error("there are no roots, and a store was made")
	}
	for i := range 2 * maxTrusted {
		if _, err := stores.of(roots, fmt.Appendf(slices.Clone(a.Cert), "# %d\n", i)); err != nil {
			t.Fatal(err)
		}
	}
	if len(stores.stores) > maxTrusted {
		t.Errorf("%d stores are kept", len(stores.stores))
	}
}

func TestProblemsOfAGuestAreBounded(t *testing.T) {
	r, _ := newEgressRig(t)
	all := make([]string, 100)
	for i := range all {
		all[i] = strings.Repeat("x", 1<<16)
	}
	r.n.tellProblems("sbx", &guestv1.SetupResponse{Problems: all})
}
