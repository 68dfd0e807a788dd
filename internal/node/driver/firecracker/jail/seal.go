package jail

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
)

// maxDepth bounds the directories in each other that a jail is cleared of. The
// jailer makes two.
const maxDepth = 64

// Seal takes everything out of the jail but the named files and the VMM's API
// socket. What the VMM has opened stays open, and its program runs on; what is
// gone is what nobody but an intruder would open now: the devices (KVM,
// userfaultfd, tun), the kernel, the memory of an image, the programs.
//
// And the VMM can make no file any more. Its root directory, which it has made
// its sockets in by now and whose own name only root can change, becomes root's
// first, so that the names in it stay what they are. Then all other directories
// go, whatever their names, since one that is left could be its own; what it puts
// into them meanwhile goes too, and nothing is followed that is removed. They
// become root's as well: in one that it has kept open some filesystems let it make
// files without a name, though the directory has none either.
func (j *Jail) Seal(keep ...string) error {
	if err := disown(j.root(), maxDepth); err != nil {
		return err
	}
	entries, err := os.ReadDir(j.root())
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if e.IsDir() || e.Name() != apiName && !slices.Contains(keep, e.Name()) {
			errs = append(errs, os.RemoveAll(filepath.Join(j.root(), e.Name())))
		}
	}
	return errors.Join(errs...)
}

// disown makes a directory root's, and then those in it, by their descriptors: a
// name may be another file's by now.
func disown(path string, depth int) error {
	dir, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	if depth == 0 {
		return fmt.Errorf("a jail has more than %d directories in each other", maxDepth)
	}
	if err := errors.Join(dir.Chown(0, 0), dir.Chmod(0o755)); err != nil {
		return err
	}
	entries, err := dir.ReadDir(-1) // all that there will be
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if err := disown(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), e.Name()), depth-1); err != nil {
			return err
		}
	}
	return nil
}
