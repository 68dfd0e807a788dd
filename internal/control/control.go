// Package control knows what should be. Its verbs write what a caller asks for
// as rows of the store (an operation beside the sandbox's new state, in one
// transaction) and answer at once; its reconciler makes them so through a
// sandbox.Node and a sandbox.Builder, and writes what it observed.
//
// Invariants: the rows are the truth and everything in memory can be lost: a
// new Control over the same store resumes every operation that has not ended.
// An operation speaks for one generation of its sandbox; an answer about an
// older one is discarded. An operation that has to wait is delayed (and says
// why), not failed. Delete supersedes whatever is under way and is tried until
// it succeeds. A machine that no row roots is deleted. Every value that a face
// passes is validated here, and every verb asks the caller's role.
//
// The faces (internal/httpapi, internal/dataplane for identities) call the
// verbs; internal/server makes one Control and runs it. It imports
// internal/sandbox and nothing else of ours.
package control

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Options are what a Control is made of. Store, Node, Builder and MintKey are
// needed, the rest has defaults.
type Options struct {
	Store   sandbox.Store
	Node    sandbox.Node
	Builder sandbox.Builder
	// MintKey makes a key's text, which its owner gets once, and its hash,
	// which is stored (auth.Mint).
	MintKey func(id string) (text string, hash []byte)
	Log     *slog.Logger
	Now     func() time.Time

	Creates int // creations under way at the node at once; 64
	Deletes int // 32
	Builds  int // 1

	CreateTimeout time.Duration // of one attempt; 10 min
	CreateWait    time.Duration // how long a create may be delayed before it fails; 30 min
	BuildTimeout  time.Duration // 30 min
	ExpireEvery   time.Duration // how often TTLs are looked at; 1 s
}

// Control is what should be. Make it with New, run it with Run.
type Control struct {
	o       Options
	store   sandbox.Store
	node    sandbox.Node
	builder sandbox.Builder
	log     *slog.Logger
	now     func() time.Time

	creates, deletes, builds *slots
	bell                     *bell

	mu      sync.Mutex
	running context.Context  // of Run; nil while it doesn't run
	wg      *sync.WaitGroup  // of the goroutines that Run owns
	tasks   map[string]*task // by operation
	garbage map[string]bool  // machines whose removal is under way

	endsMu sync.Mutex
	ends   map[string]sandbox.MachineStatus // ended machines whose rows have yet to hear it

	files fileGuard
}

// task is one operation under way in this process.
type task struct {
	sandbox    string
	generation int64
	cancel     context.CancelCauseFunc
	done       chan struct{}
}

var (
	errSuperseded = errors.New("a later operation took its place")
	errStopping   = errors.New("control is stopping")
)

// New makes a Control. It does nothing of its own until Run.
func New(o Options) *Control {
	def(&o.Creates, 64)
	def(&o.Deletes, 32)
	def(&o.Builds, 1)
	def(&o.CreateTimeout, 10*time.Minute)
	def(&o.CreateWait, 30*time.Minute)
	def(&o.BuildTimeout, 30*time.Minute)
	def(&o.ExpireEvery, time.Second)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	return &Control{
		o: o, store: o.Store, node: o.Node, builder: o.Builder, log: o.Log, now: o.Now,
		creates: newSlots(o.Creates), deletes: newSlots(o.Deletes), builds: newSlots(o.Builds),
		bell:  newBell(),
		tasks: map[string]*task{}, garbage: map[string]bool{}, ends: map[string]sandbox.MachineStatus{},
		files: fileGuard{doomed: map[string]bool{}},
	}
}

func def[T int | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// The intervals of Run's loops.
const (
	rescanEvery = 15 * time.Second // operations that a failing store has stranded
	censusEvery = 5 * time.Minute
	pruneEvery  = time.Hour
)

// Run reconciles until ctx ends and then waits for what it started. Operations
// under way are not ended by that: the next Run resumes them.
func (c *Control) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errStopping)
	var wg sync.WaitGroup
	c.mu.Lock()
	if c.running != nil {
		c.mu.Unlock()
		return errors.New("control runs already")
	}
	c.running, c.wg = ctx, &wg
	c.mu.Unlock()

	c.rescan(ctx)
	wg.Go(func() { c.every(ctx, rescanEvery, c.rescan) })
	wg.Go(func() { c.every(ctx, c.o.ExpireEvery, c.expire) })
	wg.Go(func() { c.prune(ctx); c.every(ctx, pruneEvery, c.prune) })
	wg.Go(func() { c.observe(ctx) })
	<-ctx.Done()

	c.mu.Lock()
	c.running = nil // nothing more is added to wg from here on
	c.mu.Unlock()
	wg.Wait()
	return nil
}

// every calls f each d until ctx ends.
func (c *Control) every(ctx context.Context, d time.Duration, f func(context.Context)) {
	t := time.NewTicker(d)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			f(ctx)
		}
	}
}

// rescan starts every operation that has not ended and isn't under way here.
func (c *Control) rescan(ctx context.Context) {
	ops, err := c.store.Unfinished(ctx)
	if err != nil {
		c.logErr(ctx, "can't list unfinished operations", err)
		return
	}
	for _, op := range ops {
		c.launch(op)
	}
}

// launch carries op out in a goroutine that Run owns. While Run doesn't run,
// or has the operation in hand, it does nothing.
func (c *Control) launch(op sandbox.Operation) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil || c.running.Err() != nil || c.tasks[op.ID] != nil {
		return
	}
	ctx, cancel := context.WithCancelCause(c.running)
	t := &task{sandbox: op.Sandbox, generation: op.Generation, cancel: cancel, done: make(chan struct{})}
	var before []*task // what op supersedes
	for _, other := range c.tasks {
		if op.Sandbox != "" && other.sandbox == op.Sandbox && other.generation < op.Generation {
			before = append(before, other)
		}
	}
	c.tasks[op.ID] = t
	c.wg.Go(func() {
		defer func() {
			c.mu.Lock()
			delete(c.tasks, op.ID)
			c.mu.Unlock()
			close(t.done)
			cancel(nil)
			c.bell.ring(op.ID)
		}()
		c.carryOut(ctx, op, before)
	})
}

// spawn runs f in a goroutine that Run owns, once at a time for each key.
func (c *Control) spawn(key string, f func(context.Context)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil || c.running.Err() != nil || c.garbage[key] {
		return
	}
	c.garbage[key] = true
	ctx := c.running
	c.wg.Go(func() {
		defer func() {
			c.mu.Lock()
			delete(c.garbage, key)
			c.mu.Unlock()
		}()
		f(ctx)
	})
}

// logErr logs at the edge; the end of ctx is no news.
func (c *Control) logErr(ctx context.Context, msg string, err error, args ...any) {
	if ctx.Err() != nil {
		return
	}
	c.log.ErrorContext(ctx, msg, append(args, "error", err)...)
}
