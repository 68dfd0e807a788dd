package e2e

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

// probeDeadline is the daemon's, and probeSpare what a busy machine may need more
// to tell of it.
const probeDeadline, probeSpare = 60 * time.Second, 15 * time.Second

// realFirecracker installs a real Firecracker and a kernel for a daemon, or skips
// the test.
func realFirecracker(t *testing.T, d *harness.Daemon) {
	t.Helper()
	dir, kernel := os.Getenv("CLOCHE_FIRECRACKER"), os.Getenv("CLOCHE_KERNEL_PACKAGE")
	if dir == "" || kernel == "" {
		t.Skip("SKIP: no real Firecracker or no kernel for its guests: `go run ./test/nested/run -programs` gets them, and $CLOCHE_FIRECRACKER and $CLOCHE_KERNEL_PACKAGE name them")
	}
	d.Must("firecracker", "install", "--allow-vulnerable", "--firecracker", filepath.Join(dir, "firecracker"), "--jailer", filepath.Join(dir, "jailer"))
	d.Must("kernel", "install", "--package", kernel)
}

// probed waits for what the daemon has found out about Firecracker.
func probed(t *testing.T, d *harness.Daemon) (ok bool, said string) {
	t.Helper()
	file := filepath.Join(d.State, "firecracker", "probe.json")
	eventually(t, "the probe's end", probeDeadline+probeSpare, func() bool {
		_, err := os.Stat(file)
		return err == nil
	})
	var v struct {
		OK     bool   `json:"ok"`
		Reason string `json:"reason"`
	}
	data, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(data, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v.OK, v.Reason
}

// TestFallsBackToGVisor serves on a machine whose KVM boots no Linux, with all of
// Firecracker installed: sandboxes are gVisor's from the first moment on, the log
// says why within the probe's deadline, and who asks for Firecracker by name is
// told the reason.
func TestFallsBackToGVisor(t *testing.T) {
	d := harness.New(t)
	realFirecracker(t, d)
	d.Seed()
	d.Flags = []string{"--allow-vulnerable", "1.12.1"}
	begin := time.Now()
	d.Serve()
	driverOf := func(id string) string {
		t.Helper()
		var s struct {
			Driver string `json:"driver"`
		}
		if err := json.Unmarshal([]byte(d.Must("--json", "inspect", id)), &s); err != nil {
			t.Fatal(err)
		}
		return s.Driver
	}
	// Nobody waits for the probe; what it is to find out is not guessed.
	id := d.Must("create", "base")
	if is := driverOf(id); is != "gvisor" && time.Since(begin) < probeDeadline/2 {
		t.Errorf("while Firecracker is probed a sandbox runs on %q", is)
	}
	ok, reason := probed(t, d)
	if ok {
		t.Skipf("SKIP: the KVM of this machine boots Linux: %s", reason)
	}
	took := time.Since(begin)
	if reason == "" || took > probeDeadline+probeSpare {
		t.Errorf("after %v the reason is %q", took, reason)
	}
	eventually(t, "the log says why", 5*time.Second, func() bool {
		return strings.Contains(d.Log(), "a driver can't be used here") && strings.Contains(d.Log(), reason)
	})
	refused := func(when string) {
		t.Helper()
		r := d.CLI("create", "--driver", "firecracker", "base")
		if r.Code != 3 || !strings.Contains(r.Stderr, reason) {
			t.Errorf("%s, asked for Firecracker: exit code %d, %s", when, r.Code, r.Stderr)
		}
		_, err := newClient(t, d, d.Key).CreateSandbox(t.Context(), api.CreateSandboxRequest{Template: "base", Driver: "firecracker"})
		var e *client.Error
		if !errors.As(err, &e) || e.Class != api.ClassFailedPrecondition || e.Code != "driver_unavailable" || e.Hint == "" {
			t.Errorf("%s, asked for Firecracker: %+v", when, e)
		}
	}
	refused("after the probe")
	second := d.Must("create", "base")
	if is := driverOf(second); is != "gvisor" {
		t.Errorf("a sandbox runs on %q", is)
	}
	// The next daemon of this boot knows at once.
	d.Stop()
	begin = time.Now()
	d.Serve()
	refused("after a restart")
	if again := time.Since(begin); again > probeDeadline/2 {
		t.Errorf("the next daemon knew after %v", again)
	}
	if n := strings.Count(d.Log(), "a driver is being probed"); n != 1 {
		t.Errorf("it was probed %d times", n)
	}
	if said := d.Must("exec", id, "--", "echo", "goes on"); said != "goes on" {
		t.Errorf("a sandbox says %q", said)
	}
	for _, id := range []string{id, second} {
		d.Must("rm", id)
	}
	t.Logf("told after %v: %s", took.Round(time.Second/10), reason)
	if !long() {
		return
	}
	d.Stop()
	// A daemon that must have it does not start without: it probes again.
	r := d.CLI("serve", "--listen", harness.FreePort(t), "--run-dir", d.Run, "--driver", "firecracker", "--allow-vulnerable", "1.12.1")
	if what, _, _ := strings.Cut(reason, ":"); r.Code != 3 || !strings.Contains(r.Stderr, what) {
		t.Errorf("a daemon that must have Firecracker: exit code %d, %s", r.Code, r.Stderr)
	}
}
