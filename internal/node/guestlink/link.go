// Package guestlink is the host's side of the connections that a sandbox's
// agent dials: it accepts them, lets the guest prove who it is, gives it its
// setup, and hands out RPC clients.
//
// Invariants. What dials is hostile until it has proven itself with the
// sandbox's key, and its bytes stay hostile after that: everything that is
// read is bounded in size, number and time, and nothing that a guest sends
// can block or grow the host. A connection without proof never displaces one
// with. Beside a few that have yet to prove themselves and the extra ones that
// were asked for, there are at most two connections: the newest control
// connection that is being set up, and the one that is served, which lasts until
// a newer one has been set up. A client is published only after the guest took its setup, and, on a
// fresh or restored machine, only after it was recorded that the guest has its
// key: so no process of a user exists in a fresh one before every hello needs
// its proof, and what an image's key proves ends with the first welcome.
//
// internal/node calls it, one Link per machine.
package guestlink

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	maxPending    = 4 // connections that have not proven themselves
	helloTimeout  = 5 * time.Second
	setupTimeout  = 30 * time.Second
	hooksTimeout  = 45 * time.Second // what the guest's on_restore hooks may add to it
	maxExtra      = 64               // extra connections, asked for and open
	entropySize   = 64
	unprovenPause = 2 * time.Millisecond
	listenRetry   = 100 * time.Millisecond
)

// Config is what a Link needs to know about its machine.
type Config struct {
	Listen func() (net.Listener, error) // the machine's listener, anew after each Close (driver.Machine.Guest)
	Key    []byte                       // the sandbox's key
	// Former is the key that the guest has in the image it was restored from.
	// Until it was welcomed it may prove itself with that, and is answered with Key.
	Former   []byte
	Welcomed bool         // the guest has the key: every hello needs its proof
	Welcome  func() error // records that the guest has the key, before any client is given out
	Epoch    uint64
	Setup    *guestv1.SetupRequest // its clock and entropy are filled in at each hello
	// SetUp, where not nil, is told what the guest answered each Setup with,
	// which is the guest's own word. It must not wait.
	SetUp func(*guestv1.SetupResponse)
	Log   *slog.Logger
}

// Link is the connection to one machine's agent, however often it is made anew.
type Link struct {
	cfg    Config
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
	slots  chan struct{} // tokens of extra connections

	mu       sync.Mutex
	extras   int           // extra connections, asked for and open
	fewer    chan struct{} // closed and replaced when extras becomes 0
	ln       net.Listener
	welcomed bool
	pending  []net.Conn
	setting  net.Conn // the control connection that is being set up, nil where none is
	control  *peer
	gen      uint64
	changed  chan struct{} // closed and replaced when control changes
	tickets  map[string]chan *peer
	closed   bool

	connected chan struct{} // holds a token when a connection came that nobody was told of
}

// Start starts listening for the agent.
func Start(cfg Config) *Link {
	ctx, cancel := context.WithCancel(context.Background())
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	l := &Link{
		cfg: cfg, ctx: ctx, cancel: cancel, welcomed: cfg.Welcomed, changed: make(chan struct{}),
		fewer: make(chan struct{}), tickets: map[string]chan *peer{}, slots: make(chan struct{}, maxExtra),
		connected: make(chan struct{}, 1),
	}
	l.wg.Go(l.listen)
	return l
}

// Close ends every connection and returns when nothing of the link runs any more.
func (l *Link) Close() {
	l.cancel()
	l.mu.Lock()
	l.closed = true
	if l.ln != nil {
		_ = l.ln.Close()
	}
	for _, c := range l.pending {
		_ = c.Close()
	}
	if l.setting != nil {
		_ = l.setting.Close()
	}
	if l.control != nil {
		_ = l.control.Close()
	}
	l.mu.Unlock()
	l.wg.Wait()
}

// Ready waits until the agent is there and has taken its setup.
func (l *Link) Ready(ctx context.Context) error {
	_, err := l.wait(ctx)
	return err
}

// Client returns a client of the agent. It waits for the agent while ctx
// lasts; then the error is Unavailable, "guest_unreachable".
func (l *Link) Client(ctx context.Context) (guestv1connect.GuestClient, error) {
	p, err := l.wait(ctx)
	if err != nil {
		return nil, err
	}
	return p.rpc, nil
}

// Generation counts the control connections so far; the channel is closed
// when the next one comes, or when the current one ends.
func (l *Link) Generation() (uint64, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.gen, l.changed
}

// Connected receives once after each new control connection (several in a row
// may be told as one), for the one watcher of this machine.
func (l *Link) Connected() <-chan struct{} { return l.connected }

// Live tells whether the agent is connected now.
func (l *Link) Live() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.control != nil
}

func unreachable(why error) error {
	return sandbox.Errorf(sandbox.Unavailable, "guest_unreachable", "the sandbox's agent is not connected: %w", why)
}

func (l *Link) wait(ctx context.Context) (*peer, error) {
	for {
		l.mu.Lock()
		p, changed := l.control, l.changed
		l.mu.Unlock()
		if p != nil {
			return p, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, unreachable(ctx.Err())
		case <-l.ctx.Done():
			return nil, unreachable(errors.New("its machine is being let go"))
		}
	}
}

// Extra asks the agent for a connection of its own, for one transfer or
// tunnel. Closing it ends whatever still runs on it.
func (l *Link) Extra(ctx context.Context) (guestv1connect.GuestClient, io.Closer, error) {
	select {
	case l.slots <- struct{}{}:
	case <-ctx.Done():
		return nil, nil, sandbox.Errorf(sandbox.Unavailable, "too_many_transfers", "%d transfers and tunnels to this sandbox are open", maxExtra)
	}
	l.count(1)
	p, err := l.extra(ctx)
	if err != nil {
		l.count(-1)
		<-l.slots
		return nil, nil, err
	}
	stop := context.AfterFunc(l.ctx, func() { _ = p.Close() })
	return p.rpc, &extraConn{peer: p, free: func() {
		stop()
		l.count(-1)
		<-l.slots
	}}, nil
}

func (l *Link) count(by int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.extras += by; l.extras == 0 {
		close(l.fewer)
		l.fewer = make(chan struct{})
	}
}

// Extras counts the extra connections that have been asked for and not been
// closed yet: transfers and tunnels under way.
func (l *Link) Extras() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.extras
}

// WaitExtras waits until there are none, and returns ctx's error when that
// ends first. New ones may be asked for right after.
func (l *Link) WaitExtras(ctx context.Context) error {
	l.mu.Lock()
	n, fewer := l.extras, l.fewer
	l.mu.Unlock()
	if n == 0 {
		return nil
	}
	select {
	case <-fewer:
		return nil
	case <-l.ctx.Done():
		return nil // they were cut
	case <-ctx.Done():
		return ctx.Err()
	}
}

type extraConn struct {
	*peer
	once sync.Once
	free func()
}

// Close implements io.Closer.
func (c *extraConn) Close() error {
	err := c.peer.Close()
	c.once.Do(c.free)
	return err
}

func (l *Link) extra(ctx context.Context) (*peer, error) {
	client, err := l.Client(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, setupTimeout)
	defer cancel()
	ticket, got := rand.Text(), make(chan *peer, 1)
	l.mu.Lock()
	l.tickets[ticket] = got
	l.mu.Unlock()
	_, err = client.OpenExtra(ctx, connect.NewRequest(&guestv1.OpenExtraRequest{Ticket: ticket}))
	if err == nil {
		select {
		case p := <-got:
			return p, nil
		case <-ctx.Done():
			err = unreachable(ctx.Err())
		case <-l.ctx.Done():
			err = unreachable(l.ctx.Err())
		}
	}
	l.mu.Lock()
	delete(l.tickets, ticket)
	l.mu.Unlock()
	select {
	case p := <-got: // it came after all
		_ = p.Close()
	default:
	}
	return nil, guestapi.FromRPC(err)
}

// setupNow is the setup with the clock of now and fresh entropy.
func (l *Link) setupNow() *guestv1.SetupRequest {
	m := new(guestv1.SetupRequest)
	if l.cfg.Setup != nil {
		m = proto.CloneOf(l.cfg.Setup)
	}
	m.ClockUnixNano = time.Now().UnixNano()
	m.Entropy = make([]byte, entropySize)
	rand.Read(m.Entropy) // never fails
	return m
}
