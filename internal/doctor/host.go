package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// read returns a small file of the machine, trimmed.
func (o Options) read(path string) (string, error) {
	b, err := os.ReadFile(filepath.Join(o.Root+"/", path))
	return strings.TrimSpace(string(b)), err
}

// number reads a file that holds one number; -1 when it can't.
func (o Options) number(path string) int64 {
	s, err := o.read(path)
	if err != nil {
		return -1
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return -1
	}
	return n
}

func checkUser(_ context.Context, o Options) Check {
	if o.Root == "" && os.Geteuid() != 0 {
		return Check{
			Status: Fail, Detail: fmt.Sprintf("this is user %d; `cloche serve` makes namespaces and cgroups and must be root", os.Geteuid()),
			Mend: "run `sudo cloche serve`, and `sudo cloche doctor` for the checks that need root",
		}
	}
	return Check{Status: OK, Detail: "root"}
}

// The kernels: pidfds, by which machines are watched, are complete since 5.4;
// 5.10 is the oldest one that is still maintained.
func checkKernel(_ context.Context, o Options) Check {
	s, err := o.read("proc/sys/kernel/osrelease")
	if err != nil {
		return Check{Status: Fail, Detail: err.Error(), Mend: "mount /proc"}
	}
	major, minor, ok := kernelVersion(s)
	at := func(a, b int) bool { return major > a || major == a && minor >= b }
	switch {
	case !ok:
		return Check{Status: Warn, Detail: "Linux " + s + ", a version that can't be read as one", Mend: "5.10 or later is needed"}
	case !at(5, 4):
		return Check{Status: Fail, Detail: "Linux " + s + " is too old to watch machines safely (pidfds)", Mend: "boot Linux 5.10 or later"}
	case !at(5, 10):
		return Check{Status: Warn, Detail: "Linux " + s + " is past its maintenance", Mend: "boot Linux 5.10 or later"}
	}
	return Check{Status: OK, Detail: "Linux " + s}
}

// kernelVersion reads "6.1.0-57-cloud" as 6, 1.
func kernelVersion(s string) (major, minor int, ok bool) {
	a, rest, found := strings.Cut(s, ".")
	if !found {
		return 0, 0, false
	}
	b := rest
	if i := strings.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		b = rest[:i]
	}
	major, err1 := strconv.Atoi(a)
	minor, err2 := strconv.Atoi(b)
	return major, minor, err1 == nil && err2 == nil
}

func checkMemory(_ context.Context, o Options) Check {
	s, err := o.read("proc/meminfo")
	if err != nil {
		return Check{Status: Warn, Detail: err.Error(), Mend: "mount /proc"}
	}
	values := map[string]int64{}
	for line := range strings.Lines(s) {
		name, rest, _ := strings.Cut(line, ":")
		n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		values[name] = n << 10
	}
	detail := fmt.Sprintf("%s free of %s", size(values["MemAvailable"]), size(values["MemTotal"]))
	if values["MemAvailable"] < 1<<30 {
		return Check{Status: Warn, Detail: detail, Mend: "give sandboxes less (--memory), or free some: a sandbox may use 1 GiB by default"}
	}
	return Check{Status: OK, Detail: detail}
}

// Filesystems on which state would be lost, slow or locked wrongly, by the
// magic number of statfs(2).
var filesystems = map[int64]struct{ name, fault string }{
	0xef53:     {"ext4", ""},
	0x58465342: {"xfs", ""},
	0x9123683e: {"btrfs", ""},
	0x2fc12fc1: {"zfs", ""},
	0x01021994: {"tmpfs", "is memory: state is lost when the machine restarts"},
	0x794c7630: {"overlayfs", "is a container's: state is lost with the container"},
	0x6969:     {"nfs", "is remote: SQLite can't lock safely on it"},
	0xff534d42: {"cifs", "is remote: SQLite can't lock safely on it"},
	0x65735546: {"fuse", "is a user's: its locks and fsync are not to be relied on"},
}

func checkState(_ context.Context, o Options) Check {
	dir := o.StateDir
	if dir == "" {
		return Check{Status: Warn, Detail: "no state directory was named", Mend: "use --state-dir"}
	}
	there := dir
	for {
		_, err := os.Stat(there)
		if err == nil || there == "/" {
			break
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return Check{Status: Fail, Detail: err.Error(), Mend: "name another one with --state-dir, or run as root"}
		}
		there = filepath.Dir(there)
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(there, &st); err != nil {
		return Check{Status: Fail, Detail: there + ": " + err.Error(), Mend: "name another one with --state-dir"}
	}
	return judgeState(dir, st.Type, int64(st.Bavail)*st.Bsize, int64(st.Ffree), st.Flags&syscall.MS_RDONLY != 0)
}

func judgeState(dir string, magic, free, inodes int64, readOnly bool) Check {
	fsys, known := filesystems[magic]
	if !known {
		fsys.name = fmt.Sprintf("filesystem %#x", magic)
	}
	detail := fmt.Sprintf("%s on %s, %s free", dir, fsys.name, size(free))
	elsewhere := "name a directory on a bigger or local disk with --state-dir"
	switch {
	case readOnly:
		return Check{Status: Fail, Detail: detail + ", and it is read-only", Mend: "mount it writable, or " + elsewhere}
	case free < 1<<30:
		return Check{Status: Fail, Detail: detail, Mend: "free some (a template needs about 0.5 GiB), or " + elsewhere}
	case fsys.fault != "":
		return Check{Status: Warn, Detail: detail + "; it " + fsys.fault, Mend: elsewhere}
	case free < 10<<30:
		return Check{Status: Warn, Detail: detail, Mend: "free some: a sandbox may write 8 GiB by default"}
	case inodes > 0 && inodes < 10_000:
		return Check{Status: Warn, Detail: fmt.Sprintf("%s, but only %d inodes", detail, inodes), Mend: elsewhere}
	}
	return Check{Status: OK, Detail: detail}
}

// What some hundred sandboxes need of the kernel.
func checkLimits(_ context.Context, o Options) Check {
	type limit struct {
		name  string
		have  int64
		least int64
		mend  string
	}
	limits := []limit{
		{"vm.max_map_count", o.number("proc/sys/vm/max_map_count"), 65530, "sysctl -w vm.max_map_count=262144"},
		{"kernel.pid_max", o.number("proc/sys/kernel/pid_max"), 32768, "sysctl -w kernel.pid_max=4194304"},
		{"fs.inotify.max_user_instances", o.number("proc/sys/fs/inotify/max_user_instances"), 128, "sysctl -w fs.inotify.max_user_instances=512"},
		{"fs.file-max", o.number("proc/sys/fs/file-max"), 100_000, "sysctl -w fs.file-max=1000000"},
	}
	if o.Root == "" {
		var r syscall.Rlimit
		if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err == nil {
			limits = append(limits, limit{"open files (hard limit)", int64(min(r.Max, 1<<40)), 16_384, "raise it: `ulimit -Hn 1048576`, or LimitNOFILE= in the service's unit"})
		}
	}
	var found, low, mend []string
	for _, l := range limits {
		switch {
		case l.have < 0: // this kernel does not tell
		case l.have < l.least:
			low = append(low, fmt.Sprintf("%s is %d, at least %d is good", l.name, l.have, l.least))
			mend = append(mend, l.mend)
		default:
			found = append(found, fmt.Sprintf("%s %d", l.name, l.have))
		}
	}
	if len(low) > 0 {
		return Check{Status: Warn, Detail: strings.Join(low, "; "), Mend: strings.Join(mend, "; ")}
	}
	if len(found) == 0 {
		return Check{Status: OK, Detail: "this kernel tells none"}
	}
	return Check{Status: OK, Detail: strings.Join(found, ", ")}
}

// A clock that is far off breaks TLS inside sandboxes and TTLs outside.
func checkClock(_ context.Context, o Options) Check {
	now := time.Now()
	if now.Year() < 2026 {
		return Check{Status: Warn, Detail: "the clock says " + now.Format(time.DateOnly), Mend: "set it, and keep it with chrony or systemd-timesyncd"}
	}
	if o.Root != "" {
		return Check{Status: OK, Detail: now.UTC().Format(time.RFC3339)}
	}
	var tx syscall.Timex
	if _, err := syscall.Adjtimex(&tx); err == nil && tx.Status&0x40 != 0 { // STA_UNSYNC
		return Check{Status: Warn, Detail: now.UTC().Format(time.RFC3339) + ", kept by nothing", Mend: "install chrony or systemd-timesyncd, where the machine's host does not keep the clock"}
	}
	return Check{Status: OK, Detail: now.UTC().Format(time.RFC3339) + ", synchronised"}
}

// size says a number of bytes in the largest unit that leaves a whole part.
func size(n int64) string {
	for _, u := range []struct {
		of   int64
		name string
	}{{1 << 40, "TiB"}, {1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
		if n >= u.of {
			return fmt.Sprintf("%.1f %s", float64(n)/float64(u.of), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}
