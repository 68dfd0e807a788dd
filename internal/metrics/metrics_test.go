package metrics

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/store/sqlite"
)

// world is a store with one project and template, and the metrics of it.
type world struct {
	*testing.T
	*sqlite.Store
	project string
	m       *Metrics
	f       *follower
}

const digest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

func newWorld(t *testing.T, o Options) *world {
	w := &world{T: t}
	var err error
	w.Store, err = sqlite.Open(t.Context(), filepath.Join(t.TempDir(), "cloche.db"), nil)
	w.must(err)
	t.Cleanup(func() { _ = w.Close() })
	p := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: "default", CreatedAt: time.Now()}
	w.project = p.ID
	w.must(w.CreateProject(t.Context(), p))
	_, err = w.PutTemplate(t.Context(), sandbox.Template{Digest: digest, Project: p.ID, CreatedAt: time.Now()}, "base:latest")
	w.must(err)
	w.create() // before the metrics begin
	o.Store = w.Store
	w.m = New(o)
	w.f = newFollower(w.m)
	w.must(w.f.catchUp(t.Context()))
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) op() sandbox.Operation {
	return sandbox.Operation{ID: sandbox.NewID(sandbox.KindOperation), Project: w.project, Key: "k", CreatedAt: time.Now()}
}

func (w *world) create() (sandbox.Sandbox, sandbox.Operation) {
	op := w.op()
	op.Verb = sandbox.VerbCreate
	sb, op, _, err := w.CreateSandbox(w.Context(), sandbox.Sandbox{
		ID: sandbox.NewID(sandbox.KindSandbox), Project: w.project, Template: "base:latest", CreatedAt: time.Now(),
		Resources: sandbox.Resources{MilliCPU: 1500, MemoryMiB: 512, DiskMiB: 1024}, Policy: sandbox.DefaultPolicy,
	}, op, sandbox.Capacity{}, sandbox.Idempotency{})
	w.must(err)
	return sb, op
}

func (w *world) running() sandbox.Sandbox {
	sb, op := w.create()
	w.must(w.UpdateOperation(w.Context(), op.ID, sandbox.OpRunning, "x", nil))
	w.must(w.FinishOperation(w.Context(), op.ID, sandbox.Outcome{To: sandbox.StateRunning, Epoch: sb.Generation}))
	return sb
}

func (w *world) begin(id string, verb sandbox.Verb, snap *sandbox.Snapshot) sandbox.Operation {
	_, op, _, err := w.BeginVerb(w.Context(), "", id, verb, sandbox.Begin{Op: w.op(), Snapshot: snap}, sandbox.Idempotency{})
	w.must(err)
	return op
}

func (w *world) scrape() string {
	w.Helper()
	w.must(w.f.catchUp(w.Context()))
	rec := httptest.NewRecorder()
	w.m.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if rec.Code != http.StatusOK {
		w.Fatalf("%d: %s", rec.Code, rec.Body)
	}
	return rec.Body.String()
}

func (w *world) wants(text string, lines ...string) {
	w.Helper()
	for _, l := range lines {
		if !strings.Contains("\n"+text, "\n"+l+"\n") {
			name, _, _ := strings.Cut(l, "{")
			w.Errorf("there is no line %q, but:\n%s", l, strings.Join(regexp.MustCompile(`(?m)^`+name+`.*$`).FindAllString(text, 20), "\n"))
		}
	}
}

type fakeHost struct{ err error }

func (h fakeHost) Queue(context.Context) (int, int, error) { return 1, 2, nil }
func (h fakeHost) Capacity(context.Context) (sandbox.Capacity, error) {
	return sandbox.Capacity{MilliCPU: 4000, DiskFree: 7, DiskFloor: 5}, h.err
}

func TestWhatIsShown(t *testing.T) {
	w := newWorld(t, Options{
		Host: fakeHost{}, Version: "v9", Driver: func() string { return "gvisor" },
		Sessions: func() map[string]int { return map[string]int{"running": 3} }, Output: func() uint64 { return 42 },
	})
	a, b := w.running(), w.running()
	snap := &sandbox.Snapshot{ID: sandbox.NewID(sandbox.KindSnapshot), Kind: sandbox.SnapshotMemory, Purpose: sandbox.PurposeSuspend, CreatedAt: time.Now()}
	op := w.begin(a.ID, sandbox.VerbSuspend, snap)
	at := time.Now()
	w.must(w.FinishOperation(w.Context(), op.ID, sandbox.Outcome{
		To: sandbox.StateSuspended, Image: &snap.ID, ImageAt: &at,
		Snapshot: &sandbox.SnapshotStatus{Snapshot: snap.ID, Kind: snap.Kind, SizeBytes: 3 << 20, TakenAt: at},
	}))
	op = w.begin(b.ID, sandbox.VerbPause, nil)
	w.must(w.FinishOperation(w.Context(), op.ID, sandbox.Outcome{To: sandbox.StateRunning, Failure: sandbox.Errorf(sandbox.Internal, "broken", "x")}))
	if moved, err := w.Observed(w.Context(), b.ID, b.Generation, sandbox.End{Reason: sandbox.EndOOM, At: at}); err != nil || !moved {
		t.Fatal(moved, err)
	}
	w.m.Request(409, time.Millisecond, sandbox.Errorf(sandbox.Conflict, "taken", "x"))
	w.m.Request(200, time.Millisecond, nil)
	text := w.scrape()
	w.wants(text,
		`cloche_sandboxes{state="creating"} 1`, `cloche_sandboxes{state="suspended"} 1`, `cloche_sandboxes{state="failed"} 1`, `cloche_sandboxes{state="running"} 0`,
		`cloche_operation_seconds_count{result="succeeded",step="all",verb="create"} 2`,
		`cloche_operation_seconds_count{result="succeeded",step="run",verb="create"} 2`,
		`cloche_operation_seconds_count{result="succeeded",step="wait",verb="suspend"} 1`,
		`cloche_operation_seconds_count{result="failed",step="all",verb="pause"} 1`,
		`cloche_operation_errors_total{class="internal",code="broken",verb="pause"} 1`,
		`cloche_machine_ends_total{reason="oom"} 1`,
		`cloche_snapshots{kind="memory",purpose="suspend"} 1`, `cloche_snapshot_bytes{kind="memory",purpose="suspend"} 3.145728e+06`,
		`cloche_snapshot_size_bytes_sum{kind="memory",purpose="suspend"} 3.145728e+06`,
		`cloche_host_cpu_cores 4`, `cloche_host_disk_free_bytes 7`, `cloche_host_disk_floor_bytes 5`, `cloche_used_cpu_cores 1.5`,
		`cloche_bringups{state="waiting"} 2`, `cloche_sessions{status="running"} 3`, `cloche_output_bytes_total 42`,
		`cloche_http_errors_total{class="conflict",code="taken"} 1`, `cloche_http_request_seconds_count{status="200"} 1`,
		`cloche_metrics_read{what="host"} 1`,
	)
	for _, name := range []string{`cloche_build_info{driver="gvisor"`, "go_goroutines ", "process_open_fds "} {
		if !strings.Contains(text, name) {
			t.Errorf("there is no %s", name)
		}
	}
	if strings.Contains(text, "cloche_host_memory_bytes ") {
		t.Error("a bound that is none is shown")
	}
	if id := regexp.MustCompile(`(sbx|op|snp|prj)_[a-z2-7]{20}`).FindString(text); id != "" {
		t.Errorf("an id is in the metrics: %s", id)
	}
	if w.scrape(); len(w.f.open) != 0 || len(w.f.stirred) != 0 {
		t.Errorf("kept %v, %v", w.f.open, w.f.stirred)
	}
}

// TestSuperseded: an operation that a delete ended is named by no event of its
// own end.
func TestSuperseded(t *testing.T) {
	w := newWorld(t, Options{})
	sb := w.running()
	w.begin(sb.ID, sandbox.VerbPause, nil)
	w.scrape()
	w.begin(sb.ID, sandbox.VerbDelete, nil)
	w.wants(w.scrape(), `cloche_operation_seconds_count{result="failed",step="all",verb="pause"} 1`)
	if len(w.f.open[sb.ID]) != 1 {
		t.Errorf("open: %v", w.f.open)
	}
}

// TestAPartFails: the rest is still shown, and that it failed.
func TestAPartFails(t *testing.T) {
	w := newWorld(t, Options{Host: fakeHost{errors.New("gone")}})
	w.wants(w.scrape(), `cloche_metrics_read{what="host"} 0`, `cloche_metrics_read{what="sandboxes"} 1`, `cloche_sandboxes{state="creating"} 1`)
}

// TestRowsAreKept: scraping often is not reading often.
func TestRowsAreKept(t *testing.T) {
	reads := 0
	w := newWorld(t, Options{States: func(context.Context) (map[sandbox.State]int, error) {
		reads++
		return map[sandbox.State]int{sandbox.StatePaused: reads}, nil
	}})
	for range 5 {
		w.wants(w.scrape(), `cloche_sandboxes{state="paused"} 1`)
	}
	if reads != 1 {
		t.Errorf("%d reads", reads)
	}
}

func TestLast(t *testing.T) {
	w := newWorld(t, Options{})
	for range 40 {
		w.create()
		list, err := w.Events(t.Context(), "", 0, 500)
		w.must(err)
		if got, err := last(t.Context(), w.Store); err != nil || got != list[len(list)-1].Seq {
			t.Fatalf("last = %d, %v; want %d", got, err, list[len(list)-1].Seq)
		}
	}
}

func TestFew(t *testing.T) {
	f := few{most: 2}
	for in, want := range map[string]string{"a": "a", "b": "b"} {
		if got := f.of(in); got != want {
			t.Errorf("%s is %s", in, got)
		}
	}
	if f.of("c") != "other" || f.of("a") != "a" {
		t.Error("the bound does not hold")
	}
}

func TestListen(t *testing.T) {
	for address, ok := range map[string]bool{"127.0.0.1:0": true, "[::1]:0": true, "0.0.0.0:0": false, ":0": false, "x": false} {
		l, err := Listen(t.Context(), address, false)
		if l != nil {
			_ = l.Close()
		}
		if address != "[::1]:0" && (err == nil) != ok || !ok && !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("%s: %v", address, err)
		}
	}
	l, err := Listen(t.Context(), "0.0.0.0:0", true)
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
}

func TestRun(t *testing.T) {
	w := newWorld(t, Options{})
	none := goleak.IgnoreCurrent() // the store's own
	l, err := Listen(t.Context(), "127.0.0.1:0", false)
	w.must(err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.m.Run(ctx, l) }()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for path, want := range map[string]int{"/metrics": 200, "/": 404} {
		res, err := c.Get("http://" + l.Addr().String() + path)
		w.must(err)
		_, err = io.Copy(io.Discard, res.Body)
		w.must(errors.Join(err, res.Body.Close()))
		if res.StatusCode != want {
			t.Errorf("%s: %d", path, res.StatusCode)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	goleak.VerifyNone(t, none)
}
