package boot

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guestapi"
)

// furnish mounts in the new root what a machine's users find there. It is what
// the gVisor engine gives them (internal/engine), and no control groups.
func furnish(order guestapi.Boot) error {
	for _, name := range []string{"proc", "sys", "dev", "run", ".cloche"} {
		if err := place(rootDir, name); err != nil {
			return err
		}
	}
	const quiet = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		kind, at string
		flags    uintptr
		data     string
		then     func() error
	}{
		{"proc", "proc", quiet, "", nil},
		{"sysfs", "sys", quiet, "", nil},
		{"tmpfs", "dev", unix.MS_NOSUID, "mode=755,size=1m", nodes},
		{"devpts", "dev/pts", unix.MS_NOSUID | unix.MS_NOEXEC, "gid=5,mode=620,ptmxmode=666", nil},
		{"tmpfs", "dev/shm", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777," + share(order, 2), nil},
		{"tmpfs", "run", unix.MS_NOSUID | unix.MS_NODEV, "mode=755," + share(order, 8), nil},
	} {
		if err := mountAt(m.kind, filepath.Join(rootDir, m.at), m.kind, m.flags, m.data); err != nil {
			return err
		}
		if m.then == nil {
			continue
		}
		if err := m.then(); err != nil {
			return err
		}
	}
	return carryOver()
}

// place makes sure that a directory is there to mount on. One that is missing
// is made on the disk. What is there and is none is refused: a mount would go
// astray through a symbolic link, and covering a file hides what somebody has
// put there on purpose.
func place(root, name string) error {
	err := os.Mkdir(filepath.Join(root, name), 0o755)
	if os.IsExist(err) {
		if err := realDir(filepath.Join(root, name)); err != nil {
			return fmt.Errorf("the root filesystem can't be used: /%s: %w", name, err)
		}
		return nil
	}
	return err
}

// share is a tmpfs's size: a part of the machine's memory, as the kernel sees
// it, since what it keeps for itself nobody can fill.
func share(order guestapi.Boot, part int64) string {
	memory := order.Memory
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		memory = min(memory, int64(info.Totalram)*int64(info.Unit))
	}
	return "size=" + strconv.FormatInt(memory/part, 10)
}

// nodes fills /dev with what gVisor has there, rather than with every device
// of the kernel: the drives are nobody's business.
func nodes() error {
	dev := filepath.Join(rootDir, "dev")
	for _, n := range []struct {
		name         string
		major, minor uint32
	}{
		{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0},
	} {
		if err := node(filepath.Join(dev, n.name), n.major, n.minor); err != nil {
			return err
		}
	}
	for name, to := range map[string]string{
		"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx",
	} {
		if err := os.Symlink(to, filepath.Join(dev, name)); err != nil {
			return err
		}
	}
	if err := optional(dev); err != nil {
		return err
	}
	return errors.Join(os.Mkdir(filepath.Join(dev, "pts"), 0o755), os.Mkdir(filepath.Join(dev, "shm"), 0o755))
}

// optional adds what gVisor also has, where this kernel has it too.
func optional(dev string) error {
	var errs []error
	if _, err := os.Stat("/sys/class/misc/fuse"); err == nil {
		errs = append(errs, node(filepath.Join(dev, "fuse"), 10, 229))
	}
	if _, err := os.Stat("/sys/class/misc/tun"); err == nil {
		errs = append(errs, os.Mkdir(filepath.Join(dev, "net"), 0o755), node(filepath.Join(dev, "net", "tun"), 10, 200))
	}
	return errors.Join(errs...)
}

func node(path string, major, minor uint32) error {
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))); err != nil {
		return &os.PathError{Op: "mknod", Path: path, Err: err}
	}
	return nil
}

// carryOver copies the guest binary out of the initramfs, which is freed, to a
// filesystem of its own that is then read-only.
func carryOver() error {
	from, err := os.Open(initPath)
	if err != nil {
		return err
	}
	defer from.Close()
	st, err := from.Stat()
	if err != nil {
		return err
	}
	at := filepath.Join(rootDir, filepath.Dir(guestPath))
	const flags = unix.MS_NOSUID | unix.MS_NODEV
	size := "mode=755,size=" + strconv.FormatInt(st.Size()+64<<10, 10)
	if err := mountAt("tmpfs", at, "tmpfs", flags, size); err != nil {
		return err
	}
	to, err := os.OpenFile(filepath.Join(rootDir, guestPath), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o555)
	if err != nil {
		return err
	}
	_, err = io.Copy(to, from)
	if err = errors.Join(err, to.Close()); err != nil {
		return fmt.Errorf("copy the guest binary: %w", err)
	}
	return mountAt("tmpfs", at, "tmpfs", flags|unix.MS_REMOUNT|unix.MS_RDONLY, size)
}

// identify gives the machine its name and its loopback.
func identify(order guestapi.Boot) error {
	if order.Hostname != "" {
		if err := unix.Sethostname([]byte(order.Hostname)); err != nil {
			return fmt.Errorf("set the host name: %w", err)
		}
	}
	sock, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(sock) }()
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	if err := unix.IoctlIfreq(sock, unix.SIOCGIFFLAGS, lo); err != nil {
		return fmt.Errorf("find the loopback: %w", err)
	}
	lo.SetUint16(lo.Uint16() | unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(sock, unix.SIOCSIFFLAGS, lo); err != nil {
		return fmt.Errorf("bring the loopback up: %w", err)
	}
	return nil
}
