// Package agent is the part of the guest that talks: it dials the host, says
// hello, and serves the Guest service of internal/guestapi on the connection
// that it dialled. It is the supervisor's child, runs as root, and keeps no
// state that matters: what must survive it (the key, the epoch, the setup,
// processes and their output) the supervisor keeps.
//
// cmd/cloche-guest calls it.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guest/vsock"
	"cloche.dev/cloche/internal/guest/wire"
	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	redialMin        = 10 * time.Millisecond
	redialMax        = time.Second
	dialMin          = time.Second // the least that a dial gets
	handshakeTimeout = 10 * time.Second
	maxExtra         = 64      // connections beside the control one
	maxRequest       = 2 << 20 // bytes of one RPC message
	maxStreams       = 2048    // RPCs under way on one connection

	// A connection that the host closed while a memory snapshot was taken may
	// never tell so (the event is lost in gVisor's save): asking it does. The
	// answer is given more time than a busy host needs.
	pingAfter   = 4 * time.Second
	pingTimeout = 15 * time.Second

	// agentScore is an oom_score_adj that makes the kernel take every other
	// process first.
	agentScore = -999
)

// Config says where the agent stands.
type Config struct {
	Supervisor net.Conn
	Dial       string // "unix:PATH" or "vsock:CID:PORT"
	Build      string
	Log        *slog.Logger
}

// Agent serves one guest.
type Agent struct {
	cfg   Config
	super *super
	mux   *http.ServeMux
	extra chan struct{} // tokens
	wg    sync.WaitGroup

	setting sync.Mutex    // one Setup at a time: its hooks may outlive the connection it came over
	syncing chan struct{} // the token of the one syncfs at a time

	freezer *freezer // nil where there is none

	mu    sync.Mutex
	state wire.State
	setup *guestv1.SetupRequest
}

// Run serves until ctx ends or the supervisor hangs up.
func Run(ctx context.Context, cfg Config) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a := &Agent{cfg: cfg, super: newSuper(cfg.Supervisor), mux: http.NewServeMux(), extra: make(chan struct{}, maxExtra), syncing: make(chan struct{}, 1), setup: &guestv1.SetupRequest{}}
	a.mux.Handle(guestv1connect.NewGuestHandler(a, connect.WithReadMaxBytes(maxRequest), connect.WithCompressMinBytes(1<<30), connect.WithInterceptors(rpcErrors{})))
	a.oomScore(agentScore)
	a.freezer = a.openFreezer(ctx)
	defer a.wg.Wait()
	defer cfg.Supervisor.Close()
	hungUp := make(chan error, 1)
	a.wg.Go(func() {
		hungUp <- a.super.run()
		cancel()
	})
	if err := a.recall(ctx); err != nil {
		return err
	}
	for lost := time.Now(); ctx.Err() == nil; {
		// A snapshot may be taken in the midst of this, which loses what a machine and
		// its host were saying to each other, and whoever restores it waits for what
		// is left of the time: a small part of that in which the host was away.
		away := time.Since(lost)
		conn, err := a.connect(ctx, guestapi.PurposeControl, "", max(dialMin, away/2))
		if err == nil {
			a.serve(ctx, conn)
			lost = time.Now()
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(min(max(redialMin, away/10), redialMax)):
		}
	}
	select {
	case err := <-hungUp:
		return fmt.Errorf("the supervisor hung up: %w", err)
	default:
		return ctx.Err()
	}
}

// oomScore says, in a virtual machine, how gladly the agent is killed when
// memory runs out. A gVisor machine's processes are told from outside.
func (a *Agent) oomScore(adj int) {
	if !strings.HasPrefix(a.cfg.Dial, "vsock:") {
		return
	}
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte(strconv.Itoa(adj)), 0o644); err != nil {
		a.cfg.Log.Warn("the agent's oom_score_adj can't be set", "error", err)
	}
}

// recall gets back what an earlier agent had the supervisor keep.
func (a *Agent) recall(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.super.call(ctx, wire.OpState, nil, &a.state); err != nil {
		return err
	}
	return proto.Unmarshal(a.state.Setup, a.setup)
}

// keep changes what the supervisor keeps.
func (a *Agent) keep(ctx context.Context, change func(*wire.State)) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	next := a.state
	change(&next)
	if err := a.super.call(ctx, wire.OpKeep, &next, nil); err != nil {
		return err
	}
	a.state = next
	return nil
}

// connect dials the host, for some time at most, and shakes hands.
func (a *Agent) connect(ctx context.Context, purpose, ticket string, within time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	dctx, dcancel := context.WithTimeout(ctx, within)
	defer dcancel()
	conn, err := dial(dctx, a.cfg.Dial)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := a.shake(ctx, conn, purpose, ticket); err != nil {
		_ = conn.Close()
		return nil, err
	}
	if !stop() {
		_ = conn.Close()
		return nil, ctx.Err()
	}
	return conn, nil
}

func (a *Agent) shake(ctx context.Context, conn net.Conn, purpose, ticket string) error {
	nonce, err := guestapi.ReadChallenge(conn)
	if err != nil {
		return err
	}
	a.mu.Lock()
	hello := &guestv1.Hello{
		MinVersion: guestapi.MinVersion, MaxVersion: guestapi.MaxVersion, Epoch: a.state.Epoch,
		Purpose: purpose, Ticket: ticket, Agent: a.cfg.Build,
	}
	if len(a.state.Key) != 0 && !fault.Is(fault.HelloUnproven) {
		hello.Proof = guestapi.Proof(a.state.Key, nonce, purpose, ticket)
	}
	a.mu.Unlock()
	if err := guestapi.WriteHello(conn, hello); err != nil {
		return err
	}
	answer, err := guestapi.ReadAnswer(conn)
	if err != nil {
		return err
	}
	if !answer.GetOk() {
		return fmt.Errorf("the host refused: %s", answer.GetReason())
	}
	if purpose != guestapi.PurposeControl {
		return nil
	}
	return a.keep(ctx, func(s *wire.State) {
		s.Epoch = answer.GetEpoch()
		if len(answer.GetKey()) != 0 {
			s.Key = answer.GetKey()
		}
	})
}

func dial(ctx context.Context, address string) (net.Conn, error) {
	scheme, rest, _ := strings.Cut(address, ":")
	switch scheme {
	case "unix":
		return new(net.Dialer).DialContext(ctx, "unix", rest)
	case "vsock":
		cid, port, _ := strings.Cut(rest, ":")
		c, err1 := strconv.ParseUint(cid, 10, 32)
		p, err2 := strconv.ParseUint(port, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		return vsock.Dial(ctx, uint32(c), uint32(p))
	}
	return nil, fmt.Errorf("can't dial %q", address)
}

// serve serves RPCs on conn until it ends.
func (a *Agent) serve(ctx context.Context, conn net.Conn) {
	l := newOneListener(conn)
	srv := &http.Server{ //nolint:gosec // the host is trusted, and may be silent for hours: no time limits
		Handler:     a.mux,
		BaseContext: func(net.Listener) context.Context { return ctx },
		Protocols:   new(http.Protocols),
		ErrorLog:    slog.NewLogLogger(a.cfg.Log.Handler(), slog.LevelDebug),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxStreams, MaxReadFrameSize: 256 << 10,
			MaxReceiveBufferPerConnection: 2 << 20, MaxReceiveBufferPerStream: 1 << 20,
			SendPingTimeout: pingAfter, PingTimeout: pingTimeout,
		},
	}
	srv.Protocols.SetUnencryptedHTTP2(true)
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	if err := srv.Serve(l); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, http.ErrServerClosed) {
		a.cfg.Log.Warn("serving the host failed", "error", err)
	}
	_ = srv.Close()
}

// OpenExtra implements the service.
func (a *Agent) OpenExtra(ctx context.Context, req *connect.Request[guestv1.OpenExtraRequest]) (*connect.Response[guestv1.OpenExtraResponse], error) {
	if t := req.Msg.GetTicket(); t == "" || len(t) > 256 {
		return nil, sandbox.Errorf(sandbox.Invalid, "bad_ticket", "an extra connection needs a ticket")
	}
	select {
	case a.extra <- struct{}{}:
	default:
		return nil, sandbox.Errorf(sandbox.Quota, "too_many_connections", "%d transfers and tunnels are under way", maxExtra)
	}
	conn, err := a.connect(ctx, guestapi.PurposeExtra, req.Msg.GetTicket(), handshakeTimeout)
	if err != nil {
		<-a.extra
		return nil, sandbox.Errorf(sandbox.Unavailable, "dial_failed", "the guest can't dial: %w", err)
	}
	// It must outlive this RPC; the supervisor's end and the host's hanging up end it.
	actx := context.WithoutCancel(ctx)
	a.wg.Go(func() {
		defer func() { <-a.extra }()
		ctx, cancel := context.WithCancel(actx)
		defer cancel()
		done := make(chan struct{})
		defer close(done)
		go func() {
			select {
			case <-a.super.gone:
				cancel()
			case <-done:
			}
		}()
		a.serve(ctx, conn)
	})
	return connect.NewResponse(&guestv1.OpenExtraResponse{}), nil
}
