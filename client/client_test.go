package client_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve runs a handler and returns a client of it.
func serve(t *testing.T, h http.Handler, o client.Options) *client.Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	o.URL, o.Key, o.HTTPClient = srv.URL, "clk_test", srv.Client()
	c, err := client.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func answer(w http.ResponseWriter, status int, v any) {
	kind := "application/json"
	if status >= 400 {
		kind = "application/problem+json"
	}
	w.Header().Set("Content-Type", kind)
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func frame(kind byte, offset int64, payload []byte) []byte {
	b := []byte{kind}
	b = binary.BigEndian.AppendUint64(b, uint64(offset))
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

func event(kind byte, e api.StreamEvent) []byte {
	b, _ := json.Marshal(e)
	return frame(kind, e.Offset, b)
}

// cutter serves a log as frames and cuts each connection at a random byte.
type cutter struct {
	log    []byte
	cuts   int // connections that are still to be cut
	mu     sync.Mutex
	rand   *rand.Rand
	served atomic.Int64
}

func (c *cutter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.served.Add(1)
	offset, _ := strconv.ParseInt(r.URL.Query().Get("offset"), 10, 64)
	c.mu.Lock()
	cut := c.cuts > 0
	c.cuts--
	limit := c.rand.IntN(len(c.log) / 4)
	how := c.rand.IntN(3)
	back := min(offset, int64(c.rand.IntN(50)))
	c.mu.Unlock()
	if cut && how == 0 {
		answer(w, http.StatusServiceUnavailable, api.Problem{Class: api.ClassUnavailable, Code: "starting", Retryable: true})
		return
	}
	out := event(3, api.StreamEvent{Type: api.EventStarted, Offset: offset})
	for at := offset - back; at < int64(len(c.log)); {
		n := min(int64(1+len(out)%997), int64(len(c.log))-at)
		out = append(out, frame(byte(1+at%2), at, c.log[at:at+n])...)
		if at%5 == 0 {
			out = append(out, frame(7, at+n, nil)...)
		}
		at += n
	}
	out = append(out, event(4, api.StreamEvent{Offset: int64(len(c.log)), Exit: &api.Exit{Code: 7, Reason: "exited"}})...)
	if !cut {
		_, _ = w.Write(out)
		return
	}
	if how == 1 { // told, not torn
		out = append(out[:0:0], event(8, api.StreamEvent{Offset: offset, Error: &api.ErrorBody{Class: api.ClassUnavailable, Message: "going down", Retryable: true}})...)
		limit = len(out)
	}
	_, _ = w.Write(out[:min(limit, len(out))])
	panic(http.ErrAbortHandler)
}

// No byte is lost and none comes twice, wherever the connection is cut.
func TestStreamResumes(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	for seed := range uint64(30) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		log := make([]byte, 20_000)
		for i := range log {
			log[i] = byte(rnd.Uint32())
		}
		h := &cutter{log: log, cuts: 6, rand: rnd}
		c := serve(t, h, client.Options{})
		wg.Go(func() { // they mostly wait, so all at once
			var out bytes.Buffer
			exit, err := c.Session("sbx_a", "ses_a").Attach(client.StreamOptions{}).Copy(t.Context(), &out, &out, nil)
			if err != nil || exit == nil || exit.Code != 7 {
				t.Errorf("seed %d: exit %+v, %v", seed, exit, err)
			}
			if !bytes.Equal(out.Bytes(), log) {
				t.Errorf("seed %d: got %d bytes that are not the log's %d, over %d connections", seed, out.Len(), len(log), h.served.Load())
			}
		})
	}
	wg.Wait()
}

func TestStreamTellsGapsOnceAndStops(t *testing.T) {
	t.Parallel()
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(event(3, api.StreamEvent{}))
		_, _ = w.Write(event(5, api.StreamEvent{Offset: 0, To: 100, Reason: "quota"}))
		_, _ = w.Write(frame(1, 100, []byte("abc")))
		_, _ = w.Write(event(6, api.StreamEvent{Offset: 103, Reason: "oom"}))
	})
	c := serve(t, h, client.Options{})
	st := c.Session("s", "x").Follow(client.StreamOptions{})
	var got []string
	for {
		e, err := st.Next(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%s@%d", e.Type, e.Offset))
	}
	want := "[started@0 gap@0 stdout@100 lost@103]"
	if fmt.Sprint(got) != want {
		t.Errorf("events %v, want %s", got, want)
	}
}

func TestStreamGivesUp(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		h     http.HandlerFunc
		class api.ErrorClass
	}{
		"never comes back": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, api.ClassUnavailable},
		"gone": {func(w http.ResponseWriter, _ *http.Request) {
			answer(w, 404, api.Problem{Class: api.ClassNotFound, Code: "x"})
		}, api.ClassNotFound},
		"not frames": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "<html>this is a proxy's page</html>")
		}, api.ClassInternal},
	} {
		t.Run(name, func(t *testing.T) {
			c := serve(t, tc.h, client.Options{Reconnect: 300 * time.Millisecond})
			_, err := c.Session("s", "x").Attach(client.StreamOptions{}).Next(t.Context())
			if !client.IsClass(err, tc.class) {
				t.Errorf("error %v, want class %s", err, tc.class)
			}
		})
	}
}

// A stream that is waited on ends with its context, not with the next frame.
func TestStreamEndsWithContext(t *testing.T) {
	t.Parallel()
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write(frame(1, 0, []byte("a")))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}), client.Options{})
	st := c.Session("s", "x").Attach(client.StreamOptions{})
	defer st.Close()
	if e, err := st.Next(t.Context()); err != nil || string(e.Data) != "a" {
		t.Fatalf("%+v %v", e, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := st.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want the context's", err)
	}
}

// stdin takes input by offset, in parts, and cuts connections before or after
// it has taken something.
type stdin struct {
	mu     sync.Mutex
	got    []byte
	closed bool
	calls  int
}

func (s *stdin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	offset, _ := strconv.ParseInt(r.URL.Query().Get("offset"), 10, 64)
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	if s.calls%3 == 1 {
		panic(http.ErrAbortHandler)
	}
	if skip := int64(len(s.got)) - offset; skip >= 0 && skip <= int64(len(body)) {
		fresh := body[skip:]
		s.got = append(s.got, fresh[:min(len(fresh), 700)]...)
	}
	s.closed = s.closed || r.URL.Query().Get("close") == "true"
	if s.calls%3 == 2 {
		panic(http.ErrAbortHandler)
	}
	answer(w, 200, api.StdinState{Accepted: int64(len(s.got)), Closed: s.closed})
}

func TestStdinIsNeitherLostNorDoubled(t *testing.T) {
	t.Parallel()
	h := &stdin{}
	c := serve(t, h, client.Options{})
	in := bytes.Repeat([]byte("0123456789"), 300)
	w := c.Session("s", "x").Stdin(t.Context(), 0)
	if n, err := w.Write(in); n != len(in) || err != nil {
		t.Fatalf("wrote %d, %v", n, err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(h.got, in) || !h.closed {
		t.Errorf("got %d bytes (closed %v), want %d", len(h.got), h.closed, len(in))
	}
}

// A call that creates a row is repeated with the same idempotency key; each
// call has its own.
func TestIdempotencyKeys(t *testing.T) {
	t.Parallel()
	var keys []string
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		keys = append(keys, r.Header.Get("Idempotency-Key"))
		if len(keys)%2 == 1 {
			panic(http.ErrAbortHandler)
		}
		answer(w, 202, api.AcceptedSandbox{})
	}), client.Options{})
	for range 2 {
		if _, err := c.CreateSandbox(t.Context(), api.CreateSandboxRequest{Template: "base"}); err != nil {
			t.Fatal(err)
		}
	}
	if len(keys) != 4 || keys[0] == "" || keys[0] != keys[1] || keys[2] != keys[3] || keys[0] == keys[2] {
		t.Errorf("keys %q", keys)
	}
}

func TestRetries(t *testing.T) {
	t.Parallel()
	unavailable := api.Problem{Class: api.ClassUnavailable, Retryable: true}
	for name, tc := range map[string]struct {
		status int
		body   api.Problem
		call   func(context.Context, *client.Client) error
		least  int64
		most   int64
	}{
		"503 is repeated":        {503, unavailable, func(ctx context.Context, c *client.Client) error { _, err := c.Sandbox(ctx, "a"); return err }, 2, 20},
		"a quota is not":         {429, api.Problem{Class: api.ClassQuota}, func(ctx context.Context, c *client.Client) error { _, err := c.Sandbox(ctx, "a"); return err }, 1, 1},
		"a wrong state is not":   {409, api.Problem{Class: api.ClassFailedPrecondition, Retryable: true}, func(ctx context.Context, c *client.Client) error { _, err := c.DeleteSandbox(ctx, "a"); return err }, 1, 1},
		"an internal one is not": {500, api.Problem{Class: api.ClassInternal}, func(ctx context.Context, c *client.Client) error { return c.Untag(ctx, "a:b") }, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var n atomic.Int64
			c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				n.Add(1)
				answer(w, tc.status, tc.body)
			}), client.Options{Retry: 400 * time.Millisecond})
			if err := tc.call(t.Context(), c); !client.IsClass(err, tc.body.Class) {
				t.Errorf("error %v, want class %s", err, tc.body.Class)
			}
			if got := n.Load(); got < tc.least || got > tc.most {
				t.Errorf("%d requests, want %d to %d", got, tc.least, tc.most)
			}
		})
	}
}

// A signal that may have arrived is not sent again.
func TestSignalIsNotRepeated(t *testing.T) {
	t.Parallel()
	var n atomic.Int64
	c := serve(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		n.Add(1)
		panic(http.ErrAbortHandler)
	}), client.Options{Retry: time.Second})
	if err := c.Session("s", "x").Signal(t.Context(), api.SIGINT); err == nil || n.Load() != 1 {
		t.Errorf("%d requests, error %v", n.Load(), err)
	}
}

func TestWait(t *testing.T) {
	t.Parallel()
	var n int
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n++
		switch n {
		case 1:
			panic(http.ErrAbortHandler)
		case 2:
			answer(w, 200, api.Operation{State: api.OperationRunning, Step: "unpacking"})
		default:
			answer(w, 200, api.Operation{State: api.OperationFailed, Error: &api.ErrorBody{Class: api.ClassNoCapacity, Code: "full", Message: "the host is full", Hint: "delete one"}})
		}
	}), client.Options{})
	var steps []string
	_, err := c.Wait(t.Context(), "op_a", func(op api.Operation) { steps = append(steps, op.Step) })
	var e *client.Error
	if !errors.As(err, &e) || e.Code != "full" || e.Hint != "delete one" || len(steps) != 2 || steps[0] != "unpacking" {
		t.Errorf("error %v, steps %q", err, steps)
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	for _, o := range []client.Options{{URL: "localhost:7070"}, {URL: "ftp://x"}, {URL: "http://u:p@x"}, {URL: "http://x?y=z"}, {Key: "a b"}, {Key: "a\nb"}} {
		if _, err := client.New(o); err == nil {
			t.Errorf("New(%+v) accepted it", o)
		}
	}
}
