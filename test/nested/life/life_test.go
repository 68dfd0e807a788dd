// Package life runs the whole of Cloche in L1: the built binary installs a real
// Firecracker and a kernel, serves, and takes one sandbox through its life. It
// has one test only, which skips outside of L1.
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

// sh runs a line in a sandbox.
func (h *host) sh(id, line string) string {
	h.t.Helper()
	return h.cloche("exec", id, "--", "/bin/sh", "-c", line)
}

// serve starts the daemon; the function that it returns ends it.
func (h *host) serve() (stop func()) {
	h.t.Helper()
	log, err := os.Create(filepath.Join(h.dir, "log"))
	if err != nil {
		h.t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(nested.Prebuilt, "cloche"), "serve", "--state-dir", h.state(), "--run-dir", filepath.Join(h.dir, "run"),
		"--driver", "firecracker", "--allow-vulnerable", "1.12.1", "--disk-floor", "16", "--memory-overcommit", "0", "--log-format", "text")
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		h.t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	h.t.Cleanup(func() {
		_ = cmd.Process.Kill() // unless it has ended
		if said, err := os.ReadFile(log.Name()); err == nil && h.t.Failed() {
			h.t.Logf("the daemon said: %s", said)
		}
	})
	for {
		if resp, err := http.Get(url + "/healthz"); err == nil { //nolint:noctx // it answers at once or not at all
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				break
			}
		}
		select {
		case err := <-ended:
			h.t.Fatalf("the daemon ended: %v", err)
		case <-h.ctx.Done():
			h.t.Fatal("the daemon is not ready")
		case <-time.After(100 * time.Millisecond):
		}
	}
	return func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := <-ended; err != nil {
			h.t.Errorf("the daemon ended with %v", err)
		}
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
	if os.Getenv("CLOCHE_NESTED") == "" {
		t.Skip("SKIP: this is not L1: run `make e2e-firecracker`")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	h := &host{t: t, dir: t.TempDir(), ctx: ctx}
	h.cloche("firecracker", "install", "--allow-vulnerable", "--firecracker", nested.Prebuilt+"/firecracker", "--jailer", nested.Prebuilt+"/jailer")
	install := []string{"kernel", "install"}
	debs, err := filepath.Glob(nested.Prebuilt + "/kernel-*.deb")
	if err != nil || len(debs) == 0 {
		t.Fatalf("the kernel's packages: %v, %v", debs, err)
	}
	for _, deb := range debs {
		install = append(install, "--package", deb)
	}
	h.cloche(install...)
	stop := h.serve()
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
	h.sh(id, "head -c 1000000 /dev/urandom >/root/file; (i=0; while :; do i=$((i+1)); echo $i >/tmp/n.new && mv /tmp/n.new /tmp/n; done) >/dev/null 2>&1 & sleep 1; true")
	hash := h.sh(id, "sha256sum /root/file")
	count := func(id string) int {
		t.Helper()
		n, err := strconv.Atoi(h.sh(id, "cat /tmp/n"))
		if err != nil {
			t.Errorf("the counter: %v", err)
		}
		return n
	}
	before := count(id)
	h.cloche("suspend", id)
	h.cloche("restore", id)
	if after := count(id); after <= before {
		t.Errorf("the counter was %d before, and is %d after", before, after)
	}
	names := map[string]bool{}
	for _, child := range append(strings.Fields(h.cloche("fork", "--count", "2", id)), id) {
		if now := h.sh(child, "sha256sum /root/file"); now != hash {
			t.Errorf("the file of %s is %s, and was %s", child, now, hash)
		}
		if n := count(child); n <= before {
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
	stop()
	if vms, err := exec.Command("pidof", "firecracker").Output(); err == nil {
		t.Errorf("VMMs are left: %s", vms)
	}
}
