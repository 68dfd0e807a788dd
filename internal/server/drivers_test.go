package server

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node"
	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/sandbox"
)

// kept is a driver about which an earlier process has found something out.
type kept struct{}

func (kept) Name() string { return "firecracker" }
func (kept) Probe(context.Context) driver.Capability {
	panic("it is not to be probed")
}

func TestADaemonThatMustHaveADriverFailsWithoutIt(t *testing.T) {
	lacks := sandbox.Errorf(sandbox.FailedPrecondition, "kernel_missing", "no guest kernel").WithHint("install one")
	prober := func(key node.ProbeKey, err error) *host {
		return &host{prober: node.NewProber(node.ProbeOptions{
			Driver: kept{}, File: filepath.Join(t.TempDir(), "probe.json"), Key: func() (node.ProbeKey, error) { return key, err },
		})}
	}
	alive := t.Context()
	for _, choice := range []string{"", DriverAuto, "gvisor"} {
		if err := prober(nil, lacks).proven(alive, alive, Options{Driver: choice}); err != nil {
			t.Errorf("%q: %v", choice, err)
		}
	}
	o := Options{Driver: "firecracker"}
	err := prober(nil, lacks).proven(alive, alive, o)
	if e := sandbox.AsError(err); e == nil || e.Code != "driver_unavailable" || !strings.Contains(e.Message, "no guest kernel") || e.Hint != "install one" {
		t.Errorf("%+v", e)
	}
	// A probe that does not end is not waited for once the daemon is to end.
	ended, end := context.WithCancel(alive)
	time.AfterFunc(10*time.Millisecond, end)
	for _, c := range []struct{ ctx, below context.Context }{{ended, alive}, {alive, ended}} {
		if err := prober(node.ProbeKey{"boot": "1"}, nil).proven(c.ctx, c.below, o); !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	}
	for name, want := range map[string]bool{"": true, "auto": true, "gvisor": true, "firecracker": true, "Firecracker": false, "qemu": false} {
		if err := CheckDriver(name); (err == nil) != want {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestWhatIsNotInstalledIsSaidAndNotMade(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	if c := ProbeFirecracker(state)(t.Context(), true); c.OK || !strings.Contains(c.Reason, "not installed") || c.Hint == "" {
		t.Errorf("%+v", c)
	}
	if _, err := os.Stat(state); !os.IsNotExist(err) {
		t.Errorf("it was made: %v", err)
	}
	artifacts, err := artifact.Open(filepath.Join(state, "artifacts"))
	if err != nil {
		t.Fatal(err)
	}
	if c := ProbeFirecracker(state)(t.Context(), true); c.OK || !strings.Contains(c.Reason, "not installed") || c.Hint == "" {
		t.Errorf("%+v", c)
	}
	if key, err := probeKey(installed.Open(state, artifacts), "guest", ""); key != nil || sandbox.AsError(err).Code != "firecracker_missing" {
		t.Errorf("%v %v", key, err)
	}
}

func TestAReleaseIsLetPassByName(t *testing.T) {
	if (Options{}).allowVersion() != nil {
		t.Error("the driver's own rule is not used")
	}
	allow := Options{AllowFirecracker: "1.12.1"}.allowVersion()
	for version, want := range map[string]string{
		"1.12.1": "", "1.15.1": "", "1.12.0": "firecracker_vulnerable", "1.14.0": "firecracker_vulnerable", "1.16.0": "firecracker_hangs",
	} {
		got := ""
		if err := allow(version); err != nil {
			got = sandbox.AsError(err).Code
		}
		if got != want {
			t.Errorf("%s: %q, want %q", version, got, want)
		}
	}
}
