// Package doctor finds out what this machine can and can't do for Cloche, why,
// and how to mend it. It looks at the machine itself and needs no daemon: what
// only a trial proves (that a machine starts, that KVM runs code) is tried.
//
// A check never changes the machine: what it makes to try something (a cgroup,
// a child process) is gone when it returns. `cloche doctor` is the only caller.
package doctor

import (
	"context"
	"os/exec"
	"time"

	"cloche.dev/cloche/internal/node/driver"
)

// Status is the outcome of one check.
type Status string

// The outcomes. Only Fail means that sandboxes can't run here.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Check is one thing that was looked at.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`         // what was found
	Mend   string `json:"mend,omitempty"` // what to do about it
}

// Report is all that was found.
type Report struct {
	CanRun bool    `json:"can_run"` // sandboxes can run on this machine
	Checks []Check `json:"checks"`
}

// Options say what to look at. The zero value of each field has a sensible
// meaning.
type Options struct {
	StateDir string // where the daemon keeps its state
	// Probe is the isolation driver's own probe; nil leaves the check out.
	Probe  func(context.Context) driver.Capability
	Driver string // its name, for people
	// Firecracker tells whether its machines can run here, booting one where try
	// is true and nobody has done so since the host was booted. nil: it can't be
	// told.
	Firecracker func(ctx context.Context, try bool) driver.Capability
	// Daemon asks the daemon for its version; nil leaves the check out.
	Daemon func(context.Context) (version string, err error)
	// Version is this binary's version, to compare with the daemon's.
	Version string
	// KVM is a command that runs sys.TryKVM: it prints each step as a line on
	// its standard error and the report as JSON on its standard output. Empty
	// leaves the check out.
	KVM []string
	// Root is put before every path that is read; "" is the machine itself.
	// With another root nothing is tried, only read.
	Root string
	// LookPath finds a program; nil is exec.LookPath.
	LookPath func(string) (string, error)
	// Began is called when a check begins, with its name.
	Began func(name string)

	noKVM bool // it was found that nothing can boot
}

// The time that one trial may take.
const (
	probeTime  = 60 * time.Second
	daemonTime = 5 * time.Second
	kvmTime    = 20 * time.Second
)

// Run makes every check, one after the other.
func Run(ctx context.Context, o Options) Report {
	if o.LookPath == nil {
		o.LookPath = exec.LookPath
	}
	r := Report{CanRun: true}
	for _, c := range []struct {
		name string
		look func(context.Context, Options) Check
		skip bool
	}{
		{"user", checkUser, false},
		{"kernel", checkKernel, false},
		{"cgroups", checkCgroups, false},
		{"memory", checkMemory, false},
		{"state directory", checkState, false},
		{"limits", checkLimits, false},
		{"clock", checkClock, false},
		{"gvisor", checkDriver, o.Probe == nil},
		{"kvm", checkKVM, len(o.KVM) == 0},
		{"firecracker", checkFirecracker, false},
		{"user namespaces", checkUserNamespaces, false},
		{"template tools", checkTools, false},
		{"package sources", checkSources, false},
		{"daemon", checkDaemon, o.Daemon == nil},
	} {
		if c.skip || ctx.Err() != nil {
			continue
		}
		if o.Began != nil {
			o.Began(c.name)
		}
		got := c.look(ctx, o)
		if c.name == "kvm" {
			o.noKVM = got.Status != OK
		}
		if got.Name == "" {
			got.Name = c.name
		}
		if got.Status == Fail {
			r.CanRun = false
		}
		r.Checks = append(r.Checks, got)
	}
	return r
}

func checkDriver(ctx context.Context, o Options) Check {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	c := o.Probe(ctx)
	if !c.OK {
		mend := c.Hint
		if mend == "" {
			mend = "mend what the line above says; no sandbox can run before"
		}
		return Check{Name: o.Driver, Status: Fail, Detail: c.Reason, Mend: mend}
	}
	return Check{Name: o.Driver, Status: OK, Detail: c.Reason}
}

func checkDaemon(ctx context.Context, o Options) Check {
	ctx, cancel := context.WithTimeout(ctx, daemonTime)
	defer cancel()
	v, err := o.Daemon(ctx)
	switch {
	case err != nil:
		return Check{Status: Warn, Detail: err.Error(), Mend: "start it with `sudo cloche serve`, or name another one with --url"}
	case o.Version != "" && v != o.Version:
		return Check{Status: Warn, Detail: "answers, and is version " + v + "; this program is version " + o.Version, Mend: "restart the daemon to run the new version; sandboxes live on"}
	}
	return Check{Status: OK, Detail: "answers, version " + v}
}
