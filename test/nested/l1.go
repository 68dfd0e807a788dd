package nested

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/node/driver/firecracker/kernel"
)

var (
	//go:embed l1/init
	initScript string
	//go:embed l1/stage2
	stage2Script string
)

// L1 is the machine: what it boots and what is in it. All paths are of this host.
type L1 struct {
	Kernel    string // a bzImage
	Modules   []kernel.Module
	Busybox   string // a static one
	Files     Tree   // what else is there
	MemoryMiB int    // 0: 3072
	Dir       string // an existing directory for the initial file system and the logs
	QEMU      string // "": qemu-system-x86_64 of $PATH
	// Silence is how long L1 may give no sign of life (it gives one every 5 s)
	// before it counts as frozen; 0: 90 s. The time in which QEMU waited for a
	// processor of this host does not count.
	Silence time.Duration
}

// Job is a command that runs in an L1 of its own.
type Job struct {
	Name string   // of the logs
	Args []string // the command; its path is one of L1
	Env  []string
	Dir  string        // where it runs; "": /tmp
	Time time.Duration // after which QEMU is killed
}

// ErrNoExit is an error about L1, not about what ran in it: QEMU ended, or was
// ended, before L1 told how the command ended.
var ErrNoExit = errors.New("infrastructure: L1 ended without an EXIT line")

const (
	defaultMemory  = 3072 // enough for half a dozen small guests
	defaultSilence = 90 * time.Second
)

// Run boots L1, runs the job in it with its output to w as it comes, and
// returns the command's exit status. An error that is not ErrNoExit is about
// the preparation. Left in Dir are NAME.console, what L1 and its kernel said,
// NAME.tests, what the job printed, and NAME.qemu.
func (l *L1) Run(ctx context.Context, j Job, w io.Writer) (status int, err error) {
	initramfs := filepath.Join(l.Dir, j.Name+".cpio")
	if err := l.pack(initramfs, j); err != nil {
		return 0, err
	}
	defer os.Remove(initramfs)
	console := filepath.Join(l.Dir, j.Name+".console")
	if err := os.WriteFile(console, nil, 0o644); err != nil {
		return 0, err
	}
	tests, err := os.Create(filepath.Join(l.Dir, j.Name+".tests"))
	if err != nil {
		return 0, err
	}
	defer tests.Close()
	w = io.MultiWriter(tests, w)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timer := time.AfterFunc(j.Time, func() { cancel(fmt.Errorf("it had %v", j.Time)) })
	defer timer.Stop()
	err = l.qemu(ctx, cancel, initramfs, console, w, j)
	why := context.Cause(ctx)
	text, readErr := os.ReadFile(console)
	if readErr != nil {
		return 0, readErr
	}
	if status, ok := exitLine(text); ok {
		return status, nil
	}
	if why == nil {
		why = err
	}
	if why == nil {
		why = errors.New("QEMU ended by itself")
	}
	if said := complaint(filepath.Join(l.Dir, j.Name+".qemu")); said != "" {
		why = fmt.Errorf("%w (%s)", why, said)
	}
	return 0, fmt.Errorf("%w: %w; %s; its console: %s", ErrNoExit, why, lastSign(text), console)
}

// pack writes the initial file system.
func (l *L1) pack(file string, j Job) error {
	tree := maps.Clone(l.Files)
	if tree == nil {
		tree = Tree{}
	}
	tree["init"] = Node{Mode: 0o755, Data: initScript}
	tree["l1/stage2"] = Node{Mode: 0o755, Data: stage2Script}
	tree["l1/job"] = Node{Mode: 0o755, Data: script(j)}
	tree["bin/busybox"] = Node{Mode: 0o755, Host: l.Busybox}
	tree["etc/passwd"] = Node{Data: "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"}
	tree["etc/group"] = Node{Data: "root:x:0:\nnogroup:x:65534:\n"}
	tree["etc/hosts"] = Node{Data: "127.0.0.1 localhost l1\n"}
	for i, m := range l.Modules {
		tree[fmt.Sprintf("l1/modules/%03d-%s.ko", i, m.Name)] = Node{Data: string(m.Data)}
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	return errors.Join(WriteInitramfs(f, tree), f.Close())
}

// script is the job as a shell script.
func script(j Job) string {
	var b strings.Builder
	b.WriteString("#!/bin/busybox sh\n")
	for _, e := range j.Env {
		fmt.Fprintf(&b, "export %s\n", quote(e))
	}
	dir := j.Dir
	if dir == "" {
		dir = "/tmp"
	}
	fmt.Fprintf(&b, "cd %s || exit 125\nexec", quote(dir))
	for _, a := range j.Args {
		b.WriteString(" " + quote(a))
	}
	b.WriteString("\n")
	return b.String()
}

func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// qemu runs L1 until it ends, freezes or ctx does. It is nice: the work of
// others on this host comes first.
func (l *L1) qemu(ctx context.Context, cancel context.CancelCauseFunc, initramfs, console string, w io.Writer, j Job) error {
	memory, qemu := l.MemoryMiB, l.QEMU
	if memory == 0 {
		memory = defaultMemory
	}
	if qemu == "" {
		qemu = "qemu-system-x86_64"
	}
	log, err := os.Create(filepath.Join(l.Dir, j.Name+".qemu"))
	if err != nil {
		return err
	}
	defer log.Close()
	// The short one, since a socket's path is bounded.
	run, err := os.MkdirTemp("", "l1-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(run)
	monitor := filepath.Join(run, "monitor")
	cmd := exec.CommandContext(ctx, "nice", "-n", "10", qemu,
		"-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "EPYC,+svm,+npt", "-smp", "1", "-m", strconv.Itoa(memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-monitor", "unix:"+monitor+",server=on,wait=off",
		"-kernel", l.Kernel, "-initrd", initramfs, "-append", commandLine,
		"-serial", "file:"+console, "-serial", "stdio")
	input, poker, err := os.Pipe()
	if err != nil {
		return err
	}
	defer input.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = input, w, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 10 * time.Second
	// The signal at our death is sent when the thread that started it ends.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return errors.Join(err, poker.Close())
	}
	done, watched, poked := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(poked)
		poke(done, console, poker)
	}()
	go func() {
		defer close(watched)
		if err := l.watch(done, console, cmd.Process.Pid); err != nil {
			inspect(monitor, log)
			cancel(err)
		}
	}()
	err = cmd.Wait()
	close(done)
	<-watched
	<-poked
	return err
}

// pokeEvery is longer than an interrupt takes, and shorter than what any test
// would take for a freeze.
const pokeEvery = 100 * time.Millisecond

// poke interrupts L1 all the time, by a byte on its second serial port, which
// nobody reads. QEMU 7.2 now and then forgets that an interrupt is pending while
// its processor with SVM halts: with nothing else to come, as in a machine
// without devices, that is for good. The next interrupt makes it look again.
func poke(done <-chan struct{}, console string, w *os.File) {
	defer w.Close()
	tick := time.NewTicker(pokeEvery)
	defer tick.Stop()
	up := false
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		if !up { // before that the port would echo it
			text, err := os.ReadFile(console)
			up = err == nil && bytes.Contains(text, []byte(sign+"up"))
			continue
		}
		_ = w.SetWriteDeadline(time.Now().Add(pokeEvery))
		_, _ = w.Write([]byte{0}) // where the port is full already, L1 has been interrupted
	}
}

// commandLine is L1's. The kernel's check of its timer fails where this host
// gives QEMU too little time.
const commandLine = "console=ttyS0 reboot=t panic=-1 quiet mitigations=off no_timer_check printk.devkmsg=on"

// watch returns an error when the console has had no sign of life for too long.
func (l *L1) watch(done <-chan struct{}, console string, pid int) error {
	silence := l.Silence
	if silence == 0 {
		silence = defaultSilence
	}
	tick := time.NewTicker(silence / 90)
	defer tick.Stop()
	var silent time.Duration
	signs, last, waited := 0, time.Now(), starved(pid)
	for {
		select {
		case <-done:
			return nil
		case now := <-tick.C:
			text, err := os.ReadFile(console)
			if err != nil {
				return err
			}
			w := starved(pid)
			silent += max(0, now.Sub(last)-max(0, w-waited))
			last, waited = now, w
			if n := bytes.Count(text, []byte(sign)); n != signs {
				signs, silent = n, 0
			}
			if silent > silence {
				return fmt.Errorf("it was frozen: no sign of life for %v", silence)
			}
		}
	}
}

// starved is how long that thread of a process that waited longest has waited
// for a processor.
func starved(pid int) (longest time.Duration) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid)) // the pattern is well-formed
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it ended
		}
		var ran, waited time.Duration
		if n, _ := fmt.Sscan(string(text), &ran, &waited); n == 2 {
			longest = max(longest, waited)
		}
	}
	return longest
}

// inspect asks QEMU where a frozen L1 stands, a few times, for its log.
func inspect(monitor string, log io.Writer) {
	conn, err := net.DialTimeout("unix", monitor, time.Second)
	if err != nil {
		fmt.Fprintln(log, "its monitor can't be asked:", err)
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	for range 3 {
		_, _ = io.WriteString(conn, "info registers\ninfo pic\ninfo lapic\n")
		// What it answers comes in its own time; there is no end to tell.
		_ = conn.SetReadDeadline(time.Now().Add(time.Second))
		_, _ = io.Copy(log, conn)
	}
}

// sign begins what L1 itself says.
const sign = "l1: "

var exitPattern = regexp.MustCompile(`(?m)^(?:\[[ .0-9]+\] )?l1: EXIT ([0-9]+)\r?$`)

// exitLine finds the exit status in L1's console.
func exitLine(console []byte) (status int, ok bool) {
	m := exitPattern.FindSubmatch(console)
	if m == nil {
		return 0, false
	}
	status, err := strconv.Atoi(string(m[1]))
	return status, err == nil
}

// complaint is the last line of QEMU's log, like that a signal ended it; its
// warnings about the emulated processor are none.
func complaint(log string) string {
	text, _ := os.ReadFile(log)
	line := lastLine(string(text))
	if strings.Contains(line, "warning:") {
		return ""
	}
	return line
}

// lastSign quotes the last thing that L1 said.
func lastSign(console []byte) string {
	last := "it never came up"
	for line := range strings.Lines(string(console)) {
		if i := strings.Index(line, sign); i >= 0 {
			last = "its last words: " + strings.TrimSpace(line)
		}
	}
	return last
}
