// Package harness runs the built binary as a user would: it starts `cloche
// serve` over its own state and run directories, drives it by CLI and HTTP,
// kills it, starts it again, and takes a census of what is left on the host.
// The end-to-end, benchmark and red-team suites stand on it.
//
// A suite that can't run here (not root, no binary) skips with the reason.
package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Daemon is one `cloche serve` with its own directories.
type Daemon struct {
	Bin, State, Run string
	URL, Key        string
	// Extra is environment that the daemon gets beside this process's, Flags
	// are more of serve's.
	Extra []string
	Flags []string

	tb     testing.TB
	listen string
	cmd    *exec.Cmd
	ended  chan struct{}
	log    *os.File
}

// Bin returns the binary under test: $CLOCHE_BIN or bin/cloche of this tree.
func Bin(tb testing.TB) string {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("SKIP: needs root, since it makes real sandboxes")
	}
	bin := os.Getenv("CLOCHE_BIN")
	if bin == "" {
		bin = filepath.Join(repoRoot(tb), "bin", "cloche")
	}
	if _, err := os.Stat(bin); err != nil {
		tb.Skipf("SKIP: no binary to test (%v); run `make build` first", err)
	}
	return bin
}

func repoRoot(tb testing.TB) string {
	tb.Helper()
	dir, err := os.Getwd()
	if err != nil {
		tb.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	tb.Fatal("the repository's root was not found")
	return ""
}

// Start starts a daemon whose project has the default template `base`, and
// stops it, deletes its sandboxes and checks the census when the test ends.
func Start(tb testing.TB) *Daemon {
	tb.Helper()
	d := New(tb)
	seed(tb, d)
	d.Serve()
	return d
}

// New prepares a daemon over empty directories and starts nothing.
func New(tb testing.TB) *Daemon {
	tb.Helper()
	bin := Bin(tb)
	// Socket paths must stay short, so this is not tb.TempDir().
	dir, err := os.MkdirTemp("", "clo")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { // after the daemon's own
		if err := os.RemoveAll(dir); err != nil {
			tb.Errorf("remove the daemon's directories: %v", err)
		}
	})
	return NewIn(tb, bin, dir)
}

// NewIn is New for a binary and a directory of the caller's, who removes it
// after the test: something may be mounted where the state lies, DIR/s.
func NewIn(tb testing.TB, bin, dir string) *Daemon {
	tb.Helper()
	d := &Daemon{Bin: bin, State: filepath.Join(dir, "s"), Run: filepath.Join(dir, "r"), tb: tb}
	var err error
	if d.log, err = os.Create(filepath.Join(dir, "daemon.log")); err != nil {
		tb.Fatal(err)
	}
	d.listen = FreePort(tb)
	d.URL = "http://" + d.listen
	tb.Cleanup(d.cleanup)
	return d
}

// Seed gives a daemon that has not been started the template `base`.
func (d *Daemon) Seed() {
	d.tb.Helper()
	seed(d.tb, d)
}

// FreePort finds an address that nobody listens on now.
func FreePort(tb testing.TB) string {
	tb.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// Serve starts the daemon (again) and waits until it is ready.
func (d *Daemon) Serve() {
	d.tb.Helper()
	if err := d.TryServe(); err != nil {
		d.tb.Fatal(err)
	}
}

// TryServe is Serve with an error instead of a failed test.
func (d *Daemon) TryServe() error {
	cmd := exec.Command(d.Bin, append([]string{"serve", "--listen", d.listen, "--state-dir", d.State, "--run-dir", d.Run}, d.Flags...)...)
	cmd.Stdout, cmd.Stderr = d.log, d.log
	if len(d.Extra) > 0 {
		cmd.Env = append(os.Environ(), d.Extra...)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	d.cmd, d.ended = cmd, make(chan struct{})
	ended := d.ended
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		select {
		case <-ended:
			return fmt.Errorf("the daemon ended at once: %v\n%s", cmd.ProcessState, d.Log())
		default:
		}
		resp, err := http.Get(d.URL + "/healthz")
		if err != nil {
			continue
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			continue
		}
		key, err := os.ReadFile(filepath.Join(d.State, "admin.key"))
		if err != nil {
			return err
		}
		d.Key = strings.TrimSpace(string(key))
		return nil
	}
	return fmt.Errorf("the daemon was not ready within 30 s\n%s", d.Log())
}

// Pid returns the daemon's process id.
func (d *Daemon) Pid() int { return d.cmd.Process.Pid }

// Kill9 kills the daemon as a crash would, and waits until it is gone.
func (d *Daemon) Kill9() {
	_ = d.cmd.Process.Kill()
	<-d.ended
}

// Stop asks the daemon to end, and waits.
func (d *Daemon) Stop() {
	d.tb.Helper()
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-d.ended:
	case <-time.After(20 * time.Second):
		d.tb.Errorf("the daemon did not end within 20 s of SIGTERM")
		d.Kill9()
	}
}

// Running tells whether the daemon runs.
func (d *Daemon) Running() bool {
	if d.ended == nil {
		return false
	}
	select {
	case <-d.ended:
		return false
	default:
		return true
	}
}

// How tells how the daemon ended; "" while it runs.
func (d *Daemon) How() string {
	if d.Running() || d.cmd == nil {
		return ""
	}
	return d.cmd.ProcessState.String()
}

// Log returns the end of what the daemon logged.
func (d *Daemon) Log() string {
	b, _ := os.ReadFile(d.log.Name())
	if len(b) > 20_000 {
		b = b[len(b)-20_000:]
	}
	return string(b)
}

// Result is what a run of the CLI gave.
type Result struct {
	Stdout, Stderr string
	Code           int
	Took           time.Duration
}

// Env is the environment with which the CLI finds this daemon.
func (d *Daemon) Env() []string {
	return append(os.Environ(), "CLOCHE_URL="+d.URL, "CLOCHE_API_KEY="+d.Key, "CLOCHE_STATE_DIR="+d.State)
}

// Command prepares a run of the CLI.
func (d *Daemon) Command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, d.Bin, args...)
	cmd.Env = d.Env()
	return cmd
}

// CLI runs the CLI and returns whatever came of it.
func (d *Daemon) CLI(args ...string) Result {
	d.tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := d.Command(ctx, args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	begin := time.Now()
	err := cmd.Run()
	r := Result{Stdout: out.String(), Stderr: errs.String(), Took: time.Since(begin), Code: cmd.ProcessState.ExitCode()}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		d.tb.Fatalf("run the CLI: %v", err)
	}
	return r
}

// Must runs the CLI, demands exit code 0 and returns its standard output
// without the last newline.
func (d *Daemon) Must(args ...string) string {
	d.tb.Helper()
	r := d.CLI(args...)
	if r.Code != 0 {
		d.tb.Fatalf("cloche %s: exit code %d\nstdout: %s\nstderr: %s\ndaemon: %s", strings.Join(args, " "), r.Code, r.Stdout, r.Stderr, d.Log())
	}
	return strings.TrimSuffix(r.Stdout, "\n")
}
