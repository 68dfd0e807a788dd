package jail

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	// writersTime is how long a file's last writer may take to let go of it. A VMM
	// has closed its file when it answers; but a process that we start meanwhile
	// has our own descriptors until it executes its program.
	writersTime = time.Second
	writersWait = 10 * time.Millisecond
)

// unwritten returns nil when nobody has a file open for writing or mapped so. f
// is open for reading alone. Where nobody but root may open the file it stays so:
// what is made of it is what it holds now.
//
// The kernel tells by a read lease, which it grants for nothing that can be
// written to. All local filesystems that a state directory may lie on have leases
// (ext4, XFS, Btrfs, tmpfs); on one that hasn't, such as NFS, nothing tells, and
// the file is refused.
func unwritten(ctx context.Context, f *os.File) error {
	until := time.Now().Add(writersTime)
	for {
		err := lease(f)
		if err == nil || !errors.Is(err, syscall.EAGAIN) {
			return err
		}
		if time.Now().After(until) {
			return sandbox.Errorf(sandbox.Internal, "vmm_file", "the VMM can still write to %s, which it said it has written", filepath.Base(f.Name()))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(writersWait):
		}
	}
}

// lease takes a read lease of a file and gives it back.
func lease(f *os.File) error {
	for _, kind := range []uintptr{syscall.F_RDLCK, syscall.F_UNLCK} {
		_, _, errno := syscall.Syscall(syscall.SYS_FCNTL, f.Fd(), syscall.F_SETLEASE, kind)
		switch errno {
		case 0:
		case syscall.EAGAIN:
			return errno
		default:
			return sandbox.Errorf(sandbox.FailedPrecondition, "no_leases", "the filesystem of %s does not tell who can write to a file: %w", f.Name(), errno).
				WithHint("put the state directory on a local disk, and leave the kernel's fs.leases-enable at 1")
		}
	}
	return nil
}

// overlayMagic is what statfs calls an overlayfs.
const overlayMagic = 0x794c7630

// overlaid tells whether a directory lies on an overlayfs. A mapping there is one
// of the layer's file below, and a lease does not see it.
func overlaid(dir *os.File) (bool, error) {
	var st syscall.Statfs_t
	err := syscall.Fstatfs(int(dir.Fd()), &st)
	return st.Type == overlayMagic, err
}
