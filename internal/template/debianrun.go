package template

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	// buildID is the host's identity of the build's root; the next buildIDs
	// follow. The range lies above those that systemd and shadow hand out.
	buildID  = 0x70000000
	buildIDs = 65536

	maxTail = 4 << 10 // of mmdebstrap's messages, kept for an error
	maxLine = 300
)

func isRoot() bool { return os.Geteuid() == 0 }

// buildCommand prepares mmdebstrap. As root it gets a user namespace that we
// map ourselves: in unshare mode mmdebstrap makes one only for others, and would
// run package scripts as the host's root. Everything in the new process
// namespace dies with its first process. An ordinary user needs an entry in
// /etc/subuid, as mmdebstrap says itself.
func buildCommand(ctx context.Context, dir string, args []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "mmdebstrap", args...)
	cmd.Dir = "/"
	// None of the daemon's own environment: what is here, package scripts see.
	cmd.Env = append([]string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"LC_ALL=C.UTF-8", "HOME=/", "TMPDIR=" + dir, "DEBIAN_FRONTEND=noninteractive",
	}, proxyEnv(ctx)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if isRoot() {
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: buildID, Size: buildIDs}}
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID |
			syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC
		cmd.SysProcAttr.UidMappings, cmd.SysProcAttr.GidMappings = ids, ids
		cmd.SysProcAttr.GidMappingsEnableSetgroups = true
		cmd.SysProcAttr.Credential = &syscall.Credential{}
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// proxyEnv returns the proxies that the host's apt uses, as variables: those
// leave no trace in the image.
func proxyEnv(ctx context.Context) (env []string) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, _ := exec.CommandContext(ctx, "apt-config", "dump", "--format", "%f=%v%n", "Acquire").Output() // none without apt
	for _, scheme := range []string{"http", "https"} {
		name, value := scheme+"_proxy", os.Getenv(scheme+"_proxy")
		for line := range strings.Lines(string(out)) {
			if v, ok := strings.CutPrefix(strings.TrimSpace(line), "Acquire::"+scheme+"::Proxy="); ok {
				value = v
			}
		}
		if value != "" && !strings.EqualFold(value, "DIRECT") {
			env = append(env, name+"="+value)
		}
	}
	if v := os.Getenv("no_proxy"); v != "" {
		env = append(env, "no_proxy="+v)
	}
	return env
}

// build is a running mmdebstrap.
type build struct {
	out    *os.File // the tar; the reading end of a pipe
	cancel context.CancelFunc
	done   chan struct{} // closed when it ended and err is set
	err    error
}

// startBuild starts mmdebstrap. One goroutine owns the process until it ended;
// stop waits for it.
func startBuild(ctx context.Context, dir string, args []string, progress func(string)) (*build, error) {
	ctx, cancel := context.WithCancel(ctx)
	out, in, err := os.Pipe()
	if err != nil {
		cancel()
		return nil, sandbox.AsError(fmt.Errorf("start mmdebstrap: %w", err))
	}
	b := &build{out: out, cancel: cancel, done: make(chan struct{})}
	cmd := buildCommand(ctx, dir, args)
	log := &messages{progress: progress}
	cmd.Stdout, cmd.Stderr = in, log
	go func() {
		defer close(b.done)
		// The kernel kills the child when the thread that started it ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		_ = in.Close() // the child has its own
		if err == nil {
			err = cmd.Wait()
		}
		log.flush()
		if err != nil {
			b.err = buildError(err, log.tail)
		}
	}()
	return b, nil
}

// wait waits for the end of mmdebstrap, once all its output was read.
func (b *build) wait() error {
	<-b.done
	return b.err
}

// stop ends mmdebstrap if it still runs, and tells how it ended if that was on
// its own.
func (b *build) stop() (err error) {
	select {
	case <-b.done:
		err = b.err
	case <-time.After(time.Second): // time for a process that failed to be seen failing
	}
	b.cancel()
	<-b.done
	_ = b.out.Close() // what is left in the pipe is of no use
	return err
}

// messages reads what mmdebstrap says.
type messages struct {
	progress func(string)
	line     []byte
	tail     []string
	size     int
}

// Write implements io.Writer for exec's own copying goroutine.
func (m *messages) Write(p []byte) (int, error) {
	for _, c := range p {
		switch {
		case c == '\n' || c == '\r':
			m.flush()
		case len(m.line) < maxLine:
			m.line = append(m.line, c)
		}
	}
	return len(p), nil
}

var credential = regexp.MustCompile(`//[^/@\s]+@`)

func (m *messages) flush() {
	line := strings.ToValidUTF8(strings.TrimSpace(string(m.line)), "?")
	line = credential.ReplaceAllString(line, "//")
	m.line = m.line[:0]
	if line == "" {
		return
	}
	m.tail = append(m.tail, line)
	for m.size += len(line); m.size > maxTail; m.tail = m.tail[1:] {
		m.size -= len(m.tail[0])
	}
	if info, ok := strings.CutPrefix(line, "I: "); ok && !strings.Contains(info, "tempdir") {
		m.progress(info)
	}
}

// buildError sorts a failed build by what its last messages say.
func buildError(err error, tail []string) error {
	text := strings.Join(tail, "\n")
	var exit *exec.ExitError
	has := func(parts ...string) bool {
		for _, p := range parts {
			if strings.Contains(text, p) {
				return true
			}
		}
		return false
	}
	switch {
	case !errors.As(err, &exit):
		return sandbox.Errorf(sandbox.FailedPrecondition, "mmdebstrap_cannot_start", "mmdebstrap can't be started: %w", err).
			WithHint("user namespaces must be allowed: sysctl user.max_user_namespaces; see cloche doctor")
	case has("Unable to locate package", "has no installation candidate"):
		return sandbox.Errorf(sandbox.Invalid, "package_unknown", "apt doesn't know a package: %s", text).
			WithHint("compare the names with apt-cache search on this host")
	case has("Temporary failure resolving", "Could not resolve", "Failed to fetch", "Could not connect"):
		return sandbox.Errorf(sandbox.Unavailable, "apt_unreachable", "apt can't fetch from this host's sources: %s", text).
			WithHint("try apt-get update on this host")
	}
	return sandbox.Errorf(sandbox.FailedPrecondition, "debian_build_failed", "mmdebstrap failed (%w): %s", err, text).
		WithHint("see its messages above; cloche doctor checks what it needs")
}

// DebianSuite returns the code name of this host's own release.
func DebianSuite() (string, error) {
	f, err := os.Open("/etc/os-release")
	if err == nil {
		defer func() { _ = f.Close() }() // it was only read
		sc := bufio.NewScanner(io.LimitReader(f, 64<<10))
		for sc.Scan() {
			name, ok := strings.CutPrefix(sc.Text(), "VERSION_CODENAME=")
			if name = strings.Trim(name, `"'`); ok && suiteGrammar.MatchString(name) {
				return name, nil
			}
		}
	}
	return "", sandbox.Errorf(sandbox.FailedPrecondition, "suite_unknown", "this host doesn't say which Debian release it is").
		WithHint("name the suite, e.g. --suite with a release's code name")
}

func missingTool(name string) error {
	if _, err := exec.LookPath(name); err != nil {
		return sandbox.Errorf(sandbox.FailedPrecondition, name+"_missing", "%s is not installed on this host", name).
			WithHint("apt-get install %s", name)
	}
	return nil
}

// Check tells what keeps this host from building Debian templates; nothing
// when it can. Importing a tar needs none of it.
func Check(ctx context.Context) (problems []*sandbox.Error) {
	add := func(err error) {
		if err != nil {
			problems = append(problems, sandbox.AsError(err))
		}
	}
	add(missingTool("mmdebstrap"))
	suite, err := DebianSuite()
	add(err)
	if err == nil {
		_, err = forSuite(hostSources("/etc/apt"), suite, "")
		add(err)
	}
	if isRoot() {
		cmd := buildCommand(ctx, os.TempDir(), nil)
		if path, err := exec.LookPath("true"); err == nil {
			cmd.Path, cmd.Args, cmd.Err = path, []string{"true"}, nil
			if err := cmd.Run(); err != nil {
				add(sandbox.Errorf(sandbox.FailedPrecondition, "user_namespaces_missing", "this host makes no user namespaces: %w", err).
					WithHint("sysctl user.max_user_namespaces must not be 0; a container needs the privilege to make one"))
			}
		}
	}
	return problems
}
