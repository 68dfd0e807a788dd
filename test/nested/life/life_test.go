// Package life runs the whole of Cloche in L1, with a real Firecracker: as it was
// built, through one sandbox's life, and the build that can be killed at its
// failpoints. Its tests skip outside of L1.
package life

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/test/nested"
)

const url = "http://127.0.0.1:7070"

// host is an L1 on which Cloche is used.
type host struct {
	t   *testing.T
	dir string
	ctx context.Context
}

// newHost is an L1 for one test, which is skipped where there is none.
func newHost(t *testing.T, patience time.Duration) *host {
	t.Helper()
	if os.Getenv("CLOCHE_NESTED") == "" {
		t.Skip("SKIP: this is not L1: run `make e2e-firecracker`")
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	dir, err := os.MkdirTemp("", "host-") // it goes with L1: what a failed test left mounted there can't be removed
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, dir: dir, ctx: ctx}
	h.cloche("firecracker", "install", "--allow-vulnerable", "--firecracker", nested.Prebuilt+"/firecracker", "--jailer", nested.Prebuilt+"/jailer")
	return h
}

// cloche runs the command line and returns what it prints.
func (h *host) cloche(args ...string) string {
	h.t.Helper()
	began := time.Now()
	cmd := exec.CommandContext(h.ctx, filepath.Join(nested.Prebuilt, "cloche"), append([]string{"--state-dir", h.state(), "--url", url, "-q"}, args...)...)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		h.t.Fatalf("cloche %q: %v: %s%s", args, err, out, errs.Bytes())
	}
	h.t.Logf("%v: cloche %s", time.Since(began).Round(10*time.Millisecond), strings.Join(args[:min(len(args), 4)], " "))
	return strings.TrimSpace(string(out))
}

func (h *host) state() string { return filepath.Join(h.dir, "state") }
func (h *host) run() string   { return filepath.Join(h.dir, "run") }

// sh runs a line in a sandbox.
func (h *host) sh(id, line string) string {
	h.t.Helper()
	return h.cloche("exec", id, "--", "/bin/sh", "-c", line)
}

// count is where the loop stands that begin began in a sandbox.
func (h *host) count(id string) int {
	h.t.Helper()
	n, err := strconv.Atoi(h.sh(id, "cat /tmp/n"))
	if err != nil {
		h.t.Errorf("the counter: %v", err)
	}
	return n
}

// begin begins a loop that counts.
func (h *host) begin(id string) {
	h.sh(id, "(i=0; while :; do i=$((i+1)); echo $i >/tmp/n.new && mv /tmp/n.new /tmp/n; done) >/dev/null 2>&1 & sleep 1; true")
}

// vms lists the processes of all VMMs.
func (h *host) vms() []string {
	out, err := exec.Command("pidof", "firecracker").Output()
	if err != nil {
		return nil
	}
	return strings.Fields(string(out))
}

// daemon is one that runs.
type daemon struct {
	h     *host
	cmd   *exec.Cmd
	ended chan struct{} // closed when it has
	err   error         // how, after that
}

// serve starts a daemon and waits until it is ready. All of a host write one log.
func (h *host) serve(env ...string) *daemon {
	h.t.Helper()
	log, err := os.OpenFile(filepath.Join(h.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		h.t.Fatal(err)
	}
	defer log.Close()
	// Its files' modes are cut as by the unit that `cloche service install` writes.
	cmd := exec.Command("/bin/sh", "-c", `umask 077; exec "$0" "$@"`, filepath.Join(nested.Prebuilt, "cloche"), "serve", "--state-dir", h.state(), "--run-dir", h.run(),
		"--driver", "firecracker", "--allow-vulnerable", "1.12.1", "--disk-floor", "16", "--memory-overcommit", "0", "--log-format", "text")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), env...)
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	d := &daemon{h: h, cmd: cmd, ended: make(chan struct{})}
	go func() {
		d.err = cmd.Wait()
		close(d.ended)
	}()
	h.t.Cleanup(func() { _ = cmd.Process.Kill() }) // unless it has ended
	for {
		if resp, err := http.Get(url + "/healthz"); err == nil { //nolint:noctx // it answers at once or not at all
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				break
			}
		}
		select {
		case <-d.ended:
			h.t.Fatalf("the daemon ended: %v", d.err)
		case <-h.ctx.Done():
			h.t.Fatal("the daemon is not ready")
		case <-time.After(100 * time.Millisecond):
		}
	}
	return d
}

// stop ends a daemon as an administrator does.
func (d *daemon) stop() {
	d.h.t.Helper()
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	if <-d.ended; d.err != nil {
		d.h.t.Errorf("the daemon ended with %v", d.err)
	}
}

// tellLog shows what the daemons said, if the test has failed.
func (h *host) tellLog() {
	if said, err := os.ReadFile(filepath.Join(h.dir, "log")); err == nil && h.t.Failed() {
		h.t.Logf("the daemons said: %s", said)
	}
}

// rootfs is a root filesystem of busybox alone.
func rootfs(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	program, err := os.ReadFile("/bin/busybox")
	for _, dir := range []string{"bin", "etc", "tmp", "root"} {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}))
	}
	for name, content := range map[string]string{"bin/busybox": string(program), "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n", "etc/group": "root:x:0:\n"} {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: int64(len(content))}))
		if err == nil {
			_, err = io.WriteString(w, content)
		}
	}
	for _, name := range []string{"sh", "cat", "sleep", "hostname", "sync", "sha256sum", "head"} {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: "busybox"}))
	}
	file := filepath.Join(t.TempDir(), "rootfs.tar")
	if err := errors.Join(err, w.Close(), os.WriteFile(file, b.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestFirecrackerServes takes a sandbox through its life.
func TestFirecrackerServes(t *testing.T) {
	if os.Getenv("CLOCHE_TEST_FAULTS") != "" {
		t.Skip("SKIP: this is not cloche as it was built, and there is no kernel's package: run `make e2e-firecracker`")
	}
	h := newHost(t, 15*time.Minute)
	defer h.tellLog()
	install := []string{"kernel", "install"}
	debs, err := filepath.Glob(nested.Prebuilt + "/kernel-*.deb")
	if err != nil || len(debs) == 0 {
		t.Fatalf("the kernel's packages: %v, %v", debs, err)
	}
	for _, deb := range debs {
		install = append(install, "--package", deb)
	}
	h.cloche(install...)
	d := h.serve()
	h.cloche("template", "build", "box", "--tar", rootfs(t))
	id := h.cloche("create", "box", "--memory", "192MiB", "--disk", "64MiB", "--cpu", "1")
	var seen struct {
		Driver string `json:"driver"`
	}
	if err := json.Unmarshal([]byte(h.cloche("--json", "inspect", id)), &seen); err != nil || seen.Driver != "firecracker" {
		t.Errorf("it runs on %q, %v", seen.Driver, err)
	}
	if said := h.sh(id, "echo $((6 * 7))"); said != "42" {
		t.Errorf("it says %q", said)
	}
	h.begin(id)
	hash := h.sh(id, "head -c 1000000 /dev/urandom >/root/file; sha256sum /root/file")
	before := h.count(id)
	h.cloche("suspend", id)
	h.cloche("restore", id)
	if after := h.count(id); after <= before {
		t.Errorf("the counter was %d before, and is %d after", before, after)
	}
	names := map[string]bool{}
	for _, child := range append(strings.Fields(h.cloche("fork", "--count", "2", id)), id) {
		if now := h.sh(child, "sha256sum /root/file"); now != hash {
			t.Errorf("the file of %s is %s, and was %s", child, now, hash)
		}
		if n := h.count(child); n <= before {
			t.Errorf("the counter of %s is %d, and was %d", child, n, before)
		}
		names[h.sh(child, "hostname")+h.sh(child, "head -c 16 /dev/urandom | sha256sum")] = true
		h.cloche("rm", child)
	}
	if len(names) != 3 {
		t.Errorf("three machines have the names and read the bytes of %d: %v", len(names), names)
	}
	if left := h.cloche("ls"); strings.Contains(left, "sbx_") {
		t.Errorf("left are %s", left)
	}
	d.stop()
	if vms := h.vms(); len(vms) > 0 {
		t.Errorf("VMMs are left: %v", vms)
	}
}
