package firecracker

import (
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
}

// inside is such a program: it leaves its view, and another one when that was
// taken away.
func inside() {
	for _, name := range []string{"view", "sealed"} {
		v := look()
		data, err := json.Marshal(v)
		if err == nil {
			err = os.WriteFile("/new", data, 0o600)
		}
		if err == nil {
			err = os.Rename("/new", "/"+name)
		}
		if err != nil {
			panic(err)
		}
		for {
			if _, err := os.Lstat("/" + name); err != nil {
				break
			}
			time.Sleep(time.Millisecond)
		}
	}
	select {}
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
	root := filepath.Join(f.d.machineDir(s.ID), "j", "firecracker", jail.NameOf(s.ID), "root")
	v := f.left(root, "view", log)
	f.judge(v, uid, "lo ", "tap0 ") // its own tap, until it is attached to
	if want := []uint64{2048, size}; !slices.Equal(v.Limits, want) {
		t.Errorf("its limits are %v, not %v", v.Limits, want)
	}
	t.Logf("before it is sealed, %d files: %q", len(v.Files), v.Files)
	if err := errors.Join(f.nets.MoveTap(f.ctx(), s.ID), j.Seal(diskName, "template")); err != nil {
		t.Fatal(err)
	}
	sealed := f.left(root, "sealed", log)
	f.judge(sealed, uid, "lo ")
	if want := []string{"/", "/disk", "/template"}; !slices.Equal(sealed.Files, want) {
		t.Errorf("sealed it sees %q, not %q", sealed.Files, want)
	}
	t.Logf("interfaces %q, sealed %q; tries: %v", v.Interfaces, sealed.Interfaces, v.Tries)
}

// left waits for what the program in a jail leaves.
func (f *fixture) left(root, name string, log *jail.Log) (v view) {
	f.t.Helper()
	for {
		data, err := os.ReadFile(filepath.Join(root, name))
		if err == nil {
			if err := json.Unmarshal(data, &v); err != nil {
				f.t.Fatal(err)
			}
			return v
		}
		if f.ctx().Err() != nil {
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
