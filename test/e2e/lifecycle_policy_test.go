package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

func dirNames(dir string) iter.Seq[string] {
	return func(yield func(string) bool) {
		list, _ := os.ReadDir(dir)
		for _, e := range list {
			if !yield(e.Name()) {
				return
			}
		}
	}
}

// lastOp is a sandbox's newest operation.
func (b box) lastOp() api.Operation {
	b.t.Helper()
	var ops api.OperationList
	b.want(200, &ops, "GET", "/v1/operations?limit=1&sandbox="+b.id, nil)
	if len(ops.Items) != 1 {
		b.t.Fatalf("operations: %+v", ops.Items)
	}
	return ops.Items[0]
}

// TestPolicies lets sandboxes be suspended and stopped by their idle policy and
// by the end of their TTL. Looking is no use; an attach is, for as long as it is open.
func TestPolicies(t *testing.T) {
	d := harness.Start(t)
	idle := func(action string) map[string]any {
		return map[string]any{"policy": map[string]any{"idle": map[string]any{"after_seconds": 10, "action": action}}}
	}
	quiet, stop, busy := newBox(t, d, idle("suspend")), newBox(t, d, idle("stop")), newBox(t, d, idle("suspend"))
	short := newBox(t, d, map[string]any{"ttl_seconds": 4, "policy": map[string]any{"on_expiry": "suspend"}})
	c := newClient(t, d, d.Key)
	s, err := c.CreateSession(t.Context(), busy.id, api.ProcessSpec{Args: []string{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	open := make(chan struct{})
	go func() {
		defer close(open)
		st := s.Attach(client.StreamOptions{})
		defer st.Close()
		for {
			if _, err := st.Next(ctx); err != nil {
				return
			}
		}
	}()
	begin := time.Now()
	for _, w := range []struct {
		b     box
		state api.SandboxState
		key   string
		least time.Duration
	}{
		{short, api.SandboxSuspended, "system", 4 * time.Second},
		{quiet, api.SandboxSuspended, "system-idle", 10 * time.Second},
		{stop, api.SandboxStopped, "system-idle", 10 * time.Second},
	} {
		eventually(t, "the policy's "+string(w.state), 45*time.Second, func() bool { return w.b.state() == w.state })
		op := w.b.lastOp()
		if op.Key != w.key {
			t.Errorf("who did it: %+v", op)
		}
		if age := op.CreatedAt.Sub(w.b.get().CreatedAt); age < w.least {
			t.Errorf("%s by %s came at the age of %v", op.Verb, op.Key, age)
		}
	}
	t.Logf("idle and TTL policies done after %.1f s", time.Since(begin).Seconds())
	if s := short.get(); !s.ExpiresAt.IsZero() {
		t.Errorf("the TTL that has run out still stands: %v", s.ExpiresAt)
	}
	if state := busy.state(); state != api.SandboxRunning {
		t.Errorf("a sandbox that somebody is attached to is %s", state)
	}
	cancel()
	<-open
	eventually(t, "the sandbox is idle once nobody is attached", 45*time.Second, func() bool { return busy.state() == api.SandboxSuspended })
	if i, err := s.Get(t.Context()); err != nil || i.State != api.SessionRunning || !i.Held {
		t.Errorf("its session: %+v, %v", i, err)
	}
	quiet.want(200, nil, "PATCH", quiet.path(""), map[string]any{"policy": map[string]any{"idle": map[string]any{"action": "none"}}})
	quiet.verb("wake")
	if s := quiet.get(); s.Policy.Idle.Action != "none" || s.Policy.Idle.AfterSeconds != 10 {
		t.Errorf("the changed policy: %+v", s.Policy)
	}
}

// TestWakeOnAccess suspends and stops a sandbox that may be woken: an attach, a
// command and a file that is written are served, a look wakes nothing. One that
// may not be woken refuses.
func TestWakeOnAccess(t *testing.T) {
	d := harness.Start(t)
	c := newClient(t, d, d.Key)
	b := newBox(t, d, map[string]any{"policy": map[string]any{"wake_on_access": true}})
	s, err := c.CreateSession(t.Context(), b.id, api.ProcessSpec{Args: []string{"bash", "-c", "echo before; read x; echo after $x"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	st := s.Attach(client.StreamOptions{})
	for {
		e, err := st.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == api.EventStdout {
			break
		}
	}
	st.Close()
	b.verb("suspend")
	b.want(200, nil, "GET", b.path("/sessions"), nil)
	b.want(200, nil, "GET", b.path("/sessions/"+s.ID), nil)
	b.do("GET", b.path("/files?path=/etc/hostname"), nil)
	if state := b.state(); state != api.SandboxSuspended {
		t.Fatalf("a look woke it: %s", state)
	}
	begin := time.Now()
	var in api.StdinState
	b.want(200, &in, "POST", b.path("/sessions/"+s.ID+"/stdin?offset=0&close=true"), []byte("words\n"))
	t.Logf("stdin to a suspended sandbox was taken after %v", time.Since(begin).Round(time.Millisecond))
	if got, exit := logText(t, s); got != "before\nafter words\n" || exit == nil || exit.Code != 0 {
		t.Errorf("the session went on as %q, %+v", got, exit)
	}
	if op := b.lastOp(); op.Verb != "wake" || op.Key != "system-access" {
		t.Errorf("who woke it: %+v", op)
	}
	for _, verb := range []string{"suspend", "pause", "stop"} {
		b.verb(verb)
		var x api.ExecResult
		b.want(200, &x, "POST", b.path("/exec"), api.ExecRequest{Args: []string{"echo", verb}})
		if string(x.Stdout) != verb+"\n" {
			t.Errorf("exec after a %s: %+v", verb, x)
		}
		b.verb(verb)
		b.want(200, nil, "PUT", b.path("/files?path=/tmp/"+verb), []byte("x"))
	}
	b.want(200, nil, "PATCH", b.path(""), map[string]any{"policy": map[string]any{"wake_on_access": false}})
	b.verb("suspend")
	b.refused(409, api.ClassFailedPrecondition, "POST", b.path("/exec"), api.ExecRequest{Args: []string{"true"}})
	if state := b.state(); state != api.SandboxSuspended {
		t.Errorf("a sandbox that may not be woken is %s", state)
	}
}

// logText is a session's whole output and its exit.
func logText(t *testing.T, s *client.Session) (string, *api.Exit) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	st := s.Follow(client.StreamOptions{})
	defer st.Close()
	var b strings.Builder
	for {
		e, err := st.Next(ctx)
		if err != nil {
			t.Errorf("the log ends with %v", err)
			return b.String(), nil
		}
		b.Write(e.Data)
		if e.Type == api.EventExit {
			return b.String(), e.Exit
		}
	}
}

// eventsUntil follows the events from a sequence on until enough says so, and
// returns them.
func eventsUntil(t *testing.T, d *harness.Daemon, after int64, enough func([]api.Event) bool) (list []api.Event) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.URL+"/v1/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+d.Key)
	req.Header.Set("Accept", "text/event-stream")
	req.Header.Set("Last-Event-ID", strconv.FormatInt(after, 10))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("events: %s", resp.Status)
	}
	kind, id := "", ""
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		switch name, v, _ := strings.Cut(lines.Text(), ": "); name {
		case "event":
			kind = v
		case "id":
			id = v
		case "data":
			var e api.Event
			if kind != "change" {
				t.Errorf("an event of kind %q: %s", kind, v)
			} else if err := json.Unmarshal([]byte(v), &e); err != nil || strconv.FormatInt(e.Seq, 10) != id {
				t.Errorf("event %s: %q, %v", id, v, err)
			}
			list = append(list, e)
			if enough(list) {
				return list
			}
		}
	}
	return list // the stream was cut
}

// TestEvents follows the events of a sandbox's life in pieces, over cuts and a
// restart of the daemon: every change of its state comes once, in order.
func TestEvents(t *testing.T) {
	d := harness.Start(t)
	b := newBox(t, d, nil)
	for _, verb := range []string{"pause", "resume", "suspend", "restore", "stop", "start"} {
		b.verb(verb)
	}
	snap := b.snapshot("s", "disk")
	var all []api.Event
	take := func(n int) {
		after := int64(0)
		if len(all) > 0 {
			after = all[len(all)-1].Seq
		}
		all = append(all, eventsUntil(t, d, after, func(l []api.Event) bool { return len(l) >= n })...)
	}
	take(1)
	take(4)
	d.Kill9()
	d.Serve()
	take(3)
	b.rollback(snap)
	b.kill()
	b.is(api.SandboxFailed)
	b.verb("delete")
	all = append(all, eventsUntil(t, d, all[len(all)-1].Seq, func(l []api.Event) bool {
		e := l[len(l)-1]
		return e.Type == "sandbox.state" && e.Sandbox == b.id && strings.Contains(string(e.Data), `"to":"deleted"`)
	})...)
	var states []string
	last, seq := "", int64(0)
	for _, e := range all {
		if e.Seq <= seq {
			t.Errorf("event %d comes after %d", e.Seq, seq)
		}
		seq = e.Seq
		if e.Type != "sandbox.state" || e.Sandbox != b.id {
			continue
		}
		var ch struct{ From, To string }
		if err := json.Unmarshal(e.Data, &ch); err != nil {
			t.Fatal(err)
		}
		if ch.From != last {
			t.Errorf("a change from %q, after one to %q", ch.From, last)
		}
		last = ch.To
		states = append(states, ch.To)
	}
	want := "creating running pausing paused resuming running suspending suspended restoring running stopping stopped starting running " +
		"snapshotting running rolling_back running failed deleting deleted"
	if got := strings.Join(states, " "); got != want {
		t.Errorf("the states told:\n%s\ninstead of:\n%s", got, want)
	}
	var page api.EventList
	b.want(200, &page, "GET", "/v1/events?after=0&limit=1000", nil, "Accept", "application/json")
	if len(page.Items) != len(all) {
		t.Errorf("the list has %d events, the streams had %d", len(page.Items), len(all))
	}
	b.want(202, nil, "DELETE", "/v1/snapshots/"+snap, nil)
}
