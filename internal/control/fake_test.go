package control_test

import (
	"context"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/store/sqlite"
)

// fakeBuilder answers what it is told to.
type fakeBuilder struct {
	mu      sync.Mutex
	debian  func(ctx context.Context, progress func(string)) (sandbox.Built, error)
	files   []string // digests on the host
	removed []string
}

const digestA = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

func (b *fakeBuilder) ImportTar(_ context.Context, tar io.Reader, _ sandbox.RuntimeConfig) (sandbox.Built, error) {
	n, err := io.Copy(io.Discard, tar)
	return sandbox.Built{Digest: digestA, SizeBytes: n}, err
}

func (b *fakeBuilder) BuildDebian(ctx context.Context, _ sandbox.DebianSource, _ sandbox.RuntimeConfig, progress func(string)) (sandbox.Built, error) {
	return b.debian(ctx, progress)
}

func (b *fakeBuilder) Image(context.Context, string) (string, error) { return "", nil }

func (b *fakeBuilder) Digests(context.Context) ([]string, error) { return b.files, nil }

func (b *fakeBuilder) Remove(_ context.Context, digest string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.removed = append(b.removed, digest)
	return nil
}

// world is a control with everything around it, inside a synctest bubble.
type world struct {
	t       *testing.T
	store   *sqlite.Store
	node    *fakeNode
	builder *fakeBuilder
	c       *control.Control
	opts    control.Options
	stop    func()
	admin   sandbox.Caller
	user    sandbox.Caller
	reader  sandbox.Caller
}

// bubble runs f in a bubble of fake time over a fresh world whose control runs.
func bubble(t *testing.T, f func(w *world), options ...func(*control.Options)) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, node: newNode(), builder: &fakeBuilder{}}
		var err error
		if w.store, err = sqlite.Open(context.Background(), filepath.Join(dir, "cloche.db"), nil); err != nil {
			t.Fatal(err)
		}
		prj := sandbox.Project{ID: sandbox.NewID(sandbox.KindProject), Name: "default", CreatedAt: time.Now()}
		w.must(w.store.CreateProject(t.Context(), prj))
		caller := func(r sandbox.Role) sandbox.Caller {
			return sandbox.Caller{KeyID: sandbox.NewID(sandbox.KindKey), Project: prj.ID, Role: r}
		}
		w.admin, w.user, w.reader = caller(sandbox.RoleAdmin), caller(sandbox.RoleProject), caller(sandbox.RoleRead)
		_, err = w.store.PutTemplate(t.Context(), sandbox.Template{
			Digest: digestA, Project: prj.ID, Config: sandbox.RuntimeConfig{User: "user"}, Source: "tar", CreatedAt: time.Now(),
		}, "base:latest")
		w.must(err)
		w.opts = control.Options{
			Store: w.store, Node: w.node, Builder: w.builder, Log: slog.New(slog.DiscardHandler),
			MintKey: func(id string) (string, []byte) { return "text of " + id, []byte("hash") },
		}
		for _, o := range options {
			o(&w.opts)
		}
		w.start()
		f(w)
		w.stop()
		w.must(w.store.Close())
	})
}

// start makes a new control over the same store, as a restart would.
func (w *world) start() {
	w.c = control.New(w.opts)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	c := w.c
	go func() { done <- c.Run(ctx) }()
	w.stop = func() {
		cancel()
		w.must(<-done)
	}
	synctest.Wait()
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) create(req control.CreateRequest) (sandbox.Sandbox, sandbox.Operation) {
	w.t.Helper()
	if req.Template == "" {
		req.Template = "base"
	}
	sb, op, replayed, err := w.c.CreateSandbox(w.t.Context(), w.user, req, sandbox.Idempotency{})
	w.must(err)
	if replayed || sb.State != sandbox.StateCreating || op.State != sandbox.OpAccepted {
		w.t.Fatalf("create answered %+v %+v %v", sb, op, replayed)
	}
	return sb, op
}

// running is a sandbox that runs.
func (w *world) running() sandbox.Sandbox {
	w.t.Helper()
	sb, op := w.create(control.CreateRequest{})
	w.wants(w.ended(op), sandbox.OpSucceeded, "")
	return w.is(sb.ID, sandbox.StateRunning)
}

// ended waits for an operation as a client would.
func (w *world) ended(op sandbox.Operation) sandbox.Operation {
	w.t.Helper()
	for range 60 {
		got, err := w.c.Operation(w.t.Context(), w.user, op.ID, control.MaxWait)
		w.must(err)
		if got.State.Done() {
			return got
		}
	}
	w.t.Fatalf("%s never ends", op.Verb)
	return op
}

func (w *world) wants(op sandbox.Operation, state sandbox.OperationState, code string) {
	w.t.Helper()
	if op.State != state || (op.Error == nil) != (code == "") || op.Error != nil && op.Error.Code != code {
		w.t.Fatalf("%s is %s with %v, want %s %q", op.Verb, op.State, op.Error, state, code)
	}
}

func (w *world) is(id string, state sandbox.State) sandbox.Sandbox {
	w.t.Helper()
	sb, err := w.c.Get(w.t.Context(), w.user, id)
	w.must(err)
	if sb.State != state {
		w.t.Fatalf("the sandbox is %s, want %s (%+v)", sb.State, state, sb.End)
	}
	return sb
}

func (w *world) op(id string) sandbox.Operation {
	w.t.Helper()
	op, err := w.c.Operation(w.t.Context(), w.user, id, 0)
	w.must(err)
	return op
}

func (w *world) del(id string) sandbox.Operation {
	w.t.Helper()
	_, op, _, err := w.c.Delete(w.t.Context(), w.user, id, sandbox.Idempotency{})
	w.must(err)
	return op
}

// later lets d pass while control is down, which is cheaper than its loops, and
// starts a new one.
func (w *world) later(d time.Duration) {
	w.t.Helper()
	w.stop()
	time.Sleep(d)
	w.start()
}
