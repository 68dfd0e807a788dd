package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/node/cgroup"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
)

const (
	answerTimeout = 5 * time.Second
	undoTimeout   = 30 * time.Second
	// sampleEvery is how often the kernel's kills are counted, and idleAfter
	// how long a control process without machines waits to be asked something.
	sampleEvery = 5 * time.Second
	idleAfter   = 10 * time.Minute
	// maxControlLog bounds each of the control process's two log files.
	maxControlLog = 1 << 20
)

// control is the control process.
type control struct {
	dir    string // its run directory
	log    *slog.Logger
	tree   *cgroup.Tree
	reaper *reaper
	ctx    context.Context // ends when the process is to end
	quit   context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	machines map[string]*machine
	creating map[string]*creation
	quitting bool
	used     time.Time // when it was last asked something
}

// creation is a machine that is being made.
type creation struct {
	cancel context.CancelFunc
	done   chan struct{}
}

// root is gVisor's state directory.
func (c *control) root() string { return filepath.Join(c.dir, enginerpc.RootName) }

// controlMain runs the control process in its run directory until it is asked
// to quit. When it can serve it writes a line to stdout.
func controlMain(dir string) int {
	if err := runControl(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func runControl(dir string) error {
	unix.Umask(0o077)
	for _, d := range []string{dir, filepath.Join(dir, "machines"), filepath.Join(dir, enginerpc.RootName)} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	lock, err := os.OpenFile(filepath.Join(dir, enginerpc.LockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("another control process has %s: %w", lock.Name(), err)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the reaper of the machines' processes: %w", err)
	}
	out, err := openRotating(filepath.Join(dir, "control.log"), maxControlLog)
	if err != nil {
		return err
	}
	defer out.Close() //nolint:errcheck // there is nobody left to tell
	tree, err := cgroup.Host()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	c := &control{
		dir: dir, log: slog.New(slog.NewJSONHandler(out, nil)), tree: tree, reaper: newReaper(), ctx: ctx, quit: cancel,
		machines: map[string]*machine{}, creating: map[string]*creation{}, used: time.Now(),
	}
	return c.run()
}

func (c *control) run() error {
	if err := c.resume(); err != nil {
		return fmt.Errorf("take up the machines of before: %w", err)
	}
	socket := filepath.Join(c.dir, enginerpc.SocketName)
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", socket) // closing it removes the socket
	if err != nil {
		return err
	}
	c.wg.Add(2)
	go func() { defer c.wg.Done(); c.reaper.run(c.ctx) }()
	go func() { defer c.wg.Done(); c.tick() }()
	srv := &http.Server{Handler: c.routes(), ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 16 << 10}
	stopped := make(chan struct{})
	context.AfterFunc(c.ctx, func() {
		defer close(stopped)
		ctx, cancel := context.WithTimeout(context.Background(), answerTimeout)
		defer cancel()
		_ = srv.Shutdown(ctx) // what is cut off is a question without machines to answer
	})
	c.log.Info("control process", "engine", Version, "pid", os.Getpid(), "machines", len(c.machines))
	if _, err := fmt.Println("ready"); err != nil {
		c.log.Warn("nobody waits for readiness", "err", err)
	}
	err = srv.Serve(l)
	c.quit()
	<-stopped
	c.wg.Wait()
	c.log.Info("control process quits", "pid", os.Getpid())
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// tick samples the machines and ends a process that nobody needs.
func (c *control) tick() {
	t := time.NewTicker(sampleEvery)
	defer t.Stop()
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-t.C:
		}
		c.mu.Lock()
		var live []*machine
		for _, m := range c.machines {
			live = append(live, m)
		}
		idle := time.Since(c.used) > idleAfter
		c.mu.Unlock()
		for _, m := range live {
			if m.record().End == nil {
				c.sample(m)
			}
		}
		if idle && c.retire() {
			c.quit()
		}
	}
}

// retire refuses further machines if there are none, and tells whether so.
func (c *control) retire() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.machines)+len(c.creating) > 0 {
		return false
	}
	c.quitting = true
	return true
}
