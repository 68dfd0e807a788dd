package node

import (
	"context"
	"crypto/sha256"
	"errors"
	"sync"
	"time"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/trust"
)

// Egress is the gateway through which everything leaves the machines. What it
// is told of a machine that it doesn't know is no error.
type Egress interface {
	// Set makes a its sandbox's assignment, and returns when it is in force.
	Set(ctx context.Context, a sandbox.EgressAssignment) error
	// Attach has the gateway serve a machine's network, from now until Detach.
	Attach(ctx context.Context, id string) error
	// Reset ends every connection of a machine with a reset.
	Reset(ctx context.Context, id string) error
	// Detach has the gateway close all that it has in a machine's network.
	Detach(ctx context.Context, id string) error
	// Forget drops what is known of a sandbox.
	Forget(id string)
	// CA returns the certificate of a sandbox's authority in PEM; nil: none is known.
	CA(id string) []byte
}

// SetEgress implements sandbox.EgressSetter.
func (n *Node) SetEgress(ctx context.Context, a sandbox.EgressAssignment) error {
	if n.o.Egress == nil {
		return sandbox.Errorf(sandbox.FailedPrecondition, "egress_unavailable", "this host has no egress gateway")
	}
	if !sandbox.ValidID(sandbox.KindSandbox, a.Sandbox) {
		return sandbox.Errorf(sandbox.Invalid, "bad_id", "%q is not a sandbox id", a.Sandbox)
	}
	return n.o.Egress.Set(ctx, a)
}

// gatewayStep attaches a machine that is yet to be made to the gateway, so that
// it has never more than its profile allows.
func (n *Node) gatewayStep(m *machine) step {
	return step{
		name: "attach the egress gateway",
		do: func(ctx context.Context) error {
			if n.o.Egress == nil {
				return nil
			}
			// Whatever bore this id before had another network.
			if err := n.o.Egress.Detach(ctx, m.id); err != nil {
				return err
			}
			if err := n.o.Egress.Attach(ctx, m.id); err != nil {
				return err
			}
			m.journal.Egress, m.journal.CA = true, n.o.Egress.CA(m.id)
			return nil
		},
		undo: func(ctx context.Context) error { return n.detach(ctx, m.id) },
	}
}

// detach lets go of a machine's network, which nothing else has then.
func (n *Node) detach(ctx context.Context, id string) error {
	if n.o.Egress == nil {
		return nil
	}
	return n.o.Egress.Detach(ctx, id)
}

// forgetEgress drops a sandbox's assignment and its secrets.
func (n *Node) forgetEgress(id string) {
	if n.o.Egress != nil {
		n.o.Egress.Forget(id)
	}
}

// attachWait bounds the wait for the gateway at adoption. It attaches by itself
// what could not be attached in time.
const attachWait = 5 * time.Second

// reattach attaches an adopted machine, where it was made with a gateway. A
// failure leaves it without a network, not without its processes.
func (n *Node) reattach(ctx context.Context, m *machine) {
	if n.o.Egress == nil || !m.journal.Egress {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, attachWait)
	defer cancel()
	if err := n.o.Egress.Attach(ctx, m.id); err != nil {
		n.o.Log.Error("attach an adopted machine to the egress gateway", "sandbox", m.id, "err", err)
	}
}

// setUpEgress puts into a guest's setup what it needs for the way out: the
// gateway's name server, and what to trust.
func (n *Node) setUpEgress(m *machine, setup *guestv1.SetupRequest) {
	if n.o.Egress == nil || !m.journal.Egress {
		return
	}
	setup.Nameservers = []string{netns.Resolver().String()}
	ca := n.o.Egress.CA(m.id)
	if len(ca) == 0 { // this process may not have been told yet
		ca = m.journal.CA
	}
	if len(ca) == 0 {
		return
	}
	setup.CaPem = ca
	store, err := n.trust.of(n.o.RootsFile, ca)
	if err != nil {
		n.o.Log.Error("make a guest's trust store; it trusts its project's authority only where it has one of its own", "sandbox", m.id, "err", err)
		return
	}
	setup.RootsPem, setup.TrustP12 = store.roots, store.p12
}

// What a guest tells of its setup is bounded before it is logged.
const (
	maxProblems = 8
	maxProblem  = 256
)

// tellProblems logs what a guest could not do of its setup.
func (n *Node) tellProblems(id string, answer *guestv1.SetupResponse) {
	all := answer.GetProblems()
	for _, p := range all[:min(len(all), maxProblems)] {
		n.o.Log.Warn("the guest could not set up its way out", "sandbox", id, "problem", p[:min(len(p), maxProblem)])
	}
}

// The bounds of what guests are to trust: it goes into one message.
const (
	maxTrusted = 64
	maxTrust   = 1 << 20
)

// trusted makes trust stores, which takes a while, once for each authority.
type trusted struct {
	mu     sync.Mutex
	stores map[[sha256.Size]byte]trustStore
}

type trustStore struct{ roots, p12 []byte }

func (t *trusted) of(file string, ca []byte) (trustStore, error) {
	roots, err := trust.HostRoots(file)
	if err != nil {
		return trustStore{}, err
	}
	key := sha256.Sum256(append(ca[:len(ca):len(ca)], roots...))
	t.mu.Lock()
	defer t.mu.Unlock()
	if s, ok := t.stores[key]; ok {
		return s, nil
	}
	s := trustStore{roots: roots}
	if s.p12, err = trust.Store(roots, ca); err != nil {
		return s, err
	}
	if len(s.roots) > maxTrust || len(s.p12) > maxTrust {
		return s, errors.New("the host's root certificates are too many for a guest")
	}
	if t.stores == nil || len(t.stores) >= maxTrusted {
		t.stores = map[[sha256.Size]byte]trustStore{}
	}
	t.stores[key] = s
	return s, nil
}
