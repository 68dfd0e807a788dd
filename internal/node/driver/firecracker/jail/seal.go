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
// The VMM may write in its directory all the while. What it puts there is its
// own, and nothing is followed that is removed.
func (j *Jail) Seal(keep ...string) error {
	entries, err := os.ReadDir(j.root())
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if e.Name() != apiName && !slices.Contains(keep, e.Name()) {
			errs = append(errs, os.RemoveAll(filepath.Join(j.root(), e.Name())))
		}
	}
	return errors.Join(errs...)
}
