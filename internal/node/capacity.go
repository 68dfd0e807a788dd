package node

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"syscall"

	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
)

// Capacity implements sandbox.Machines.
func (n *Node) Capacity(context.Context) (sandbox.Capacity, error) {
	c := sandbox.Capacity{MilliCPU: int(float64(runtime.NumCPU()) * 1000 * n.o.CPUOvercommit), DiskFloor: n.o.DiskFloor, Drivers: n.driverStatus()}
	var st syscall.Statfs_t
	if err := syscall.Statfs(n.o.StateDir, &st); err != nil {
		return sandbox.Capacity{}, snapshot.DiskError(fmt.Errorf("ask for the free space of %s: %w", n.o.StateDir, err))
	}
	c.DiskFree = int64(st.Bavail) * st.Frsize
	if n.o.MemoryShare > 0 {
		f, err := os.Open("/proc/meminfo")
		if err != nil {
			return sandbox.Capacity{}, err
		}
		defer f.Close()
		total, err := memTotal(f)
		if err != nil {
			return sandbox.Capacity{}, err
		}
		c.MemoryMiB = int(float64(total>>10) * n.o.MemoryShare)
	}
	return c, nil
}

// memTotal reads the host's memory in KiB from what /proc/meminfo says.
func memTotal(r io.Reader) (int64, error) {
	for lines := bufio.NewScanner(r); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), "MemTotal:"); ok {
			var kib int64
			if _, err := fmt.Sscanf(rest, "%d kB", &kib); err != nil || kib <= 0 {
				return 0, fmt.Errorf("the kernel's MemTotal is %q", rest)
			}
			return kib, nil
		}
	}
	return 0, errors.New("the kernel tells no MemTotal")
}
