package engine

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/specutils"

	"cloche.dev/cloche/internal/node/cgroup"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sys"
)

// maxCreateLog bounds what gVisor's own messages may add to an error.
const maxCreateLog = 16 << 10

// created is what the create child tells the control process.
type created struct {
	Machine enginerpc.Machine `json:"machine"`
	Error   string            `json:"error,omitempty"`
	Log     string            `json:"log,omitempty"` // gVisor's warnings, when it failed
}

// createMain is the create child: it reads a CreateRequest from stdin, makes
// and starts the machine, and writes a created to descriptor 3. Descriptor 4
// is what PID 1 gets as stdout and stderr; root is gVisor's state directory.
//
// It shares no memory, descriptor or thread with any other creation, and ends
// when the guest's PID 1 was started.
func createMain(root string) int {
	var out created
	result := os.NewFile(3, "result")
	tail := &tailWriter{max: maxCreateLog}
	log.SetTarget(log.GoogleEmitter{Writer: &log.Writer{Next: tail}})
	log.SetLevel(log.Warning)
	m, err := create(root)
	if err != nil {
		out.Error, out.Log = err.Error(), tail.String()
	} else {
		out.Machine = m
	}
	if err := json.NewEncoder(result).Encode(out); err != nil {
		return 1
	}
	return 0
}

func create(root string) (enginerpc.Machine, error) {
	var none enginerpc.Machine
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return none, fmt.Errorf("close descriptors on exec: %w", err)
	}
	var req enginerpc.CreateRequest
	if err := json.NewDecoder(io.LimitReader(os.Stdin, enginerpc.MaxRequest)).Decode(&req); err != nil {
		return none, fmt.Errorf("read the request: %w", err)
	}
	// Kept until this process ends: only then can nothing of the machine appear
	// any more (see the driver's Discard).
	lock, err := sys.TryLock(filepath.Join(req.Dir, enginerpc.LockedName))
	if err != nil {
		return none, err
	}
	defer runtime.KeepAlive(lock)
	if err := lendStdio(); err != nil {
		return none, err
	}
	conf, err := runscConfig(root, &req)
	if err != nil {
		return none, err
	}
	bundle := filepath.Join(req.Dir, enginerpc.BundleName)
	if err := writeBundle(bundle, ociSpec(&req)); err != nil {
		return none, err
	}
	spec, err := specutils.ReadSpec(bundle, conf)
	if err != nil {
		return none, err
	}
	args := container.Args{ID: req.ID, Spec: spec, BundleDir: bundle}
	if req.RestoreKind == enginerpc.Disk {
		args.FSRestoreImagePath = req.Restore
	}
	c, err := container.New(conf, args)
	if err != nil {
		return none, err
	}
	m, err := describe(c, &req)
	if err == nil {
		err = launch(c, conf, &req)
	}
	if err == nil {
		err = protectInit(m.Sentry.PID)
	}
	if err != nil {
		_ = c.Destroy()
		return none, err
	}
	return m, nil
}

// launch lets a created machine run: from PID 1's first instruction, or from
// where its image stood. The pages of an image are read while it runs already;
// gVisor waits for those that it needs.
func launch(c *container.Container, conf *config.Config, req *enginerpc.CreateRequest) error {
	if req.RestoreKind == enginerpc.Memory {
		if err := c.Restore(conf, req.Restore, false /* direct */, true /* background */, nil); err != nil {
			return err
		}
		// Restoring replaced the platform and its first stub.
		return scoreStubs(c.Sandbox.Getpid())
	}
	if err := c.Start(conf); err != nil || req.RestoreKind == "" {
		return err
	}
	return c.WaitFSRestore()
}

// lendStdio makes this process's stdio what PID 1 shall have: gVisor passes it
// on. Not /dev/null: gVisor changes the owner of these files to the sentry's.
func lendStdio() error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	if err := w.Close(); err != nil { // stdin is at its end
		return err
	}
	console := os.NewFile(4, "console")
	os.Stdin, os.Stdout, os.Stderr = r, console, console
	return nil
}

func writeBundle(dir string, spec *specs.Spec) error {
	if err := os.MkdirAll(spec.Root.Path, 0o700); err != nil {
		return err
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600)
}

// describe names a created machine's processes, and gets it ready to start:
// its memory limit and the order in which the kernel would kill its processes.
func describe(c *container.Container, req *enginerpc.CreateRequest) (enginerpc.Machine, error) {
	m := enginerpc.Machine{ID: req.ID, Engine: Version, Cgroup: req.Cgroup, Live: true}
	var err error
	if m.Sentry, err = sys.FindProcess(c.Sandbox.Getpid()); err != nil {
		return m, fmt.Errorf("find the sentry: %w", err)
	}
	if pid := c.GoferPid.Load(); pid != 0 {
		if m.Gofer, err = sys.FindProcess(pid); err != nil {
			return m, fmt.Errorf("find the gofer: %w", err)
		}
	}
	tree, err := cgroup.Host()
	if err != nil {
		return m, err
	}
	if err := tree.Group(req.Cgroup).SetMemoryLimit(req.MemoryBytes + req.OverheadBytes); err != nil {
		return m, fmt.Errorf("set the memory limit: %w", err)
	}
	for _, p := range []sys.Process{m.Sentry, m.Gofer} {
		if err := setScore(p.PID, sentryScore); err != nil && !errors.Is(err, os.ErrPermission) {
			return m, fmt.Errorf("make process %d the kernel's last choice: %w", p.PID, err)
		}
	}
	// Every stub is forked from the one that is there by now, and inherits.
	return m, scoreStubs(m.Sentry.PID)
}

// scoreStubs makes every stub of a sentry the kernel's first choice. It looks
// again until it finds no new one, since a stub may be forked meanwhile from one
// that it had not come to.
func scoreStubs(sentry int) error {
	seen := map[int]bool{}
	for more := true; more; {
		stubs, err := children(sentry)
		if err != nil {
			return fmt.Errorf("find the stub processes: %w", err)
		}
		more = false
		for _, pid := range stubs {
			if seen[pid] {
				continue
			}
			seen[pid], more = true, true
			if err := setScore(pid, stubScore); err != nil {
				return fmt.Errorf("make stub %d the kernel's first choice: %w", pid, err)
			}
		}
	}
	return nil
}

// protectInit finds the stub of the guest's PID 1 (the first that was forked
// from the first one) and has the kernel take it after all the others.
func protectInit(sentry int) error {
	stubs, err := children(sentry)
	if err != nil || len(stubs) < 2 {
		return err
	}
	return setScore(stubs[1], initScore)
}

func inOrder(procs []sys.Process) []int {
	slices.SortFunc(procs, func(a, b sys.Process) int {
		if c := cmp.Compare(a.Start, b.Start); c != 0 {
			return c
		}
		return cmp.Compare(a.PID, b.PID)
	})
	pids := make([]int, len(procs))
	for i, p := range procs {
		pids[i] = p.PID
	}
	return pids
}

// tailWriter keeps the last max bytes of what is written to it.
type tailWriter struct {
	mu  sync.Mutex
	max int
	buf []byte
}

// Write implements io.Writer.
func (w *tailWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = append(w.buf, p...)
	if over := len(w.buf) - w.max; over > 0 {
		w.buf = append(w.buf[:0], w.buf[over:]...)
	}
	return len(p), nil
}

// String returns what is kept.
func (w *tailWriter) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(bytes.ToValidUTF8(w.buf, []byte("?")))
}
