package boot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guestapi"
)

func order() guestapi.Boot {
	return guestapi.Boot{
		Dial: "vsock:2:1024", Report: 1023, Hostname: "box", MaxProcs: 77, Env: map[string]string{"GREETING": "hello"},
		Root: guestapi.RootDisk, Memory: 64 << 20,
	}
}

func cmdline(t *testing.T, b guestapi.Boot) string {
	t.Helper()
	arg, err := b.Arg()
	if err != nil {
		t.Fatal(err)
	}
	return "quiet " + arg + "\n"
}

// plant makes a template's tree.
func plant(t *testing.T, change func(tree string) error) (image string) {
	t.Helper()
	tree := filepath.Join(t.TempDir(), "tree")
	for dir, mode := range map[string]os.FileMode{"": 0o751, "etc": 0o755, "tmp": 0o777 | os.ModeSticky, "data/sub": 0o755} {
		path := filepath.Join(tree, dir)
		if err := errors.Join(os.MkdirAll(path, 0o755), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"etc/mark": "from the image", "data/sub/file": "deep", "data/one": "linked", "gone": "x"} {
		if err := os.WriteFile(filepath.Join(tree, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	err := errors.Join(os.Chown(tree, 0, 7), os.Link(filepath.Join(tree, "data/one"), filepath.Join(tree, "data/two")))
	if change != nil {
		err = errors.Join(err, change(tree))
	}
	if err != nil {
		t.Fatal(err)
	}
	image = filepath.Join(t.TempDir(), "image.erofs")
	tool(t, "mkfs.erofs", "-Enoinline_data", "-x-1", image, tree)
	return image
}

func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
	return strings.TrimSpace(string(out))
}

// blank makes a formatted disk of 32 MiB.
func blank(t *testing.T, args ...string) string {
	t.Helper()
	disk := filepath.Join(t.TempDir(), "disk")
	tool(t, "mkfs.ext4", append([]string{"-q", "-m", "0", disk, "32M"}, args...)...)
	return disk
}

// loop makes a file a drive, and returns the drive's name.
func loop(t *testing.T, file string, args ...string) string {
	t.Helper()
	dev := tool(t, "losetup", append(args, "--find", "--show", file)...)
	t.Cleanup(func() { tool(t, "losetup", "--detach", dev) })
	return filepath.Base(dev)
}

func perform(t *testing.T, st stage) outcome {
	t.Helper()
	st.Dir = t.TempDir()
	text, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	cmd := exec.Command(needSelf(t))
	cmd.Env = []string{stageEnv + "=" + string(text)}
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC,
	}
	if err := cmd.Run(); err != nil {
		t.Logf("it ended with %v", err)
	}
	return readOutcome(t, &said)
}

// TestNative boots without a machine, in namespaces, twice over one disk.
func TestNative(t *testing.T) {
	needHost(t)
	st := stage{Cmdline: cmdline(t, order()), Template: loop(t, plant(t, nil), "--read-only"), Disk: loop(t, blank(t))}
	for _, persist := range []string{"", "kept"} {
		o := perform(t, st)
		if o.report != "ok" || o.seen == nil {
			t.Fatalf("it said: %s", o.all)
		}
		checkSight(t, o.seen, ourFiles(t))
		if o.seen.Persist != persist || o.seen.Mark != "from the image" {
			t.Errorf("persisted %q, want %q; mark %q", o.seen.Persist, persist, o.seen.Mark)
		}
		t.Logf("the root: %s", o.seen.Mounts["/"])
		if m := o.seen.Modes["/"]; m != "40751 0:7" {
			t.Errorf("the root is %s", m)
		}
	}
}

// checkSight holds what the supervisor sees to what a gVisor machine's sees.
func checkSight(t *testing.T, s *sight, files string) {
	t.Helper()
	if len(s.Trouble) != 0 {
		t.Errorf("trouble: %q", s.Trouble)
	}
	if s.Host != "box" || s.Cwd != "/" || s.Umask != 0o022 || s.OOM != "0" || !slices.Equal(s.Args, []string{guestPath, "supervisor"}) {
		t.Errorf("host %q, directory %q, umask %o, oom_score_adj %s, %q", s.Host, s.Cwd, s.Umask, s.OOM, s.Args)
	}
	if want := []string{"CLOCHE_DIAL=vsock:2:1024", "GREETING=hello", "PATH=" + searchPath}; !slices.Equal(s.Env, want) {
		t.Errorf("environment %q", s.Env)
	}
	for path, want := range map[string]string{
		"/dev/null": "20666 0:0 1:3", "/dev/random": "20666 0:0 1:8", "/dev/tty": "20666 0:0 5:0", "/dev/ptmx": "20666 0:0 5:2",
		"/dev/shm": "41777 0:0", "/dev/pts": "40755 0:0", "/run": "40755 0:0", "/tmp": "41777 0:0", "/.cloche/guest": "100555 0:0",
	} {
		if s.Modes[path] != want {
			t.Errorf("%s is %s, want %s", path, s.Modes[path], want)
		}
	}
	for limit, want := range map[string]string{"NOFILE": files, "NPROC": "77 77", "CORE": "0 0"} {
		if s.Limits[limit] != want {
			t.Errorf("RLIMIT_%s is %s, want %s", limit, s.Limits[limit], want)
		}
	}
	if lost := missing(s.Dev, []string{"fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"}); len(lost) != 0 {
		t.Errorf("/dev lacks %q", lost)
	}
	for _, name := range s.Dev {
		if strings.HasPrefix(name, "vd") || strings.HasPrefix(name, "loop") {
			t.Errorf("/dev has the drive %s", name)
		}
	}
	checkMounts(t, s)
	if len(s.Files) != 3 || s.Files[0] != "0 /dev/null" {
		t.Errorf("descriptors: %q", s.Files)
	}
}

// ourFiles is RLIMIT_NOFILE of a machine that could not raise it.
func ourFiles(t *testing.T) string {
	t.Helper()
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(min(1<<16, lim.Max), " ", min(1<<20, lim.Max))
}

func checkMounts(t *testing.T, s *sight) {
	t.Helper()
	want := map[string]string{
		"/": "", "/proc": "proc rw,nosuid,nodev,noexec,relatime", "/sys": "sysfs rw,nosuid,nodev,noexec,relatime",
		"/dev": "tmpfs rw,nosuid,relatime", "/dev/pts": "devpts rw,nosuid,noexec,relatime", "/dev/shm": "tmpfs rw,nosuid,nodev,relatime",
		"/run": "tmpfs rw,nosuid,nodev,relatime", "/.cloche": "tmpfs ro,nosuid,nodev,relatime",
	}
	for at, how := range s.Mounts {
		if w, ok := want[at]; !ok || !strings.HasPrefix(how, w) {
			t.Errorf("mounted on %s: %s", at, how)
		}
		delete(want, at)
	}
	if len(want) != 0 {
		t.Errorf("not mounted: %v", want)
	}
	memory := min(order().Memory, s.Memory)
	if s.Sizes["/dev/shm"] != memory/2 || s.Sizes["/run"] != memory/8 {
		t.Errorf("of %d bytes: %v", memory, s.Sizes)
	}
}

const allKinds = "nodev\ttmpfs\n\text4\n\terofs\nnodev\toverlay\n"

func TestNativeEmptyRoot(t *testing.T) {
	needTools(t, "go")
	b := order()
	b.Root = guestapi.RootNone
	o := perform(t, stage{Cmdline: cmdline(t, b), Template: "none", Disk: "none", Filesystems: allKinds})
	if o.report != "ok" || o.seen == nil {
		t.Fatalf("it said: %s", o.all)
	}
	checkSight(t, o.seen, ourFiles(t))
	if !strings.HasPrefix(o.seen.Mounts["/"], "tmpfs rw") {
		t.Errorf("the root is %s", o.seen.Mounts["/"])
	}
}

// TestNativeNoFilesystem: a probe, which has no drives, finds a kernel that could
// not mount them.
func TestNativeNoFilesystem(t *testing.T) {
	needTools(t, "go")
	b := order()
	b.Root = guestapi.RootNone
	for lacks, list := range map[string]string{
		"erofs": strings.Replace(allKinds, "\terofs\n", "", 1), "ext4": strings.Replace(allKinds, "ext4", "ext2", 1),
		"overlay": strings.Replace(allKinds, "overlay", "overlayfs", 1), "erofs and no ext4 and no overlay": "nodev\ttmpfs\n",
	} {
		o := perform(t, stage{Cmdline: cmdline(t, b), Filesystems: list})
		if want := "the kernel has no filesystem " + lacks + ", neither inside it nor among its modules"; !strings.HasPrefix(o.report, want) || o.seen != nil {
			t.Errorf("without %s it said: %s", lacks, o.all)
		}
	}
}

func TestLacking(t *testing.T) {
	for list, want := range map[string][]string{
		allKinds: {}, "": {"erofs", "ext4", "overlay"}, "\n\n \nerofs": {"ext4", "overlay"}, "erofs\text4\toverlay": {"erofs", "ext4"},
		"nodev\terofs2\n\text4x\nnodev\tmyoverlay\n": {"erofs", "ext4", "overlay"},
	} {
		if got := lacking(list); !slices.Equal(got, want) {
			t.Errorf("%q lacks %q", list, got)
		}
	}
}

// TestNativeTemplates tries templates that have something odd where a
// filesystem is mounted.
func TestNativeTemplates(t *testing.T) {
	needHost(t)
	for name, c := range map[string]struct {
		change func(tree string) error
		report string
	}{
		"link":       {func(d string) error { return os.Symlink("/etc", d+"/run") }, "/run: where a directory must be, there is a symbolic link"},
		"link to /":  {func(d string) error { return os.Symlink("/", d+"/proc") }, "/proc: where a directory must be, there is a symbolic link"},
		"dangling":   {func(d string) error { return os.Symlink("../../nowhere", d+"/dev") }, "/dev: where a directory must be, there is a symbolic link"},
		"file":       {func(d string) error { return os.WriteFile(d+"/.cloche", nil, 0o755) }, "/.cloche: where a directory must be, there is a file"},
		"fifo":       {func(d string) error { return syscall.Mkfifo(d+"/sys", 0o644) }, "/sys: where a directory must be, there is a file"},
		"in the way": {func(d string) error { return errors.Join(os.Mkdir(d+"/dev", 0o700), os.Symlink("/etc", d+"/dev/shm")) }, "ok"},
		"not empty": {func(d string) error {
			return errors.Join(os.Mkdir(d+"/.cloche", 0o700), os.WriteFile(d+"/.cloche/guest", []byte("evil"), 0o755))
		}, "ok"},
	} {
		t.Run(name, func(t *testing.T) {
			o := perform(t, stage{Cmdline: cmdline(t, order()), Template: loop(t, plant(t, c.change), "--read-only"), Disk: loop(t, blank(t))})
			if !strings.HasSuffix(o.report, c.report) || (o.seen != nil) != (c.report == "ok") {
				t.Fatalf("it said: %s", o.all)
			}
			if o.seen != nil {
				checkSight(t, o.seen, ourFiles(t))
			}
		})
	}
}

// TestNativeFailures looks for the reason in the report.
func TestNativeFailures(t *testing.T) {
	needHost(t)
	image := loop(t, plant(t, nil), "--read-only")
	zeroes := filepath.Join(t.TempDir(), "zeroes")
	if err := os.WriteFile(zeroes, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	odd := t.TempDir()
	if err := os.Symlink("/lower", filepath.Join(odd, "upper")); err != nil {
		t.Fatal(err)
	}
	nothing, planted := loop(t, zeroes), loop(t, blank(t, "-d", odd))
	fine := cmdline(t, order())
	for name, c := range map[string]struct {
		stage stage
		said  string
	}{
		"no disk":         {stage{Template: image, Disk: "nodrive", Cmdline: fine}, "the kernel has no drive nodrive after 300ms; it has "},
		"unformatted":     {stage{Template: image, Disk: nothing, Cmdline: fine}, "the drive " + nothing + " (disk) holds no ext4 filesystem"},
		"swapped":         {stage{Template: planted, Disk: image, Cmdline: fine}, "the drive " + planted + " (template) holds no erofs filesystem"},
		"no template":     {stage{Template: nothing, Disk: nothing, Cmdline: fine}, "the drive " + nothing + " (template) holds no erofs filesystem"},
		"a link as upper": {stage{Template: image, Disk: planted, Cmdline: fine}, "the disk can't be prepared: /disk/upper: where a directory must be, there is a symbolic link"},
		"bad module":      {stage{Modules: map[string]string{"000-bad.ko": "junk"}, Cmdline: fine}, "the kernel module 000-bad.ko can't be loaded: "},
		"no orders":       {stage{Cmdline: "quiet"}, "the kernel command line says no cloche="},
	} {
		t.Run(name, func(t *testing.T) {
			o := perform(t, c.stage)
			if !strings.Contains(o.all, c.said) || o.report == "ok" || o.seen != nil || (o.report == "") != (name == "no orders") {
				t.Errorf("it said: %s", o.all)
			}
		})
	}
}

// TestNativeFull boots again and again from a disk that has become full: its
// owner must be able to make room.
func TestNativeFull(t *testing.T) {
	needHost(t)
	image := loop(t, plant(t, nil), "--read-only")
	for name, fill := range map[string]string{
		"blocks": `cat /dev/zero >> "$1/upper/junk"`,
		"inodes": `i=0; while touch "$1/upper/$2$i"; do i=$((i+1)); done`,
		"both":   `cat /dev/zero >> "$1/upper/junk"; i=0; while touch "$1/upper/$2$i"; do i=$((i+1)); done`,
	} {
		t.Run(name, func(t *testing.T) {
			st := stage{Cmdline: cmdline(t, order()), Template: image, Disk: loop(t, blank(t, "-N", "128"))}
			for round := range 4 {
				o := perform(t, st)
				if o.report != "ok" || o.seen == nil || !strings.HasPrefix(o.seen.Mounts["/"], "overlay rw") || len(o.seen.Trouble) != 0 {
					t.Fatalf("boot %d: it said: %s", round, o.all)
				}
				script := `mount "$3" "$1"; ` + fill + `; umount "$1"`
				said := tool(t, "unshare", "--mount", "sh", "-c", script, "sh", t.TempDir(), fmt.Sprint(round), "/dev/"+st.Disk)
				if !strings.Contains(said, "No space left") {
					t.Fatalf("it is not full: %s", said)
				}
			}
		})
	}
}

// TestDriveComesLate makes a drive while it is waited for.
func TestDriveComesLate(t *testing.T) {
	needTools(t)
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("SKIP: no loop devices: %v", err)
	}
	defer control.Close()
	number := 5000 + os.Getpid()%5000
	came := make(chan error, 1)
	go func() { came <- waitForDrives(20*time.Second, "null", fmt.Sprint("loop", number)) }()
	select {
	case err := <-came:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, number); err != nil {
		t.Skipf("SKIP: no new loop device: %v", err)
	}
	defer unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number)
	if err := <-came; err != nil {
		t.Error(err)
	}
}
