package firecracker

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/node/driver/firecracker/jail"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	mib = 1 << 20

	// defaultMaxProcs bounds the processes of each guest user but root.
	defaultMaxProcs = 256
	// maxVCPUs is Firecracker's own bound.
	maxVCPUs = 32
	// spareTasks is what a VMM has of threads beside one for each processor, and
	// some more.
	spareTasks = 16

	// bootTimeout bounds a boot whose caller does not: a kernel that has not
	// come up by then never will.
	bootTimeout = 2 * time.Minute
	undoTimeout = 60 * time.Second
)

// overhead is what a machine may use on the host beside the guest's memory: the
// VMM, page tables, and the page cache of what it reads and writes.
func overhead(memory int64) int64 { return 128*mib + memory/8 }

// noRoot in Spec.Image asks for a machine without drives, whose root filesystem
// is in memory. Probe makes one.
const noRoot = ""

// plan is what a machine is to be made of.
type plan struct {
	spec   driver.Spec
	pair   installed.Pair
	kernel installed.Kernel // of one that boots
	image  *driver.Image    // nil: with an empty disk
}

// loads tells whether the machine goes on from a memory image.
func (p plan) loads() bool { return p.image != nil && p.image.Kind == sandbox.SnapshotMemory }

func (p plan) vcpus() int { return (p.spec.Resources.MilliCPU + 999) / 1000 }

// Create implements driver.Driver.
func (d *Driver) Create(ctx context.Context, spec driver.Spec) (driver.Machine, error) {
	if err := check(spec); err != nil {
		return nil, err
	}
	p := plan{spec: spec}
	if err := d.current(&p); err != nil {
		return nil, err
	}
	return d.bring(ctx, p)
}

// current fills in what is installed.
func (d *Driver) current(p *plan) (err error) {
	if p.pair, p.kernel, err = d.o.Pair(); err != nil {
		return err
	}
	return d.o.AllowVersion(p.pair.Version)
}

func check(spec driver.Spec) error {
	if !sandbox.ValidID(sandbox.KindSandbox, spec.ID) {
		return sandbox.Errorf(sandbox.Invalid, "malformed_id", "%q is not the id of a sandbox", spec.ID)
	}
	for _, p := range []string{spec.Image, spec.Guest, spec.NetNS} {
		if !filepath.IsAbs(p) {
			return sandbox.Errorf(sandbox.Invalid, "relative_path", "%q is not an absolute path", p)
		}
		if _, err := os.Stat(p); err != nil {
			return sandbox.Errorf(sandbox.FailedPrecondition, "file_missing", "a machine can't be made: %w", err)
		}
	}
	if most := 1000 * maxVCPUs; spec.Resources.MilliCPU > most {
		return sandbox.Errorf(sandbox.Invalid, "too_many_cpus", "a Firecracker machine has at most %d processors", maxVCPUs).
			WithHint("ask for at most %d thousandths of a core", most)
	}
	return spec.Resources.Validate()
}

// bring makes a machine, and removes what it made of it on an error.
func (d *Driver) bring(ctx context.Context, p plan) (driver.Machine, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	dir := d.machineDir(p.spec.ID)
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		if os.IsExist(err) {
			return nil, sandbox.Errorf(sandbox.Conflict, "machine_exists", "there is a machine %s, or what is left of one", p.spec.ID)
		}
		return nil, err
	}
	m, err := d.make(ctx, p)
	if err == nil {
		return m, nil
	}
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if uerr := d.Discard(undo, p.spec.ID); uerr != nil {
		d.o.Log.Error("undo a failed creation", "machine", p.spec.ID, "err", uerr)
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return nil, err
}

// make makes a machine in its directory.
func (d *Driver) make(ctx context.Context, p plan) (_ *machine, err error) {
	m := newMachine(d, record{ID: p.spec.ID, Version: p.pair.Version, Hash: p.pair.Hash, Resources: p.spec.Resources})
	defer func() {
		if err != nil && !m.watched { // else Discard does that
			m.letGo()
		}
	}()
	d.at("make.claimed")
	if err := m.furnish(ctx, p); err != nil {
		return nil, err
	}
	d.at("make.furnished")
	if err := m.start(ctx, p); err != nil {
		return nil, err
	}
	d.at("make.started")
	if p.loads() {
		err = m.load(ctx)
	} else {
		err = m.boot(ctx, p)
	}
	if err != nil {
		return nil, m.because(err)
	}
	d.at("make.running")
	if err := m.note(func(r *record) { r.Ready = true }); err != nil {
		return nil, err
	}
	d.at("make.ready")
	return m, nil
}

// furnish gives the machine a user, a jail and the files in it.
func (m *machine) furnish(ctx context.Context, p plan) error {
	uid, err := m.d.users.Take(m.id)
	if m.d.test.sameUser {
		uid = jail.FirstUID
	}
	if err != nil {
		return err
	}
	m.d.at("make.user")
	if err := m.note(func(r *record) { r.UID = uid }); err != nil {
		return err
	}
	if err := m.jail.Make(uid); err != nil {
		return err
	}
	m.d.at("make.jail")
	if err := m.openLog(); err != nil {
		return err
	}
	if p.loads() {
		if err := m.shareImage(ctx, p); err != nil {
			return err
		}
	} else if err := m.shareKernel(ctx, p); err != nil {
		return err
	}
	if p.spec.Image == noRoot {
		return nil
	}
	if err := m.jail.Share(ctx, p.spec.Image, "template"); err != nil {
		return err
	}
	if err := m.putDisk(ctx, p); err != nil {
		return err
	}
	m.d.at("make.disk")
	return m.jail.Own(diskName, uid)
}

// start starts the VMM and waits until it answers.
func (m *machine) start(ctx context.Context, p plan) error {
	r := p.spec.Resources
	memory := int64(r.MemoryMiB) * mib
	limits := jail.Limits{
		MemoryBytes: memory + overhead(memory), Tasks: p.vcpus() + spareTasks, FileBytes: max(memory, int64(r.DiskMiB)*mib) + mib,
		MilliCPU: 1000 * (p.vcpus() + 1), // and one for the VMM's own threads; its share holds when it is up
	}
	// Both wait for the kernel, and the VMM is told of its tap only later.
	uid, made := m.record().UID, make(chan error, 1)
	go func() {
		var err error
		m.tap, m.mac, err = m.d.o.Networks.Tap(ctx, m.id, uid)
		m.d.at("make.tap")
		made <- err
	}()
	process, err := m.jail.Start(ctx, jail.Program{
		Firecracker: p.pair.Firecracker, Jailer: p.pair.Jailer, UID: uid, NetNS: p.spec.NetNS, Limits: limits, Console: m.d.o.Console,
	}, m.log)
	if err := errors.Join(err, <-made); err != nil {
		return err
	}
	m.d.at("make.process")
	if err := m.note(func(r *record) { r.Process = process }); err != nil {
		return err
	}
	m.d.watch(m) //nolint:contextcheck // it is watched beyond the call
	if p.loads() {
		return nil // what it is asked first it may be asked at once
	}
	var info vmm.Info
	err = m.whenThere(ctx, func(ctx context.Context) (err error) {
		info, err = m.client.Info(ctx)
		return err
	})
	if err != nil {
		return m.because(err)
	}
	if info.Version != p.pair.Version || info.ID != jail.NameOf(m.id) {
		return sandbox.Errorf(sandbox.Internal, "vmm_other", "the VMM says that it is %q of Firecracker %s, not %s", info.ID, info.Version, p.pair.Version)
	}
	return nil
}

// whenThere asks a VMM that was just started, again until it listens: it tells of
// that by nothing but its socket.
func (m *machine) whenThere(ctx context.Context, ask func(context.Context) error) error {
	until := time.Now().Add(askTimeout)
	for {
		err := ask(ctx)
		if !vmm.NotThere(err) || time.Now().After(until) {
			return err
		}
		select {
		case <-m.exited:
			return err
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}

// because adds what is known of a VMM that has ended to an error that may come
// of it.
func (m *machine) because(err error) error {
	if !errors.Is(err, vmm.ErrGone) && !errors.Is(err, errEnded) && !errors.Is(err, net.ErrClosed) {
		return err
	}
	select {
	case <-m.exited:
	case <-time.After(time.Second): // it closed its socket and lives
		return err
	}
	end := m.End()
	said := ""
	if m.d.o.Console {
		for _, line := range m.log.Lines(12) {
			said += "\n" + line
		}
	}
	return sandbox.Errorf(sandbox.FailedPrecondition, "machine_not_booted", "the machine ended before it was up (%s: %s): %w%s", end.Reason, end.Detail, err, said)
}

// errEnded says that the VMM ended while something was awaited of its guest.
var errEnded = errors.New("its guest never reported")

// boot boots the machine's kernel, and returns when the guest binary says that
// it is about to start the supervisor.
func (m *machine) boot(ctx context.Context, p plan) error {
	args, err := arguments(p, m.d.o.Console)
	if err != nil {
		return err
	}
	cfg := vmm.Config{
		VCPUs: p.vcpus(), MemoryMiB: p.spec.Resources.MemoryMiB, Kernel: "/vmlinux", Initrd: "/initrd", Args: args,
		VsockCID: guestCID, VsockPath: vsockName, Entropy: true, Tap: m.tap, MAC: m.mac,
	}
	if p.spec.Image != noRoot {
		cfg.Drives = []vmm.Drive{
			{ID: "template", Path: "/template", ReadOnly: true},
			{ID: "disk", Path: "/" + diskName, Writeback: true},
		}
	}
	asked, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if err := m.client.Configure(asked, cfg); err != nil {
		return err
	}
	// Both are there before the guest can dial them.
	if _, err := m.Guest(); err != nil {
		return err
	}
	reports, err := m.jail.Listen(reportName, m.record().UID)
	if err != nil {
		return err
	}
	defer func() { _ = reports.Close() }()
	// The VMM has it; the gateway must, before the guest runs.
	if err := m.d.o.Networks.MoveTap(ctx, m.id); err != nil {
		return err
	}
	m.d.at("make.configured")
	// It reads the kernel for that, and many may do so at once.
	starting, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	if err := m.client.Start(starting); err != nil {
		return kvmHint(err)
	}
	m.d.at("make.booting")
	if !m.d.test.noReport {
		if err := m.report(ctx, reports); err != nil {
			return err
		}
	}
	// Nothing but our own /init has run in the guest until now.
	if err := m.seal(); err != nil {
		return err
	}
	return m.jail.Group().SetCPU(p.spec.Resources.MilliCPU)
}

// seal leaves in the jail what the VMM and its guest go on to use, once the VMM
// has opened everything else.
func (m *machine) seal() error {
	return m.jail.Seal(vsockName, agentName, "template", diskName)
}

// kvmHint says what to do where the VMM has no KVM.
func kvmHint(err error) error {
	var f *vmm.Fault
	if !errors.As(err, &f) {
		return err
	}
	return sandbox.Errorf(sandbox.FailedPrecondition, "machine_not_started", "the VMM could not start the machine: %w", f).
		WithHint("it needs /dev/kvm on this host, and a state directory that is not mounted with nodev")
}

// arguments is the kernel command line.
func arguments(p plan, console bool) (string, error) {
	procs := p.spec.MaxProcs
	if procs <= 0 {
		procs = defaultMaxProcs
	}
	b := guestapi.Boot{
		Dial: agentDial, Report: reportPort, Hostname: p.spec.Hostname, MaxProcs: procs, Env: p.spec.Supervisor,
		Root: guestapi.RootDisk, Memory: int64(p.spec.Resources.MemoryMiB) * mib,
	}
	if p.spec.Image == noRoot {
		b.Root = guestapi.RootNone
	}
	arg, err := b.Arg()
	if err != nil {
		return "", sandbox.Errorf(sandbox.Invalid, "boot_parameters", "a machine can't be told what to be: %w", err)
	}
	serial := "8250.nr_uarts=0"
	if console {
		serial = "console=ttyS0"
	}
	line := "reboot=t panic=-1 quiet " + serial + " i8042.noaux i8042.nomux i8042.dumbkbd random.trust_cpu=on " + arg
	if len(line) > guestapi.MaxBootLine {
		return "", sandbox.Errorf(sandbox.Invalid, "boot_parameters", "the kernel command line of the machine would have %d bytes, and has at most %d", len(line), guestapi.MaxBootLine).
			WithHint("give the supervisor a smaller environment")
	}
	return line, nil
}
