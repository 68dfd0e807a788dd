package gvisor

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// TestImageWithoutEth0 restores what was saved when machines had an empty
// namespace: it goes on, in a pair of today's and in a namespace of its time.
func TestImageWithoutEth0(t *testing.T) {
	f := newFixture(t)
	old := f.spec(128)
	old.NetNS = emptyNamespace(t)
	m := f.create(old)
	l := f.link(m)
	if r := l.run(0, "interfaces"); strings.Contains(r.Out, "eth0") {
		t.Fatalf("it has an eth0: %+v", r)
	}
	f.unlink(m, l)
	image, err := m.Snapshot(f.ctx(time.Minute), t.TempDir(), sandbox.SnapshotMemory)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		spec func() driver.Spec
		eth0 bool
	}{
		{"into a pair", func() driver.Spec { return f.spec(128) }, true},
		{"into an empty namespace", func() driver.Spec {
			s := f.spec(128)
			s.NetNS = emptyNamespace(t)
			return s
		}, false},
	} {
		restored, err := f.d.Restore(f.ctx(time.Minute), tt.spec(), image)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		r := f.link(restored).run(0, "interfaces")
		if r.Code != 0 || strings.Contains(r.Out, "eth0") != tt.eth0 {
			t.Errorf("%s it has %+v", tt.name, r)
		}
	}
}

// emptyNamespace makes a network namespace as releases before the gateway did.
func emptyNamespace(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ns")
	if err := os.WriteFile(path, nil, 0o400); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with this goroutine
		err := syscall.Unshare(syscall.CLONE_NEWNET)
		if err == nil {
			err = syscall.Mount("/proc/thread-self/ns/net", path, "", syscall.MS_BIND, "")
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(path, syscall.MNT_DETACH) })
	return path
}

// TestQuiet sees that a machine sends nothing by itself that its gateway drops:
// what the counters there tell is what somebody inside tried.
func TestQuiet(t *testing.T) {
	f := newFixture(t)
	spec := f.spec(128)
	l := f.link(f.create(spec))
	for range 20 {
		if r := l.run(0, "interfaces"); !strings.Contains(r.Out, "eth0") {
			t.Fatalf("it has no eth0: %+v", r)
		}
	}
	dropped, err := f.nets.Counters(f.ctx(time.Minute), spec.ID)
	if err != nil || len(dropped) == 0 {
		t.Fatalf("Counters = %v, %v", dropped, err)
	}
	for why, n := range dropped {
		if n != 0 {
			t.Errorf("%d packets were dropped as %s", n, why)
		}
	}
}
