package firecracker

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/node/cgroup"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/node/driver/firecracker/jail"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/sandbox"
)

// Name is the driver's name.
const Name = "firecracker"

// Networks makes the network namespaces that Probe's machine needs, and the tap
// of every machine in those that there are for it.
type Networks interface {
	Create(ctx context.Context, id string) (path string, err error)
	Delete(ctx context.Context, id string) error
	Tap(ctx context.Context, id string, uid int) (name, mac string, err error)
	MoveTap(ctx context.Context, id string) error
}

// Options make a Driver. All paths are absolute.
type Options struct {
	StateDir string // machines are in StateDir/machines; of any length
	RunDir   string // where other drivers have their sockets; this one needs none there
	// Pair is what new machines are made with, and ByHash what a memory image
	// needs. Both are asked for each machine: an administrator may install another.
	Pair   func() (installed.Pair, installed.Kernel, error)
	ByHash func(hash string) (installed.Pair, error)
	Guest  string // the guest binary that Probe boots

	Networks Networks
	// AllowVersion tells whether a release may be used; nil: all that
	// vmm.CheckVersion passes. Only tests pass others, by their names.
	AllowVersion func(version string) error
	// Console has the guest's serial console written to the VMM's log, of which
	// the end is part of an error. It makes every boot slower.
	Console bool
	Log     *slog.Logger
}

// Driver runs machines as Firecracker microVMs.
type Driver struct {
	o      Options
	tree   *cgroup.Tree
	parent string // cgroup
	users  *jail.Users
	ctx    context.Context
	stop   context.CancelFunc
	wg     sync.WaitGroup // watchers of machines, and those who wait for late ones
	test   hooks

	mu       sync.Mutex
	machines map[string]*machine
	hashes   map[string]hashed // of guest binaries, by path

	makes sync.Mutex // one initramfs or empty disk is made at a time
}

var _ driver.Driver = (*Driver)(nil)

// hooks are what tests change; the zero value is the driver as it should be.
type hooks struct {
	// at is called where the end of the process would tear two effects apart.
	at func(step string)
	// noReport: Create does not wait for the boot report. On a machine whose KVM
	// boots nothing it is the only way to test anything else; anywhere else it is
	// a driver that calls a machine good that may never be.
	noReport bool
	ask      time.Duration // askTimeout of a machine that is found; 0: that
	// The other ways to be wrong on purpose.
	noPause  bool // a snapshot is taken of a machine that runs
	sameUser bool // every jail has the same user id
}

func (d *Driver) at(step string) {
	failpoint.Hit("firecracker." + step)
	if d.test.at != nil {
		d.test.at(step)
	}
}

// New makes a driver. It starts nothing, and needs nothing to be installed.
func New(o Options) (*Driver, error) {
	if !filepath.IsAbs(o.StateDir) {
		return nil, sandbox.Errorf(sandbox.Invalid, "relative_path", "%q is not an absolute path", o.StateDir)
	}
	if o.AllowVersion == nil {
		o.AllowVersion = func(v string) error { return vmm.CheckVersion(v, v, false) }
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	d := &Driver{o: o, machines: map[string]*machine{}, hashes: map[string]hashed{}}
	var err error
	if d.tree, err = cgroup.Host(); err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(o.StateDir))
	d.parent = "/cloche-" + hex.EncodeToString(sum[:4])
	d.users = jail.NewUsers(filepath.Join(o.StateDir, Name, "uids"))
	d.ctx, d.stop = context.WithCancel(context.Background())
	return d, nil
}

// Close stops watching; the machines live on.
func (d *Driver) Close(ctx context.Context) error {
	d.stop()
	d.wg.Wait()
	d.mu.Lock()
	for _, m := range d.machines {
		m.letGo()
	}
	d.machines = map[string]*machine{}
	d.mu.Unlock()
	// The other drivers' machines are in the same group.
	if names, err := d.tree.List(d.parent); err != nil || len(names) > 0 {
		return err
	}
	return d.tree.Group(d.parent).Remove(ctx)
}

// Name implements driver.Driver.
func (d *Driver) Name() string { return Name }

func (d *Driver) machineDir(id string) string {
	return filepath.Join(d.o.StateDir, "machines", id, Name)
}

func (d *Driver) jail(id string) *jail.Jail {
	return jail.New(d.machineDir(id), id, d.tree, d.parent)
}

// List implements driver.Driver.
func (d *Driver) List(context.Context) ([]string, error) {
	var ids []string
	groups, err := d.tree.List(d.parent)
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		ids = append(ids, jail.IDOf(g)) // "" for another driver's
	}
	dirs, err := filepath.Glob(filepath.Join(d.o.StateDir, "machines", "*", Name))
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		ids = append(ids, filepath.Base(filepath.Dir(dir)))
	}
	users, err := d.users.List()
	if err != nil {
		return nil, err
	}
	for _, owner := range users {
		ids = append(ids, owner)
	}
	ids = slices.DeleteFunc(ids, func(id string) bool { return !sandbox.ValidID(sandbox.KindSandbox, id) })
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

func notFound(id string) error {
	return sandbox.Errorf(sandbox.NotFound, "machine_not_found", "there is no machine %s", id)
}

// Discard implements driver.Driver. Each step removes what it finds and knows
// no more than the id; the record only spares a search.
func (d *Driver) Discard(ctx context.Context, id string) error {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return sandbox.Errorf(sandbox.Invalid, "malformed_id", "%q is not the id of a sandbox", id)
	}
	d.mu.Lock()
	m := d.machines[id]
	delete(d.machines, id)
	d.mu.Unlock()
	if m != nil {
		m.retire()
	}
	rec, _ := readRecord(d.machineDir(id)) // without one the cgroup and the links tell the same
	j := d.jail(id)
	err := j.Kill(ctx, rec.Process)
	if err == nil {
		d.at("discard.killed")
		err = j.Remove(ctx)
	}
	d.at("discard.jail")
	if err == nil {
		err = os.RemoveAll(d.machineDir(id))
	}
	if err == nil { // a user id is given back when nothing is its any more
		d.at("discard.files")
		err = d.users.Give(id, rec.UID)
	}
	if m != nil && err == nil {
		err = m.over(ctx)
	}
	if err != nil {
		return fmt.Errorf("discard machine %s: %w", id, err)
	}
	// The directory around it is the node's, who may have put nothing there.
	_ = os.Remove(filepath.Dir(d.machineDir(id)))
	return nil
}

// Adopt implements driver.Driver.
func (d *Driver) Adopt(ctx context.Context, id string) (driver.Machine, error) {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return nil, notFound(id)
	}
	d.mu.Lock()
	m := d.machines[id]
	d.mu.Unlock()
	if m != nil {
		if end := m.End(); end.Reason != "" {
			return nil, &driver.Ended{End: end}
		}
		return m, nil
	}
	rec, err := readRecord(d.machineDir(id))
	if errors.Is(err, os.ErrNotExist) {
		return nil, notFound(id)
	}
	if err != nil {
		return nil, sandbox.Errorf(sandbox.NotFound, "machine_unreadable", "what is left of the machine %s can't be read: %w", id, err)
	}
	if rec.End != nil {
		return nil, &driver.Ended{End: *rec.End}
	}
	m = newMachine(d, rec)
	if err := m.find(ctx); err != nil {
		m.letGo()
		return nil, err
	}
	d.watch(m) //nolint:contextcheck // it is watched beyond the call
	if rec.writing() {
		d.wg.Go(m.catchUp) //nolint:contextcheck // likewise
	} else {
		close(m.met)
	}
	return m, nil
}
