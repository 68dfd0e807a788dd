package boot

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// sight is what the supervisor sees.
type sight struct {
	Args, Env     []string
	Host, Cwd     string
	Mounts        map[string]string // by mount point: type and options
	Modes         map[string]string // of some paths: mode, owner, group, and device numbers
	Dev           []string          // what is in /dev
	Sizes         map[string]int64  // of some filesystems, in bytes
	Limits        map[string]string // soft and hard
	Files         []string          // what its descriptors are
	Umask         int
	OOM           string
	Memory        int64
	Trouble       []string // whatever did not work as users expect
	Mark, Persist string   // contents of two files
}

func lookAround() {
	s := sight{
		Args: os.Args, Env: os.Environ(), Mounts: map[string]string{}, Modes: map[string]string{}, Sizes: map[string]int64{},
		Limits: map[string]string{}, Umask: unix.Umask(0o022),
	}
	s.Files = descriptors()
	s.Host, _ = os.Hostname()
	s.Cwd, _ = os.Getwd()
	s.mounts()
	for _, path := range []string{
		"/", "/dev/null", "/dev/random", "/dev/tty", "/dev/ptmx", "/dev/shm", "/dev/pts", "/run", "/tmp", "/etc/mark", "/.cloche/guest",
	} {
		s.Modes[path] = mode(path)
	}
	list, _ := os.ReadDir("/dev")
	for _, e := range list {
		s.Dev = append(s.Dev, e.Name())
	}
	for _, path := range []string{"/", "/dev/shm", "/run"} {
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err == nil {
			s.Sizes[path] = int64(st.Blocks) * st.Bsize
		}
	}
	var info unix.Sysinfo_t
	_ = unix.Sysinfo(&info)
	s.Memory = int64(info.Totalram)
	s.OOM = read("/proc/self/oom_score_adj")
	s.Mark, s.Persist = read("/etc/mark"), read("/persist")
	s.try("limits", s.limits)
	s.try("a terminal", terminal)
	s.try("the loopback", loopback)
	s.try("the guest binary", guestIsReadOnly)
	if s.Mark != "" {
		s.try("the overlay", overlayIsOne)
	}
	text, _ := json.Marshal(s)
	fmt.Println(seenMark + string(text))
	drain()
}

func (s *sight) try(what string, f func() error) {
	if err := f(); err != nil {
		s.Trouble = append(s.Trouble, what+": "+err.Error())
	}
}

func read(path string) string {
	b, _ := os.ReadFile(path)
	return strings.TrimSpace(string(b))
}

func descriptors() []string {
	var out []string
	for fd := range 64 {
		if to, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd)); err == nil && !strings.HasPrefix(to, "anon_inode:") {
			out = append(out, fmt.Sprint(fd, " ", to))
		}
	}
	return out
}

func (s *sight) mounts() {
	for _, line := range strings.Split(read("/proc/self/mountinfo"), "\n") {
		left, right, _ := strings.Cut(line, " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if len(l) > 5 && len(r) > 2 {
			s.Mounts[l[4]] += r[0] + " " + l[5] + " " + r[2]
		}
	}
}

func mode(path string) string {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return err.Error()
	}
	dev := ""
	if st.Mode&unix.S_IFMT == unix.S_IFCHR {
		dev = fmt.Sprintf(" %d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	return fmt.Sprintf("%o %d:%d%s", st.Mode, st.Uid, st.Gid, dev)
}

// limits reads those of a child that has not run yet: Go programs raise one of
// their own.
func (s *sight) limits() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, err := syscall.ForkExec(os.Args[0], os.Args, &syscall.ProcAttr{Sys: &syscall.SysProcAttr{Ptrace: true}})
	if err != nil {
		return err
	}
	defer syscall.Wait4(pid, nil, 0, nil)
	defer syscall.Kill(pid, syscall.SIGKILL)
	if _, err := syscall.Wait4(pid, nil, 0, nil); err != nil {
		return err
	}
	for _, line := range strings.Split(read(fmt.Sprintf("/proc/%d/limits", pid)), "\n") {
		for name, key := range map[string]string{"Max open files": "NOFILE", "Max processes": "NPROC", "Max core file size": "CORE"} {
			if rest, ok := strings.CutPrefix(line, name); ok {
				f := strings.Fields(rest)
				s.Limits[key] = f[0] + " " + f[1]
			}
		}
	}
	return nil
}

func terminal() error {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return err
	}
	if m := mode(fmt.Sprintf("/dev/pts/%d", n)); !strings.HasPrefix(m, "20620 0:5 ") {
		return fmt.Errorf("the terminal's mode is %s", m)
	}
	return nil
}

func loopback() error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return err
	}
	return c.Close()
}

func guestIsReadOnly() error {
	self, err := os.ReadFile("/proc/self/exe")
	there, err2 := os.ReadFile(guestPath)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	if !bytes.Equal(self, there) {
		return errors.New("it is not what runs")
	}
	if f, err := os.Create(filepath.Join(filepath.Dir(guestPath), "x")); !errors.Is(err, unix.EROFS) {
		_ = f.Close()
		return fmt.Errorf("a file beside it: %w", err)
	}
	if err := os.Remove(guestPath); !errors.Is(err, unix.EROFS) {
		return fmt.Errorf("its removal: %w", err)
	}
	return nil
}

// overlayIsOne does, once, what works on one filesystem and not on every
// overlay. The template's tree is plant's.
func overlayIsOne() error {
	if _, err := os.Lstat("/data"); err != nil {
		return nil // done in an earlier boot
	}
	var whole unix.Stat_t
	if err := unix.Stat("/etc", &whole); err != nil {
		return err
	}
	for _, path := range []string{"/", "/etc/mark", "/data/sub", "/data/sub/file", "/data/one"} {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return err
		}
		if st.Dev != whole.Dev {
			return fmt.Errorf("%s has the device %d, /etc has %d", path, st.Dev, whole.Dev)
		}
	}
	before := inode("/data/one")
	if err := appendTo("/data/one", "+"); err != nil {
		return err
	}
	if read("/data/two") != "linked+" || inode("/data/two") != before || inode("/data/one") != before {
		return fmt.Errorf("the hard link is broken: %q, inodes %d, %d, before %d", read("/data/two"), inode("/data/one"), inode("/data/two"), before)
	}
	if err := os.Rename("/data", "/moved"); err != nil {
		return err
	}
	if read("/moved/sub/file") != "deep" {
		return errors.New("a renamed directory has lost what is in it")
	}
	if err := unix.Mknod("/moved/node", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))); err != nil {
		return err
	}
	if err := os.WriteFile("/moved/node", []byte("x"), 0); err != nil { // a device, and no nodev
		return err
	}
	if err := os.Remove("/gone"); err != nil {
		return err
	}
	if err := os.WriteFile("/persist", []byte("kept"), 0o600); err != nil {
		return err
	}
	unix.Sync()
	return nil
}

func inode(path string) uint64 {
	var st unix.Stat_t
	_ = unix.Lstat(path, &st) // 0, then
	return st.Ino
}

func appendTo(path, text string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = io.WriteString(f, text)
	return errors.Join(err, f.Close())
}

// missing returns what of want is not in have.
func missing(have, want []string) []string {
	return slices.DeleteFunc(slices.Clone(want), func(w string) bool { return slices.Contains(have, w) })
}
