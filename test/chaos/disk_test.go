package chaos

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// disk is a filesystem of its own for a daemon's state, which can be filled and
// made read-only without harm to anybody else.
type disk struct {
	dir, img string
	full     atomic.Bool
}

// mountDisk mounts a new ext4 of so many bytes at DIR/s, or skips the test where
// there are no loop devices.
func mountDisk(t *testing.T, dir string, size int64) *disk {
	t.Helper()
	d := &disk{dir: filepath.Join(dir, "s"), img: filepath.Join(dir, "state.img")}
	f, err := os.Create(d.img)
	if err == nil {
		err = errors.Join(f.Truncate(size), f.Close(), os.Mkdir(d.dir, 0o700))
	}
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-m", "0", "-F", d.img).CombinedOutput(); err != nil {
		t.Skipf("SKIP: NOT CHECKED: no ext4 can be made: %v %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", d.img, d.dir).CombinedOutput(); err != nil {
		t.Skipf("SKIP: NOT CHECKED: no loop device can be mounted: %v %s", err, out)
	}
	t.Cleanup(func() {
		var err error
		var out []byte
		for range 50 { // what the daemon had open closes in its own time
			if out, err = exec.Command("umount", d.dir).CombinedOutput(); err == nil {
				return
			}
			time.Sleep(100 * time.Millisecond)
		}
		t.Errorf("umount: %v %s", err, out)
	})
	return d
}

// fill leaves nothing free until the returned function is called.
func (d *disk) fill() (release func(), err error) {
	path := filepath.Join(d.dir, "ballast")
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	d.full.Store(true)
	release = func() {
		_ = f.Close()
		_ = os.Remove(path)
		d.full.Store(false)
	}
	var st syscall.Statfs_t
	at := int64(0)
	for range 20 { // others write meanwhile
		if err := syscall.Statfs(d.dir, &st); err != nil {
			release()
			return nil, err
		}
		n := int64(st.Bavail) * st.Bsize
		if n == 0 {
			break
		}
		for ; n >= st.Bsize; n /= 2 {
			if syscall.Fallocate(int(f.Fd()), 0, at, n) == nil {
				at += n
				break
			}
		}
	}
	return release, nil
}
