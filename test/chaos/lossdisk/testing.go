package lossdisk

import (
	"os"
	"os/exec"
	"testing"
)

// Mount gives a test a disk, or skips it where there can be none.
func Mount(tb testing.TB, size int64) *Disk {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("SKIP: NOT CHECKED: a disk that loses unflushed writes needs root")
	}
	for _, dev := range []string{"/dev/fuse", "/dev/loop-control"} {
		if _, err := os.Stat(dev); err != nil {
			tb.Skipf("SKIP: NOT CHECKED: a disk that loses unflushed writes needs %s: %v", dev, err)
		}
	}
	if _, err := exec.LookPath("mkfs.ext4"); err != nil {
		tb.Skipf("SKIP: NOT CHECKED: %v", err)
	}
	d, err := New(tb.TempDir(), size)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
	})
	return d
}
