package session

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sort"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

const ringSize = 1 << 20

// fakeGuest is a guest whose commands are Go functions. It keeps what is not
// acknowledged and makes commands wait when that is 1 MiB, as the real one.
type fakeGuest struct {
	guestv1connect.UnimplementedGuestHandler
	run    func(p *fakeProc, args []string)
	follow func(ctx context.Context, at uint64, s *connect.ServerStream[guestv1.Event]) error // hostile

	mu     sync.Mutex
	procs  map[string]*fakeProc
	starts int
	infos  []*guestv1.SessionInfo // hostile: what it says of its sessions, if not nil

	arrived chan struct{} // tells of a start that waits at the gate
	stdin   []byte
	signal  int32
	kill    func(p *fakeProc) // what a signal does
	gate    chan struct{}     // starts wait for it, if there is one
	size    *guestv1.WindowSize
	acks    int
}

type chunk struct {
	at     uint64
	data   []byte
	stderr bool
}

type fakeProc struct {
	mu       sync.Mutex
	ring     []chunk
	acked    uint64
	produced uint64
	exit     *guestv1.Exit
	freed    bool
	moved    chan struct{}
	room     chan struct{}
}

func newGuest(run func(p *fakeProc, args []string)) *fakeGuest {
	return &fakeGuest{run: run, procs: map[string]*fakeProc{}, arrived: make(chan struct{}, 8)}
}

// serve makes the guest reachable; the URL takes HTTP/2 without TLS.
func (g *fakeGuest) serve(t testing.TB) string {
	mux := http.NewServeMux()
	mux.Handle(guestv1connect.NewGuestHandler(g))
	srv := httptest.NewUnstartedServer(mux)
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	return srv.URL
}

// link is one connection's worth of client; cut breaks it.
type link struct {
	mu     sync.Mutex
	url    string
	broken bool
	conns  []net.Conn
	client guestv1connect.GuestClient
}

func newLink(t testing.TB, url string) *link {
	l := &link{url: url}
	tr := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err == nil {
			l.mu.Lock()
			l.conns = append(l.conns, c)
			l.mu.Unlock()
		}
		return c, err
	}}
	tr.Protocols.SetUnencryptedHTTP2(true)
	l.client = guestv1connect.NewGuestClient(&http.Client{Transport: tr}, url,
		connect.WithReadMaxBytes(4<<20), connect.WithAcceptCompression("gzip", nil, nil))
	if t != nil {
		t.Cleanup(func() { l.cut(); tr.CloseIdleConnections() })
	}
	return l
}

func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.conns {
		_ = c.Close()
	}
	l.conns = nil
}

func (l *link) setBroken(b bool) {
	l.mu.Lock()
	l.broken = b
	l.mu.Unlock()
	if b {
		l.cut()
	}
}

func (l *link) Client(context.Context, string) (guestv1connect.GuestClient, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.broken {
		return nil, sandbox.Errorf(sandbox.Unavailable, "agent_away", "no agent")
	}
	return l.client, nil
}

func (g *fakeGuest) proc(id string) (*fakeProc, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := g.procs[id]; p != nil {
		return p, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, errors.New("no such session"))
}

func (g *fakeGuest) Start(_ context.Context, r *connect.Request[guestv1.StartRequest]) (*connect.Response[guestv1.StartResponse], error) {
	g.mu.Lock()
	gate := g.gate
	g.mu.Unlock()
	if gate != nil {
		g.arrived <- struct{}{}
		<-gate
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.procs[r.Msg.Session] == nil {
		p := &fakeProc{moved: make(chan struct{}), room: make(chan struct{})}
		g.procs[r.Msg.Session] = p
		g.starts++
		go g.run(p, r.Msg.Args)
	}
	return connect.NewResponse(&guestv1.StartResponse{Pid: 42, StartedUnixNano: time.Now().UnixNano()}), nil
}

func (p *fakeProc) write(stderr bool, b []byte) {
	b = append([]byte(nil), b...)
	for len(b) > 0 {
		p.mu.Lock()
		room := int(ringSize - (p.produced - p.acked))
		wait := p.room
		if p.freed {
			p.mu.Unlock()
			return
		}
		if room <= 0 {
			p.mu.Unlock()
			<-wait
			continue
		}
		n := min(room, len(b), 64<<10)
		p.ring = append(p.ring, chunk{p.produced, b[:n], stderr})
		p.produced += uint64(n)
		b = b[n:]
		close(p.moved)
		p.moved = make(chan struct{})
		p.mu.Unlock()
	}
}

func (p *fakeProc) finish(x *guestv1.Exit) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.exit = x
	close(p.moved)
	p.moved = make(chan struct{})
}

func (g *fakeGuest) Follow(ctx context.Context, r *connect.Request[guestv1.FollowRequest], s *connect.ServerStream[guestv1.Event]) error {
	if g.follow != nil {
		return g.follow(ctx, r.Msg.Offset, s)
	}
	p, err := g.proc(r.Msg.Session)
	if err != nil {
		return err
	}
	at := r.Msg.Offset
	for {
		p.mu.Lock()
		first := sort.Search(len(p.ring), func(i int) bool { return p.ring[i].at+uint64(len(p.ring[i].data)) > at })
		send := slices.Clone(p.ring[first:])
		exit, moved := p.exit, p.moved
		p.mu.Unlock()
		for _, c := range send {
			// Sent whole, although at may lie inside: duplicates are legal.
			ev := &guestv1.Event{Offset: c.at, Event: &guestv1.Event_Stdout{Stdout: c.data}}
			if c.stderr {
				ev.Event = &guestv1.Event_Stderr{Stderr: c.data}
			}
			if err := s.Send(ev); err != nil {
				return err
			}
			at = c.at + uint64(len(c.data))
		}
		if len(send) > 0 {
			continue
		}
		if exit != nil {
			return s.Send(&guestv1.Event{Offset: at, Event: &guestv1.Event_Exit{Exit: exit}})
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-moved:
		}
	}
}

func (g *fakeGuest) Ack(_ context.Context, r *connect.Request[guestv1.AckRequest]) (*connect.Response[guestv1.AckResponse], error) {
	p, err := g.proc(r.Msg.Session)
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	g.acks++
	if r.Msg.Exit {
		delete(g.procs, r.Msg.Session)
	}
	g.mu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.freed = p.freed || r.Msg.Exit
	if r.Msg.Offset > p.acked && r.Msg.Offset <= p.produced {
		p.acked = r.Msg.Offset
		for len(p.ring) > 0 && p.ring[0].at+uint64(len(p.ring[0].data)) <= p.acked {
			p.ring = p.ring[1:]
		}
	}
	close(p.room)
	p.room = make(chan struct{})
	return connect.NewResponse(&guestv1.AckResponse{}), nil
}

func (g *fakeGuest) Sessions(context.Context, *connect.Request[guestv1.SessionsRequest]) (*connect.Response[guestv1.SessionsResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.infos != nil {
		return connect.NewResponse(&guestv1.SessionsResponse{Sessions: g.infos}), nil
	}
	var list []*guestv1.SessionInfo
	for id, p := range g.procs {
		p.mu.Lock()
		list = append(list, &guestv1.SessionInfo{Session: id, Pid: 42, Exited: p.exit != nil, Acked: p.acked, Produced: p.produced})
		p.mu.Unlock()
	}
	return connect.NewResponse(&guestv1.SessionsResponse{Sessions: list}), nil
}

func (g *fakeGuest) Stdin(_ context.Context, r *connect.Request[guestv1.StdinRequest]) (*connect.Response[guestv1.StdinResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.procs[r.Msg.Session] == nil {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no such session"))
	}
	if skip := uint64(len(g.stdin)) - r.Msg.Offset; skip < uint64(len(r.Msg.Data)) {
		g.stdin = append(g.stdin, r.Msg.Data[skip:]...)
	}
	return connect.NewResponse(&guestv1.StdinResponse{Accepted: uint64(len(g.stdin)), Closed: r.Msg.Close}), nil
}

func (g *fakeGuest) Signal(_ context.Context, r *connect.Request[guestv1.SignalRequest]) (*connect.Response[guestv1.SignalResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.signal = r.Msg.Signal
	if p := g.procs[r.Msg.Session]; p == nil {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no such session"))
	} else if g.kill != nil {
		g.kill(p)
	}
	return connect.NewResponse(&guestv1.SignalResponse{}), nil
}

func (g *fakeGuest) Resize(_ context.Context, r *connect.Request[guestv1.ResizeRequest]) (*connect.Response[guestv1.ResizeResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.size = r.Msg.Size
	return connect.NewResponse(&guestv1.ResizeResponse{}), nil
}

// snapshot is another guest in the state that this one is in now. Its commands
// do nothing by themselves.
func (g *fakeGuest) snapshot() *fakeGuest {
	g.mu.Lock()
	defer g.mu.Unlock()
	c := newGuest(g.run)
	for id, p := range g.procs {
		p.mu.Lock()
		c.procs[id] = &fakeProc{
			ring: slices.Clone(p.ring), acked: p.acked, produced: p.produced, exit: p.exit,
			moved: make(chan struct{}), room: make(chan struct{}),
		}
		p.mu.Unlock()
	}
	return c
}

// has tells whether the guest knows a session.
func (g *fakeGuest) has(id string) bool {
	_, err := g.proc(id)
	return err == nil
}

// say makes the command that the guest knows as id write.
func (g *fakeGuest) say(t testing.TB, id string, text string) {
	t.Helper()
	p, err := g.proc(id)
	must(t, err)
	p.write(false, []byte(text))
}

func (g *fakeGuest) end(t testing.TB, id string, code int32) {
	t.Helper()
	p, err := g.proc(id)
	must(t, err)
	p.finish(exited(code))
}
