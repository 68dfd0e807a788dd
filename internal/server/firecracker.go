package server

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/node"
	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/node/driver/gvisor"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// addFirecracker gives the host the driver that needs KVM, which is there for
// the machines and snapshots that it made before, whatever Options.Driver says.
func (h *host) addFirecracker(o Options, artifacts *artifact.Store, guests *artifact.Builds, networks *netns.Manager) error {
	store := installed.Open(o.StateDir, artifacts)
	d, err := firecracker.New(firecracker.Options{
		StateDir: o.StateDir, RunDir: o.RunDir, Pair: store.Current, ByHash: store.ByHash, Guest: guests.CurrentPath(), Networks: networks,
		AllowVersion: o.allowVersion(), Log: o.Log,
	})
	if err != nil {
		return err
	}
	h.drivers = append(h.drivers, d)
	p := node.ProbeOptions{
		Driver: d, File: probeFile(o.StateDir), Again: o.Driver == firecracker.Name, Log: o.Log,
		Key: func() (node.ProbeKey, error) { return probeKey(store, guests.Current(), o.AllowFirecracker) },
	}
	if o.Driver == gvisor.Name {
		p.Off, p.OffHint = "this daemon was told to use gVisor alone", "start it with --driver auto"
	}
	h.prober = node.NewProber(p)
	return nil
}

// allowVersion lets one release pass, where one is named; nil is the driver's own rule.
func (o Options) allowVersion() func(string) error {
	if o.AllowFirecracker == "" {
		return nil
	}
	return func(version string) error { return vmm.CheckVersion(version, version, version == o.AllowFirecracker) }
}

// probeFile is where what was found out about Firecracker is kept.
func probeFile(stateDir string) string {
	return filepath.Join(stateDir, firecracker.Name, "probe.json")
}

// probeKey is all that decides whether a Firecracker machine boots here, or why
// there is none to boot.
func probeKey(store *installed.Store, guest, allowed string) (node.ProbeKey, error) {
	pair, kernel, err := store.Current()
	if err != nil {
		return nil, err
	}
	key := node.ProbeKey{
		"boot": sys.HostBootID(), "kvm": kvmLook(), "guest": guest, "kernel": kernel.Hash,
		"firecracker": pair.Hash, "jailer": filepath.Base(filepath.Dir(pair.Jailer)), // artifacts lie below their hashes
	}
	if allowed != "" {
		key["allowed"] = allowed
	}
	return key, nil
}

// kvmLook changes when KVM's module is loaded again, or its device given to
// others: within one boot of the host that may mend it.
func kvmLook() string {
	st, err := os.Stat("/dev/kvm")
	if err != nil {
		return "absent"
	}
	raw, _ := st.Sys().(*syscall.Stat_t)
	if raw == nil {
		return st.Mode().String()
	}
	return fmt.Sprintf("%d %d %s %d:%d", raw.Ino, raw.Rdev, st.Mode(), raw.Uid, raw.Gid)
}

// ProbeFirecracker returns what tells whether a Firecracker machine can run on
// this host with what is installed in stateDir. `cloche doctor` calls it. What a
// daemon has found out about the same programs is told where it was good; else a
// machine is booted in directories of its own, unless try is false, since nothing
// can boot.
func ProbeFirecracker(stateDir string) func(ctx context.Context, try bool) driver.Capability {
	return func(ctx context.Context, try bool) driver.Capability {
		return told(probeFirecracker(ctx, stateDir, try))
	}
}

func probeFirecracker(ctx context.Context, stateDir string, try bool) (c driver.Capability, err error) {
	dir := filepath.Join(stateDir, "artifacts")
	if _, err := os.Stat(dir); err != nil { // to look is not to make it
		return c, sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_missing", "Firecracker is not installed in %s", stateDir).
			WithHint("`cloche firecracker install` and `cloche kernel install` do that")
	}
	artifacts, err := artifact.Open(dir)
	if err != nil {
		return c, err
	}
	store := installed.Open(stateDir, artifacts)
	pair, kernel, err := store.Current()
	if err != nil {
		return c, err
	}
	var kept driver.Capability
	var at time.Time
	var known bool
	err = apart(func(dir string, mine *artifact.Store) error {
		guests, err := mine.Builds(artifact.GuestName)
		if err != nil {
			return err
		}
		key, err := probeKey(store, guests.Current(), "")
		if err != nil {
			return err
		}
		kept, at, known = node.KeptProbe(probeFile(stateDir), key)
		if known && (kept.OK || !try) {
			c = kept
			return nil
		}
		if !try {
			c = driver.Capability{Reason: "not tried, since KVM can't run a kernel here", Hint: "see kvm"}
			return nil
		}
		c, err = bootOnce(ctx, dir, store, guests)
		return err
	})
	what := fmt.Sprintf("Firecracker %s with its jailer, kernel %s: ", pair.Version, kernel.Name)
	if known && (kept.OK || !try) {
		what += "the daemon found at " + at.Local().Format(time.DateTime) + ": "
	} else if known && c.OK {
		c.Reason += fmt.Sprintf(". The daemon still goes by what it found at %s (%s): remove %s and start it again",
			at.Local().Format(time.DateTime), kept.Reason, probeFile(stateDir))
	}
	c.Reason = what + c.Reason
	return c, err
}

// bootOnce probes in a directory that nothing else uses.
func bootOnce(ctx context.Context, dir string, store *installed.Store, guests *artifact.Builds) (driver.Capability, error) {
	d, err := firecracker.New(firecracker.Options{
		StateDir: dir, RunDir: filepath.Join(dir, "r"), Pair: store.Current, ByHash: store.ByHash, Guest: guests.CurrentPath(),
		Networks: netns.New(netns.Options{Dir: filepath.Join(dir, "r", "netns")}), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return driver.Capability{}, err
	}
	return once(ctx, d)
}
