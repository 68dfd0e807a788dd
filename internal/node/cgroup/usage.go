package cgroup

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sys"
)

// Usage is what a group uses.
type Usage struct {
	Memory int64         // bytes charged to it, page cache included
	CPU    time.Duration // consumed since it was made
	Tasks  int           // processes and threads
}

// file returns the path of a control file: in v1 that of the controller's own
// hierarchy.
func (g Group) file(controller, name string) string {
	if g.tree.v2 {
		return filepath.Join(g.tree.root, g.path, name)
	}
	return filepath.Join(g.tree.root, controller, g.path, name)
}

func (g Group) number(controller, name string) (int64, error) {
	data, err := os.ReadFile(g.file(controller, name))
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
}

// keyed reads one value of a file of "key value" lines.
func (g Group) keyed(controller, name, key string) (int64, error) {
	data, err := os.ReadFile(g.file(controller, name))
	if err != nil {
		return 0, err
	}
	for sc := bufio.NewScanner(bytes.NewReader(data)); sc.Scan(); {
		k, v, ok := strings.Cut(sc.Text(), " ")
		if ok && k == key {
			return strconv.ParseInt(strings.TrimSpace(v), 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %q", g.file(controller, name), key)
}

// Usage tells what the group uses now.
func (g Group) Usage() (Usage, error) {
	var u Usage
	var err error
	if g.tree.v2 {
		if u.Memory, err = g.number("", "memory.current"); err != nil {
			return u, err
		}
		us, err := g.keyed("", "cpu.stat", "usage_usec")
		if err != nil {
			return u, err
		}
		u.CPU = time.Duration(us) * time.Microsecond
		tasks, err := g.number("", "pids.current")
		u.Tasks = int(tasks)
		return u, err
	}
	if u.Memory, err = g.number("memory", "memory.usage_in_bytes"); err != nil {
		return u, err
	}
	ns, err := g.number("cpuacct", "cpuacct.usage")
	if err != nil {
		return u, err
	}
	u.CPU = time.Duration(ns)
	tasks, err := g.number("pids", "pids.current")
	u.Tasks = int(tasks)
	return u, err
}

// OOMKills tells how many processes of the group the kernel has killed for
// want of memory.
func (g Group) OOMKills() (int64, error) {
	if g.tree.v2 {
		return g.keyed("", "memory.events", "oom_kill")
	}
	return g.keyed("memory", "memory.oom_control", "oom_kill")
}

// memoryAndSwap is the file of version 1 that limits both together.
const memoryAndSwap = "memory.memsw.limit_in_bytes"

// CountsSwap tells, of version 1, whether swap can be limited on this host. In
// version 2 a group's own files tell.
func (g Group) CountsSwap() bool {
	return !g.tree.v2 && there(filepath.Join(g.tree.root, "memory", memoryAndSwap))
}

// SetMemoryLimit changes how much memory may be charged to the group, which may
// have no swap beside it, where the kernel can tell.
func (g Group) SetMemoryLimit(bytes int64) error {
	limit := []byte(strconv.FormatInt(bytes, 10))
	if g.tree.v2 {
		err := os.WriteFile(g.file("", "memory.max"), limit, 0)
		if swap := g.file("", "memory.swap.max"); err == nil && there(swap) {
			err = os.WriteFile(swap, []byte("0"), 0)
		}
		return err
	}
	both := g.file("memory", memoryAndSwap)
	if there(both) {
		// The limit of both is never below the other. Where that is to grow this
		// comes first, and where it is to shrink it is refused, and comes after.
		_ = os.WriteFile(both, limit, 0)
	}
	err := os.WriteFile(g.file("memory", "memory.limit_in_bytes"), limit, 0)
	if err == nil && there(both) {
		err = os.WriteFile(both, limit, 0)
	}
	return err
}

// cpuPeriod is the time, in microseconds, in which a share of the CPU is
// counted.
const cpuPeriod = 100_000

// SetCPU changes how much CPU the group may use, in thousandths of a core.
func (g Group) SetCPU(milli int) error {
	quota := strconv.Itoa(milli * cpuPeriod / 1000)
	if g.tree.v2 {
		return os.WriteFile(g.file("", "cpu.max"), []byte(quota+" "+strconv.Itoa(cpuPeriod)), 0)
	}
	if err := os.WriteFile(g.file("cpu", "cpu.cfs_period_us"), []byte(strconv.Itoa(cpuPeriod)), 0); err != nil {
		return err
	}
	return os.WriteFile(g.file("cpu", "cpu.cfs_quota_us"), []byte(quota), 0)
}

// CountCPU has what a process uses from now on counted by Usage. In v2 that is
// so for what is in the group at all; in v1 the CPU is counted in a hierarchy
// that has no limits, so that whoever only sets limits leaves it out.
func (g Group) CountCPU(p sys.Process) error {
	if g.tree.v2 {
		return nil
	}
	dir := filepath.Join(g.tree.root, "cpuacct", g.path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	pid := []byte(strconv.Itoa(p.PID))
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), pid, 0); err != nil {
		return err
	}
	if p.Exists() {
		return nil
	}
	// It ended meanwhile, and its number may be another process's by now.
	_ = os.WriteFile(filepath.Join(g.tree.root, "cpuacct", "cgroup.procs"), pid, 0)
	return fmt.Errorf("count the CPU of process %d: %w", p.PID, os.ErrProcessDone)
}
