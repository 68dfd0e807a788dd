package dataplane

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
)

// keyring is a fake of auth's verifier: the role is the key.
type keyring struct{ project string }

func (k keyring) Verify(_ context.Context, key string) (sandbox.Caller, error) {
	role, project, _ := strings.Cut(key, "@")
	if project == "" {
		project = k.project
	}
	if !sandbox.Role(role).Valid() {
		return sandbox.Caller{}, sandbox.Errorf(sandbox.Denied, "unauthenticated", "no such key")
	}
	return sandbox.Caller{KeyID: "key_" + role, Project: project, Role: sandbox.Role(role)}, nil
}

// guest is a fake agent. A session's first argument says what it does.
type guest struct {
	guestv1connect.UnimplementedGuestHandler
	mu    sync.Mutex
	files map[string][]byte
	procs map[string]*proc
	lie   string // a way in which it is hostile
}

type proc struct {
	mu     sync.Mutex
	moved  chan struct{}
	events []*guestv1.Event
	total  uint64
	exited bool
	stdin  uint64
	closed bool
	reads  bool // takes stdin and echoes it
}

func (p *proc) emit(e *guestv1.Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.Offset = p.total
	p.total += uint64(len(e.GetStdout()) + len(e.GetStderr()))
	p.exited = e.GetExit() != nil
	p.events = append(p.events, e)
	close(p.moved)
	p.moved = make(chan struct{})
}

func out(b []byte) *guestv1.Event {
	return &guestv1.Event{Event: &guestv1.Event_Stdout{Stdout: b}}
}

func errOut(b []byte) *guestv1.Event {
	return &guestv1.Event{Event: &guestv1.Event_Stderr{Stderr: b}}
}

func exit(code int32) *guestv1.Event {
	return &guestv1.Event{Event: &guestv1.Event_Exit{Exit: &guestv1.Exit{Code: code, Reason: "exited", UnixNano: time.Now().UnixNano()}}}
}

func (g *guest) Start(_ context.Context, r *connect.Request[guestv1.StartRequest]) (*connect.Response[guestv1.StartResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	answer := connect.NewResponse(&guestv1.StartResponse{Pid: 7, StartedUnixNano: time.Now().UnixNano()})
	if g.procs[r.Msg.GetSession()] != nil {
		return answer, nil
	}
	p := &proc{moved: make(chan struct{})}
	g.procs[r.Msg.GetSession()] = p
	args := r.Msg.GetArgs()
	switch args[0] {
	case "both":
		p.emit(out([]byte("to stdout\n")))
		p.emit(errOut([]byte("to stderr\n")))
		p.emit(exit(3))
	case "bytes":
		all := make([]byte, 256)
		for i := range all {
			all[i] = byte(i)
		}
		p.emit(out(all))
		p.emit(exit(0))
	case "flood":
		n, _ := strconv.Atoi(args[1])
		go func() {
			for chunk := make([]byte, 64<<10); n > 0; n -= len(chunk) {
				chunk = bytes.Clone(chunk[:min(n, len(chunk))])
				rand.Read(chunk)
				p.emit(out(chunk))
			}
			p.emit(exit(0))
		}()
	case "cat":
		p.reads = true
	case "hang":
	}
	return answer, nil
}

func (g *guest) proc(id string) (*proc, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if p := g.procs[id]; p != nil {
		return p, nil
	}
	return nil, connect.NewError(connect.CodeNotFound, errors.New("no such session"))
}

func (g *guest) Follow(ctx context.Context, r *connect.Request[guestv1.FollowRequest], s *connect.ServerStream[guestv1.Event]) error {
	p, err := g.proc(r.Msg.GetSession())
	if err != nil {
		return err
	}
	for next := 0; ; {
		p.mu.Lock()
		events, moved := p.events[next:], p.moved
		p.mu.Unlock()
		for _, e := range events {
			next++
			if size := uint64(len(e.GetStdout()) + len(e.GetStderr())); e.GetExit() == nil && e.Offset+size <= r.Msg.GetOffset() {
				continue
			}
			if err := s.Send(e); err != nil {
				return err
			}
			if e.GetExit() != nil {
				return nil
			}
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (g *guest) Ack(context.Context, *connect.Request[guestv1.AckRequest]) (*connect.Response[guestv1.AckResponse], error) {
	return connect.NewResponse(&guestv1.AckResponse{}), nil
}

func (g *guest) Stdin(ctx context.Context, r *connect.Request[guestv1.StdinRequest]) (*connect.Response[guestv1.StdinResponse], error) {
	p, err := g.proc(r.Msg.GetSession())
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	data, reads := r.Msg.GetData(), p.reads
	if len(data) > 0 && !reads {
		p.mu.Unlock()
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("it reads no input"))
	}
	if r.Msg.GetOffset() > p.stdin {
		p.mu.Unlock()
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("gap"))
	}
	data = data[min(uint64(len(data)), p.stdin-r.Msg.GetOffset()):]
	p.stdin += uint64(len(data))
	closing := r.Msg.GetClose() && !p.closed
	p.closed = p.closed || closing
	taken := p.stdin
	p.mu.Unlock()
	if len(data) > 0 {
		p.emit(out(bytes.Clone(data)))
	}
	if closing {
		p.emit(exit(0))
	}
	return connect.NewResponse(&guestv1.StdinResponse{Accepted: taken, Closed: closing}), nil
}

func (g *guest) Signal(_ context.Context, r *connect.Request[guestv1.SignalRequest]) (*connect.Response[guestv1.SignalResponse], error) {
	p, err := g.proc(r.Msg.GetSession())
	if err != nil {
		return nil, err
	}
	p.emit(&guestv1.Event{Event: &guestv1.Event_Exit{Exit: &guestv1.Exit{
		Code: 128 + r.Msg.GetSignal(), Signal: r.Msg.GetSignal(), Reason: "signaled", UnixNano: time.Now().UnixNano(),
	}}})
	return connect.NewResponse(&guestv1.SignalResponse{}), nil
}

func (g *guest) Resize(_ context.Context, r *connect.Request[guestv1.ResizeRequest]) (*connect.Response[guestv1.ResizeResponse], error) {
	p, err := g.proc(r.Msg.GetSession())
	if err != nil {
		return nil, err
	}
	p.emit(out([]byte(fmt.Sprintf("%dx%d\n", r.Msg.GetSize().GetRows(), r.Msg.GetSize().GetCols()))))
	return connect.NewResponse(&guestv1.ResizeResponse{}), nil
}

func (g *guest) Stat(_ context.Context, r *connect.Request[guestv1.StatRequest]) (*connect.Response[guestv1.StatResponse], error) {
	info, err := g.info(r.Msg.GetPath())
	if g.lie == "no info" {
		return connect.NewResponse(&guestv1.StatResponse{}), nil
	}
	return connect.NewResponse(&guestv1.StatResponse{Info: info}), err
}

func (g *guest) info(path string) (*guestv1.FileInfo, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	b, ok := g.files[path]
	f := &guestv1.FileInfo{Name: path[strings.LastIndex(path, "/")+1:], Type: "file", Size: uint64(len(b)), Mode: 0o100644, MtimeUnixNano: 1}
	switch {
	case path == "/dir":
		f.Type = "dir"
	case path == "/proc/x":
		f.Size = 0
	case path == "/dev/zero":
		f.Type = "weird"
	case path == "/huge":
		f.Size = 1<<64 - 1
	case !ok:
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no \x1b[31msuch file"))
	}
	return f, nil
}

func (g *guest) List(_ context.Context, r *connect.Request[guestv1.ListRequest], s *connect.ServerStream[guestv1.ListResponse]) error {
	if r.Msg.GetPath() != "/dir" {
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("not a directory"))
	}
	if g.lie == "endless list" {
		for {
			batch := &guestv1.ListResponse{}
			for range 1000 {
				batch.Entries = append(batch.Entries, &guestv1.FileInfo{Name: "x", Type: "file"})
			}
			if err := s.Send(batch); err != nil {
				return err
			}
		}
	}
	return s.Send(&guestv1.ListResponse{Entries: []*guestv1.FileInfo{{Name: "b", Type: "file"}, {Name: "a", Type: "symlink", Target: "b"}}})
}

func (g *guest) Mkdir(context.Context, *connect.Request[guestv1.MkdirRequest]) (*connect.Response[guestv1.MkdirResponse], error) {
	return connect.NewResponse(&guestv1.MkdirResponse{}), nil
}

func (g *guest) Move(_ context.Context, r *connect.Request[guestv1.MoveRequest]) (*connect.Response[guestv1.MoveResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.files[r.Msg.GetTo()]; ok {
		return nil, connect.NewError(connect.CodeAlreadyExists, errors.New("it is there"))
	}
	g.files[r.Msg.GetTo()] = g.files[r.Msg.GetFrom()]
	delete(g.files, r.Msg.GetFrom())
	return connect.NewResponse(&guestv1.MoveResponse{}), nil
}

func (g *guest) Remove(_ context.Context, r *connect.Request[guestv1.RemoveRequest]) (*connect.Response[guestv1.RemoveResponse], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.files, r.Msg.GetPath())
	return connect.NewResponse(&guestv1.RemoveResponse{}), nil
}

func (g *guest) Read(_ context.Context, r *connect.Request[guestv1.ReadRequest], s *connect.ServerStream[guestv1.Chunk]) error {
	g.mu.Lock()
	b := g.files[r.Msg.GetPath()]
	g.mu.Unlock()
	if r.Msg.GetPath() == "/proc/x" {
		b = []byte("from proc")
	}
	if !r.Msg.GetWhole() {
		b = b[r.Msg.GetOffset() : r.Msg.GetOffset()+r.Msg.GetLength()]
	}
	switch g.lie {
	case "short":
		b = b[:len(b)/2]
	case "long":
		b = append(bytes.Clone(b), "more"...)
	}
	for len(b) > 0 {
		n := min(len(b), 1000)
		if err := s.Send(&guestv1.Chunk{Data: b[:n]}); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func (g *guest) Write(_ context.Context, s *connect.ClientStream[guestv1.WriteRequest]) (*connect.Response[guestv1.WriteResponse], error) {
	var all []byte
	var open *guestv1.WriteOpen
	for s.Receive() {
		if open == nil {
			open = s.Msg().GetOpen()
		}
		if open.GetPath() == "/full" {
			return nil, connect.NewError(connect.CodeResourceExhausted, errors.New("no space left"))
		}
		all = append(all, s.Msg().GetData()...)
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	written := uint64(len(all))
	if open.GetAtOffset() {
		all = append(bytes.Clone(g.files[open.GetPath()][:open.GetOffset()]), all...)
	}
	g.files[open.GetPath()] = all
	return connect.NewResponse(&guestv1.WriteResponse{Written: written}), nil
}

func (g *guest) TarOut(_ context.Context, _ *connect.Request[guestv1.TarOutRequest], s *connect.ServerStream[guestv1.Chunk]) error {
	return s.Send(&guestv1.Chunk{Data: []byte("a tar")})
}

func (g *guest) TarIn(_ context.Context, s *connect.ClientStream[guestv1.TarInRequest]) (*connect.Response[guestv1.TarInResponse], error) {
	n := uint64(0)
	for s.Receive() {
		n++
	}
	return connect.NewResponse(&guestv1.TarInResponse{Entries: n}), s.Err()
}

// Tunnel echoes on port 7; nothing listens elsewhere.
func (g *guest) Tunnel(_ context.Context, s *connect.BidiStream[guestv1.TunnelRequest, guestv1.Chunk]) error {
	first, err := s.Receive()
	if err != nil {
		return err
	}
	if first.GetAddress() != "127.0.0.1:7" {
		return connect.NewError(connect.CodeFailedPrecondition, errors.New("connection refused"))
	}
	if err := s.Send(&guestv1.Chunk{}); err != nil {
		return err
	}
	for {
		m, err := s.Receive()
		if errors.Is(err, io.EOF) || err == nil && m.GetCloseWrite() {
			return s.Send(&guestv1.Chunk{})
		}
		if err != nil {
			return err
		}
		if err := s.Send(&guestv1.Chunk{Data: m.GetData()}); err != nil {
			return err
		}
	}
}

// bench is a Plane with everything below it.
type bench struct {
	t       *testing.T
	plane   *Plane
	rows    *rows
	guest   *guest
	manager *session.Manager
	tokens  *auth.Tokens
	url     string
	client  *http.Client
	box     string
	project string
}

type guests struct{ client guestv1connect.GuestClient }

func (g guests) Client(context.Context, string) (guestv1connect.GuestClient, error) {
	return g.client, nil
}

func (g guests) Extra(context.Context, string) (guestv1connect.GuestClient, io.Closer, error) {
	return g.client, io.NopCloser(nil), nil
}

func newBench(t *testing.T) *bench {
	t.Helper()
	b := &bench{
		t: t, box: sandbox.NewID(sandbox.KindSandbox), project: sandbox.NewID(sandbox.KindProject),
		guest: &guest{files: map[string][]byte{}, procs: map[string]*proc{}},
		rows:  &rows{boxes: map[string]sandbox.Sandbox{}, sessions: map[string]sandbox.Session{}, keys: map[string]string{}},
	}
	b.rows.boxes[b.box] = sandbox.Sandbox{ID: b.box, Project: b.project, State: sandbox.StateRunning}
	mux := http.NewServeMux()
	mux.Handle(guestv1connect.NewGuestHandler(b.guest))
	agent := httptest.NewUnstartedServer(mux)
	agent.EnableHTTP2 = true
	agent.StartTLS()
	t.Cleanup(agent.Close)
	g := guests{guestv1connect.NewGuestClient(agent.Client(), agent.URL)}
	manager, err := session.New(session.Options{Dir: t.TempDir(), Guests: g, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	b.manager = manager
	t.Cleanup(func() { _ = manager.Close() })
	b.tokens = auth.NewTokens(make([]byte, 32))
	b.plane = New(Options{Identities: b.rows, Recorder: Recorded(manager), Guests: g, Keys: keyring{b.project}, Tokens: b.tokens})
	router, err := rest.NewRouter(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	b.plane.Register(router)
	base, stop := context.WithCancel(context.Background())
	srv := httptest.NewUnstartedServer(router)
	srv.Config.BaseContext = func(net.Listener) context.Context { return base }
	srv.Start()
	t.Cleanup(func() { stop(); srv.CloseClientConnections(); srv.Close() })
	b.url, b.client = srv.URL, srv.Client()
	return b
}
