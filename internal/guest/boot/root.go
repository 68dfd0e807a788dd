package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guestapi"
)

// Where things are mounted in the initramfs until the new root is entered.
const (
	lowerDir = "/lower"
	diskDir  = "/disk"
	rootDir  = "/root"
)

// The filesystems that a root of two drives is made of.
const (
	templateKind = "erofs"
	diskKind     = "ext4"
	rootKind     = "overlay"
)

const (
	// A disk with an error turns read-only rather than get worse. Unwritten
	// inode tables are not written in the background: each would become a block
	// of the disk's sparse file on the host.
	diskOptions = "errors=remount-ro,noinit_itable"

	// Users expect of the root what one filesystem gives.
	//   redirect_dir: a directory of the template can be renamed; without it
	//     that is EXDEV, which few programs but mv handle.
	//   index: hard links of the template stay links when one is written to.
	//   xino: one device number for all files. Else those of the template have
	//     another than the directories that they are in, and what doesn't
	//     cross filesystems (tar, du, find, rsync with -x) skips them.
	//   metacopy off: a chown or chmod copies the file's data, as it does in
	//     gVisor's overlay. The disk then holds whole files only, and no file
	//     whose data depend on a redirection into the template.
	// Every flush goes to the disk (no "volatile"): its durability is "crash".
	overlayOptions = "redirect_dir=on,index=on,xino=on,metacopy=off"
)

// reserved is how many directories, each an inode and a block, are kept on the
// disk so that a full one can be laid over the template. Two have sufficed.
const reserved = 16

// layRoot mounts the new root at rootDir.
func (s *site) layRoot(order guestapi.Boot) error {
	if err := os.MkdirAll(rootDir, 0o755); err != nil {
		return err
	}
	if order.Root == guestapi.RootNone {
		return s.emptyRoot(order)
	}
	if err := waitForDrives(s.within, s.template, s.disk); err != nil {
		return err
	}
	if err := mountDrive(s.template, "template", lowerDir, templateKind, unix.MS_RDONLY, ""); err != nil {
		return err
	}
	if err := mountDrive(s.disk, "disk", diskDir, diskKind, 0, diskOptions); err != nil {
		return err
	}
	upper, work := filepath.Join(diskDir, "upper"), filepath.Join(diskDir, "work")
	if err := prepareDisk(upper, work); err != nil {
		return fmt.Errorf("the disk can't be prepared: %w", err)
	}
	if err := mountOverlay(upper, work); err != nil {
		return err
	}
	// The overlay holds on to both. Nobody shall find them by name.
	for _, dir := range []string{lowerDir, diskDir} {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
	return nil
}

// mountOverlay lays the disk over the template. The overlay makes and removes
// a few files to do so, and can't where a user has filled the disk. Then what
// was reserved for it is given up for the moment: a user must be able to get
// at a full disk, to make room.
func mountOverlay(upper, work string) error {
	options := "lowerdir=" + lowerDir + ",upperdir=" + upper + ",workdir=" + work + "," + overlayOptions
	reserve := filepath.Join(diskDir, "reserve")
	err := mountWritable(options)
	if errors.Is(err, unix.ENOSPC) {
		if rerr := os.RemoveAll(reserve); rerr != nil {
			return errors.Join(err, rerr)
		}
		err = mountWritable(options)
	}
	if err != nil {
		return err
	}
	for i := range reserved { // nobody else is there to take the room meanwhile
		if err := os.MkdirAll(filepath.Join(reserve, strconv.Itoa(i)), 0o700); err != nil && !errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("the disk can't be prepared: %w", err)
		}
	}
	return nil
}

// mountWritable mounts the overlay. For want of room the kernel may mount it
// read-only instead of failing.
func mountWritable(options string) error {
	if err := mountAt("overlay", rootDir, rootKind, 0, options); err != nil {
		return err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(rootDir, &st); err != nil {
		return &os.PathError{Op: "statfs", Path: rootDir, Err: err}
	}
	if st.Flags&unix.ST_RDONLY == 0 {
		return nil
	}
	err := fmt.Errorf("mount overlay on %s: it can only be read: %w", rootDir, unix.ENOSPC)
	return errors.Join(err, os.NewSyscallError("umount", unix.Unmount(rootDir, 0)))
}

func mountDrive(name, what, at, kind string, flags uintptr, data string) error {
	if err := os.MkdirAll(at, 0o700); err != nil {
		return err
	}
	err := mountAt(filepath.Join("/dev", name), at, kind, flags, data)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EUCLEAN) {
		return fmt.Errorf("the drive %s (%s) holds no %s filesystem, or a damaged one: %w", name, what, kind, err)
	}
	if err != nil {
		return fmt.Errorf("the drive %s (%s): %w", name, what, err)
	}
	return nil
}

// prepareDisk makes the overlay's directories on a disk that has none.
func prepareDisk(upper, work string) error {
	if err := os.Mkdir(work, 0o700); err != nil && !os.IsExist(err) {
		return err
	}
	if err := realDir(work); err != nil {
		return fmt.Errorf("%s: %w", work, err)
	}
	err := realDir(upper)
	if os.IsNotExist(err) {
		return makeUpper(upper)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", upper, err)
	}
	return nil
}

// makeUpper makes the upper directory. It is the root directory that a machine
// sees, so its owner and mode are the template's. It gets its name last, so
// that a disk has it wholly or not at all.
func makeUpper(upper string) error {
	var st unix.Stat_t
	if err := unix.Stat(lowerDir, &st); err != nil {
		return &os.PathError{Op: "stat", Path: lowerDir, Err: err}
	}
	fresh := upper + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return err
	}
	if err := os.Mkdir(fresh, 0o700); err != nil {
		return err
	}
	if err := os.Chown(fresh, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if err := unix.Chmod(fresh, st.Mode&0o7777); err != nil {
		return &os.PathError{Op: "chmod", Path: fresh, Err: err}
	}
	return os.Rename(fresh, upper)
}

// notDir is what stands where a directory must be.
type notDir string

// Error implements error.
func (n notDir) Error() string { return "where a directory must be, there is " + string(n) }

// realDir returns a notDir unless there is a directory, rather than a symbolic
// link to one.
func realDir(path string) error {
	st, err := os.Lstat(path)
	switch {
	case err != nil:
		return err
	case st.Mode()&os.ModeSymlink != 0:
		return notDir("a symbolic link")
	case !st.IsDir():
		return notDir("a file")
	}
	return nil
}

// emptyRoot makes a root without drives, with what the agent expects. It is how
// a kernel is probed, so it refuses one that could not mount drives either.
func (s *site) emptyRoot(order guestapi.Boot) error {
	list, err := os.ReadFile(s.filesystems)
	if err != nil {
		return err
	}
	if lacks := lacking(string(list)); len(lacks) != 0 {
		return fmt.Errorf("the kernel has no filesystem %s, neither inside it nor among its modules: a sandbox's root needs it", strings.Join(lacks, " and no "))
	}
	if err := mountAt("root", rootDir, "tmpfs", 0, "mode=755,"+share(order, 4)); err != nil {
		return err
	}
	return errors.Join(os.Mkdir(rootDir+"/etc", 0o755), os.Mkdir(rootDir+"/root", 0o700), os.Mkdir(rootDir+"/tmp", 0o777|os.ModeSticky))
}

// lacking tells which of the filesystems that a sandbox needs are not in the
// text of /proc/filesystems, which has one at the end of each line.
func lacking(list string) []string {
	var has []string
	for line := range strings.Lines(list) {
		if words := strings.Fields(line); len(words) != 0 {
			has = append(has, words[len(words)-1])
		}
	}
	return slices.DeleteFunc([]string{templateKind, diskKind, rootKind}, func(kind string) bool { return slices.Contains(has, kind) })
}

// enter frees the initramfs and makes the new root the only one.
func enter() error {
	if err := os.Remove(initPath); err != nil {
		return err
	}
	for _, dir := range []string{"/dev", "/sys", "/proc"} {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
	// The kernel has no pivot_root for its first root filesystem.
	if err := unix.Chdir(rootDir); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("enter the root: %w", err)
	}
	return unix.Chdir("/")
}
