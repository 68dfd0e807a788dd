// Package boot is what the guest binary does as /init of a virtual machine,
// before it becomes the supervisor: it makes, of a bare kernel and two drives,
// the same surroundings that a gVisor machine has from its engine.
//
// The initramfs holds /init and, in load order, /modules/NNN-name.ko. The
// kernel command line holds a guestapi.Boot. The first drive is the template's
// image, the second the sandbox's own disk; laid over each other they are the
// root. What came of it is told to the host in one line over vsock, and to the
// kernel's log, which is what a serial console shows.
//
// Invariants. Nothing runs beside it. It waits for events, never for a while.
// It ends in the supervisor or in the end of the machine, which is told before.
// It leaves nothing behind that a memory snapshot could break: no process, no
// connection, no file of the initramfs. The template is not trusted: nothing is
// mounted through a symbolic link.
//
// The kernel never kills its PID 1, neither for want of memory nor by a signal
// from inside, so PID 1 needs no protection, and must have none: its
// oom_score_adj would be inherited by every user's process.
//
// cmd/cloche-guest calls it.
package boot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guest/vsock"
	"cloche.dev/cloche/internal/guestapi"
)

const (
	initPath   = "/init"    // in the initramfs
	modulesDir = "/modules" // likewise
	guestPath  = "/.cloche/guest"
	searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

	drivesWithin  = 30 * time.Second // a kernel under emulation takes seconds
	reportTimeout = 10 * time.Second
	maxCmdline    = 4096
)

// Run boots the machine. It returns only in a process that is no machine's
// PID 1, where the kernel can't be restarted.
func Run() error {
	err := machine.boot()
	machine.log(3, "the boot failed: "+err.Error())
	// This is what the VMM understands; a kernel without ACPI can't power off.
	return errors.Join(err, os.NewSyscallError("reboot", unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)))
}

// site is what differs between a machine and a test.
type site struct {
	cmdline        string        // the file with the kernel's command line
	filesystems    string        // the file with those that the kernel has
	template, disk string        // the names of the drives
	within         time.Duration // in which the kernel finds them
	files          uint64        // the most that a process may have open
	report         func(port uint32, failure error) error
	kmsg           *os.File
}

var machine = &site{cmdline: "/proc/cmdline", filesystems: "/proc/filesystems", template: "vda", disk: "vdb", within: drivesWithin, files: 1 << 20, report: tellHost}

// boot returns only when it failed.
func (s *site) boot() error {
	unix.Umask(0)
	if err := s.kernelFiles(); err != nil {
		return err
	}
	order, err := readOrder(s.cmdline)
	if err != nil {
		return err
	}
	err = s.prepare(order)
	if rerr := s.report(order.Report, err); rerr != nil {
		return errors.Join(err, fmt.Errorf("the host can't be told: %w", rerr))
	}
	if err != nil {
		return err
	}
	s.log(6, "the machine is ready")
	return s.become(order)
}

// prepare does everything but the start of the supervisor.
func (s *site) prepare(order guestapi.Boot) error {
	if err := loadModules(); err != nil {
		return err
	}
	if err := s.layRoot(order); err != nil {
		return err
	}
	if err := furnish(order); err != nil {
		return err
	}
	if err := errors.Join(identify(order), network()); err != nil {
		return err
	}
	return enter()
}

func readOrder(file string) (guestapi.Boot, error) {
	f, err := os.Open(file)
	if err != nil {
		return guestapi.Boot{}, err
	}
	defer f.Close()
	line, err := io.ReadAll(io.LimitReader(f, maxCmdline+1))
	if err != nil {
		return guestapi.Boot{}, err
	}
	return guestapi.ParseBoot(string(line))
}

// become executes the supervisor. It stands in the new root.
func (s *site) become(order guestapi.Boot) error {
	// A thread's bounding set is its own, and exec keeps that of the thread that
	// calls it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := s.limits(order); err != nil {
		return err
	}
	null, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Dup3(null, 0, 0) // the console is for what the guest says alone
	}
	if err != nil {
		return fmt.Errorf("%s: %w", os.DevNull, err)
	}
	env := map[string]string{"PATH": searchPath, "CLOCHE_DIAL": order.Dial}
	maps.Copy(env, order.Env)
	var environ []string
	for _, k := range slices.Sorted(maps.Keys(env)) {
		environ = append(environ, k+"="+env[k])
	}
	if !fault.In(order.Env, fault.RebootAllowed) {
		if err := refuseReboot(); err != nil {
			return err
		}
	}
	unix.Umask(0o022)
	return fmt.Errorf("%s: %w", guestPath, unix.Exec(guestPath, []string{guestPath, "supervisor"}, environ))
}

// refuseReboot takes the right to restart or power off the machine from the
// supervisor and all that it will ever spawn: a `reboot` or `poweroff` inside is
// refused as it is on gVisor. When a machine ends is its owner's decision.
func refuseReboot() error {
	return os.NewSyscallError("prctl", unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_BOOT, 0, 0, 0))
}

// limits are those of the gVisor engine.
func (s *site) limits(order guestapi.Boot) error {
	procs := uint64(order.MaxProcs)
	for _, l := range []struct {
		name     string
		resource int
		limit    unix.Rlimit
	}{
		{"NOFILE", unix.RLIMIT_NOFILE, unix.Rlimit{Cur: min(1<<16, s.files), Max: s.files}},
		{"NPROC", unix.RLIMIT_NPROC, unix.Rlimit{Cur: procs, Max: procs}},
		{"CORE", unix.RLIMIT_CORE, unix.Rlimit{}},
	} {
		if err := unix.Setrlimit(l.resource, &l.limit); err != nil {
			return fmt.Errorf("RLIMIT_%s: %w", l.name, err)
		}
	}
	return nil
}

// tellHost says the boot report. A failure is told before the machine ends, so
// it waits until the host has hung up; the kernel delivers the other one later.
func tellHost(port uint32, failure error) error {
	ctx, cancel := context.WithTimeout(context.Background(), reportTimeout)
	defer cancel()
	conn, err := vsock.Dial(ctx, vsock.Host, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write(guestapi.BootReport(failure)); err != nil || failure == nil {
		return err
	}
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		err = half.CloseWrite()
	}
	_ = conn.SetReadDeadline(time.Now().Add(reportTimeout))
	_, _ = io.Copy(io.Discard, io.LimitReader(conn, 1)) // however it hangs up
	return err
}

// log writes a line to the kernel's log, with a priority of syslog(2).
func (s *site) log(priority int, line string) {
	if s.kmsg == nil { // only where devtmpfs could not be mounted
		fmt.Fprintln(os.Stderr, "cloche:", line)
		return
	}
	if len(line) > 900 { // the kernel takes no longer records
		line = line[:900]
	}
	fmt.Fprintf(s.kmsg, "<%d>cloche: %s\n", priority, line)
}

func mountAt(source, target, kind string, flags uintptr, data string) error {
	err := unix.Mount(source, target, kind, flags, data)
	if errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("the kernel has no filesystem %q, neither inside it nor among its modules", kind)
	}
	if err != nil {
		return fmt.Errorf("mount %s on %s: %w", kind, filepath.Clean(target), err)
	}
	return nil
}
