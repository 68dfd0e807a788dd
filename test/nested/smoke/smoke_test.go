// Package smoke is what the first L1 of a run proves: that the machine is what
// the other suites take it for, and that the real Firecracker boots a guest to
// its user space in it. It has tests only, and they skip outside of L1.
package smoke

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/test/nested"
)

func inL1(t *testing.T) {
	t.Helper()
	if os.Getenv("CLOCHE_NESTED") == "" {
		t.Skip("SKIP: this is not L1: run `make e2e-firecracker`")
	}
}

// TestL1 looks for what drivers need of their host.
func TestL1(t *testing.T) {
	inL1(t)
	if st, err := os.Stat("/dev/kvm"); err != nil || st.Mode()&os.ModeDevice == 0 {
		t.Errorf("/dev/kvm: %v", err)
	}
	have, err := os.ReadFile("/sys/fs/cgroup/cgroup.subtree_control")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []string{"cpu", "memory", "pids"} {
		if !strings.Contains(" "+string(have), " "+c) {
			t.Errorf("the cgroup controller %s is not there: %q", c, have)
		}
	}
	dir := t.TempDir()
	link := filepath.Join(dir, "vmlinux")
	if err := os.Link(filepath.Join(nested.Prebuilt, "vmlinux"), link); err != nil {
		t.Errorf("a hard link from %s to the temporary directory: %v", nested.Prebuilt, err)
	}
	sparse := filepath.Join(dir, "sparse")
	if err := errors.Join(os.WriteFile(sparse, nil, 0o600), os.Truncate(sparse, 1<<34)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", sparse, "64M").CombinedOutput(); err != nil {
		t.Errorf("mkfs.ext4: %v: %s", err, out)
	}
	st, err := os.Stat(sparse)
	if err != nil {
		t.Fatal(err)
	}
	if blocks := st.Sys().(*syscall.Stat_t).Blocks; blocks > 1<<18 {
		t.Errorf("a sparse file takes %d blocks", blocks)
	}
}

const words = "user space was reached"

// TestFirecrackerReachesUserSpace boots a guest without Cloche: the VMM without
// a jail, the pinned kernel, and an initial file system whose PID 1 prints to
// the serial console.
func TestFirecrackerReachesUserSpace(t *testing.T) {
	inL1(t)
	dir := t.TempDir()
	initrd, err := os.Create(filepath.Join(dir, "initrd"))
	if err != nil {
		t.Fatal(err)
	}
	err = nested.WriteInitramfs(initrd, nested.Tree{
		"bin/busybox": {Mode: 0o755, Host: "/bin/busybox"},
		"init": {Mode: 0o755, Data: "#!/bin/busybox sh\n/bin/busybox mkdir /dev\n/bin/busybox mount -t devtmpfs dev /dev\n" +
			"echo " + words + " >/dev/ttyS0\n/bin/busybox reboot -f\n"},
	})
	if err := errors.Join(err, initrd.Close()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	vm := exec.CommandContext(ctx, filepath.Join(nested.Prebuilt, "firecracker"), "--api-sock", filepath.Join(dir, "api"))
	stdout, err := vm.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var console bytes.Buffer
	begun := time.Now()
	if err := vm.Start(); err != nil {
		t.Fatal(err)
	}
	put := api(ctx, t, filepath.Join(dir, "api"))
	put("machine-config", `{"vcpu_count":1,"mem_size_mib":256}`)
	put("boot-source", `{"kernel_image_path":"`+nested.Prebuilt+`/vmlinux","initrd_path":"`+initrd.Name()+
		`","boot_args":"console=ttyS0 reboot=t panic=-1 quiet"}`)
	put("actions", `{"action_type":"InstanceStart"}`)
	started := time.Now()
	reached := false
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		console.WriteString(lines.Text() + "\n")
		if strings.Contains(lines.Text(), words) {
			reached = true
			t.Logf("user space after %v, %v of it since InstanceStart was answered",
				time.Since(begun).Round(time.Millisecond), time.Since(started).Round(time.Millisecond))
		}
	}
	if err := vm.Wait(); err != nil {
		t.Errorf("firecracker: %v", err)
	}
	if !reached {
		t.Errorf("the guest's console:\n%s", &console)
	}
}

// api waits for the VMM's socket and returns a PUT that must succeed.
func api(ctx context.Context, t *testing.T, socket string) func(path, body string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		for {
			conn, err := d.DialContext(ctx, "unix", socket)
			if err == nil || ctx.Err() != nil {
				return conn, err
			}
			time.Sleep(10 * time.Millisecond) // the VMM makes it when it is ready
		}
	}}}
	t.Cleanup(client.CloseIdleConnections)
	return func(path, body string) {
		t.Helper()
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://vmm/"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatalf("PUT %s: %v", path, err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusNoContent {
			var said bytes.Buffer
			_, _ = said.ReadFrom(resp.Body)
			t.Fatalf("PUT %s: %s: %s", path, resp.Status, said.String())
		}
	}
}
