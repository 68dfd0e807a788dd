package drivertest

import (
	"context"
	"os"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// Fault is a driver or a guest that is broken on purpose.
type Fault struct {
	Name   string
	Clause string // that must fail
	guest  bool   // Name is a fault of the guest's
	caches bool   // it is one where guests cache their disks (driver.Traits)
	kernel bool   // it is one where guests have a kernel of their own
	wrap   func(*broken)
}

// faultEnv names the guest's fault; see internal/guest/fault.
const faultEnv = "CLOCHE_FAULT"

// Faults are all of them.
var Faults = []Fault{
	{Name: "exit_lost", Clause: "exit-code", guest: true},
	{Name: "swapped", Clause: "streams-apart", guest: true},
	{Name: "wrong_user", Clause: "identity", guest: true},
	{Name: "output_lost", Clause: "output-intact", guest: true},
	{Name: "signal_main_only", Clause: "signal-group", guest: true},
	{Name: "no_reap", Clause: "orphans-reaped", guest: true},
	{Name: "limit_ignored", Clause: "setup-max-procs", guest: true},
	{Name: "env_lost", Clause: "environment", guest: true},
	{Name: "cwd_ignored", Clause: "directory", guest: true},
	{Name: "timeout_ignored", Clause: "timeout", guest: true},
	{Name: "stdin_dropped", Clause: "stdin-intact", guest: true},
	{Name: "orphan_wait", Clause: "orphans-dont-delay", guest: true},
	{Name: "hello_unproven", Clause: "hello-proof", guest: true},
	{Name: "agent_once", Clause: "agent-restart", guest: true},
	{Name: "sync_ignored", Clause: "disk-unsynced", guest: true, caches: true},
	{Name: "reboot_allowed", Clause: "reboot-refused", guest: true, kernel: true},
	{Name: "no_reseed", Clause: "fork-random", guest: true, kernel: true},
	{Name: "no_freeze", Clause: "frozen", guest: true, kernel: true},

	{Name: "create_returns_early", Clause: "create-runs", wrap: func(k *broken) { k.early = true }},
	{Name: "create_ignores_cancel", Clause: "create-cancelled", wrap: func(k *broken) { k.deaf = true }},
	{Name: "create_leaks_descriptor", Clause: "descriptors-return", wrap: func(k *broken) { k.leak = true }},
	{Name: "quota_ignored", Clause: "disk-quota", wrap: func(k *broken) { k.change = func(s *driver.Spec) { s.Resources.DiskMiB = 1024 } }},
	{Name: "memory_ignored", Clause: "memory-seen", wrap: func(k *broken) { k.change = func(s *driver.Spec) { s.Resources.MemoryMiB = 1024 } }},
	{Name: "cpu_ignored", Clause: "cpu-limit", wrap: func(k *broken) { k.change = func(s *driver.Spec) { s.Resources.MilliCPU = 2000 } }},
	{Name: "max_procs_ignored", Clause: "max-procs", wrap: func(k *broken) { k.change = func(s *driver.Spec) { s.MaxProcs = 1000 } }},
	{Name: "hostname_ignored", Clause: "hostname", wrap: func(k *broken) { k.change = func(s *driver.Spec) { s.Hostname = "localhost" } }},
	{Name: "supervisor_env_lost", Clause: "pid-1", wrap: func(k *broken) { k.change = func(s *driver.Spec) { s.Supervisor = nil } }},
	{Name: "kill_leaves_processes", Clause: "kill", wrap: func(k *broken) { k.noKill = true }},
	{Name: "end_lost", Clause: "killed-outside", wrap: func(k *broken) { k.noEnd = true }},
	{Name: "exit_unnoticed", Clause: "exit-of-pid-1", wrap: func(k *broken) { k.noExit = true }},
	{Name: "stats_frozen", Clause: "stats", wrap: func(k *broken) { k.frozen = true }},
	{Name: "adopt_believes_dead", Clause: "adopt-dead", wrap: func(k *broken) { k.believes = true }},
	{Name: "adopt_forgets_live", Clause: "adopt", wrap: func(k *broken) { k.forgets = true }},
	{Name: "list_forgets_ended", Clause: "list", wrap: func(k *broken) { k.shortList = true }},
	{Name: "discard_leaves_files", Clause: "discard-live", wrap: func(k *broken) { k.noDiscard = true }},
	{Name: "pause_ignored", Clause: "pause", wrap: func(k *broken) { k.noPause = true }},
	{Name: "snapshot_halts", Clause: "snapshot-goes-on", wrap: func(k *broken) { k.halts = true }},
	{Name: "restore_boots", Clause: "restore", wrap: func(k *broken) { k.boots = true }},
	{Name: "disk_lost", Clause: "disk-restore", wrap: func(k *broken) { k.boots = true }},
	{Name: "needs_ignored", Clause: "restore-needs", wrap: func(k *broken) { k.careless = true }},
}

// RunFaults proves that the contract bites: the clause of each fault fails
// with it, and holds without it.
func RunFaults(t *testing.T, h Harness) {
	traits := h.traits(t)
	for _, f := range Faults {
		if f.caches && !traits.CachesDisk || f.kernel && !traits.OwnKernel {
			continue
		}
		t.Run(f.Name, func(t *testing.T) {
			c, ok := find(f.Clause)
			if !ok {
				t.Fatalf("there is no clause %q", f.Clause)
			}
			contrast(t, c, h.with(f, false), h.with(f, true))
		})
	}
}

// traits are those of the harness's driver.
func (h Harness) traits(t *testing.T) driver.Traits {
	t.Helper()
	d, shut, err := h.Open()
	if err != nil {
		t.Fatalf("open the driver: %v", err)
	}
	defer func() {
		if err := shut(t.Context()); err != nil {
			t.Errorf("end the driver: %v", err)
		}
	}()
	return d.Traits()
}

// RunBroken proves that a clause, by name, holds for one harness and fails for
// another, whose driver is broken in a way that only its own tests can break it.
func RunBroken(t *testing.T, sound, broken Harness, clause string) {
	t.Helper()
	c, ok := find(clause)
	if !ok {
		t.Fatalf("there is no clause %q", clause)
	}
	contrast(t, c, sound, broken)
}

func contrast(t *testing.T, c Clause, sound, broken Harness) {
	t.Helper()
	for i, h := range []Harness{sound, broken} {
		isBroken := i == 1
		failures, left := verdict(h, c)
		if left != nil {
			t.Errorf("broken: %v: what it left: %v", isBroken, left)
		}
		if isBroken != (len(failures) > 0) {
			t.Errorf("broken: %v: the clause %q says %q", isBroken, c.Name, failures)
		}
		if isBroken && len(failures) > 0 {
			t.Logf("caught by %q: %.200s", c.Name, failures[0])
		}
	}
}

func find(name string) (Clause, bool) {
	for _, c := range Contract {
		if c.Name == name {
			return c, true
		}
	}
	return Clause{}, false
}

// with returns the harness with a fault, or the same parts in order.
func (h Harness) with(f Fault, isBroken bool) Harness {
	if f.guest {
		h.Files.Guest = h.Files.Broken
		if isBroken {
			h.supervisor = map[string]string{faultEnv: f.Name}
		}
		return h
	}
	h.wrap = func(d driver.Driver) driver.Driver {
		k := &broken{Driver: d}
		if isBroken {
			f.wrap(k)
		}
		return k
	}
	return h
}

// broken is a driver with defects.
type broken struct {
	driver.Driver
	change                                                                                    func(*driver.Spec)
	early, deaf, leak, noKill, noEnd, noExit, frozen, believes, forgets, shortList, noDiscard bool
	noPause, halts, boots, careless                                                           bool
	leaked                                                                                    []*os.File
}

// Create implements driver.Driver.
func (k *broken) Create(ctx context.Context, spec driver.Spec) (driver.Machine, error) {
	if k.change != nil {
		k.change(&spec)
	}
	if k.leak {
		f, err := os.Open(spec.Image)
		if err != nil {
			return nil, err
		}
		k.leaked = append(k.leaked, f)
	}
	if k.early {
		return &brokenMachine{Machine: noMachine{id: spec.ID}, k: k}, nil
	}
	in := ctx
	if k.deaf {
		in = context.WithoutCancel(ctx)
	}
	m, err := k.Driver.Create(in, spec)
	if err != nil {
		return nil, err
	}
	if k.deaf && ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return &brokenMachine{Machine: m, k: k}, nil
}

// Missing implements driver.Restorer.
func (k *broken) Missing(needs sandbox.Needs) error {
	if k.careless {
		return nil
	}
	return k.Driver.Missing(needs)
}

// Restore implements driver.Restorer.
func (k *broken) Restore(ctx context.Context, spec driver.Spec, image driver.Image) (driver.Machine, error) {
	if k.boots {
		return k.Driver.Create(ctx, spec)
	}
	return k.Driver.Restore(ctx, spec, image)
}

// Adopt implements driver.Driver.
func (k *broken) Adopt(ctx context.Context, id string) (driver.Machine, error) {
	m, err := k.Driver.Adopt(ctx, id)
	switch {
	case k.believes && err != nil:
		m, err = noMachine{id: id}, nil
	case k.forgets && err == nil:
		return nil, sandbox.Errorf(sandbox.NotFound, "machine_not_found", "there is no machine %s", id)
	}
	if err != nil {
		return nil, err
	}
	return &brokenMachine{Machine: m, k: k}, nil
}

// List implements driver.Driver.
func (k *broken) List(ctx context.Context) ([]string, error) {
	ids, err := k.Driver.List(ctx)
	if err != nil || !k.shortList {
		return ids, err
	}
	var live []string
	for _, id := range ids {
		if _, err := k.Driver.Adopt(ctx, id); err == nil {
			live = append(live, id)
		}
	}
	return live, nil
}

// Discard implements driver.Driver.
func (k *broken) Discard(ctx context.Context, id string) error {
	if !k.noDiscard {
		return k.Driver.Discard(ctx, id)
	}
	m, err := k.Driver.Adopt(ctx, id)
	if err != nil {
		return nil
	}
	return m.Kill(ctx)
}

// brokenMachine is a machine of a broken driver.
type brokenMachine struct {
	driver.Machine
	k *broken
}

// Kill implements driver.Machine.
func (m *brokenMachine) Kill(ctx context.Context) error {
	if m.k.noKill {
		return nil
	}
	return m.Machine.Kill(ctx)
}

// Exited implements driver.Machine.
func (m *brokenMachine) Exited() <-chan struct{} {
	if m.k.noExit {
		return make(chan struct{})
	}
	return m.Machine.Exited()
}

// End implements driver.Machine.
func (m *brokenMachine) End() sandbox.End {
	if m.k.noEnd {
		return sandbox.End{}
	}
	return m.Machine.End()
}

// Stats implements driver.Machine.
func (m *brokenMachine) Stats(ctx context.Context) (driver.Stats, error) {
	if m.k.frozen {
		return driver.Stats{MemoryBytes: 32 << 20, CPU: time.Second, Processes: 3, DiskBytes: 1 << 20}, nil
	}
	return m.Machine.Stats(ctx)
}

// Pause implements driver.Pauser.
func (m *brokenMachine) Pause(ctx context.Context) error {
	if m.k.noPause {
		return nil
	}
	return m.Machine.Pause(ctx)
}

// Snapshot implements driver.Snapshotter.
func (m *brokenMachine) Snapshot(ctx context.Context, dir string, kind sandbox.SnapshotKind) (driver.Image, error) {
	image, err := m.Machine.Snapshot(ctx, dir, kind)
	if err == nil && m.k.halts {
		err = m.Machine.Pause(ctx)
	}
	return image, err
}
