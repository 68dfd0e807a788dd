package template

import (
	"os"
	"os/exec"
	"testing"

	"cloche.dev/cloche/internal/template/rootfs"
)

func openStore(t *testing.T) *Store {
	t.Helper()
	s, err := Open(t.TempDir(), Limits{Tar: rootfs.Limits{DataBytes: 1 << 30, Entries: 100_000}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// mountImage mounts an image with the kernel's own EROFS for the test's time.
func mountImage(t *testing.T, image string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: mounting an image needs root")
	}
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "erofs", "-o", "loop,ro", image, dir).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
	return dir
}
