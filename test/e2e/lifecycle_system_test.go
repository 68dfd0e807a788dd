package e2e

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/test/harness"
	"cloche.dev/cloche/test/linear"
)

// long tells whether the suites run at their full length.
func long() bool { return os.Getenv("E2E_LONG") != "" }

// atFull is what a suite does at its full length, or else.
func atFull[N int | time.Duration](full, short N) N {
	if long() {
		return full
	}
	return short
}

// small is a sandbox whose snapshots cost little.
var small = map[string]int{"memory_mib": 256, "disk_mib": 256}

// box is one sandbox over HTTP.
type box struct {
	caller
	d  *harness.Daemon
	id string
}

func (b box) path(rest string) string { return "/v1/sandboxes/" + b.id + rest }

// newBox creates a sandbox and waits until it runs. more goes into the request.
func newBox(t testing.TB, d *harness.Daemon, more map[string]any) box {
	t.Helper()
	b := box{caller: caller{t: t, url: d.URL, key: d.Key}, d: d}
	req := map[string]any{"template": "base", "resources": small}
	for k, v := range more {
		req[k] = v
	}
	if req["snapshot"] != nil {
		delete(req, "template")
		delete(req, "resources")
	}
	var a api.AcceptedSandbox
	b.want(202, &a, "POST", "/v1/sandboxes", req)
	b.id = a.Sandbox.Id
	b.done(a.Operation.Id)
	return b
}

// at is the same sandbox in another test, at is another one of the same daemon.
func (b box) in(t testing.TB) box     { b.t = t; return b }
func (b box) other(id string) box     { b.id = id; return b }
func (b box) get() (s api.Sandbox)    { b.t.Helper(); b.want(200, &s, "GET", b.path(""), nil); return s }
func (b box) state() api.SandboxState { b.t.Helper(); return b.get().State }

// ended waits for an operation's end.
func (b box) ended(op string) (o api.Operation) {
	b.t.Helper()
	for range 10 {
		b.want(200, &o, "GET", "/v1/operations/"+op+"?wait_seconds=60", nil)
		if o.State == api.OperationSucceeded || o.State == api.OperationFailed {
			return o
		}
	}
	b.t.Fatalf("the operation does not end: %+v\n%s", o, b.d.Log())
	return o
}

// done demands that an operation succeeds.
func (b box) done(op string) api.Operation {
	b.t.Helper()
	o := b.ended(op)
	if o.State != api.OperationSucceeded {
		b.t.Fatalf("%s of %s: %+v\n%s", o.Verb, b.id, o.Error, b.d.Log())
	}
	return o
}

// ask sends a verb and answers whatever came.
func (b box) ask(verb, to string, disk bool, header ...string) reply {
	b.t.Helper()
	switch verb {
	case "create":
		return b.do("POST", "/v1/sandboxes", map[string]any{"template": "base", "resources": small}, header...)
	case "delete":
		return b.do("DELETE", b.path(""), nil, header...)
	case "rollback":
		return b.do("POST", b.path("/rollback"), map[string]any{"snapshot": to}, header...)
	case "snapshot":
		kind := "memory"
		if disk {
			kind = "disk"
		}
		return b.do("POST", b.path("/snapshots"), map[string]any{"name": "s", "kind": kind}, header...)
	case "fork":
		return b.do("POST", b.path("/fork"), map[string]any{"count": 1}, header...)
	case "stop":
		return b.do("POST", b.path("/stop?grace_seconds=0"), nil, header...)
	}
	return b.do("POST", b.path("/"+verb), nil, header...)
}

// answer is what every verb's answer holds.
type answer struct {
	Sandbox   api.Sandbox           `json:"sandbox"`
	Snapshot  api.Snapshot          `json:"snapshot"`
	Operation api.Operation         `json:"operation"`
	Children  []api.AcceptedSandbox `json:"children"`
}

func (r reply) answer(t testing.TB) answer {
	t.Helper()
	var a answer
	if r.status != http.StatusAccepted {
		t.Fatalf("not accepted: %d %.800s", r.status, r.body)
	}
	// A delete is answered with its operation alone.
	if _ = json.Unmarshal(r.body, &a.Operation); a.Operation.Verb == "" {
		a.Operation = api.Operation{}
		r.into(t, &a)
	}
	return a
}

// verb asks and waits until it is done.
func (b box) verb(verb string) answer {
	b.t.Helper()
	a := b.ask(verb, "", false).answer(b.t)
	b.done(a.Operation.Id)
	return a
}

// snapshot takes a named snapshot and returns its id.
func (b box) snapshot(name, kind string) string {
	b.t.Helper()
	var a api.AcceptedSnapshot
	b.want(202, &a, "POST", b.path("/snapshots"), map[string]any{"name": name, "kind": kind})
	b.done(a.Operation.Id)
	return a.Snapshot.Id
}

// rollback goes back to a snapshot and waits.
func (b box) rollback(to string) {
	b.t.Helper()
	b.done(b.ask("rollback", to, false).answer(b.t).Operation.Id)
}

// script runs a shell script as root and demands that it succeeds.
func (b box) script(text string) string {
	b.t.Helper()
	return mustScript(b.t, b.d, b.id, "root", text)
}

// sentry finds the process of a sandbox's machine.
func (b box) sentry() int { return harness.Sentry(b.id) }

// kill ends the machine as a crash would; it tells whether there was one.
func (b box) kill() bool { return harness.KillSentry(b.id) > 0 }

// is waits until the sandbox is in a state.
func (b box) is(state api.SandboxState) {
	b.t.Helper()
	eventually(b.t, b.id+" is "+string(state), 30*time.Second, func() bool { return b.state() == state })
}

// freeze stops the engine's control processes and returns how to let them go on.
func freeze(t testing.TB, d *harness.Daemon) func() {
	t.Helper()
	var pids []int
	for _, p := range d.ControlProcesses() {
		pid, err := strconv.Atoi(p)
		if err == nil && syscall.Kill(pid, syscall.SIGSTOP) == nil {
			pids = append(pids, pid)
		}
	}
	if len(pids) == 0 {
		t.Fatal("no control process of the engine was found")
	}
	thaw := sync.OnceFunc(func() {
		for _, pid := range pids {
			_ = syscall.Kill(pid, syscall.SIGCONT)
		}
	})
	t.Cleanup(thaw)
	return thaw
}

// overHTTP is a sandbox as a history sees it.
type overHTTP struct {
	box
	mu       *sync.Mutex
	children *[]string
}

func historyOf(b box) *overHTTP { return &overHTTP{box: b, mu: &sync.Mutex{}, children: &[]string{}} }

// refusedAs is "class/code" of a problem, "" of what was accepted.
func (r reply) refusedAs() string {
	if r.status < 400 {
		return ""
	}
	var p api.Problem
	if err := json.Unmarshal(r.body, &p); err != nil {
		return "no problem: " + string(r.body)
	}
	return string(p.Class) + "/" + p.Code
}

// Ask implements linear.System.
func (o *overHTTP) Ask(_ context.Context, a linear.Ask) linear.Answer {
	var header []string
	if a.Key != "" {
		header = []string{"Idempotency-Key", a.Key}
	}
	r := o.ask(a.Verb, a.To, a.Disk, header...)
	if r.status != http.StatusAccepted {
		return linear.Answer{Refused: r.refusedAs()}
	}
	got := r.answer(o.t)
	if a.Verb == "create" {
		o.id = got.Sandbox.Id
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, c := range got.Children {
		*o.children = append(*o.children, c.Sandbox.Id)
	}
	return linear.Answer{Op: got.Operation.Id, Snapshot: got.Snapshot.Id}
}

// Look implements linear.System.
func (o *overHTTP) Look(context.Context) linear.Answer {
	s := o.get()
	return linear.Answer{State: string(s.State), Op: s.Operation}
}

// Wait implements linear.System.
func (o *overHTTP) Wait(_ context.Context, op string) linear.Answer {
	e := o.ended(op)
	if e.Error != nil {
		return linear.Answer{Failed: e.Error.Code}
	}
	return linear.Answer{}
}

// Crash implements linear.System.
func (o *overHTTP) Crash(context.Context) { o.kill() }

// orphans deletes the children that forks made.
func (o *overHTTP) orphans() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, id := range *o.children {
		o.do("DELETE", "/v1/sandboxes/"+id, nil)
	}
	*o.children = nil
}

// home brings the sandbox back to running, as part of the history; false where
// that can't be.
func (o *overHTTP) home(h *linear.History, snapshot string) bool {
	ctx := context.Background()
	for range 6 {
		switch state := h.Look(ctx, o, 0).State; state {
		case "running":
			return true
		case "paused", "suspended", "stopped":
			_, done := h.Ask(ctx, o, 0, linear.Ask{Verb: "wake"})
			<-done
		case "failed":
			_, done := h.Ask(ctx, o, 0, linear.Ask{Verb: "rollback", To: snapshot})
			<-done
		default:
			return false
		}
	}
	return false
}
