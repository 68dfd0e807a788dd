package harness

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Usage is what a host process occupies. FDs leaves out the files of a store:
// its pool of connections grows with load, and has a bound of its own.
type Usage struct {
	FDs, Threads int
	RSS          int64 // bytes
}

// UsageOf reads a process's usage; the zero Usage when it is gone.
func UsageOf(pid string) Usage {
	var u Usage
	for _, file := range openFiles(pid) {
		if !strings.Contains(file, "/cloche.db") {
			u.FDs++
		}
	}
	status, _ := os.ReadFile(filepath.Join("/proc", pid, "status"))
	for line := range bytes.Lines(status) {
		f := strings.Fields(string(line))
		if len(f) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "Threads:":
			u.Threads = int(n)
		case "VmRSS:":
			u.RSS = n << 10
		}
	}
	return u
}

// Usage is the daemon's own.
func (d *Daemon) Usage() Usage { return UsageOf(strconv.Itoa(d.Pid())) }

// ControlFDs is how many descriptors the engine's control processes hold.
func (d *Daemon) ControlFDs() int {
	n := 0
	for _, pid := range d.ControlProcesses() {
		n += UsageOf(pid).FDs
	}
	return n
}

// For returns the daemon as another test sees it: its failures are tb's. Only
// the daemon that Start returned may be killed, stopped and started.
func (d *Daemon) For(tb testing.TB) *Daemon {
	c := *d
	c.tb = tb
	return &c
}

// DemandLevel demands that the descriptors of the daemon and of the engine's
// control process return to the level of before, with a little room for
// connections that are kept for the next call.
func (d *Daemon) DemandLevel(before, control int) {
	d.tb.Helper()
	const room = 6
	var now, ctl int
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		now, ctl = d.Usage().FDs, d.ControlFDs()
		if now <= before+room && ctl <= control+room {
			d.tb.Logf("descriptors: daemon %d (before: %d), control process %d (before: %d)", now, before, ctl, control)
			return
		}
	}
	d.tb.Errorf("descriptors stay: daemon %d (before: %d), control process %d (before: %d)", now, before, ctl, control)
	for _, pid := range append([]string{strconv.Itoa(d.Pid())}, d.ControlProcesses()...) {
		d.tb.Logf("descriptors of %s:\n%s", pid, strings.Join(openFiles(pid), "\n"))
	}
}

// openFiles names what a process holds open, one line per descriptor.
func openFiles(pid string) []string {
	var lines []string
	fds, _ := filepath.Glob(filepath.Join("/proc", pid, "fd", "*"))
	for _, fd := range fds {
		to, _ := os.Readlink(fd)
		lines = append(lines, filepath.Base(fd)+" "+to)
	}
	return lines
}

// Sentry finds the process of a sandbox's machine; 0 is none. Ids are unique,
// so that it needs no daemon.
func Sentry(id string) int {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil || !bytes.Contains(b, []byte(id)) {
			continue
		}
		for _, arg := range bytes.Split(b, []byte{0}) {
			if string(arg) == "boot" {
				pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
				return pid
			}
		}
	}
	return 0
}

// KillSentry ends a sandbox's machine as a crash would and returns the process
// that it killed; 0 is none. Numbers are used again within seconds: it must still
// be the sentry's when the process is held.
func KillSentry(id string) int {
	pid := Sentry(id)
	if pid == 0 {
		return 0
	}
	p, err := os.FindProcess(pid)
	if err != nil || Sentry(id) != pid || p.Signal(syscall.SIGKILL) != nil {
		return 0
	}
	return pid
}
