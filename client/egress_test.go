package client_test

import (
	"bytes"
	"fmt"
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

// auditor serves records 1 to 100, each twice where it is asked again, and cuts
// its connections at random bytes.
type auditor struct {
	mu   sync.Mutex
	rand *rand.Rand
	cuts int
	bad  []string
}

func (a *auditor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	cut, limit := a.cuts > 0, a.rand.IntN(4000)
	a.cuts--
	q := r.URL.Query()
	if q.Get("verdict") != "denied" || q.Get("would_deny") != "true" || q.Get("since") != "2026-01-02T03:04:05Z" || r.URL.Path != "/v1/egress/audit" {
		a.bad = append(a.bad, r.URL.String())
	}
	a.mu.Unlock()
	if strings.HasPrefix(r.Header.Get("Accept"), "application/json") {
		answer(w, 200, api.EgressRecordList{Items: []api.EgressRecord{}, NextAfter: 10})
		return
	}
	after, _ := strconv.ParseInt(q.Get("after"), 10, 64)
	var out bytes.Buffer
	out.WriteString("retry: 1000\n\n: nothing happened\n\n")
	for seq := max(after, 1); seq <= 100; seq++ { // the one that was told already too
		fmt.Fprintf(&out, "event: decision\nid: %d\ndata: {\"seq\":%d,\"kind\":\"http\"}\n\n", seq, seq)
	}
	if cut {
		_, _ = w.Write(out.Bytes()[:min(limit, out.Len())])
		panic(http.ErrAbortHandler)
	}
	_, _ = w.Write(out.Bytes())
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}

// No record is lost and none comes twice, wherever the connection is cut.
func TestEgressTailResumes(t *testing.T) {
	t.Parallel()
	for seed := range uint64(5) {
		h := &auditor{rand: rand.New(rand.NewPCG(seed, 2)), cuts: 5}
		c := serve(t, h, client.Options{})
		f := client.EgressFilter{Verdict: api.EgressDenied, WouldDeny: true, Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
		first := int64(11) // now is behind 10
		if seed%2 == 0 {
			f.After, first = pointer(int64(0)), 1
		} else {
			h.cuts = 0
		}
		s := c.EgressTail(f, nil, nil)
		for want := first; want <= 100; want++ {
			r, err := s.Next(t.Context())
			if err != nil || r.Seq != want || r.Kind != api.EgressHTTP {
				t.Fatalf("seed %d: %+v %v, want %d", seed, r, err, want)
			}
		}
		s.Close()
		h.mu.Lock()
		if len(h.bad) > 0 {
			t.Errorf("asked for %v", h.bad)
		}
		h.mu.Unlock()
	}
}

// What has no idempotency key is not said twice.
func TestSecretIsSentOnce(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	calls := 0
	c := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		calls++
		if r.Header.Get("Idempotency-Key") != "" {
			t.Error("it has a key")
		}
		panic(http.ErrAbortHandler)
	}), client.Options{})
	if _, err := c.CreateSecret(t.Context(), api.CreateSecretRequest{Name: "KEY"}); err == nil {
		t.Error("it succeeded")
	}
	mu.Lock()
	defer mu.Unlock()
	if calls != 1 {
		t.Errorf("%d calls", calls)
	}
}
