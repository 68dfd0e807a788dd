package client_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// newsroom serves events 1 to last and cuts its connections at random bytes.
type newsroom struct {
	mu     sync.Mutex
	rand   *rand.Rand
	oldest int64
	last   int64
	cuts   int
	now    int64 // told to who asks for a page
	asked  []string
}

func (n *newsroom) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n.mu.Lock()
	n.asked = append(n.asked, r.URL.RawQuery)
	cut, how := n.cuts > 0, n.rand.IntN(3)
	n.cuts--
	limit := n.rand.IntN(4000)
	n.mu.Unlock()
	if strings.HasPrefix(r.Header.Get("Accept"), "application/json") {
		answer(w, 200, api.EventList{Items: []api.Event{}, NextAfter: n.now})
		return
	}
	if cut && how == 0 {
		answer(w, 503, api.Problem{Class: api.ClassUnavailable, Retryable: true})
		return
	}
	var out bytes.Buffer
	out.WriteString("retry: 1000\n\n: nothing happened\n\n")
	after, _ := strconv.ParseInt(r.URL.Query().Get("after"), 10, 64)
	if after > 0 && after+1 < n.oldest {
		fmt.Fprintf(&out, "event: gap\nid: %d\ndata: {\"after\":%d,\"oldest\":%d}\n\n", n.oldest-1, after, n.oldest)
	}
	for seq := max(after+1, n.oldest); seq <= n.last; seq++ {
		fmt.Fprintf(&out, "event: change\nid: %d\ndata: {\"seq\":%d,\"type\":\"sandbox.state\",\"data\":{\"to\":\"running\"}}\n\n", seq, seq)
	}
	if cut && how == 1 { // told, not torn
		out.WriteString("event: error\nid: 0\ndata: {\"class\":\"unavailable\",\"code\":\"stream_cut\",\"message\":\"x\",\"retryable\":true}\n\n")
		_, _ = w.Write(out.Bytes())
		return
	}
	if cut {
		_, _ = w.Write(out.Bytes()[:min(limit, out.Len())])
		panic(http.ErrAbortHandler)
	}
	_, _ = w.Write(out.Bytes())
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}

func pointer[T any](v T) *T { return &v }

// No event is lost and none comes twice, wherever the connection is cut.
func TestEventsResume(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	for seed := range uint64(20) {
		h := &newsroom{rand: rand.New(rand.NewPCG(seed, 2)), oldest: 1, last: 100, cuts: 5}
		c := serve(t, h, client.Options{})
		wg.Go(func() {
			s := c.Events(client.EventOptions{After: pointer(int64(0))})
			defer s.Close()
			for want := int64(1); want <= 100; want++ {
				got, err := s.Next(t.Context())
				if err != nil || got.Event == nil || got.Event.Seq != want || string(got.Event.Data) != `{"to":"running"}` {
					t.Errorf("seed %d: %+v %v, want %d", seed, got, err, want)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestEventsTellGapsAndBeginNow(t *testing.T) {
	t.Parallel()
	h := &newsroom{rand: rand.New(rand.NewPCG(1, 1)), oldest: 50, last: 51, now: 50}
	c := serve(t, h, client.Options{})
	s := c.Events(client.EventOptions{After: pointer(int64(7))})
	defer s.Close()
	if got, err := s.Next(t.Context()); err != nil || got.Gap == nil || got.Gap.After != 7 || got.Gap.Oldest != 50 {
		t.Errorf("%+v %v", got, err)
	}
	if got, err := s.Next(t.Context()); err != nil || got.Event == nil || got.Event.Seq != 50 {
		t.Errorf("%+v %v", got, err)
	}
	now := c.Events(client.EventOptions{})
	defer now.Close()
	if got, err := now.Next(t.Context()); err != nil || got.Event == nil || got.Event.Seq != 51 {
		t.Errorf("%+v %v", got, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if got, err := now.Next(ctx); err == nil {
		t.Errorf("%+v", got)
	}
}

func TestEventsEndWithTheKey(t *testing.T) {
	t.Parallel()
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "retry: 1000\n\nevent: error\nid: 3\ndata: {\"class\":\"denied\",\"code\":\"unauthenticated\",\"message\":\"x\"}\n\n")
	}), client.Options{})
	if _, err := c.Events(client.EventOptions{After: pointer(int64(0))}).Next(t.Context()); !client.IsClass(err, api.ClassDenied) {
		t.Errorf("%v", err)
	}
}

// A daemon that only ever cuts its streams is given up in the end.
func TestEventsGiveUp(t *testing.T) {
	t.Parallel()
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "retry: 1000\n\n")
		panic(http.ErrAbortHandler)
	}), client.Options{Reconnect: 300 * time.Millisecond})
	if _, err := c.Events(client.EventOptions{After: pointer(int64(0))}).Next(t.Context()); !client.IsClass(err, api.ClassUnavailable) {
		t.Errorf("%v", err)
	}
}
