package node

import (
	"context"
	"errors"
	"sync"
	"time"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/guestlink"
	"cloche.dev/cloche/internal/sandbox"
)

// machine is one machine that this node knows: being made, ready, or ended and
// not yet deleted. Its fields are guarded by the node's mutex.
type machine struct {
	id      string
	journal *journal
	driver  driver.Machine
	link    *guestlink.Link
	ready   bool
	seq     int64
	ctx     context.Context // ends when the machine is deleted or the node stops
	unlink  context.CancelFunc
	watches sync.WaitGroup
}

func (n *Node) newMachine(id string, j *journal) *machine {
	m := &machine{id: id, journal: j}
	m.ctx, m.unlink = context.WithCancel(n.ctx)
	return m
}

func (m *machine) status() sandbox.MachineStatus {
	return sandbox.MachineStatus{
		Sandbox: m.id, Generation: m.journal.Request.Generation, Driver: m.journal.Driver,
		Ready: m.ready && m.journal.End == nil, End: m.journal.End,
	}
}

// startLink starts listening for the machine's agent.
func (n *Node) startLink(m *machine) {
	req := m.journal.Request
	m.link = guestlink.Start(guestlink.Config{
		Listen: m.driver.Guest, Key: m.journal.Key, Welcomed: m.journal.Welcomed, Epoch: m.journal.Epoch,
		Welcome: func() error {
			m.journal.Welcomed = true
			return m.journal.save(n.dir(m.id))
		},
		Setup: &guestv1.SetupRequest{Hostname: req.Hostname, Env: environment(req), MaxProcsPerUser: n.maxProcs(req.Resources)},
		Log:   n.o.Log.With("sandbox", m.id),
	})
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
	n.startLink(m)
	ctx, cancel := context.WithTimeout(ctx, n.o.HelloWait)
	defer cancel()
	go func() { // ends with ctx, which ends with this function
		select {
		case <-m.driver.Exited():
			cancel()
		case <-ctx.Done():
		}
	}()
	err := m.link.Ready(ctx)
	if err == nil {
		return nil
	}
	select {
	case <-m.driver.Exited():
		end := m.driver.End()
		return sandbox.Errorf(sandbox.Internal, "machine_ended_early", "the machine ended before its agent was ready: %s %s", end.Reason, end.Detail)
	default:
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return sandbox.Errorf(sandbox.Unavailable, "agent_not_ready", "the machine's agent did not say hello within %s", n.o.HelloWait).
			WithHint("the host may be overloaded; try again")
	}
	return err
}

// watch starts what follows a ready machine until it ends, is deleted, or the
// node stops.
func (n *Node) watch(m *machine) {
	n.wg.Add(2)
	m.watches.Add(2)
	for _, f := range []func(*machine){n.watchEnd, n.watchLink} {
		go func() {
			defer n.wg.Done()
			defer m.watches.Done()
			f(m)
		}()
	}
}

func (n *Node) watchEnd(m *machine) {
	defer m.link.Close()
	select {
	case <-m.driver.Exited():
		n.ended(m, m.driver.End())
	case <-m.ctx.Done():
	}
}

// watchLink tells the recorder of each new connection of the agent.
func (n *Node) watchLink(m *machine) {
	var told uint64
	for {
		generation, changed := m.link.Generation()
		if generation > told && m.link.Live() {
			told = generation
			if err := n.o.Recorder.MachineReady(m.ctx, m.id); err != nil && m.ctx.Err() == nil {
				n.o.Log.Warn("take up a sandbox's sessions", "sandbox", m.id, "err", err)
			}
		}
		select {
		case <-changed:
		case <-m.ctx.Done():
			return
		}
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
	m.journal.End = &end
	n.touch(m)
	j := *m.journal
	n.mu.Unlock()
	defer m.unlink()
	if err := j.save(n.dir(m.id)); err != nil {
		n.o.Log.Error("save a machine's end", "sandbox", m.id, "err", err)
	}
	n.tellEnd(n.ctx, m.id, end)
	n.o.Log.Info("machine ended", "sandbox", m.id, "reason", end.Reason, "detail", end.Detail)
}

func (n *Node) tellEnd(ctx context.Context, id string, end sandbox.End) {
	if err := n.o.Recorder.MachineEnded(ctx, id, end); err != nil {
		n.o.Log.Error("end a sandbox's sessions", "sandbox", id, "err", err)
	}
}
