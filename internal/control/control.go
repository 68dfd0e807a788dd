// Package control knows what should be. Its verbs write what a caller asks for
// as rows of the store (an operation beside the sandbox's new state, in one
// transaction) and answer at once; its reconciler makes them so through a
// sandbox.Node and a sandbox.Builder, and writes what it observed.
//
// Invariants: the rows are the truth and everything in memory can be lost: a
// new Control over the same store resumes every operation that has not ended,
// by doing it again from its beginning, which is safe at any instant.
// An operation speaks for one generation of its sandbox; an answer about an
// older one is discarded. An operation that has to wait is delayed (and says
// why), not failed. One that failed leaves its sandbox where the table says, or
// failed if the machine that it should have there has ended. Delete supersedes
// whatever is under way and is tried until it succeeds. Machines and snapshots
// that no row roots are deleted. What Cloche does on its own (TTL, idle and
// crash policy, checkpoints, drain) goes through the same verbs. Every value
// that a face passes is validated here, and every verb asks the caller's role.
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
	Egress  *Egress // nil: no sandbox reaches anything
	// MintKey makes a key's text, which its owner gets once, and its hash,
	// which is stored (auth.Mint).
	MintKey func(id string) (text string, hash []byte)
	Log     *slog.Logger
	Now     func() time.Time

	// How many are under way at the node at once.
	Creates     int // machines that come up, whatever the verb; 64
	Deletes     int // 32
	Builds      int // 1
	Snapshots   int // that somebody asked for; 4
	Checkpoints int // that nobody did; 2

	CreateTimeout   time.Duration // of one attempt to bring a machine up; 10 min
	CreateWait      time.Duration // how long that may be delayed before it fails; 30 min
	BuildTimeout    time.Duration // 30 min
	SnapshotTimeout time.Duration // of one snapshot; 30 min
	MachineTimeout  time.Duration // of one pause, resume or release; 1 min
	RetryFor        time.Duration // how long what may pass is tried again, but for machines that come up; 1 min
	AccessWait      time.Duration // how long an access waits for its sandbox to wake; 2 min

	ExpireEvery     time.Duration // how often TTLs are looked at; 1 s
	IdleEvery       time.Duration // how often idle sandboxes are; 10 s
	FlushEvery      time.Duration // how often touches reach the store; 10 s
	CheckpointEvery time.Duration // how often it is looked which checkpoint is due; 1 s
	ReapEvery       time.Duration // how often snapshots that nothing roots are; 15 s
	CrashEvery      time.Duration // how often crashed sandboxes are; 15 s

	// StillShare is the share of its time that a machine may stand still for
	// automatic checkpoints; 0.02.
	StillShare float64
	// CrashStarts bounds how often a crashed sandbox is started again within
	// CrashWindow; 3 in 10 min.
	CrashStarts int
	CrashWindow time.Duration
}

// Control is what should be. Make it with New, run it with Run.
type Control struct {
	o       Options
	store   sandbox.Store
	node    sandbox.Node
	builder sandbox.Builder
	log     *slog.Logger
	now     func() time.Time

	creates, deletes, builds, snapshots, checkpoints, egresses *slots

	bell        *bell
	reap, crash kicker

	mu      sync.Mutex
	running context.Context  // of Run; nil while it doesn't run
	wg      *sync.WaitGroup  // of the goroutines that Run owns
	tasks   map[string]*task // by operation
	garbage map[string]bool  // what spawn has under way: removals of machines, assignments, fetches of tokens

	endsMu sync.Mutex
	ends   map[string]sandbox.MachineStatus // ended machines whose rows have yet to hear it

	files        fileGuard
	capacity     capacity
	touches      touches
	beats        beats
	salvages     salvages
	durabilities sync.Map   // by driver: a sandbox.Durability
	policies     sync.Mutex // over changes of policies
	retries      retries
	pushes       pushes
	tokens       tokens
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
	o.defaults()
	return &Control{
		o: o, store: o.Store, node: o.Node, builder: o.Builder, log: o.Log, now: o.Now,
		creates: newSlots(o.Creates), deletes: newSlots(o.Deletes), builds: newSlots(o.Builds),
		snapshots: newSlots(o.Snapshots), checkpoints: newSlots(o.Checkpoints), egresses: newSlots(egressAtOnce),
		bell: newBell(), reap: newKicker(), crash: newKicker(),
		tasks: map[string]*task{}, garbage: map[string]bool{}, ends: map[string]sandbox.MachineStatus{},
		capacity: capacity{turn: newSlots(1)},
		files:    fileGuard{doomed: map[string]bool{}},
		touches:  touches{at: map[string]time.Time{}, held: map[string]int{}},
		beats:    beats{of: map[string]*beat{}, mine: map[string]bool{}},
		salvages: salvages{of: map[string]*salvaging{}},
		retries:  retries{at: map[string]time.Time{}},
		pushes:   newPushes(),
		tokens:   tokens{of: map[string]*token{}},
	}
}

func (o *Options) defaults() {
	def(&o.Creates, 64)
	def(&o.Deletes, 32)
	def(&o.Builds, 1)
	def(&o.Snapshots, 4)
	def(&o.Checkpoints, 2)
	def(&o.CreateTimeout, 10*time.Minute)
	def(&o.CreateWait, 30*time.Minute)
	def(&o.BuildTimeout, 30*time.Minute)
	def(&o.SnapshotTimeout, 30*time.Minute)
	def(&o.MachineTimeout, time.Minute)
	def(&o.RetryFor, time.Minute)
	def(&o.AccessWait, 2*time.Minute)
	def(&o.ExpireEvery, time.Second)
	def(&o.IdleEvery, 10*time.Second)
	def(&o.FlushEvery, 10*time.Second)
	def(&o.CheckpointEvery, time.Second)
	def(&o.ReapEvery, 15*time.Second)
	def(&o.CrashEvery, 15*time.Second)
	def(&o.StillShare, 0.02)
	def(&o.CrashStarts, 3)
	def(&o.CrashWindow, 10*time.Minute)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

func def[T int | float64 | time.Duration](v *T, d T) {
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
	wg.Go(func() { c.every(ctx, c.o.IdleEvery, c.idle) })
	wg.Go(func() { c.every(ctx, c.o.FlushEvery, c.flush) })
	wg.Go(func() { c.every(ctx, c.o.CheckpointEvery, c.checkpointDue) })
	wg.Go(func() { c.kicked(ctx, c.o.ReapEvery, c.reap, c.reapSnapshots) })
	wg.Go(func() { c.kicked(ctx, c.o.CrashEvery, c.crash, c.startCrashed) })
	wg.Go(func() { c.prune(ctx); c.every(ctx, pruneEvery, c.prune) })
	wg.Go(func() { c.observe(ctx) })
	if c.o.Egress != nil {
		c.pushes.everything()
		wg.Go(func() { c.kicked(ctx, egressEvery, c.pushes.kick, c.pushEgress) })
	}
	<-ctx.Done()

	c.mu.Lock()
	c.running = nil // nothing more is added to wg from here on
	c.mu.Unlock()
	wg.Wait()
	last, stop := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer stop()
	c.flush(last)
	return nil
}

// kicker asks a loop for a round before its time.
type kicker chan struct{}

func newKicker() kicker { return make(kicker, 1) }

func (k kicker) kick() {
	select {
	case k <- struct{}{}:
	default: // one is asked for already
	}
}

// kicked calls f at once, each d and when k is kicked, until ctx ends.
func (c *Control) kicked(ctx context.Context, d time.Duration, k kicker, f func(context.Context)) {
	t := time.NewTicker(d)
	defer t.Stop()
	for ctx.Err() == nil {
		f(ctx)
		select {
		case <-ctx.Done():
		case <-t.C:
		case <-k:
		}
	}
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

// spawn runs f in a goroutine that Run owns, once at a time for each key; false
// where it does not, because it runs already or Run doesn't.
func (c *Control) spawn(key string, f func(context.Context)) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil || c.running.Err() != nil || c.garbage[key] {
		return false
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
	return true
}

// logErr logs at the edge; the end of ctx is no news.
func (c *Control) logErr(ctx context.Context, msg string, err error, args ...any) {
	if ctx.Err() != nil {
		return
	}
	c.log.ErrorContext(ctx, msg, append(args, "error", err)...)
}
