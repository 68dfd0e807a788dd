package firecracker

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/drivertest"
	"cloche.dev/cloche/internal/node/netns"
)

// paceEnv says how many times longer than on a plain host things take here; the
// nested run, a machine in an emulated one, sets nothing and gets nestedPace.
const (
	paceEnv    = "CLOCHE_TEST_PACE"
	nestedPace = 12
)

// TestConformance holds the driver to the contract of all drivers. It needs a
// KVM that boots Linux.
func TestConformance(t *testing.T) {
	h := newHarness(t)
	t.Run("firecracker", func(t *testing.T) { drivertest.Run(t, h) })
}

// TestForks makes eight machines of one image.
func TestForks(t *testing.T) {
	h := newHarness(t)
	t.Run("firecracker", func(t *testing.T) { drivertest.Forks(t, h, 8) })
}

// TestUnseededForks proves that TestForks notices a guest that is not reseeded.
func TestUnseededForks(t *testing.T) {
	h := newHarness(t)
	t.Run("firecracker", func(t *testing.T) { drivertest.UnseededForks(t, h, 8, 5) })
}

// TestCycles suspends and restores one machine, over and over.
func TestCycles(t *testing.T) {
	h := newHarness(t)
	t.Run("firecracker", func(t *testing.T) { drivertest.Cycles(t, h, 20) })
}

// TestBrokenDrivers proves that the contract notices drivers and guests that
// break it.
func TestBrokenDrivers(t *testing.T) {
	h := newHarness(t)
	t.Run("firecracker", func(t *testing.T) { drivertest.RunFaults(t, h) })
}

// TestBrokenFirecracker breaks this driver in ways that only it can be broken
// in; the contract must notice. (A driver whose jails share a user is caught by
// TestJailsAreApart.)
func TestBrokenFirecracker(t *testing.T) {
	for name, f := range map[string]struct {
		clause string
		breaks func(*Driver) driver.Driver
	}{
		"ready_before_report": {"create-corrupt-image", func(d *Driver) driver.Driver { d.test.noReport = true; return d }},
		"guest_unseen":        {"create-corrupt-guest", func(d *Driver) driver.Driver { d.test.noReport = true; return d }},
		"snapshot_of_running": {"snapshot-goes-on", func(d *Driver) driver.Driver { d.test.noPause = true; return d }},
		"stale_socket":        {"adopt", func(d *Driver) driver.Driver { return staleDriver{d} }},
	} {
		t.Run("firecracker/"+name, func(t *testing.T) {
			h := newHarness(t)
			broken := h
			broken.Open = func() (driver.Driver, func(context.Context) error, error) {
				d, shut, err := h.Open()
				if err != nil {
					return nil, nil, err
				}
				return f.breaks(d.(*Driver)), shut, nil
			}
			drivertest.RunBroken(t, h, broken, f.clause)
		})
	}
}

// staleDriver leaves an adopted machine's socket as it found it.
type staleDriver struct{ driver.Driver }

// Adopt implements driver.Driver.
func (d staleDriver) Adopt(ctx context.Context, id string) (driver.Machine, error) {
	m, err := d.Driver.Adopt(ctx, id)
	return staleMachine{m}, err
}

type staleMachine struct{ driver.Machine }

// Guest implements driver.Living: a listener that no guest can reach.
func (staleMachine) Guest() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") }

// prebuilt finds what the nested run has made for this test, or skips it.
func prebuilt(t testing.TB) (dir string, files drivertest.Files) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: machines need root")
	}
	dir = os.Getenv(prebuiltEnv)
	if dir == "" {
		t.Skipf("SKIP: no Firecracker whose KVM boots Linux: $%s names no directory with firecracker, jailer, vmlinux, modules, guest, guest-faults, image.erofs and inside (see test/nested)", prebuiltEnv)
	}
	for _, name := range []string{"firecracker", "jailer", "vmlinux"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Skipf("SKIP: no Firecracker whose KVM boots Linux: %v", err)
		}
	}
	files, err := drivertest.Prebuilt(dir)
	if errors.Is(err, drivertest.ErrMissing) {
		t.Skipf("SKIP: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir, files
}

func newHarness(t *testing.T) drivertest.Harness {
	t.Helper()
	programs, files := prebuilt(t)
	pace := nestedPace
	if n, err := strconv.Atoi(os.Getenv(paceEnv)); err == nil {
		pace = n
	}
	dir := t.TempDir()
	nets := netns.New(netns.Options{Dir: filepath.Join(dir, "net")})
	o := optionsFor(t, programs, dir, nets)
	o.Guest = files.Guest
	var current *Driver
	return drivertest.Harness{
		Name: Name, Files: files, Networks: nets, Pace: pace,
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
		// What boots the machine is the guest binary itself, so that no other can
		// stand in for it; the one that can be broken ends by itself.
		Mortal: func(s *driver.Spec) {
			s.Guest = files.Broken
			s.Supervisor["CLOCHE_FAULT"] = "supervisor_ends"
		},
		// An image is a file of the VMM's state of some KiB and two as large as the
		// machine's memory and disk.
		Damage: func(dir string) error {
			st, err := os.Stat(filepath.Join(dir, stateName))
			if err != nil {
				return err
			}
			return os.Truncate(filepath.Join(dir, stateName), st.Size()/2)
		},
	}
}
