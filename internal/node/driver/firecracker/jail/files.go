package jail

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

func ownedByRoot(st fs.FileInfo) bool {
	raw, ok := st.Sys().(*syscall.Stat_t)
	return ok && raw.Uid == 0
}

// copyTo makes a copy of a file under a name that is not there yet.
func copyTo(ctx context.Context, target, source string, mode os.FileMode) error {
	src, err := os.Open(source)
	if err != nil {
		return err
	}
	defer src.Close()
	return copyFile(ctx, target, src, mode)
}

func copyFile(ctx context.Context, target string, src *os.File, mode os.FileMode) error {
	dst, err := os.OpenFile(target, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return diskError(err)
	}
	err = sys.CopySparse(ctx, dst, src)
	if err == nil {
		err = dst.Chmod(mode)
	}
	if err = errors.Join(err, dst.Close()); err != nil {
		_ = os.Remove(target)
	}
	return diskError(err)
}

// Room is a directory in a jail that its VMM writes files into for the host. It
// is root's, and the files are there before: the VMM can make none.
type Room struct {
	j    *Jail
	name string
	dir  *os.File // as it was made
	uid  int
}

// MakeRoom makes such a directory, after removing what an earlier one left.
func (j *Jail) MakeRoom(name string, uid int) (*Room, error) {
	path := filepath.Join(j.root(), name)
	if err := os.RemoveAll(path); err != nil {
		return nil, err
	}
	made, err := os.MkdirTemp(j.dir, ".room-")
	if err != nil {
		return nil, diskError(err)
	}
	dir, err := os.Open(made)
	if err == nil {
		err = errors.Join(dir.Chmod(0o755), os.Rename(made, path))
	}
	if err != nil {
		if dir != nil {
			_ = dir.Close()
		}
		_ = os.Remove(made)
		return nil, err
	}
	return &Room{j: j, name: name, dir: dir, uid: uid}, nil
}

// DropRoom removes a room that another process made, and what is in it.
func (j *Jail) DropRoom(name string) error { return os.RemoveAll(filepath.Join(j.root(), name)) }

// Path is what the VMM calls a file in the room.
func (r *Room) Path(name string) string { return filepath.Join("/", r.name, name) }

// Reserve makes a file that the VMM is to write, with all the space that it will
// need, so that a full disk is known before anything waits for it. The space is
// charged to us and not to the jail: where files lie in memory that tells.
func (r *Room) Reserve(name string, size int64) error {
	path := fmt.Sprintf("/proc/self/fd/%d/%s", r.dir.Fd(), name)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return diskError(err)
	}
	if size > 0 {
		err = syscall.Fallocate(int(f.Fd()), 0, 0, size)
	}
	if errors.Is(err, syscall.EOPNOTSUPP) {
		err = nil // then it is found out later
	}
	if err != nil {
		err = &fs.PathError{Op: "fallocate", Path: name, Err: err}
	}
	return diskError(errors.Join(err, f.Chown(r.uid, r.uid), f.Close()))
}

// Take moves a file that the VMM has written into a directory of the host's,
// and makes it root's with the mode. It must be a regular file of the jail's
// user, with no other name, which nobody can write to any more.
func (r *Room) Take(ctx context.Context, name, dir string, mode os.FileMode) error {
	from, to := fmt.Sprintf("/proc/self/fd/%d/%s", r.dir.Fd(), name), filepath.Join(dir, name)
	copied, err := overlaid(r.dir)
	if err == nil && !copied {
		err = os.Rename(from, to)
		copied = errors.Is(err, syscall.EXDEV)
	}
	if copied {
		return r.carry(ctx, from, to, mode)
	}
	if err != nil {
		return err
	}
	// It has a name now that the VMM can't change.
	f, err := openPlain(to, r.uid)
	if err == nil {
		err = errors.Join(f.Chown(os.Geteuid(), os.Getegid()), f.Chmod(mode))
		if err == nil {
			err = unwritten(ctx, f)
		}
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		_ = os.RemoveAll(to) // it may be a directory
	}
	return err
}

// carry does the same by a copy, which nobody has ever had open.
func (r *Room) carry(ctx context.Context, from, to string, mode os.FileMode) error {
	f, err := openPlain(from, r.uid)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := copyFile(ctx, to, f, mode); err != nil {
		return err
	}
	return os.Remove(from)
}

// openPlain opens a file that somebody hostile has named.
func openPlain(path string, uid int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil {
		raw, ok := st.Sys().(*syscall.Stat_t)
		if !ok || !st.Mode().IsRegular() || int(raw.Uid) != uid || raw.Nlink != 1 {
			err = sandbox.Errorf(sandbox.Internal, "vmm_file", "what the VMM left as %s is not a file of its own", filepath.Base(path))
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Close removes the room and what is left in it.
func (r *Room) Close() error {
	return errors.Join(r.dir.Close(), r.j.DropRoom(r.name))
}

// CopyDisk copies a file of the machine's own directory, the disk, to a new
// file of root's.
func (j *Jail) CopyDisk(ctx context.Context, name, target string) error {
	f, err := os.Open(filepath.Join(j.dir, name))
	if err != nil {
		return err
	}
	defer f.Close()
	return copyFile(ctx, target, f, 0o600)
}

// PutDisk makes a file of the machine's own directory a copy of another.
func (j *Jail) PutDisk(ctx context.Context, source, name string) error {
	f, err := os.OpenFile(source, os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return copyFile(ctx, filepath.Join(j.dir, name), f, 0o600)
}

// diskError gives a full disk its class.
func diskError(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return sandbox.Errorf(sandbox.NoCapacity, "disk_full", "the host's disk is full: %w", err).
			WithHint("free space where the state directory lies")
	}
	return err
}
