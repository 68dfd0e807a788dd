package gvisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"cloche.dev/cloche/internal/node/cgroup"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
)

// Name is the driver's name.
const Name = "gvisor"

// Networks makes the network namespace that Probe's machine needs.
type Networks interface {
	Create(ctx context.Context, id string) (path string, err error)
	Delete(ctx context.Context, id string) error
}

// Options make a Driver. All paths are absolute.
type Options struct {
	StateDir string   // machines are in StateDir/machines
	RunDir   string   // sockets; short, since a socket's path has 107 bytes at most
	Engine   string   // the engine for new machines: an artifact that is never overwritten
	Guest    string   // the guest binary that Probe runs
	Networks Networks // for Probe
	// EngineByHash finds the engine of that hash, which an image needs; nil: there
	// is only Engine.
	EngineByHash func(hash string) (path string, err error)
	Log          *slog.Logger
}

// Driver runs machines as gVisor sandboxes.
type Driver struct {
	o      Options
	tree   *cgroup.Tree
	parent string // cgroup
	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup // watchers of machines

	mu       sync.Mutex
	engines  map[string]*engine // by run directory
	machines map[string]*machine
}

var _ driver.Driver = (*Driver)(nil)

// maxSocketPath is what fits into a socket's address.
const maxSocketPath = 107

// New makes a driver. It starts nothing.
func New(o Options) (*Driver, error) {
	d := &Driver{o: o, engines: map[string]*engine{}, machines: map[string]*machine{}}
	longest := filepath.Join(d.engineDir(o.Engine), "root", "runsc-"+sandbox.NewID(sandbox.KindSandbox)+".sock")
	if len(longest) > maxSocketPath {
		return nil, sandbox.Errorf(sandbox.Invalid, "run_dir_too_long", "the run directory %s is too long for the sockets below it", o.RunDir).
			WithHint("choose one of at most %d bytes", len(o.RunDir)+maxSocketPath-len(longest))
	}
	var err error
	if d.tree, err = cgroup.Host(); err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(o.StateDir))
	d.parent = "/cloche-" + hex.EncodeToString(sum[:4])
	d.ctx, d.stop = context.WithCancel(context.Background())
	return d, nil
}

// Close stops watching; the machines live on. A control process that has none
// is ended, and its run directory removed.
func (d *Driver) Close(ctx context.Context) error {
	d.stop()
	d.wg.Wait()
	d.mu.Lock()
	for _, m := range d.machines {
		m.guest.Close()
	}
	d.mu.Unlock()
	var errs []error
	for _, e := range d.known() {
		if err := e.quit(ctx); err != nil && !sandbox.IsClass(err, sandbox.FailedPrecondition) {
			errs = append(errs, err)
		} else if err == nil {
			errs = append(errs, e.remove())
		}
	}
	if names, err := d.tree.List(d.parent); err == nil && len(names) == 0 {
		errs = append(errs, d.tree.Group(d.parent).Remove(ctx))
	}
	return errors.Join(errs...)
}

// Name implements driver.Driver.
func (d *Driver) Name() string { return Name }

func (d *Driver) machineDir(id string) string {
	return filepath.Join(d.o.StateDir, "machines", id, Name)
}
func (d *Driver) socketDir(id string) string { return filepath.Join(d.o.RunDir, "m", id) }
func (d *Driver) group(id string) cgroup.Group {
	return d.tree.Group(filepath.Join(d.parent, id))
}

// List implements driver.Driver.
func (d *Driver) List(context.Context) ([]string, error) {
	var ids []string
	add := func(names []string) {
		for _, n := range names {
			if sandbox.ValidID(sandbox.KindSandbox, n) {
				ids = append(ids, n)
			}
		}
	}
	groups, err := d.tree.List(d.parent)
	if err != nil {
		return nil, err
	}
	add(groups)
	for _, pattern := range []string{
		filepath.Join(d.o.StateDir, "machines", "*", Name), filepath.Join(d.o.RunDir, "m", "*", "*"),
	} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, p := range paths {
			add([]string{filepath.Base(filepath.Dir(p))})
		}
	}
	for _, e := range d.known() {
		linked, err := e.links()
		if err != nil {
			return nil, err
		}
		add(linked)
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

// Adopt implements driver.Driver.
func (d *Driver) Adopt(ctx context.Context, id string) (driver.Machine, error) {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return nil, notFound(id)
	}
	e := d.engineOf(id)
	if e == nil {
		if rec, err := readRecord(d.machineDir(id)); err == nil && rec.End != nil {
			return nil, &driver.Ended{End: *rec.End}
		}
		return nil, notFound(id)
	}
	rec, err := e.get(ctx, id)
	if err != nil {
		return nil, err
	}
	if rec.End != nil {
		return nil, &driver.Ended{End: *rec.End}
	}
	if !rec.Live {
		return nil, sandbox.Errorf(sandbox.NotFound, "machine_silent", "the machine %s does not answer", id)
	}
	return d.hold(rec, e), nil //nolint:contextcheck // it is watched beyond the call
}

func notFound(id string) error {
	return sandbox.Errorf(sandbox.NotFound, "machine_not_found", "there is no machine %s", id)
}

// Discard implements driver.Driver. It goes on past failures and needs no
// control process: each step removes what it finds.
func (d *Driver) Discard(ctx context.Context, id string) error {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return sandbox.Errorf(sandbox.Invalid, "malformed_id", "%q is not the id of a sandbox", id)
	}
	var errs []error
	d.mu.Lock()
	m := d.machines[id]
	delete(d.machines, id)
	d.mu.Unlock()
	var forgot []*engine // an engine that has not forgotten it is told again the next time
	for _, e := range d.known() {
		if !e.has(id) {
			continue
		}
		if err := e.discard(ctx, id); err != nil {
			errs = append(errs, err)
		} else {
			forgot = append(forgot, e)
		}
	}
	errs = append(errs, d.settle(ctx, id))
	for _, e := range forgot {
		errs = append(errs, e.sweep(id))
	}
	if rec, err := readRecord(d.machineDir(id)); err == nil {
		errs = append(errs, rec.Sentry.Kill(), rec.Gofer.Kill())
	}
	g := d.group(id)
	errs = append(errs, g.Kill(ctx), g.Remove(ctx))
	if m != nil {
		m.guest.Retire()
	}
	errs = append(errs, os.RemoveAll(d.socketDir(id)), os.RemoveAll(d.machineDir(id)))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("discard machine %s: %w", id, err)
	}
	// The directory around it is the node's, who may have put nothing there.
	_ = os.Remove(filepath.Dir(d.machineDir(id)))
	return nil
}

// settle returns when no create child of the machine lives any more. One whose
// control process was killed is killed with it, but not before we are here; what it
// still made would be found by the next creation, or end that one's machine.
func (d *Driver) settle(ctx context.Context, id string) error {
	lock, err := lockFile(ctx, filepath.Join(d.machineDir(id), enginerpc.LockedName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("the machine is still being made: %w", err)
	}
	return lock.Close()
}
