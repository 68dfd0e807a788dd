package guestlink

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
)

// fakeAgent dials the link as an agent does, with what it has for a key.
type fakeAgent struct {
	guestv1connect.UnimplementedGuestHandler
	f *fixture

	mu     sync.Mutex
	key    []byte
	setups []*guestv1.SetupRequest
	refuse bool // to take its setup
	reply  *guestv1.SetupResponse

	sessions []*guestv1.SessionInfo
}

// Setup implements the service.
func (a *fakeAgent) Setup(_ context.Context, r *connect.Request[guestv1.SetupRequest]) (*connect.Response[guestv1.SetupResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.refuse {
		return nil, connect.NewError(connect.CodeInternal, errors.New("no"))
	}
	a.setups = append(a.setups, r.Msg)
	if a.reply != nil {
		return connect.NewResponse(a.reply), nil
	}
	return connect.NewResponse(&guestv1.SetupResponse{Hooks: []*guestv1.HookResult{{Name: "h", Code: 1, Output: "secret"}}}), nil
}

// taken is which setups it was given.
func (a *fakeAgent) taken() []*guestv1.SetupRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.setups
}

// Sessions implements the service.
func (a *fakeAgent) Sessions(context.Context, *connect.Request[guestv1.SessionsRequest]) (*connect.Response[guestv1.SessionsResponse], error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return connect.NewResponse(&guestv1.SessionsResponse{Sessions: a.sessions}), nil
}

// OpenExtra implements the service.
func (a *fakeAgent) OpenExtra(_ context.Context, r *connect.Request[guestv1.OpenExtraRequest]) (*connect.Response[guestv1.OpenExtraResponse], error) {
	c, _, err := a.f.say(a.key, guestapi.PurposeExtra, r.Msg.Ticket)
	if err == nil {
		a.serve(c)
	}
	return connect.NewResponse(&guestv1.OpenExtraResponse{}), err
}

// dial says hello and serves, if it is let in. lose: the answer's key is not kept.
func (a *fakeAgent) dial(lose bool) (*guestv1.HelloAnswer, error) {
	c, answer, err := a.f.say(a.key, guestapi.PurposeControl, "")
	if err != nil {
		return nil, err
	}
	if len(answer.Key) != 0 && !lose {
		a.key = answer.Key
	}
	if lose {
		_ = c.Close()
		return answer, nil
	}
	a.serve(c)
	return answer, nil
}

func (a *fakeAgent) serve(c net.Conn) {
	mux := http.NewServeMux()
	mux.Handle(guestv1connect.NewGuestHandler(a))
	a.answer(c, mux)
}

func (a *fakeAgent) answer(c net.Conn, h http.Handler) {
	_ = c.SetDeadline(time.Time{})
	srv := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	l := &one{c: make(chan net.Conn, 1), done: make(chan struct{}), addr: c.LocalAddr()}
	srv.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			_ = l.Close()
		}
	}
	l.c <- c
	stopped := make(chan struct{})
	go func() { _ = srv.Serve(l); close(stopped) }()
	a.f.t.Cleanup(func() { _ = srv.Close(); <-stopped })
}

// one is a listener of one connection.
type one struct {
	c    chan net.Conn
	done chan struct{}
	once sync.Once
	addr net.Addr
}

func (o *one) Accept() (net.Conn, error) {
	select {
	case c := <-o.c:
		return c, nil
	case <-o.done:
		return nil, net.ErrClosed
	}
}
func (o *one) Close() error   { o.once.Do(func() { close(o.done) }); return nil }
func (o *one) Addr() net.Addr { return o.addr }

// say shakes hands with the given key, nil for none.
func (f *fixture) say(key []byte, purpose, ticket string) (net.Conn, *guestv1.HelloAnswer, error) {
	c := f.dial()
	nonce, err := guestapi.ReadChallenge(c)
	if err != nil {
		return c, nil, err
	}
	h := &guestv1.Hello{MinVersion: 1, MaxVersion: 1, Purpose: purpose, Ticket: ticket}
	if key != nil {
		h.Proof = guestapi.Proof(key, nonce, h.Purpose, ticket)
	}
	if err := guestapi.WriteHello(c, h); err != nil {
		return c, nil, err
	}
	a, err := guestapi.ReadAnswer(c)
	return c, a, err
}

// restored is a link to a machine that was restored from an image in which
// the guest has former.
func restored(t *testing.T, former, key []byte, welcomed bool, change func(*Config)) *fixture {
	f := &fixture{t: t, sock: filepath.Join(t.TempDir(), "s"), key: key}
	cfg := Config{
		Listen: func() (net.Listener, error) {
			_ = os.Remove(f.sock)
			return net.Listen("unix", f.sock)
		},
		Key: key, Former: former, Welcomed: welcomed, Epoch: 8,
		Setup:   &guestv1.SetupRequest{Hostname: "box", Restored: true, Generation: 8},
		Welcome: func() error { f.mu.Lock(); f.seen++; f.mu.Unlock(); return nil },
	}
	if change != nil {
		change(&cfg)
	}
	f.link = Start(cfg)
	t.Cleanup(f.link.Close)
	return f
}

func (f *fixture) ready() error {
	ctx, cancel := context.WithTimeout(f.t.Context(), 30*time.Second)
	defer cancel()
	return f.link.Ready(ctx)
}

func TestRestoredGuest(t *testing.T) {
	former, key := guestapi.NewKey(), guestapi.NewKey()
	var told []*guestv1.SetupResponse
	f := restored(t, former, key, false, func(c *Config) {
		c.SetUp = func(r *guestv1.SetupResponse) { told = append(told, r) }
	})
	for name, k := range map[string][]byte{"none": nil, "another": guestapi.NewKey()} {
		if _, a, err := f.hello(k); err == nil {
			t.Errorf("%s: %v", name, a)
		}
	}
	a := &fakeAgent{f: f, key: former}
	// The answer is lost on its way: the guest has its old key still, and is taken again.
	for range 2 {
		if got, err := a.dial(true); err != nil || !bytes.Equal(got.GetKey(), key) || got.GetEpoch() != 8 {
			t.Fatalf("%v %v", got, err)
		}
	}
	if _, err := a.dial(false); err != nil || !bytes.Equal(a.key, key) {
		t.Fatal(err)
	}
	if err := f.ready(); err != nil || f.seen != 1 {
		t.Fatal(err, f.seen)
	}
	if len(a.setups) != 1 || !a.setups[0].Restored || len(a.setups[0].Entropy) != entropySize || a.setups[0].ClockUnixNano == 0 {
		t.Errorf("%v", a.setups)
	}
	if len(told) != 1 || told[0].Hooks[0].Name != "h" {
		t.Errorf("%v", told)
	}
	// From now on the image's key, which every clone of it knows, opens nothing.
	for name, k := range map[string][]byte{"none": nil, "the image's": former} {
		if _, a, err := f.hello(k); err == nil {
			t.Errorf("welcomed, %s: %v", name, a)
		}
	}
	if got, err := a.dial(false); err != nil || len(got.GetKey()) != 0 {
		t.Errorf("%v %v", got, err)
	}
	_ = f.ready()
	if n := len(a.setups); n == 2 && bytes.Equal(a.setups[0].Entropy, a.setups[1].Entropy) {
		t.Error("the same entropy twice")
	}
}

// TestCrashBeforeWelcome: the guest has taken its new key, and the host ended
// before it had recorded that. The next host takes either key, until it has.
func TestCrashBeforeWelcome(t *testing.T) {
	former, key := guestapi.NewKey(), guestapi.NewKey()
	f := restored(t, former, key, false, func(c *Config) { c.Welcome = func() error { return errors.New("the disk is full") } })
	a := &fakeAgent{f: f, key: former}
	if _, err := a.dial(false); err != nil || !bytes.Equal(a.key, key) {
		t.Fatal(err)
	}
	waitSetups(t, a, 1)
	if f.link.Live() {
		t.Fatal("it is live, and nobody knows that it has its key")
	}
	f.link.Close()

	f = restored(t, former, key, false, nil) // with what the journal of before says
	a.f = f
	if got, err := a.dial(false); err != nil || len(got.GetKey()) != 0 {
		t.Fatalf("with the new key: %v %v", got, err)
	}
	if err := f.ready(); err != nil || f.seen != 1 {
		t.Fatal(err)
	}
	f.link.Close()

	f = restored(t, former, key, true, nil)
	a.f = f
	if _, err := a.dial(false); err != nil {
		t.Fatal(err)
	}
	if err := f.ready(); err != nil || f.seen != 0 {
		t.Fatal(err)
	}
}

// TestRefusedSetup: a guest that did not take its setup is not welcomed, so
// that it may come with its former key once more.
func TestRefusedSetup(t *testing.T) {
	former, key := guestapi.NewKey(), guestapi.NewKey()
	f := restored(t, former, key, false, nil)
	a := &fakeAgent{f: f, key: former, refuse: true}
	if _, err := a.dial(false); err != nil {
		t.Fatal(err)
	}
	if f.link.Live() || f.seen != 0 {
		t.Error("it is live")
	}
	b := &fakeAgent{f: f, key: former}
	if _, err := b.dial(false); err != nil {
		t.Fatal(err)
	}
	if err := f.ready(); err != nil || f.seen != 1 {
		t.Fatal(err)
	}
}

func waitSetups(t *testing.T, a *fakeAgent, n int) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		a.mu.Lock()
		got := len(a.setups)
		a.mu.Unlock()
		if got >= n {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d setups", got)
		}
	}
}

func TestExtras(t *testing.T) {
	f := newFixture(t, true)
	a := &fakeAgent{f: f, key: f.key}
	if _, err := a.dial(false); err != nil {
		t.Fatal(err)
	}
	if n := f.link.Extras(); n != 0 {
		t.Fatalf("%d extras", n)
	}
	if err := f.link.WaitExtras(t.Context()); err != nil {
		t.Fatal(err)
	}
	var closers []func() error
	for range 2 {
		_, c, err := f.link.Extra(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		closers = append(closers, c.Close)
	}
	if n := f.link.Extras(); n != 2 {
		t.Fatalf("%d extras", n)
	}
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := f.link.WaitExtras(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	got := make(chan error, 1)
	go func() { got <- f.link.WaitExtras(t.Context()) }()
	_, _ = closers[0](), closers[0]() // closing twice counts once
	select {
	case err := <-got:
		t.Fatalf("one is open still: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	_ = closers[1]()
	if err := <-got; err != nil || f.link.Extras() != 0 {
		t.Fatal(err, f.link.Extras())
	}
	// One that could not be had is not counted; closing the link ends the waiting.
	ended, end := context.WithCancel(t.Context())
	end()
	if _, _, err := f.link.Extra(ended); err == nil || f.link.Extras() != 0 {
		t.Fatal(err, f.link.Extras())
	}
	_, c, err := f.link.Extra(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	go func() { got <- f.link.WaitExtras(t.Context()) }()
	f.link.Close()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}
