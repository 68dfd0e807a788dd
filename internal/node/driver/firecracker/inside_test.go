package firecracker

import (
	"debug/elf"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/node/driver/firecracker/jail"
)

// view is what a program sees that runs where a VMM does, and may do anything
// that a VMM may before it has put its own system call filter over itself.
type view struct {
	IDs        []int // uid, gid, pid, and its groups
	Caps       []uint32
	Files      []string
	Interfaces []string
	Limits     []uint64          // open files, size of a file
	Tries      map[string]string // what it tried, and how that failed; "" is success
	Made       []string          // what it could make in the directories that it sees or has kept
}

// again is what the host puts into such a program's disk for another view.
const again = "again"

// inside is such a program: it leaves its view in its disk, the one file that is
// its own all the while, and another one when it is told to. Before the first it
// makes a directory with the name of a file that is to stay, and keeps it open.
func inside() {
	kept := -1
	for _, name := range []string{"/v.sock", "/kept"} {
		if err := os.Mkdir(name, 0o777); err != nil {
			panic(err)
		}
		var err error
		if kept, err = unix.Open(name, unix.O_DIRECTORY, 0); err != nil {
			panic(err)
		}
	}
	for {
		v := look()
		v.Made = makes(v.Files, kept)
		data, err := json.Marshal(v)
		if err == nil {
			err = os.WriteFile("/disk", data, 0o600)
		}
		if err != nil {
			panic(err)
		}
		for string(data) != again {
			time.Sleep(time.Millisecond)
			if data, err = os.ReadFile("/disk"); err != nil {
				panic(err)
			}
		}
	}
}

// makes makes names and files without one in every directory, and leaves them, and
// tells what came of it.
func makes(files []string, kept int) (made []string) {
	try := func(where string, dir int) {
		_ = unix.Fchmod(dir, 0o777) // if it is its own
		for what, mk := range map[string]func() error{
			"a file": func() error {
				return unix.Close(or(unix.Openat(dir, "new-file", unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, 0o600)))
			},
			"a nameless file": func() error { return unix.Close(or(unix.Openat(dir, ".", unix.O_TMPFILE|unix.O_RDWR, 0o600))) },
			"a directory":     func() error { return unix.Mkdirat(dir, "new-directory", 0o700) },
			"a link":          func() error { return unix.Symlinkat("/", dir, "new-link") },
			"a FIFO":          func() error { return unix.Mknodat(dir, "new-fifo", unix.S_IFIFO|0o600, 0) },
			"another name":    func() error { return unix.Linkat(unix.AT_FDCWD, "/disk", dir, "new-disk", 0) },
			"a socket": func() error {
				s := or(unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0))
				defer unix.Close(s)
				return errors.Join(unix.Fchdir(dir), unix.Bind(s, &unix.SockaddrUnix{Name: "new-socket"}))
			},
		} {
			if err := mk(); err == nil {
				made = append(made, what+" in "+where)
			}
		}
	}
	try("what it has kept", kept)
	for _, path := range files {
		if dir, err := unix.Open(path, unix.O_DIRECTORY, 0); err == nil {
			try(path, dir)
			_ = unix.Close(dir)
		}
	}
	return made
}

// or is -1 where something was not to be had.
func or(fd int, err error) int {
	if err != nil {
		return -1
	}
	return fd
}

func look() view {
	v := view{IDs: []int{os.Getuid(), os.Getgid(), os.Getpid()}, Tries: map[string]string{}}
	if groups, err := os.Getgroups(); err == nil {
		v.IDs = append(v.IDs, groups...)
	}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
		panic(err)
	}
	for _, c := range caps {
		v.Caps = append(v.Caps, c.Effective, c.Permitted, c.Inheritable)
	}
	_ = filepath.WalkDir("/", func(path string, _ fs.DirEntry, err error) error {
		v.Files = append(v.Files, path)
		return err
	})
	if list, err := net.Interfaces(); err == nil {
		for _, i := range list {
			v.Interfaces = append(v.Interfaces, i.Name+" "+i.Flags.String())
		}
	}
	for _, what := range []int{unix.RLIMIT_NOFILE, unix.RLIMIT_FSIZE} {
		var l unix.Rlimit
		if err := unix.Getrlimit(what, &l); err != nil {
			panic(err)
		}
		v.Limits = append(v.Limits, l.Max)
	}
	for name, try := range map[string]func() error{
		"to become root":            func() error { return unix.Setuid(0) },
		"to mount":                  func() error { return unix.Mount("x", "/", "tmpfs", 0, "") },
		"to make a device":          func() error { return unix.Mknod("/disk0", unix.S_IFBLK|0o600, int(unix.Mkdev(8, 0))) },
		"to leave its root":         func() error { return unix.Chroot("..") },
		"to raise a limit":          func() error { return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}) },
		"to read the host's files":  func() error { _, err := os.ReadFile("/../../../../../../etc/passwd"); return err },
		"to find processes":         func() error { _, err := os.ReadDir("/proc"); return err },
		"to find anybody to kill":   func() error { return unix.Kill(-1, 0) },
		"to reach the network":      func() error { _, err := net.DialTimeout("tcp4", "1.1.1.1:80", time.Second); return err },
		"to open a raw socket":      func() error { _, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP); return err },
		"to add an interface":       func() error { return bringUp("lo") },
		"to write to the template":  func() error { f, err := os.OpenFile("/template", os.O_WRONLY, 0); _ = f.Close(); return err },
		"to own the template":       func() error { return os.Chown("/template", os.Getuid(), os.Getgid()) },
		"to set the host's clock":   func() error { return unix.Settimeofday(&unix.Timeval{}) },
		"to load a module":          func() error { return unix.InitModule([]byte("x"), "") },
		"to reboot the host":        func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) },
		"to write to its own files": func() error { return os.WriteFile("/disk", []byte("own"), 0o600) },
	} {
		v.Tries[name] = ""
		if err := try(); err != nil {
			v.Tries[name] = err.Error()
		}
	}
	return v
}

func bringUp(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	r, err := unix.NewIfreq(name)
	if err == nil {
		r.SetUint16(unix.IFF_UP)
		err = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r)
	}
	return err
}

// TestViewFromInside puts this test in a VMM's place, and judges what it sees
// there and what it can do.
func TestViewFromInside(t *testing.T) {
	f := newFixture(t)
	if self, err := elf.Open("/proc/self/exe"); err != nil {
		t.Fatal(err)
	} else if libs, err := self.ImportedLibraries(); err != nil || len(libs) > 0 {
		t.Skipf("SKIP: this test needs libraries, which no jail has, unless it is built with CGO_ENABLED=0: %v, %v", libs, err)
	}
	p, _, err := f.o.Pair()
	if err != nil {
		t.Fatal(err)
	}
	s := f.spec()
	if err := os.MkdirAll(f.d.machineDir(s.ID), 0o700); err != nil {
		t.Fatal(err)
	}
	uid, err := f.d.users.Take(s.ID)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "firecracker")
	if data, err := os.ReadFile("/proc/self/exe"); err != nil || os.WriteFile(program, data, 0o755) != nil {
		t.Fatalf("copy this test: %v", err)
	}
	j := f.d.jail(s.ID)
	disk := filepath.Join(f.d.machineDir(s.ID), diskName)
	err = errors.Join(j.Make(uid), j.Share(f.ctx(), f.image, "template"), os.WriteFile(disk, nil, 0o600), j.Own(diskName, uid))
	if err != nil {
		t.Fatal(err)
	}
	log, err := j.Log()
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	if _, _, err := f.nets.Tap(f.ctx(), s.ID, uid); err != nil {
		t.Fatal(err)
	}
	const size = 32 << 20
	_, err = j.Start(f.ctx(), jail.Program{
		Firecracker: program, Jailer: p.Jailer, UID: uid, NetNS: s.NetNS,
		Limits: jail.Limits{MemoryBytes: 256 << 20, MilliCPU: 1000, Tasks: 32, FileBytes: size},
	}, log)
	if err != nil {
		t.Fatal(err)
	}
	v := f.left(disk, log)
	f.judge(v, uid, "lo ", "tap0 ") // its own tap, until it is attached to
	if want := []uint64{2048, size}; !slices.Equal(v.Limits, want) {
		t.Errorf("its limits are %v, not %v", v.Limits, want)
	}
	t.Logf("before it is sealed, %d files: %q; it made %q", len(v.Files), v.Files, v.Made)
	for _, want := range []string{"a file in /", "a socket in /dev/net", "a nameless file in what it has kept"} {
		if !slices.Contains(v.Made, want) {
			t.Errorf("before it is sealed it can't make %s", want)
		}
	}
	if err := errors.Join(f.nets.MoveTap(f.ctx(), s.ID), j.Seal(vsockName, diskName, "template"), os.WriteFile(disk, []byte(again), 0o600)); err != nil {
		t.Fatal(err)
	}
	sealed := f.left(disk, log)
	f.judge(sealed, uid, "lo ")
	if len(sealed.Made) > 0 {
		t.Errorf("sealed it made %q", sealed.Made)
	}
	if want := []string{"/", "/disk", "/template"}; !slices.Equal(sealed.Files, want) {
		t.Errorf("sealed it sees %q, not %q", sealed.Files, want)
	}
	t.Logf("interfaces %q, sealed %q; tries: %v", v.Interfaces, sealed.Interfaces, v.Tries)
}

// left waits for what the program in a jail leaves in its disk.
func (f *fixture) left(disk string, log *jail.Log) (v view) {
	f.t.Helper()
	ctx := f.ctx()
	for {
		data, err := os.ReadFile(disk)
		if err == nil {
			err = json.Unmarshal(data, &v) // not before it is whole
		}
		if err == nil {
			return v
		}
		if ctx.Err() != nil {
			f.t.Fatalf("it left nothing: %v; it said %q", err, log.Lines(10))
		}
		time.Sleep(time.Millisecond)
	}
}

func (f *fixture) judge(v view, uid int, links ...string) {
	f.t.Helper()
	if want := []int{uid, uid, 1}; !slices.Equal(v.IDs, want) {
		f.t.Errorf("it is %v, not %v", v.IDs, want)
	}
	if slices.Max(v.Caps) != 0 {
		f.t.Errorf("its capabilities are %x", v.Caps)
	}
	if !slices.EqualFunc(v.Interfaces, links, strings.HasPrefix) {
		f.t.Errorf("its network is %q, not %q", v.Interfaces, links)
	}
	for what, failed := range v.Tries {
		if (failed == "") != (what == "to write to its own files") && (what != "to leave its root" || failed == "") {
			f.t.Errorf("it tried %s: %q", what, failed)
		}
	}
}
