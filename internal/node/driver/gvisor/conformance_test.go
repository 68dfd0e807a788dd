package gvisor

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/drivertest"
	"cloche.dev/cloche/internal/node/netns"
)

// TestConformance holds the driver to the contract of all drivers.
func TestConformance(t *testing.T) {
	h := newHarness(t)
	t.Run("gvisor", func(t *testing.T) { drivertest.Run(t, h) })
}

// conformance are the binaries and the image that the suite's tests share.
var conformance struct {
	once   sync.Once
	files  drivertest.Files
	engine string
	err    error
}

// prepare builds them in the directory that TestMain removes.
func prepare(t *testing.T) {
	t.Helper()
	built.once.Do(func() { built.err = build() })
	if built.err != nil {
		t.Fatal(built.err)
	}
	conformance.once.Do(func() {
		dir := filepath.Join(built.dir, "conformance")
		if prebuilt != "" {
			conformance.files, conformance.err = drivertest.Prebuilt(prebuilt)
		} else if conformance.err = os.Mkdir(dir, 0o700); conformance.err == nil {
			conformance.files, conformance.err = drivertest.Prepare(dir)
		}
	})
	if errors.Is(conformance.err, drivertest.ErrMissing) {
		t.Skipf("SKIP: %v", conformance.err)
	}
	if conformance.err != nil {
		t.Fatal(conformance.err)
	}
}

func newHarness(t *testing.T) drivertest.Harness {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: machines need root")
	}
	prepare(t)
	dir, err := os.MkdirTemp("", "cg") // short: a socket's path is
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the directories are kept in %s", dir)
		} else if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	nets := netns.New(netns.Options{Dir: filepath.Join(dir, "net")})
	o := Options{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Engine: built.engine,
		Guest: conformance.files.Guest, Networks: nets, Log: slog.New(slog.DiscardHandler),
	}
	pace := 1
	if prebuilt != "" {
		pace = 10 // its processor is emulated
	}
	var current *Driver
	return drivertest.Harness{
		Name: "gvisor", Files: conformance.files, Networks: nets, Pace: pace,
		Open: func() (driver.Driver, func(context.Context) error, error) {
			d, err := New(o)
			if err != nil {
				return nil, nil, err
			}
			current = d
			return d, d.Close, nil
		},
		HostPIDs:  func(id string) ([]int, error) { return hostPIDs(current, id) },
		Leftovers: func(id string) ([]string, error) { return leftovers(current, id) },
	}
}

// hostPIDs lists a machine's processes, the sentry first.
func hostPIDs(d *Driver, id string) ([]int, error) {
	pids, err := d.group(id).Procs()
	if err != nil {
		return nil, err
	}
	rec, err := readRecord(d.machineDir(id))
	if errors.Is(err, fs.ErrNotExist) {
		return pids, nil
	}
	if err != nil {
		return nil, err
	}
	if i := slices.Index(pids, rec.Sentry.PID); i > 0 {
		pids[0], pids[i] = pids[i], pids[0]
	}
	return pids, nil
}

// leftovers looks for a machine's id wherever one might be left.
func leftovers(d *Driver, id string) ([]string, error) {
	left, err := drivertest.Traces(id, []string{id}, d.o.StateDir, d.o.RunDir)
	if err != nil {
		return nil, err
	}
	there, err := d.group(id).Exists()
	if there {
		left = append(left, "cgroup "+d.group(id).Path())
	}
	return left, err
}
