package httpapi

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
)

func (b *bench) events(query string, header ...string) api.EventList {
	b.t.Helper()
	a := b.do("read", "GET", "/v1/events"+query, "", "", append(header, "Accept", "application/json")...)
	var list api.EventList
	if err := json.Unmarshal(a.Body, &list); err != nil || a.Status != 200 {
		b.t.Fatalf("%s: %d %s", query, a.Status, a.Body)
	}
	return list
}

func TestEventList(t *testing.T) {
	b := newBench(t)
	if got := b.events(""); len(got.Items) != 0 || got.NextAfter != 0 || got.Gap != nil {
		t.Errorf("%+v", got)
	}
	b.fake.log.add(5, 6, 9, 70, 71)
	for _, c := range []struct {
		query       string
		first, next int64 // 0: no events
		n           int
		gap         int64 // the oldest that is kept
	}{
		{"", 0, 71, 0, 0},
		{"?after=0", 5, 71, 5, 0},
		{"?after=0&limit=2", 5, 6, 2, 0},
		{"?after=4", 5, 71, 5, 0},
		{"?after=3", 5, 71, 5, 5},
		{"?after=6", 9, 71, 3, 0},
		{"?after=71", 0, 71, 0, 0},
	} {
		got := b.events(c.query)
		if len(got.Items) != c.n || got.NextAfter != c.next || c.n > 0 && got.Items[0].Seq != c.first {
			t.Errorf("%s: %+v", c.query, got)
		}
		if (got.Gap != nil) != (c.gap != 0) || got.Gap != nil && got.Gap.Oldest != c.gap {
			t.Errorf("%s: %+v", c.query, got.Gap)
		}
	}
	if got := b.events("?after=0", "Last-Event-ID", "70"); len(got.Items) != 1 || string(got.Items[0].Data) != `{"to":"running"}` {
		t.Errorf("%+v", got)
	}
	for _, bad := range []string{"?after=-1", "?limit=1001", "?limit=0", "?wait_seconds=61", "?after=x"} {
		if a := b.do("read", "GET", "/v1/events"+bad, "", "", "Accept", "application/json"); a.Status != 400 {
			t.Errorf("%s: %d", bad, a.Status)
		}
	}
	if a := b.do("read", "GET", "/v1/events", "", "", "Accept", "application/json", "Last-Event-ID", "9999999999999999999"); a.Status != 400 {
		t.Errorf("%d", a.Status)
	}
	if a := b.do("read", "GET", "/v1/events", "", "", "Accept", "image/png"); a.Status != 406 {
		t.Errorf("%d", a.Status)
	}
}

// TestNewest: now is found wherever it is, in few questions.
func TestNewest(t *testing.T) {
	for _, seqs := range [][]int64{{}, {1}, {7}, {1, 2, 3}, {1 << 50}, {3, 900, 901, 1 << 33, 1<<33 + 1}} {
		f := newFake()
		f.log.add(seqs...)
		want := int64(0)
		if len(seqs) > 0 {
			want = seqs[len(seqs)-1]
		}
		got, err := New(Options{Control: f}).newest(t.Context())
		if err != nil || got != want || f.log.asked > 200 {
			t.Errorf("%v: %d %v in %d questions", seqs, got, err, f.log.asked)
		}
	}
}

func TestEventListWaits(t *testing.T) {
	b := newBench(t)
	time.AfterFunc(50*time.Millisecond, func() { b.fake.log.add(1) })
	if got := b.events("?wait_seconds=10"); len(got.Items) != 1 || got.NextAfter != 1 {
		t.Errorf("%+v", got)
	}
}

// stream is a stream of events that a test reads.
type stream struct {
	t    *testing.T
	body io.ReadCloser
	r    *bufio.Reader
}

func (b *bench) stream(query string, header ...string) *stream {
	b.t.Helper()
	return b.streamOf("read", "/v1/events"+query, header...)
}

func (b *bench) streamOf(key, path string, header ...string) *stream {
	b.t.Helper()
	r, err := http.NewRequestWithContext(b.t.Context(), "GET", b.url+path, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+key)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := b.client.Do(r)
	if err != nil || resp.StatusCode != 200 || resp.Header.Get("Content-Type") != eventStream {
		b.t.Fatalf("%+v %v", resp, err)
	}
	b.t.Cleanup(func() { _ = resp.Body.Close() })
	s := &stream{b.t, resp.Body, bufio.NewReader(resp.Body)}
	if got := s.next(); got != "retry: 1000" {
		b.t.Errorf("it begins with %q", got)
	}
	return s
}

// next is the next block, its lines joined by a bar.
func (s *stream) next() string {
	s.t.Helper()
	var lines []string
	for {
		line, err := s.r.ReadString('\n')
		if errors.Is(err, io.EOF) {
			return "end"
		}
		if err != nil {
			s.t.Fatal(err)
		}
		if line = strings.TrimSuffix(line, "\n"); line == "" {
			return strings.Join(lines, "|")
		}
		lines = append(lines, line)
	}
}

func (s *stream) want(prefixes ...string) {
	s.t.Helper()
	for _, p := range prefixes {
		if got := s.next(); !strings.HasPrefix(got, p) {
			s.t.Fatalf("got %q, want %q", got, p)
		}
	}
}

func TestEventStream(t *testing.T) {
	b := newBench(t)
	b.api.pace = pace{look: 10 * time.Millisecond, comment: 30 * time.Millisecond}
	b.fake.log.add(3, 4)
	fromNow, all, resumed := b.stream(""), b.stream("?after=0"), b.stream("?after=0", "Last-Event-ID", "3", "Accept", "text/event-stream")
	gapped := b.stream("?after=1")
	all.want("event: change|id: 3|data: {", "event: change|id: 4|data: {")
	resumed.want("event: change|id: 4|")
	gapped.want(`event: gap|id: 2|data: {"after":1,"oldest":3}`, "event: change|id: 3|", "event: change|id: 4|")
	fromNow.want(": nothing happened")
	b.fake.log.add(9)
	for got := ""; !strings.HasPrefix(got, "event: change|id: 9|"); got = fromNow.next() {
		if strings.HasPrefix(got, "event: ") {
			t.Fatalf("it tells the past: %q", got)
		}
	}
}

// TestEventStreamEnds: with the key, and with the daemon.
func TestEventStreamEnds(t *testing.T) {
	b := newBench(t)
	b.api.pace = pace{look: 10 * time.Millisecond, comment: time.Hour}
	s := b.stream("?after=0")
	b.revoked.Store(true)
	b.fake.log.add(1)
	s.want(`event: error|id: 0|data: {"class":"denied"`, "end")
	b.revoked.Store(false)
	s = b.stream("?after=0")
	s.want("event: change|id: 1|")
	b.stop()
	s.want(`event: error|id: 1|data: {"class":"unavailable","code":"stream_cut"`, "end")
}

// TestEventsGapIsFoundLater: a gap that nothing told of at first is told
// before what comes behind it.
func TestEventsGapIsFoundLater(t *testing.T) {
	b := newBench(t)
	b.api.pace = pace{look: 10 * time.Millisecond, comment: 20 * time.Millisecond}
	s := b.stream("?after=7")
	s.want(": nothing happened")
	b.fake.log.add(20)
	for got := ""; !strings.HasPrefix(got, `event: gap|id: 19|`); got = s.next() {
		if strings.HasPrefix(got, "event: change") {
			t.Fatal("the gap was not told")
		}
	}
	s.want("event: change|id: 20|")
}
