package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// machine is one machine that this node knows: being made, ready, or ended and
// not yet deleted. Its fields are guarded by the node's mutex, but for those
// that only the call under way for the sandbox changes.
type machine struct {
	id      string
	journal *journal
	driver  driver.Machine
	former  []byte // the guest's key in the image that it was restored from, while it is brought up
	wish    wish
	line    *line         // nil while there is none
	moved   chan struct{} // closed and replaced when line or wish has changed
	ready   bool
	adrift  bool         // it was adopted, and may not stand still or run as it is to; see takeUp
	leaving bool         // a snapshot is taken after which it is to be released
	untold  *sandbox.End // its end, which came while leaving; see depart
	seq     int64
	ctx     context.Context // ends when the machine is deleted or the node stops
	unlink  context.CancelFunc
	watches sync.WaitGroup

	// What may have changed on its disk; see checkpoint.go.
	changes  int64 // begun and ended
	changing int   // under way
	image    lastImage
}

func (n *Node) newMachine(id string, j *journal) *machine {
	m := &machine{id: id, journal: j, moved: make(chan struct{})}
	m.ctx, m.unlink = context.WithCancel(n.ctx)
	return m
}

func (n *Node) status(m *machine) sandbox.MachineStatus {
	st := sandbox.MachineStatus{
		Sandbox: m.id, Generation: m.journal.Request.Generation, Driver: m.journal.Driver,
		Ready: m.ready && m.journal.End == nil, End: m.journal.End,
	}
	if d, ok := n.drivers[m.journal.Driver]; ok {
		st.Durability = d.Traits().Durability
	}
	return st
}

// leastProcs is what a user in a sandbox with little memory may still have.
const leastProcs = 64

// mibPerProc is what a process of a fork bomb costs its machine, with a margin:
// 0.6 to 2 MiB of host memory were measured under gVisor.
const mibPerProc = 3

// maxProcs is how many processes (threads count) a user in a sandbox may have.
// More of them than the machine can hold would make a fork bomb an
// out-of-memory, which ends a gVisor machine where it takes a stub that is just
// being made.
func (n *Node) maxProcs(r sandbox.Resources) uint64 {
	return min(n.o.MaxProcs, max(leastProcs, uint64(max(0, r.MemoryMiB)/mibPerProc)))
}

// connect starts the link to the machine's agent and returns when the agent
// has proved itself and taken its identity.
func (n *Node) connect(ctx context.Context, m *machine) error {
	n.join(m)
	ctx, cancel := context.WithTimeout(ctx, n.o.HelloWait)
	defer cancel()
	go func() { // ends with ctx, which ends with this function
		select {
		case <-m.driver.Exited():
			cancel()
		case <-ctx.Done():
		}
	}()
	if m.line == nil {
		return m.ctx.Err() // the node stops
	}
	err := m.line.Ready(ctx)
	if err == nil {
		return nil
	}
	if gone(m) {
		end := m.driver.End()
		return sandbox.Errorf(sandbox.Internal, "machine_ended_early", "the machine ended before its agent was ready: %s %s", end.Reason, end.Detail)
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return sandbox.Errorf(sandbox.Unavailable, "agent_not_ready", "the machine's agent did not say hello within %s", n.o.HelloWait).
			WithHint("the host may be overloaded; try again")
	}
	return err
}

// gone tells whether the machine has ended.
func gone(m *machine) bool {
	select {
	case <-m.driver.Exited():
		return true
	default:
		return false
	}
}

// watch starts what follows a ready machine until it ends, is deleted, or the
// node stops. The node's lock is held.
func (n *Node) watch(m *machine) {
	n.wg.Add(1)
	m.watches.Add(1)
	go func() {
		defer n.wg.Done()
		defer m.watches.Done()
		defer n.cut(m)
		select {
		case <-m.driver.Exited():
			n.ended(m, m.driver.End())
		case <-m.ctx.Done():
		}
	}()
	if m.line != nil {
		n.follow(m, m.line)
	}
}

// ended records the end of a machine that nobody asked to end.
func (n *Node) ended(m *machine, end sandbox.End) {
	if end.At.IsZero() {
		end.At = time.Now().UTC()
	}
	n.mu.Lock()
	if m.ctx.Err() != nil { // its deletion is under way and says the rest
		n.mu.Unlock()
		return
	}
	j := *m.journal
	j.End = &end
	m.journal = &j
	held, leaving := m.wish.Held, m.leaving
	if leaving {
		m.untold = &end
	}
	n.touch(m)
	n.mu.Unlock()
	defer m.unlink()
	if err := j.save(n.dir(m.id)); err != nil {
		n.o.Log.Error("save a machine's end", "sandbox", m.id, "err", err)
	}
	if !leaving && !n.complete(held) { // else its snapshot is all that counts, and its release says what becomes of the sessions
		n.tellEnd(n.ctx, m.id, end)
	}
	n.o.Log.Info("machine ended", "sandbox", m.id, "reason", end.Reason)
}

// depart notes that a snapshot is begun after which the machine is to be
// released. A machine that ends meanwhile has lost nothing if the snapshot
// becomes whole, so its end is told by the function that depart returns, once
// that is known.
func (n *Node) depart(m *machine) (done func()) {
	n.mu.Lock()
	m.leaving = true
	n.mu.Unlock()
	return func() {
		n.mu.Lock()
		end, held := m.untold, m.wish.Held
		m.leaving, m.untold = false, nil
		n.mu.Unlock()
		if end != nil && !n.complete(held) {
			n.tellEnd(n.ctx, m.id, *end)
		}
	}
}

func (n *Node) tellEnd(ctx context.Context, id string, end sandbox.End) {
	if err := n.o.Recorder.MachineEnded(ctx, id, end); err != nil {
		n.o.Log.Error("end a sandbox's sessions", "sandbox", id, "err", err)
	}
}
