package boot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// kernelFiles mounts what the boot itself needs of the kernel, in the
// initramfs.
func (s *site) kernelFiles() error {
	for _, m := range []struct{ kind, at string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := mountAt(m.kind, m.at, m.kind, 0, ""); err != nil {
			return err
		}
	}
	kmsg, err := os.OpenFile("/dev/kmsg", os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	s.kmsg = kmsg
	return nil
}

// loadModules loads the initramfs's modules in the order of their names and
// frees their memory. A kernel that needs none comes with none. One that is
// there already is fine.
func loadModules() error {
	list, err := os.ReadDir(modulesDir)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	for _, m := range list {
		if err := loadModule(filepath.Join(modulesDir, m.Name())); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("the kernel module %s can't be loaded: %w", m.Name(), err)
		}
	}
	return os.RemoveAll(modulesDir)
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.FinitModule(int(f.Fd()), "", 0)
}

// waitForDrives returns when the kernel has every named drive, which it may
// find long after its driver was loaded. The kernel's own events say when to
// look again.
func waitForDrives(within time.Duration, names ...string) error {
	deadline := time.Now().Add(within)
	events, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err == nil {
		defer func() { _ = unix.Close(events) }()
		err = unix.Bind(events, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1})
	}
	if err != nil {
		return fmt.Errorf("the kernel's events can't be listened to: %w", err)
	}
	for {
		missing := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
			_, err := os.Stat(filepath.Join("/dev", name))
			return err == nil
		})
		if len(missing) == 0 {
			return nil
		}
		left := time.Until(deadline)
		if left <= 0 {
			return fmt.Errorf("the kernel has no drive %s after %v; it has %s", strings.Join(missing, " and "), within, drives())
		}
		if err := nextEvent(events, left); err != nil {
			return err
		}
	}
}

// nextEvent waits for an event, or for some of the time.
func nextEvent(events int, left time.Duration) error {
	poll := []unix.PollFd{{Fd: int32(events), Events: unix.POLLIN}}
	_, err := unix.Poll(poll, int(left.Milliseconds())+1)
	if err != nil && !errors.Is(err, unix.EINTR) {
		return os.NewSyscallError("poll", err)
	}
	var buf [4096]byte // whatever they say
	for {
		if _, _, err := unix.Recvfrom(events, buf[:], unix.MSG_DONTWAIT); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return nil // none is left
		}
	}
}

func drives() string {
	list, _ := os.ReadDir("/sys/block") // what could be read
	var names []string
	for _, d := range list {
		names = append(names, d.Name())
	}
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}
