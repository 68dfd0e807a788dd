package dataplane

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
)

type event struct {
	kind, id string
	data     api.StreamEvent
}

func parseSSE(t *testing.T, body []byte) []event {
	t.Helper()
	var list []event
	for block := range strings.SplitSeq(strings.TrimSuffix(string(body), "\n\n"), "\n\n") {
		var e event
		for line := range strings.SplitSeq(block, "\n") {
			name, value, _ := strings.Cut(line, ": ")
			switch name {
			case "event":
				e.kind = value
			case "id":
				e.id = value
			case "data":
				if err := json.Unmarshal([]byte(value), &e.data); err != nil {
					t.Fatalf("%q: %v", line, err)
				}
			default:
				t.Fatalf("odd line %q", line)
			}
		}
		if string(e.data.Type) != e.kind {
			t.Fatalf("event %s holds %s", e.kind, e.data.Type)
		}
		list = append(list, e)
	}
	return list
}

type frame struct {
	kind    byte
	offset  uint64
	payload []byte
}

func readFrame(r io.Reader) (frame, error) {
	var head [13]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return frame{}, err
	}
	f := frame{head[0], binary.BigEndian.Uint64(head[1:]), make([]byte, binary.BigEndian.Uint32(head[9:]))}
	_, err := io.ReadFull(r, f.payload)
	return f, err
}

func parseFrames(t *testing.T, body []byte) []frame {
	t.Helper()
	var list []frame
	for r := bytes.NewReader(body); ; {
		f, err := readFrame(r)
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, f)
	}
}

// TestBytesArriveUnchanged: what is not UTF-8 passes through every form.
func TestBytesArriveUnchanged(t *testing.T) {
	b := newBench(t)
	s := b.session(false, "bytes")
	path := "/sessions/" + s.Session.Id + "/attach"
	want := make([]byte, 256)
	for i := range want {
		want[i] = byte(i)
	}
	events := parseSSE(t, b.call(200, nil, "POST", path, nil).Body)
	if !bytes.Equal(events[1].data.Data, want) {
		t.Errorf("SSE: %q", events[1].data.Data)
	}
	frames := parseFrames(t, b.call(200, nil, "GET", path, nil, "Accept", octets).Body)
	if frames[0].kind != 3 || frames[1].kind != 1 || !bytes.Equal(frames[1].payload, want) || frames[2].kind != 4 || frames[2].offset != 256 {
		t.Errorf("frames: %+v", frames)
	}
}

// TestGetWaitsForTheStart: a GET begins to answer at once, starts nothing and
// gets all once somebody starts the command.
func TestGetWaitsForTheStart(t *testing.T) {
	b := newBench(t)
	b.plane.heartbeat = 20 * time.Millisecond
	s := b.session(false, "both")
	path := "/sessions/" + s.Session.Id
	resp, err := b.client.Do(b.req("GET", path+"/attach", nil, "Accept", octets))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if f, err := readFrame(resp.Body); err != nil || f.kind != 7 {
		t.Fatalf("the first frame is no heartbeat: %+v %v", f, err)
	}
	var got api.Session
	b.call(200, &got, "GET", path, nil)
	if got.State != api.SessionCreated {
		t.Fatalf("a GET started it: %s", got.State)
	}
	b.call(200, nil, "POST", path+"/attach", nil, "Accept", "application/json")
	for {
		f, err := readFrame(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		if f.kind == 4 {
			break
		}
	}
}

// TestSlowReader: a reader that does nothing keeps neither the command nor
// another reader, and still gets all of it.
func TestSlowReader(t *testing.T) {
	b := newBench(t)
	const size = 24 << 20
	s := b.session(false, "flood", "25165824")
	path := "/sessions/" + s.Session.Id + "/attach"
	slow, err := b.client.Do(b.req("POST", path, nil, "Accept", octets))
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Body.Close()
	fast := b.call(200, nil, "GET", path, nil, "Accept", octets)
	sum := func(frames []frame) (n int, h [32]byte) {
		var all []byte
		for _, f := range frames {
			if f.kind == 1 {
				all = append(all, f.payload...)
			}
		}
		return len(all), sha256.Sum256(all)
	}
	n, h := sum(parseFrames(t, fast.Body))
	rest, err := io.ReadAll(slow.Body)
	if err != nil {
		t.Fatal(err)
	}
	if m, g := sum(parseFrames(t, rest)); n != size || m != size || h != g {
		t.Errorf("%d and %d bytes of %d, same: %v", n, m, size, h == g)
	}
}

// TestResumeAfterDisconnect: a stream that broke off goes on from its last id.
func TestResumeAfterDisconnect(t *testing.T) {
	b := newBench(t)
	s := b.session(false, "flood", "3000000")
	path := "/sessions/" + s.Session.Id + "/attach"
	ctx, cancel := context.WithCancel(context.Background())
	resp, err := b.client.Do(b.req("POST", path, nil).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	var first bytes.Buffer
	r := bufio.NewReader(resp.Body)
	for strings.Count(first.String(), "\n\n") < 5 {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		first.WriteString(line)
	}
	cancel()
	resp.Body.Close()
	events := parseSSE(t, first.Bytes())
	more := parseSSE(t, b.call(200, nil, "GET", path, nil, "Last-Event-ID", events[len(events)-1].id).Body)
	at := int64(0)
	for _, e := range append(events, more...) {
		if e.kind != "stdout" {
			continue
		}
		if e.data.Offset != at {
			t.Fatalf("a gap or a repetition at %d: %d", at, e.data.Offset)
		}
		at += int64(len(e.data.Data))
	}
	if at != 3_000_000 {
		t.Errorf("%d bytes", at)
	}
}

// scripted is a reader of given events, then of an error.
type scripted struct {
	events []session.Event
	err    error
}

func (s *scripted) Next(ctx context.Context) (session.Event, error) {
	if len(s.events) > 0 {
		ev := s.events[0]
		s.events = s.events[1:]
		return ev, nil
	}
	if s.err != nil {
		return session.Event{}, s.err
	}
	<-ctx.Done()
	return session.Event{}, ctx.Err()
}
func (s *scripted) Close() error { return nil }

func (b *bench) pump(ctx context.Context, t *testing.T, r Events) []event {
	t.Helper()
	var body bytes.Buffer
	w := bufio.NewWriter(&body)
	if err := b.plane.pump(ctx, r, &sse{w: w}, 5, w.Flush); err != nil {
		t.Fatal(err)
	}
	return parseSSE(t, body.Bytes())
}

func TestGapAndLossAreTold(t *testing.T) {
	b := newBench(t)
	got := b.pump(context.Background(), t, &scripted{err: io.EOF, events: []session.Event{
		{Kind: session.KindGap, Offset: 0, To: 4096},
		{Kind: session.KindStdout, Offset: 4096, Data: []byte("x")},
		{Kind: session.KindLost, Offset: 4097, Loss: &session.Loss{Reason: "oom", At: time.Now()}},
	}})
	if len(got) != 3 || got[0].id != "4096" || got[0].data.To != 4096 || got[0].data.Reason == "" || got[2].kind != "lost" || got[2].data.Reason != "oom" {
		t.Errorf("%+v", got)
	}
}

// TestCutStreamsAreTold: who is cut by a shutdown or a fault is told that the
// log has not ended.
func TestCutStreamsAreTold(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	got := b.pump(ctx, t, &scripted{})
	if len(got) != 1 || got[0].kind != "error" || got[0].data.Error == nil || !got[0].data.Error.Retryable || got[0].id != "5" {
		t.Errorf("%+v", got)
	}
	got = b.pump(context.Background(), t, &scripted{err: sandbox.Errorf(sandbox.Internal, "log_unreadable", "secret path")})
	if len(got) != 1 || got[0].data.Reason != "log_unreadable" || strings.Contains(got[0].data.Error.Message, "secret") {
		t.Errorf("%+v", got)
	}
}
