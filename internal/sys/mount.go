package sys

import (
	"errors"

	"golang.org/x/sys/unix"
)

// BindMount shows the file or directory at source also at target.
func BindMount(source, target string) error {
	return unix.Mount(source, target, "", unix.MS_BIND, "")
}

// UnmountAll removes every mount at path, those in use as soon as they no
// longer are. It succeeds where nothing is mounted or nothing is there.
func UnmountAll(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
