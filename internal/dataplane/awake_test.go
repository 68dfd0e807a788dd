package dataplane

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/sandbox"
)

// uses is what a call did to the sandbox's use.
type uses struct{ asked, touches, held int }

// count tells what a call did to the sandbox's use.
func (b *bench) count(call func()) uses {
	b.rows.mu.Lock()
	before := uses{b.rows.asked, b.rows.touches, b.rows.held}
	b.rows.mu.Unlock()
	call()
	b.rows.mu.Lock()
	defer b.rows.mu.Unlock()
	return uses{b.rows.asked - before.asked, b.rows.touches - before.touches, b.rows.held - before.held}
}

// TestWhoTouchesAndWakes walks every operation of the data half, on a sandbox
// that sleeps and may be woken.
func TestWhoTouchesAndWakes(t *testing.T) {
	b := newBench(t)
	b.guest.files["/a"] = []byte("0123456789")
	created, running := b.session(true, "cat").Session.Id, b.session(true, "cat").Session.Id
	b.call(200, nil, "POST", "/sessions/"+running+"/attach", nil, "Accept", jsonForm)
	waitFor(t, "the command to run", func() bool {
		var s api.Session
		b.call(200, &s, "GET", "/sessions/"+running, nil)
		return s.State == api.SessionRunning
	})
	const tar = "application/x-tar"
	for _, c := range []struct {
		what          string
		asleep, awake int // the status without a wake and with one
		wakes, holds  bool
		do            func(want int)
	}{
		{"list sessions", 200, 200, false, false, func(s int) { b.call(s, nil, "GET", "/sessions", nil) }},
		{"get a session", 200, 200, false, false, func(s int) { b.call(s, nil, "GET", "/sessions/"+running, nil) }},
		{"create a session", 201, 201, false, false, func(s int) { b.call(s, nil, "POST", "/sessions", `{"args":["both"]}`) }},
		{"start a command", 409, 200, true, false, func(s int) { b.call(s, nil, "POST", "/sessions/"+created+"/attach", nil, "Accept", jsonForm) }},
		{"attach to a running one", 200, 200, true, false, func(s int) { b.call(s, nil, "POST", "/sessions/"+running+"/attach", nil, "Accept", jsonForm) }},
		{"stdin", 409, 200, true, false, func(s int) { b.call(s, nil, "POST", "/sessions/"+running+"/stdin", []byte("x")) }},
		{"resize", 409, 204, true, false, func(s int) { b.call(s, nil, "POST", "/sessions/"+running+"/resize", `{"rows":1,"cols":1}`) }},
		{"exec", 409, 200, true, true, func(s int) { b.call(s, nil, "POST", "/exec", `{"args":["both"]}`) }},
		{"stat", 409, 409, false, false, func(s int) { b.call(s, nil, "GET", "/files/stat?path=/a", nil) }},
		{"list", 409, 409, false, false, func(s int) { b.call(s, nil, "GET", "/files/list?path=/dir", nil) }},
		{"read", 409, 409, false, false, func(s int) { b.call(s, nil, "GET", "/files?path=/a", nil) }},
		{"read a tree", 409, 409, false, false, func(s int) { b.call(s, nil, "GET", "/files/archive?path=/dir", nil) }},
		{"write", 409, 200, true, true, func(s int) { b.call(s, nil, "PUT", "/files?path=/w", []byte("x")) }},
		{"write a tree", 409, 200, true, true, func(s int) { b.call(s, nil, "PUT", "/files/archive?path=/dir", []byte("x"), "Content-Type", tar) }},
		{"mkdir", 409, 204, true, false, func(s int) { b.call(s, nil, "POST", "/files/mkdir", `{"path":"/d"}`) }},
		{"move", 409, 204, true, false, func(s int) { b.call(s, nil, "POST", "/files/move", `{"from":"/w","to":"/v"}`) }},
		{"remove", 409, 204, true, false, func(s int) { b.call(s, nil, "DELETE", "/files?path=/v", nil) }},
		{"tunnel", 409, 101, true, true, b.handshake("/ports/7/tunnel")},
		{"signal", 409, 204, true, false, func(s int) { b.call(s, nil, "POST", "/sessions/"+running+"/signal", `{"signal":"SIGTERM"}`) }},
	} {
		b.rows.move(sandbox.StateSuspended)
		b.rows.access = nil
		got := b.count(func() { c.do(c.asleep) })
		if got.asked > 0 != c.wakes || got.touches > 0 || got.held > 0 {
			t.Errorf("%s, asleep: %+v", c.what, got)
		}
		b.rows.access = func(f *rows) error { f.move(sandbox.StateRunning); return nil }
		if got = b.count(func() { c.do(c.awake) }); got.asked > 0 != c.wakes || got.held > 0 != c.holds {
			t.Errorf("%s, woken: %+v", c.what, got)
		}
	}
	b.rows.move(sandbox.StateRunning)
	for _, path := range []string{"/files/stat?path=/a", "/files/list?path=/dir", "/files?path=/a", "/files/archive?path=/dir"} {
		if got := b.count(func() { b.call(200, nil, "GET", path, nil) }); got.touches == 0 || got.asked > 0 {
			t.Errorf("%s of a running sandbox: %+v", path, got)
		}
	}
	waitFor(t, "everything to be given back", func() bool {
		b.rows.mu.Lock()
		defer b.rows.mu.Unlock()
		return b.rows.holds == 0
	})
}

// handshake opens a WebSocket and wants a status.
func (b *bench) handshake(path string) func(want int) {
	return func(want int) {
		b.t.Helper()
		r := b.req("GET", path, nil)
		conn, resp, err := websocket.Dial(b.t.Context(), r.URL.String(), &websocket.DialOptions{HTTPHeader: r.Header})
		if resp == nil || resp.StatusCode != want {
			b.t.Errorf("%s: %v, want %d", path, err, want)
		}
		if err == nil {
			_ = conn.CloseNow()
		}
	}
}

func waitFor(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// TestWakeFails: why a sandbox can't be woken is the answer.
func TestWakeFails(t *testing.T) {
	b := newBench(t)
	b.rows.move(sandbox.StateSuspended)
	b.rows.access = func(*rows) error {
		return sandbox.Errorf(sandbox.NoCapacity, "no_capacity_memory", "the host is full").WithRetry(7 * time.Second)
	}
	a := b.call(503, nil, "POST", "/exec", `{"args":["both"]}`)
	if p := a.Problem(t); p.Code != "no_capacity_memory" || a.Header.Get("Retry-After") != "7" {
		t.Errorf("%+v", p)
	}
	b.rows.access = func(*rows) error {
		return sandbox.Errorf(sandbox.Quota, "quota_running", "too many").WithRetry(time.Second)
	}
	if a := b.call(429, nil, "PUT", "/files?path=/a", []byte("x")); a.Header.Get("Retry-After") != "1" {
		t.Errorf("%+v", a.Header)
	}
	b.rows.access = nil
	if p := b.call(409, nil, "POST", "/exec", `{"args":["both"]}`).Problem(t); p.Code != "sandbox_not_running" || !strings.Contains(p.Hint, "wake") {
		t.Errorf("%+v", p)
	}
}

// TestStreamOutlastsSuspend: an attached stream stays open while its sandbox is
// suspended, says that it is there, and goes on afterwards.
func TestStreamOutlastsSuspend(t *testing.T) {
	b := newBench(t)
	b.plane.heartbeat = 10 * time.Millisecond
	id := b.session(true, "cat").Session.Id
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := b.client.Do(b.req("POST", "/sessions/"+id+"/attach", nil, "Accept", octets).WithContext(ctx))
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%+v %v", resp, err)
	}
	defer resp.Body.Close()
	next := func(kind byte) frame {
		t.Helper()
		for {
			f, err := readFrame(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			if f.kind == kind {
				return f
			}
		}
	}
	next(3)
	if b.rows.held != 1 || b.rows.holds != 1 {
		t.Errorf("an open attach holds %d", b.rows.holds)
	}
	b.rows.move(sandbox.StateSuspended)
	var s api.Session
	if b.call(200, &s, "GET", "/sessions/"+id, nil); !s.Held || s.State != api.SessionRunning {
		t.Errorf("%+v", s)
	}
	for range 5 {
		next(7)
	}
	if p := b.call(409, nil, "POST", "/sessions/"+id+"/stdin", []byte("early")).Problem(t); p.Code != "sandbox_not_running" {
		t.Errorf("%+v", p)
	}
	b.rows.move(sandbox.StateRunning)
	b.call(200, nil, "POST", "/sessions/"+id+"/stdin?close=true", []byte("hello"))
	if f := next(1); string(f.payload) != "hello" {
		t.Errorf("%+v", f)
	}
	next(4)
	if _, err := readFrame(resp.Body); !errors.Is(err, io.EOF) {
		t.Errorf("the stream goes on: %v", err)
	}
	waitFor(t, "the attach to end", func() bool { b.rows.mu.Lock(); defer b.rows.mu.Unlock(); return b.rows.holds == 0 })
	if got := b.count(func() { b.call(200, nil, "POST", "/sessions/"+id+"/attach", nil) }); got != (uses{}) {
		t.Errorf("the log of a command that has ended: %+v", got)
	}
}

// TestTypingWaits: what is typed into the terminal of a sandbox that stands
// still arrives when it goes on.
func TestTypingWaits(t *testing.T) {
	b := newBench(t)
	id := b.session(true, "cat").Session.Id
	b.call(200, nil, "POST", "/sessions/"+id+"/attach", nil, "Accept", jsonForm)
	r := b.req("GET", "/sessions/"+id+"/pty", nil)
	conn, _, err := websocket.Dial(t.Context(), r.URL.String(), &websocket.DialOptions{HTTPHeader: r.Header})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow()
	b.rows.move(sandbox.StateSuspended)
	if err := conn.Write(t.Context(), websocket.MessageBinary, []byte("typed")); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the input to be looked at", func() bool { b.rows.mu.Lock(); defer b.rows.mu.Unlock(); return b.rows.asked > 0 })
	b.rows.move(sandbox.StateRunning)
	for {
		kind, data, err := conn.Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if kind == websocket.MessageBinary {
			if !bytes.Equal(data, []byte("typed")) {
				t.Errorf("%q", data)
			}
			return
		}
		var ev api.StreamEvent
		if err := json.Unmarshal(data, &ev); err != nil || ev.Type != api.EventStarted {
			t.Fatalf("%s %v", data, err)
		}
	}
}
