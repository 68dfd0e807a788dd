package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/bench/pattern"
)

// log is what a reader got of a session.
type log struct {
	stdout int64
	stderr []byte
	gaps   []api.StreamEvent
	wrong  int64 // offset of the first byte that is not the pattern's; -1 for none
	code   int
}

// drain reads a stream to its end and, where check is set, compares every byte.
func drain(t *testing.T, st *client.Stream, check bool) log {
	t.Helper()
	defer st.Close()
	l := log{wrong: -1}
	var c pattern.Checker
	for {
		ev, err := st.Next(context.Background())
		if errors.Is(err, io.EOF) {
			return l
		}
		if err != nil {
			t.Fatalf("read the stream: %v", err)
		}
		switch ev.Type {
		case api.EventStdout:
			l.stdout += int64(len(ev.Data))
			if check && l.wrong < 0 && !c.Check(ev.Data) {
				l.wrong = ev.Offset
			}
		case api.EventStderr:
			l.stderr = append(l.stderr, ev.Data...)
		case api.EventGap:
			l.gaps = append(l.gaps, ev)
			c.Skip(ev.To) // what goes is old, when only the pattern had been written
		case api.EventExit:
			l.code = ev.Exit.Code
		case api.EventLost:
			t.Fatalf("lost: %+v", ev)
		}
	}
}

// session makes a session of the benchmark's command.
func (f *fixture) session(t *testing.T, id string, args ...string) *client.Session {
	t.Helper()
	s, err := f.c.CreateSession(context.Background(), id, api.ProcessSpec{Args: args})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// octets runs a command and reads its output as the octet stream.
func (f *fixture) octets(t *testing.T, id string, args ...string) log {
	t.Helper()
	return drain(t, f.session(t, id, args...).Attach(client.StreamOptions{}), false)
}

// sse runs a command and reads its output as server-sent events, decoding all
// of it.
func (f *fixture) sse(t *testing.T, id string, args ...string) (total int64) {
	t.Helper()
	s := f.session(t, id, args...)
	req, err := http.NewRequest(http.MethodPost, fmt.Sprintf("%s/v1/sandboxes/%s/sessions/%s/attach", f.d.URL, id, s.ID), nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", "text/event-stream")
	req.Header.Set("Authorization", "Bearer "+s.Token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	r := bufio.NewReaderSize(resp.Body, 256<<10)
	var kind string
	buf := make([]byte, 256<<10)
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			t.Fatalf("the events end early: %v", err)
		}
		switch line = bytes.TrimSuffix(line, []byte("\n")); {
		case bytes.HasPrefix(line, []byte("event: ")):
			kind = string(line[len("event: "):])
		case bytes.HasPrefix(line, []byte("data: ")) && kind == "stdout":
			total += int64(decode(t, line[len("data: "):], buf))
		case kind == "exit" && len(line) == 0:
			return total
		}
	}
}

// decode returns how many bytes of output an event has.
func decode(t *testing.T, event, buf []byte) int {
	t.Helper()
	const mark = `"data":"`
	at := bytes.Index(event, []byte(mark))
	if at >= 0 {
		text := event[at+len(mark):]
		if end := bytes.IndexByte(text, '"'); end >= 0 && base64.StdEncoding.DecodedLen(end) <= len(buf) {
			n, err := base64.StdEncoding.Decode(buf, text[:end])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	var ev api.StreamEvent
	if err := json.Unmarshal(event, &ev); err != nil {
		t.Fatal(err)
	}
	return len(ev.Data)
}
