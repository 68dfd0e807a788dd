package node

import (
	"context"
	"io"
	"sync"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/node/guestlink"
	"cloche.dev/cloche/internal/sandbox"
)

// line is one link to a machine's agent and what watches it. A machine has at
// most one at a time; a memory snapshot replaces it.
type line struct {
	*guestlink.Link
	ctx  context.Context // ends when it is cut
	stop context.CancelFunc
}

// linkConfig is what a link to the machine's agent needs to know.
func (n *Node) linkConfig(m *machine) guestlink.Config {
	j := m.journal
	procs := j.MaxProcs
	if procs == 0 { // a machine of an earlier release
		procs = n.maxProcs(j.Request.Resources)
	}
	setup := &guestv1.SetupRequest{
		Hostname: j.Request.Hostname, Env: environment(j.Request), MaxProcsPerUser: procs,
		Generation: j.Epoch, MachineId: machineID(m.id), BootId: j.GuestBoot, Restored: fromMemory(j.Request), Source: j.Origin,
	}
	n.setUpEgress(m, setup)
	return guestlink.Config{
		Listen: m.driver.Guest, Key: j.Key, Former: m.former, Welcomed: j.Welcomed, Epoch: j.Epoch,
		Welcome: func() error {
			j.Welcomed = true
			return j.save(n.dir(m.id))
		},
		Setup: setup, SetUp: func(a *guestv1.SetupResponse) { n.tellProblems(m.id, a) }, Log: n.o.Log.With("sandbox", m.id),
	}
}

// join starts listening for the machine's agent, unless that is done already
// or the machine is being let go.
func (n *Node) join(m *machine) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if m.line == nil && m.ctx.Err() == nil {
		l := &line{Link: guestlink.Start(n.linkConfig(m))}
		l.ctx, l.stop = context.WithCancel(m.ctx)
		m.line = l
		if m.ready {
			n.follow(m, l)
		}
	}
	n.poke(m)
}

// cut ends every connection with the machine's agent.
func (n *Node) cut(m *machine) {
	n.mu.Lock()
	l := m.line
	m.line = nil
	n.mu.Unlock()
	if l != nil {
		l.stop()
		l.Close()
	}
}

// poke wakes who waits for the machine's line. The node's lock is held.
func (n *Node) poke(m *machine) {
	close(m.moved)
	m.moved = make(chan struct{})
}

// follow tells the recorder of each new connection of the agent, while the
// line lasts. The node's lock is held.
func (n *Node) follow(m *machine, l *line) {
	n.wg.Add(1)
	m.watches.Add(1)
	go func() { // ends with the line
		defer n.wg.Done()
		defer m.watches.Done()
		var told uint64
		for {
			generation, changed := l.Generation()
			if generation > told && l.Live() {
				told = generation
				if err := n.o.Recorder.MachineReady(l.ctx, m.id); err != nil && l.ctx.Err() == nil {
					n.o.Log.Warn("take up a sandbox's sessions", "sandbox", m.id, "err", err)
				}
			}
			select {
			case <-changed:
			case <-l.ctx.Done():
				return
			}
		}
	}()
}

// lineTo returns the line to a sandbox's machine. While a snapshot replaces it,
// it waits within ctx.
func (n *Node) lineTo(ctx context.Context, id string) (*machine, *line, error) {
	if err := n.settled(ctx); err != nil {
		return nil, nil, err
	}
	for {
		n.mu.Lock()
		m, err := n.up(id)
		if err != nil {
			n.mu.Unlock()
			return nil, nil, err
		}
		l, held, paused, moved := m.line, m.wish.Held != "", m.wish.Paused, m.moved
		n.mu.Unlock()
		switch {
		case paused:
			return nil, nil, sandbox.Errorf(sandbox.FailedPrecondition, "paused", "the sandbox is paused").
				WithHint("resume it with `cloche resume`")
		case l != nil && !held:
			return m, l, nil
		}
		select {
		case <-moved:
		case <-m.ctx.Done():
		case <-ctx.Done():
			return nil, nil, sandbox.Errorf(sandbox.Unavailable, "guest_unreachable", "a snapshot of the sandbox is being taken: %w", ctx.Err())
		}
	}
}

// reach asks for something of a sandbox's line, and again where the line was
// replaced meanwhile.
func reach[T any](ctx context.Context, n *Node, id string, ask func(*machine, *line) (T, error)) (T, error) {
	for {
		m, l, err := n.lineTo(ctx, id)
		if err != nil {
			var none T
			return none, err
		}
		got, err := ask(m, l)
		if err == nil || ctx.Err() != nil || l.ctx.Err() == nil {
			return got, err
		}
	}
}

// Client returns the RPC client of a sandbox's agent, waiting for the agent
// while ctx lasts.
func (n *Node) Client(ctx context.Context, id string) (guestv1connect.GuestClient, error) {
	return reach(ctx, n, id, func(m *machine, l *line) (guestv1connect.GuestClient, error) {
		c, err := l.Client(ctx)
		if err != nil {
			return nil, err
		}
		return &counted{GuestClient: c, n: n, m: m}, nil
	})
}

// Extra returns a client on a connection of its own, for one bulk transfer or
// tunnel. The caller closes it.
func (n *Node) Extra(ctx context.Context, id string) (guestv1connect.GuestClient, io.Closer, error) {
	type extra struct {
		guestv1connect.GuestClient
		io.Closer
	}
	x, err := reach(ctx, n, id, func(m *machine, l *line) (extra, error) {
		end := n.begin(m)
		c, conn, err := l.Extra(ctx)
		if err != nil {
			end()
			return extra{}, err
		}
		return extra{c, &closer{Closer: conn, end: end}}, nil
	})
	return x.GuestClient, x.Closer, err
}

// closer tells once that it was closed.
type closer struct {
	io.Closer
	once sync.Once
	end  func()
}

// Close implements io.Closer.
func (c *closer) Close() error {
	err := c.Closer.Close()
	c.once.Do(c.end)
	return err
}

// begin notes that something which may change the guest's disk is under way,
// until the function that it returns is called.
func (n *Node) begin(m *machine) (end func()) {
	count := func(by int) {
		n.mu.Lock()
		defer n.mu.Unlock()
		m.changes++
		m.changing += by
	}
	count(1)
	return func() { count(-1) }
}

// counted is a client that notes the calls which may change the guest's disk
// (see checkpoint.go). Those that it does not have only read, or belong to a
// session that runs, or are made on extra connections, which count as a whole.
type counted struct {
	guestv1connect.GuestClient
	n *Node
	m *machine
}

// Start implements guestv1connect.GuestClient.
func (c *counted) Start(ctx context.Context, r *connect.Request[guestv1.StartRequest]) (*connect.Response[guestv1.StartResponse], error) {
	defer c.n.begin(c.m)()
	return c.GuestClient.Start(ctx, r)
}

// Mkdir implements guestv1connect.GuestClient.
func (c *counted) Mkdir(ctx context.Context, r *connect.Request[guestv1.MkdirRequest]) (*connect.Response[guestv1.MkdirResponse], error) {
	defer c.n.begin(c.m)()
	return c.GuestClient.Mkdir(ctx, r)
}

// Move implements guestv1connect.GuestClient.
func (c *counted) Move(ctx context.Context, r *connect.Request[guestv1.MoveRequest]) (*connect.Response[guestv1.MoveResponse], error) {
	defer c.n.begin(c.m)()
	return c.GuestClient.Move(ctx, r)
}

// Remove implements guestv1connect.GuestClient.
func (c *counted) Remove(ctx context.Context, r *connect.Request[guestv1.RemoveRequest]) (*connect.Response[guestv1.RemoveResponse], error) {
	defer c.n.begin(c.m)()
	return c.GuestClient.Remove(ctx, r)
}
