package sys

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// RaiseFiles lets this process and its children open as many files as it may,
// n at most, and returns how many that is. Root raises the hard limit too.
func RaiseFiles(n uint64) (uint64, error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 0, fmt.Errorf("read the limit of open files: %w", err)
	}
	want := unix.Rlimit{Cur: n, Max: max(n, l.Max)}
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &want) == nil {
		return n, nil
	}
	want = unix.Rlimit{Cur: min(n, l.Max), Max: l.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &want); err != nil {
		return l.Cur, fmt.Errorf("raise the limit of open files: %w", err)
	}
	return want.Cur, nil
}

// NoDumps keeps this process's memory from being written to a core file, and
// from being read by other processes of its user.
func NoDumps() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core files: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("forbid reading this process's memory: %w", err)
	}
	return nil
}

// NoNewPrivileges tells whether this process can gain no privileges by an exec.
func NoNewPrivileges() bool {
	n, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0)
	return err == nil && n == 1
}

// ExecWithoutNewPrivileges runs this program again in this process's place,
// with the same arguments, such that no exec gains privileges any more. The flag
// is a thread's own, so only a program that begins with it has it in every
// thread. It returns only where it failed.
func ExecWithoutNewPrivileges(env []string) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("give up new privileges: %w", err)
	}
	return fmt.Errorf("run this program again: %w", unix.Exec("/proc/self/exe", os.Args, env))
}

// Confine gives up what root has: this process then sees no file but what is
// below root and what it has open, is user and group id, in no other group, and
// has no capability. Only root may.
func Confine(root string, id int) error {
	if err := unix.Chdir(root); err != nil {
		return fmt.Errorf("enter %s: %w", root, err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("confine the process to %s: %w", root, err)
	}
	for _, err := range []error{unix.Setgroups(nil), unix.Setresgid(id, id, id), unix.Setresuid(id, id, id)} {
		if err != nil {
			return fmt.Errorf("become user %d: %w", id, err)
		}
	}
	if err := NoDumps(); err != nil { // the kernel forgets it when the user changes
		return err
	}
	var caps [2]unix.CapUserData
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capget(&head, &caps[0]); err != nil {
		return fmt.Errorf("read the process's capabilities: %w", err)
	}
	if caps != [2]unix.CapUserData{} || unix.Setresuid(0, 0, 0) == nil {
		return errors.New("the process still has privileges")
	}
	return nil
}
