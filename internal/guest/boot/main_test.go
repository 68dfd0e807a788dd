package boot

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// This test binary, built statically, plays every part in the machine: it is
// /init, and what /init starts as the supervisor, which looks around and tells
// what it sees in one line.

const (
	// stageEnv makes the binary a machine's /init without a machine: in
	// namespaces of its own, with the files of the stage that it names.
	stageEnv = "CLOCHE_BOOT_STAGE"

	seenMark   = "SEEN "   // before what the supervisor saw
	reportMark = "REPORT " // before the boot report
)

// stage is a boot in namespaces.
type stage struct {
	Cmdline, Template, Disk string
	Filesystems             string // "" leaves the kernel's
	Modules                 map[string]string
	Dir                     string // an empty one to stand in
}

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 2 && os.Args[1] == "supervisor":
		lookAround()
		os.Exit(0)
	case os.Getenv(stageEnv) != "":
		if err := onStage([]byte(os.Getenv(stageEnv))); err != nil {
			fmt.Println("STAGE", err)
		}
		os.Exit(1)
	case len(os.Args) == 1 && os.Getpid() == 1:
		s := *machine
		s.report = printReport
		machine = &s
		fmt.Println("RUN", Run())
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(selfDir)
	os.Exit(code)
}

func printReport(port uint32, failure error) error {
	said := "ok"
	if failure != nil {
		said = failure.Error()
	}
	fmt.Println(reportMark+fmt.Sprint(port), said)
	drain()
	return nil
}

// drain waits until a serial console has said everything.
func drain() { _ = unix.IoctlSetInt(1, unix.TCSBRK, 1) } // an error where it is a pipe

// onStage makes itself an initramfs, and boots.
func onStage(text []byte) error {
	// What the shell around the test has open is not what a boot leaves open.
	if err := unix.CloseRange(3, 1<<31-1, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return err
	}
	var st stage
	if err := json.Unmarshal(text, &st); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return err
	}
	if err := unix.Mount("stage", st.Dir, "tmpfs", 0, ""); err != nil {
		return err
	}
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	files := map[string]string{"init": string(self), "cmdline": st.Cmdline, "filesystems": st.Filesystems}
	for name, content := range st.Modules {
		files["modules/"+name] = content
	}
	for name, content := range files {
		path := filepath.Join(st.Dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o755)); err != nil {
			return err
		}
	}
	if err := os.Chdir(st.Dir); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		return err
	}
	// Only a machine's PID 1 is sure to be allowed to raise its own limit.
	s := site{
		cmdline: "/cmdline", filesystems: machine.filesystems, template: st.Template, disk: st.Disk, within: 300 * time.Millisecond, report: printReport,
		files: min(machine.files, lim.Max),
	}
	if st.Filesystems != "" {
		s.filesystems = "/filesystems"
	}
	return s.boot()
}

// self is this test, built so that it runs without anything beside it.
var self = sync.OnceValues(func() (path string, err error) {
	if selfDir, err = os.MkdirTemp("", "boot-test-"); err != nil {
		return "", err
	}
	path = filepath.Join(selfDir, "self")
	cmd := exec.Command("go", "test", "-c", "-ldflags=-s -w", "-o", path, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if msg, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the test: %w: %s", err, msg)
	}
	return path, nil
})

var selfDir string

func needSelf(t *testing.T) string {
	t.Helper()
	path, err := self()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func needTools(t *testing.T, tools ...string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: needs root, for loop devices and mounts")
	}
	for _, name := range tools {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("SKIP: %s is missing", name)
		}
	}
}

// needHost asks for what a boot in namespaces needs of this host's kernel.
func needHost(t *testing.T) {
	t.Helper()
	needTools(t, "mkfs.erofs", "mkfs.ext4", "losetup", "unshare", "go")
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skipf("SKIP: no loop devices: %v", err)
	}
	for _, kind := range []string{"erofs", "ext4", "overlay"} {
		_ = exec.Command("modprobe", kind).Run() // it may be there already, or not be to be had
		list, err := os.ReadFile("/proc/filesystems")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(list), "\t"+kind+"\n") {
			t.Skipf("SKIP: this kernel has no %s", kind)
		}
	}
}

// outcome is what a boot said.
type outcome struct {
	report string // "ok" or why not; "" when there was none
	seen   *sight
	all    string
}

// readOutcome reads what a boot says, until it says no more.
func readOutcome(t *testing.T, from io.Reader) outcome {
	t.Helper()
	var o outcome
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.TrimRight(lines.Text(), "\r")
		o.all += line + "\n"
		if _, said, ok := strings.Cut(line, reportMark+"1023 "); ok {
			o.report = said
		}
		if _, text, ok := strings.Cut(line, seenMark); ok {
			o.seen = new(sight)
			if err := json.Unmarshal([]byte(text), o.seen); err != nil {
				t.Errorf("%v: %q", err, line)
			}
		}
	}
	return o
}
