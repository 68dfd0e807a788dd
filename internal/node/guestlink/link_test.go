package guestlink

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type fixture struct {
	t    *testing.T
	sock string
	key  []byte
	link *Link
	mu   sync.Mutex
	seen int // calls of Welcome
}

func newFixture(t *testing.T, welcomed bool) *fixture {
	f := &fixture{t: t, sock: filepath.Join(t.TempDir(), "s"), key: guestapi.NewKey()}
	f.link = Start(Config{
		Listen: func() (net.Listener, error) {
			_ = os.Remove(f.sock)
			return net.Listen("unix", f.sock)
		},
		Key: f.key, Welcomed: welcomed, Epoch: 5, Setup: &guestv1.SetupRequest{Hostname: "box"},
		Welcome: func() error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.seen++
			return nil
		},
	})
	t.Cleanup(f.link.Close)
	return f
}

func (f *fixture) dial() net.Conn {
	f.t.Helper()
	for {
		c, err := net.Dial("unix", f.sock)
		if err == nil {
			f.t.Cleanup(func() { _ = c.Close() })
			_ = c.SetDeadline(time.Now().Add(10 * time.Second))
			return c
		}
		if f.t.Context().Err() != nil {
			f.t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
}

// hello shakes hands for a control connection with the given key, nil for none.
func (f *fixture) hello(key []byte) (net.Conn, *guestv1.HelloAnswer, error) {
	f.t.Helper()
	return f.say(key, guestapi.PurposeControl, "")
}

func TestForgedHellos(t *testing.T) {
	f := newFixture(t, true)
	for name, key := range map[string][]byte{"none": nil, "wrong": guestapi.NewKey()} {
		if _, a, err := f.hello(key); err == nil {
			t.Errorf("%s: %v", name, a)
		}
	}
	if _, a, err := f.hello(f.key); err != nil || !a.Ok || a.Epoch != 5 || len(a.Key) != 0 {
		t.Errorf("the true one: %v %v", a, err)
	}
	// A replayed proof is for another nonce.
	c := f.dial()
	n, err := guestapi.ReadChallenge(c)
	if err != nil {
		t.Fatal(err)
	}
	proof := guestapi.Proof(f.key, n, guestapi.PurposeControl, "")
	c2 := f.dial()
	if _, err := guestapi.ReadChallenge(c2); err != nil {
		t.Fatal(err)
	}
	_ = guestapi.WriteHello(c2, &guestv1.Hello{MinVersion: 1, MaxVersion: 1, Purpose: guestapi.PurposeControl, Proof: proof})
	if a, err := guestapi.ReadAnswer(c2); err == nil {
		t.Errorf("a replayed proof: %v", a)
	}
}

func TestFreshGuestGetsItsKey(t *testing.T) {
	f := newFixture(t, false)
	_, a, err := f.hello(nil)
	if err != nil || !bytes.Equal(a.Key, f.key) {
		t.Fatalf("%v %v", a, err)
	}
	if f.link.Live() || f.seen != 0 {
		t.Error("it is live before its setup")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := f.link.Client(ctx); sandbox.AsError(err).Code != "guest_unreachable" {
		t.Errorf("%v", err)
	}
}

// Connections that say nothing neither pile up nor keep the honest one out.
func TestFlood(t *testing.T) {
	f := newFixture(t, true)
	before := runtime.NumGoroutine()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if c, err := net.Dial("unix", f.sock); err == nil {
					_, _ = c.Write([]byte{0, 0, 16, 0, 1, 2, 3})
					defer c.Close()
				}
				time.Sleep(2 * time.Millisecond)
			}
		})
	}
	ok := false
	for i := 0; i < 200 && !ok; i++ {
		_, a, err := f.hello(f.key)
		ok = err == nil && a.Ok
	}
	if !ok {
		t.Error("the honest agent never got through")
	}
	if n := runtime.NumGoroutine() - before; n > 60 {
		t.Errorf("%d goroutines more", n)
	}
	close(stop)
	wg.Wait()
}

// After a proven hello the guest talks rubbish: the host lets go, and is ready
// for the next.
func TestGarbageAfterHello(t *testing.T) {
	settings := []byte{0, 0, 0, 4, 0, 0, 0, 0, 0}
	endless := append([]byte{}, settings...)
	for range 64 { // CONTINUATION frames without an end
		frame := make([]byte, 9+16384)
		frame[1], frame[2], frame[3], frame[8] = 0x40, 0, 9, 1
		if len(endless) == len(settings) {
			frame[3] = 1 // HEADERS
		}
		endless = append(endless, frame...)
	}
	huge := binary.BigEndian.AppendUint32(nil, 0xffffff00)
	for name, junk := range map[string][]byte{
		"text": []byte("HTTP/1.1 200 OK\r\n\r\n"), "half a frame": settings[:5], "zeros": make([]byte, 1<<20),
		"endless headers": endless, "a huge frame": append(append([]byte{}, settings...), huge...), "pings": bytes.Repeat([]byte{0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8}, 10000),
	} {
		f := newFixture(t, true)
		c, _, err := f.hello(f.key)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write(junk)
		_ = c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		if _, err := f.link.Client(ctx); err == nil {
			t.Errorf("%s: a client", name)
		}
		cancel()
		if _, a, err := f.hello(f.key); err != nil || !a.Ok {
			t.Errorf("%s: afterwards %v %v", name, a, err)
		}
		f.link.Close()
	}
}

func TestExtraNeedsItsTicket(t *testing.T) {
	f := newFixture(t, true)
	c := f.dial()
	n, err := guestapi.ReadChallenge(c)
	if err != nil {
		t.Fatal(err)
	}
	_ = guestapi.WriteHello(c, &guestv1.Hello{
		MinVersion: 1, MaxVersion: 1, Purpose: guestapi.PurposeExtra, Ticket: "guess", Proof: guestapi.Proof(f.key, n, guestapi.PurposeExtra, "guess"),
	})
	if a, err := guestapi.ReadAnswer(c); !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && err == nil {
		t.Errorf("%v", a)
	}
}

func TestCloseWhileWaiting(t *testing.T) {
	f := newFixture(t, true)
	got := make(chan error, 1)
	go func() { got <- f.link.Ready(context.Background()) }()
	f.link.Close()
	if err := <-got; connect.CodeOf(err) == 0 || sandbox.AsError(err).Code != "guest_unreachable" {
		t.Errorf("%v", err)
	}
	f.link.Close()
}
