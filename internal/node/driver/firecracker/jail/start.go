package jail

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"cloche.dev/cloche/internal/node/cgroup"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Limits are what a VMM process can use.
type Limits struct {
	MemoryBytes int64 // charged to its control group
	MilliCPU    int   // thousandths of a core
	Tasks       int   // threads
	FileBytes   int64 // of each file that it writes
}

// maxFiles is how many descriptors a VMM can have: one for each of the 1023
// connections that its vsock device takes, and its own.
const maxFiles = 2048

// Program is what to start in a jail.
type Program struct {
	Firecracker, Jailer string // paths, of one release
	UID                 int
	NetNS               string
	Limits              Limits
	Console             bool // its standard output, the guest's serial console, goes to the log
}

// Start starts the VMM in a jail that was made, and returns its process, which
// has not necessarily made its API socket yet. On an error there may be
// processes in the control group; the reason is told by log, where the VMM or
// the jailer gave one.
//
// The jailer forks the VMM into a new pid namespace and ends. Until then it
// dies with this process, so that none outlives a daemon unseen: once it has
// forked, the VMM is in the control group.
func (j *Jail) Start(ctx context.Context, p Program, log *Log) (sys.Process, error) {
	errs, err := j.openLog()
	if err != nil {
		return sys.Process{}, err
	}
	defer errs.Close()
	if p.Firecracker, err = j.program(ctx, p.Firecracker); err != nil {
		return sys.Process{}, err
	}
	cmd := j.command(ctx, p, errs)
	if j.group.Version() == 2 {
		// The jailer would move itself there, for which the kernel makes it wait.
		dir, err := j.group.Make(p.Limits.files(j.group))
		if err != nil {
			return sys.Process{}, err
		}
		defer dir.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	if err := runJailer(ctx, cmd); err != nil {
		if ctx.Err() != nil {
			return sys.Process{}, ctx.Err()
		}
		return sys.Process{}, j.failed(log, "the jailer failed: %w", err)
	}
	pids, err := j.group.Procs()
	if err != nil {
		return sys.Process{}, err
	}
	if len(pids) != 1 {
		return sys.Process{}, j.failed(log, "the VMM ended at once, or is not one process: %v", pids)
	}
	vmm, err := sys.FindProcess(pids[0])
	if err == nil {
		err = j.group.CountCPU(vmm)
	}
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrProcessDone) {
		return sys.Process{}, j.failed(log, "the VMM ended at once: %w", err)
	}
	return vmm, err
}

func (j *Jail) failed(log *Log, format string, args ...any) error {
	log.Finish()
	said := strings.Join(log.Lines(3), "; ")
	return sandbox.Errorf(sandbox.Internal, "vmm_not_started", "%w (%s)", fmt.Errorf(format, args...), said)
}

func (j *Jail) command(ctx context.Context, p Program, stderr *os.File) *exec.Cmd {
	args := []string{
		"--id", j.name, "--exec-file", p.Firecracker, "--uid", strconv.Itoa(p.UID), "--gid", strconv.Itoa(p.UID),
		"--chroot-base-dir", filepath.Join(j.dir, baseName), "--netns", p.NetNS, "--new-pid-ns",
		"--resource-limit", "no-file=" + strconv.Itoa(maxFiles), "--resource-limit", "fsize=" + strconv.FormatInt(p.Limits.FileBytes, 10),
	}
	if j.group.Version() == 1 {
		args = append(args, "--cgroup-version", "1", "--parent-cgroup", strings.TrimPrefix(filepath.Dir(j.group.Path()), "/"))
		for _, l := range p.Limits.files(j.group) {
			args = append(args, "--cgroup", l.Name+"="+l.Value)
		}
	}
	args = append(args, "--", "--api-sock", apiName, "--log-path", logName)
	cmd := exec.CommandContext(ctx, p.Jailer, args...)
	cmd.Env = []string{}
	cmd.Dir = "/"
	cmd.Stderr = stderr
	if p.Console {
		cmd.Stdout = stderr
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// cpuPeriod is the time, in microseconds, in which a share of the CPU is counted.
const cpuPeriod = 100_000

// files are the limits as files of the control group, in the order in which they
// are to be written. Swap is no memory beside that of the limit, where the kernel
// can tell.
func (l Limits) files(g cgroup.Group) []cgroup.Value {
	memory, tasks, quota := strconv.FormatInt(l.MemoryBytes, 10), strconv.Itoa(l.Tasks), strconv.Itoa(l.MilliCPU*cpuPeriod/1000)
	period := strconv.Itoa(cpuPeriod)
	if g.Version() == 2 {
		return []cgroup.Value{
			{Name: "memory.max", Value: memory},
			{Name: "memory.swap.max", Value: "0", Optional: true},
			{Name: "pids.max", Value: tasks},
			{Name: "cpu.max", Value: quota + " " + period},
		}
	}
	values := []cgroup.Value{{Name: "memory.limit_in_bytes", Value: memory}}
	if g.CountsSwap() {
		values = append(values, cgroup.Value{Name: "memory.memsw.limit_in_bytes", Value: memory})
	}
	return append(values,
		cgroup.Value{Name: "pids.max", Value: tasks},
		cgroup.Value{Name: "cpu.cfs_period_us", Value: period},
		cgroup.Value{Name: "cpu.cfs_quota_us", Value: quota},
	)
}

// runJailer runs the jailer to its end. The kernel tells a process of its
// parent's death when the parent's thread ends, so the thread is kept until
// then.
func runJailer(ctx context.Context, cmd *exec.Cmd) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return cmd.Run()
}

// Holds tells whether a process is in the jail. A record of an earlier boot of
// the host may name another one that has both its number and its start time.
func (j *Jail) Holds(vmm sys.Process) (bool, error) {
	pids, err := j.group.Procs()
	return err == nil && slices.Contains(pids, vmm.PID) && vmm.Exists(), err
}

// Kill kills what is in the jail, and returns when it has ended: the VMM, which
// may be the zero Process where it isn't known, and whatever else.
func (j *Jail) Kill(ctx context.Context, vmm sys.Process) error {
	held, err := j.Holds(vmm)
	if err != nil {
		return err
	}
	if held {
		if err := vmm.Kill(); err != nil {
			return err
		}
	}
	if err := j.group.Kill(ctx); err != nil || !held {
		return err
	}
	return vmm.Wait(ctx) // the host's init reaps it
}

// Remove removes the jail's control group, in which no process may be, and its
// files. It removes what there is.
func (j *Jail) Remove(ctx context.Context) error {
	return errors.Join(j.group.Remove(ctx), os.RemoveAll(filepath.Join(j.dir, baseName)), remove(filepath.Join(j.dir, logName)), remove(filepath.Join(j.dir, binaryName)))
}

func remove(path string) error {
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
