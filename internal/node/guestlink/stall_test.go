package guestlink

import (
	"context"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
)

// census counts the connections that the host has open.
type census struct {
	net.Listener
	open, most *atomic.Int64
}

func (c census) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	for n := c.open.Add(1); ; {
		most := c.most.Load()
		if n <= most || c.most.CompareAndSwap(most, n) {
			break
		}
	}
	return &countedConn{Conn: conn, open: c.open}, nil
}

type countedConn struct {
	net.Conn
	once sync.Once
	open *atomic.Int64
}

func (c *countedConn) Close() error {
	c.once.Do(func() { c.open.Add(-1) })
	return c.Conn.Close()
}

// counting is a welcomed machine's link whose open connections are counted.
func counting(t *testing.T) (f *fixture, open, most *atomic.Int64) {
	key := guestapi.NewKey()
	open, most = new(atomic.Int64), new(atomic.Int64)
	f = restored(t, nil, key, true, func(c *Config) {
		listen := c.Listen
		c.Listen = func() (net.Listener, error) {
			ln, err := listen()
			return census{ln, open, most}, err
		}
	})
	return f, open, most
}

// half answers every call with the beginning of a message, and then no more.
var half = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/grpc+proto")
	_, _ = w.Write(append([]byte{0, 0, 0x1f, 0xff, 0xff}, make([]byte, 1<<20)...))
	_ = http.NewResponseController(w).Flush()
	<-r.Context().Done()
})

// TestStalledSetups: who has the key makes many connections and finishes the
// setup of none. The host has one of them at a time, and the newest wins.
func TestStalledSetups(t *testing.T) {
	f, open, most := counting(t)
	a := &fakeAgent{f: f, key: f.key}
	before := runtime.NumGoroutine()
	for range 200 {
		c, _, err := f.hello(f.key)
		if err != nil {
			t.Fatal(err)
		}
		a.answer(c, half)
	}
	eventually(t, "the host lets go of all but one", func() bool { return open.Load() <= 1 && runtime.NumGoroutine()-before <= 40 })
	if n := most.Load(); n > 30 {
		t.Errorf("the host had %d connections at once", n)
	}
	if f.link.Live() {
		t.Error("it is live, and has not taken its setup")
	}
	if _, err := a.dial(false); err != nil {
		t.Fatal(err)
	}
	if err := f.ready(); err != nil {
		t.Fatal(err)
	}
	// Whom the host serves, nobody displaces who doesn't finish.
	generation, _ := f.link.Generation()
	for range 20 {
		c, _, err := f.hello(f.key)
		if err != nil {
			t.Fatal(err)
		}
		a.answer(c, half)
	}
	eventually(t, "the host lets go of all but two", func() bool { return open.Load() <= 2 })
	if now, _ := f.link.Generation(); now != generation || !f.link.Live() {
		t.Error("the one that was served was displaced")
	}
	if _, c, err := f.link.Extra(t.Context()); err != nil {
		t.Error(err)
	} else {
		_ = c.Close()
	}
	f.link.Close()
	if n := open.Load(); n != 0 {
		t.Errorf("%d connections after Close", n)
	}
}

// TestAnswerBounds: what the longest honest answers have is taken, and what has
// more bytes or more parts is not.
func TestAnswerBounds(t *testing.T) {
	hooks := func(n, output int) (list []*guestv1.HookResult) {
		for range n {
			list = append(list, &guestv1.HookResult{Name: strings.Repeat("n", min(output, 255)), Output: strings.Repeat("o", output)})
		}
		return list
	}
	for name, c := range map[string]struct {
		reply *guestv1.SetupResponse
		live  bool
	}{
		"the most": {&guestv1.SetupResponse{Hooks: hooks(64, 4096), Problems: slices.Repeat([]string{strings.Repeat("p", 512)}, 16)}, true},
		"long":     {&guestv1.SetupResponse{Hooks: hooks(1, maxSetup)}, false},
		"many":     {&guestv1.SetupResponse{Hooks: hooks(maxParts+1, 0)}, false},
		"problems": {&guestv1.SetupResponse{Problems: make([]string, maxParts+1)}, false},
	} {
		t.Run(name, func(t *testing.T) {
			f, open, _ := counting(t)
			a := &fakeAgent{f: f, key: f.key, reply: c.reply}
			if _, err := a.dial(false); err != nil {
				t.Fatal(err)
			}
			if !c.live {
				eventually(t, "the host hangs up", func() bool { return len(a.taken()) == 1 && open.Load() == 0 })
				return
			}
			if err := f.ready(); err != nil {
				t.Fatal(err)
			}
			client, err := f.link.Client(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for n, code := range map[int]connect.Code{1024: 0, maxParts + 1: connect.CodeInvalidArgument} {
				a.mu.Lock()
				a.sessions = slices.Repeat([]*guestv1.SessionInfo{{}}, n)
				a.mu.Unlock()
				r, err := client.Sessions(t.Context(), connect.NewRequest(&guestv1.SessionsRequest{}))
				if code == 0 && (err != nil || len(r.Msg.GetSessions()) != n) || code != 0 && connect.CodeOf(err) != code {
					t.Errorf("%d sessions: %v", n, err)
				}
			}
		})
	}
}

// TestSpentTickets: a ticket that is guessed or that was used keeps nothing open.
func TestSpentTickets(t *testing.T) {
	f, open, _ := counting(t)
	var ticket atomic.Value
	a := &ticketAgent{fakeAgent: &fakeAgent{f: f, key: f.key}, ticket: &ticket}
	c, _, err := f.hello(f.key)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(guestv1connect.NewGuestHandler(a))
	a.answer(c, mux)
	_, extra, err := f.link.Extra(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		if _, answer, err := f.say(f.key, guestapi.PurposeExtra, ticket.Load().(string)); err == nil {
			t.Fatalf("a ticket was good twice: %v", answer)
		}
	}
	eventually(t, "the control and the extra connection are left", func() bool { return open.Load() == 2 })
	_ = extra.Close()
}

// ticketAgent dials many times for each ticket.
type ticketAgent struct {
	*fakeAgent
	ticket *atomic.Value
}

func (a *ticketAgent) OpenExtra(ctx context.Context, r *connect.Request[guestv1.OpenExtraRequest]) (*connect.Response[guestv1.OpenExtraResponse], error) {
	a.ticket.Store(r.Msg.Ticket)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() { _, _ = a.fakeAgent.OpenExtra(ctx, r) })
	}
	wg.Wait()
	return connect.NewResponse(&guestv1.OpenExtraResponse{}), nil
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not so: " + what)
		}
	}
}
