package node

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
)

// Images finds a template's image by digest.
type Images interface {
	Image(ctx context.Context, digest string) (string, error)
}

// Networks makes and removes the machines' network namespaces, by id.
type Networks interface {
	Create(ctx context.Context, id string) (path string, err error)
	Delete(ctx context.Context, id string) error
	List(ctx context.Context) ([]string, error)
}

// Guests finds the guest binaries that machines were made with, by hash.
type Guests interface {
	// Current returns the hash of the binary for new machines.
	Current() string
	// Path returns a binary's file.
	Path(hash string) (string, error)
}

// Options make a Node.
type Options struct {
	StateDir string // machines' journals are in StateDir/machines, snapshots in StateDir/snapshots
	Drivers  []driver.Driver
	Default  string // name of the driver for requests that name none, unless Prober's works
	// Prober finds out whether one of Drivers, which is then the default, works;
	// nil: all of them do, as far as anybody knows.
	Prober      *Prober
	Images      Images
	Networks    Networks
	Egress      Egress // nil: no machine has a gateway
	RootsFile   string // of the certificates that guests trust beside their own; "": the host's
	Guests      Guests
	Recorder    Recorder
	Concurrency int           // creations at once
	HelloWait   time.Duration // how long a new machine's agent may take to prove itself
	SyncWait    time.Duration // how long a guest may take to sync its disk for a snapshot; 0 is a minute
	MaxProcs    uint64        // processes of one user that is not root, in each sandbox
	BootID      string        // of the host
	// CPUOvercommit is how often each core is lent and MemoryShare how much of
	// the host's memory (0 is no bound); DiskFloor are bytes of StateDir's disk
	// that stay free.
	CPUOvercommit float64
	MemoryShare   float64
	DiskFloor     int64
	Log           *slog.Logger
}

// Node carries machines. It implements sandbox.Node.
type Node struct {
	o         Options
	drivers   map[string]driver.Driver
	snapshots *snapshot.Store
	slots     chan struct{}
	wg        sync.WaitGroup // watchers
	ctx       context.Context
	stop      context.CancelFunc
	adopted   chan struct{} // closed when every machine of before is adopted or undone; never if the node stops first

	mu       sync.Mutex
	machines map[string]*machine
	fences   map[string]fence // of machines that are, and of those that were not long ago
	swept    time.Time        // when the latter were last looked through
	calls    map[string]*call // the one under way for each sandbox
	waiting  int
	changes  changes
	trust    trusted
}

var _ sandbox.Node = (*Node)(nil)

// New makes a node. Nothing happens before Run.
func New(o Options) (*Node, error) {
	if err := os.MkdirAll(filepath.Join(o.StateDir, "machines"), 0o700); err != nil {
		return nil, fmt.Errorf("make the machines' directory: %w", err)
	}
	snapshots, err := snapshot.Open(filepath.Join(o.StateDir, "snapshots"))
	if err != nil {
		return nil, err
	}
	n := &Node{
		o: o, snapshots: snapshots, drivers: map[string]driver.Driver{}, slots: make(chan struct{}, o.Concurrency),
		adopted: make(chan struct{}), machines: map[string]*machine{}, fences: map[string]fence{}, calls: map[string]*call{}, changes: newChanges(),
	}
	for _, d := range o.Drivers {
		n.drivers[d.Name()] = d
	}
	n.ctx, n.stop = context.WithCancel(context.Background())
	return n, nil
}

// Run adopts what lives, undoes what was not finished, collects what nothing
// roots, and then waits for ctx to end. Machines live on after it, whenever that
// is: one that was not adopted by then is found by the next start as it was.
func (n *Node) Run(ctx context.Context) error {
	if n.o.Prober != nil {
		// A probe's machine has no journal: the census would take it for rubbish.
		n.wg.Go(func() { n.o.Prober.run(n.ctx, n.adopted) })
	}
	n.recover(ctx)
	if ctx.Err() == nil {
		close(n.adopted)
	}
	<-ctx.Done()
	n.stop()
	n.wg.Wait()
	return nil
}

// Stats tells what a sandbox's machine uses now.
func (n *Node) Stats(ctx context.Context, id string) (driver.Stats, error) {
	m, err := n.live(ctx, id)
	if err != nil {
		return driver.Stats{}, err
	}
	return m.driver.Stats(ctx)
}

// live returns the machine of a sandbox if it is up. After a start it waits
// for adoption.
func (n *Node) live(ctx context.Context, id string) (*machine, error) {
	if err := n.settled(ctx); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.up(id)
}

// up is live with the node's lock held.
func (n *Node) up(id string) (*machine, error) {
	m := n.machines[id]
	if m == nil || !m.ready || m.ctx.Err() != nil || m.journal.End != nil {
		return nil, sandbox.Errorf(sandbox.FailedPrecondition, "not_running", "the sandbox has no running machine").
			WithHint("look at its state with `cloche inspect`")
	}
	return m, nil
}

// Queue tells how many creations run and wait now.
func (n *Node) Queue(context.Context) (running, waiting int, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.slots), n.waiting, nil
}

func (n *Node) dir(id string) string { return filepath.Join(n.o.StateDir, "machines", id) }
