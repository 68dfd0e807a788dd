package jail

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
)

// Seal takes everything out of the jail but the named files and the VMM's API
// socket. What the VMM has opened stays open, and its program runs on; what is
// gone is what nobody but an intruder would open now: the devices (KVM,
// userfaultfd, tun), the kernel, the memory of an image, the programs.
//
// And the VMM can make no file any more. Its root directory, which it has made
// its sockets in by now and whose own name only root can change, becomes root's
// first, so that the names in it stay what they are. Then all other directories
// go, whatever their names, since one that is left could be its own; what it puts
// into them meanwhile goes too, and nothing is followed that is removed.
func (j *Jail) Seal(keep ...string) error {
	if err := errors.Join(os.Lchown(j.root(), 0, 0), os.Chmod(j.root(), 0o755)); err != nil {
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
