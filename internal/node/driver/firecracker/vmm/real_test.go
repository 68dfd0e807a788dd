package vmm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// realEnv names a directory with the files firecracker, jailer and vmlinux (an
// uncompressed kernel, which need not get anywhere: the VMM answers all the
// same where the host's KVM can't boot it).
const realEnv = "CLOCHE_FIRECRACKER"

// staleSocket is a recording of a start, not of an exchange.
const staleSocket = "stale-socket.txt"

// realDir returns the directory of realEnv, or skips the test.
func realDir(t *testing.T) string {
	t.Helper()
	dir := os.Getenv(realEnv)
	if dir == "" {
		t.Skipf("SKIP: %s is not set: it names a directory with firecracker, jailer and vmlinux", realEnv)
	}
	for _, name := range []string{Firecracker, Jailer, "vmlinux"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Skipf("SKIP: the real Firecracker's files are not all there: %v", err)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIP: needs root for a network namespace of its own")
	}
	kvm, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("SKIP: a real Firecracker needs /dev/kvm: %v", err)
	}
	kvm.Close()
	dir, err = filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// realVersion runs a program of dir with --version.
func realVersion(t *testing.T, dir, program string) string {
	t.Helper()
	out, err := exec.Command(filepath.Join(dir, program), "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	v, err := ParseVersion(program, out)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// realVMM is a Firecracker process without a jail.
type realVMM struct {
	cmd    *exec.Cmd
	socket string
	out    *bytes.Buffer
	ended  chan struct{} // closed when the process is reaped
}

// workDir makes a directory with a short path, for sockets, and the files of a
// machine in it.
func workDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "vmm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for name, size := range map[string]int64{"initrd": 4096, "template": 1 << 20, "disk": 1 << 20, "rootfs.ext4": 1 << 20} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(filepath.Join(dir, name), size); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "garbage"), []byte("not a state file"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// launch starts a VMM in dir and waits until its socket takes connections.
func launch(t *testing.T, firecracker, dir, id string) *realVMM {
	t.Helper()
	v := &realVMM{socket: filepath.Join(dir, id+".sock"), out: &bytes.Buffer{}, ended: make(chan struct{})}
	os.Remove(filepath.Join(dir, "v.sock"))
	v.cmd = exec.Command(firecracker, "--api-sock", v.socket, "--id", id)
	v.cmd.Dir, v.cmd.Stdout, v.cmd.Stderr = dir, v.out, v.out
	v.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := v.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = v.cmd.Wait()
		close(v.ended)
	}()
	t.Cleanup(v.kill)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		conn, err := net.Dial("unix", v.socket)
		if err == nil {
			conn.Close()
			return v
		}
		if time.Now().After(deadline) {
			v.kill()
			t.Fatalf("no API socket: %v; %s", err, v.out)
		}
	}
}

func (v *realVMM) kill() {
	_ = v.cmd.Process.Kill()
	<-v.ended
}

// exited waits for the process to end by itself.
func (v *realVMM) exited(t *testing.T) {
	t.Helper()
	select {
	case <-v.ended:
	case <-time.After(10 * time.Second):
		t.Errorf("the VMM lives on")
	}
}

// ask sends a request as it stands, and returns the answer, whose bytes it
// holds to how the fake frames its own.
func ask(t *testing.T, socket, method, path, body string) (status int, answer string) {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Errorf("%s %s: %v", method, path, err)
		return http.StatusTeapot, ""
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	head := fmt.Sprintf("%s %s HTTP/1.1\r\nHost: localhost\r\n", method, path)
	if body != "" {
		head += fmt.Sprintf("Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	var raw bytes.Buffer
	_, _ = io.WriteString(conn, head+"\r\n"+body)
	resp, err := http.ReadResponse(bufio.NewReader(io.TeeReader(conn, &raw)), nil)
	if err != nil {
		t.Errorf("%s %s: %v", method, path, err)
		return http.StatusTeapot, ""
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if want := frame(resp.StatusCode, string(data)); err != nil || raw.String() != want {
		t.Errorf("%s %s: the VMM's bytes are (%v)\n%q\nand the fake's would be\n%q", method, path, err, raw.String(), want)
	}
	return resp.StatusCode, string(data)
}

var column = regexp.MustCompile(`column \d+`)

// compared answers a fake's requests by a real VMM: paths and version of the
// recording become the real ones and back. Where the release is one that was
// recorded, the words must be the same, else only the status; a difference is
// an error, and the fake goes on with what was recorded.
func compared(t *testing.T, socket string, there, back *strings.Replacer, exact bool) func(exchange) (int, string) {
	return func(e exchange) (int, string) {
		status, answer := ask(t, socket, e.method, e.path, there.Replace(e.body))
		answer = back.Replace(answer)
		if status != e.status {
			t.Errorf("%s: %s:\n the real VMM says %d %s\n     recorded was %d %s", e.where, e.request(), status, answer, e.status, e.answer)
		} else if column.ReplaceAllString(answer, "") != column.ReplaceAllString(e.answer, "") {
			say := t.Errorf
			if !exact {
				say = t.Logf
			}
			say("%s: %s:\n the real VMM says %s\n     recorded was %s", e.where, e.request(), answer, e.answer)
		}
		return e.status, e.answer
	}
}

// diff finds the request whose answer differs between the recorded releases.
func diff(p process) int {
	return slices.IndexFunc(p.exchanges, func(e exchange) bool { return strings.Contains(e.body, `"Diff"`) })
}

// TestRealContract holds the recordings, and so the fake, to a real VMM: the
// same steps of the same client, answered by it.
func TestRealContract(t *testing.T) {
	bin := realDir(t)
	version := realVersion(t, bin, Firecracker)
	old, own := readRecording(t, "1.13.0.txt"), readRecording(t, "1.12.1.txt")
	if version == "1.12.1" {
		is := &old[0].exchanges[diff(old[0])]
		is.status, is.answer = own[0].exchanges[diff(own[0])].status, own[0].exchanges[diff(own[0])].answer
	}
	exact := version == "1.12.1" || version == "1.13.0"
	for file, list := range map[string][]process{"1.13.0": old, "1.12.1": own} {
		t.Run(file, func(t *testing.T) {
			if file == "1.12.1" && version != file {
				t.Skipf("SKIP: the release here is %s, and this recording says what 1.12.1 lacks", version)
			}
			dir := workDir(t)
			kernel := filepath.Join(bin, "vmlinux")
			pairs := []string{
				"/l2/vmlinux-krunfw-6.12.91", kernel, "/l2/rootfs.ext4", dir + "/rootfs.ext4", "/tmp/", dir + "/",
				// Where the kernel does boot it must stay when it finds no root.
				"panic=1", "panic=0", `"` + file + `"`, `"` + version + `"`,
			}
			if file == "1.12.1" {
				pairs = []string{"/jail/vmlinux", kernel, "/jail/", dir + "/"}
			}
			for _, p := range list {
				v := launch(t, filepath.Join(bin, Firecracker), dir, p.id)
				f := serve(t, p, compared(t, v.socket, strings.NewReplacer(pairs...), strings.NewReplacer(swapped(pairs)...), exact))
				follow(t, f, p)
				if p.exchanges[len(p.exchanges)-1].exits {
					v.exited(t)
				}
				v.kill()
			}
		})
	}
}

func swapped(pairs []string) []string {
	pairs = slices.Clone(pairs)
	for i := 0; i < len(pairs); i += 2 {
		pairs[i], pairs[i+1] = pairs[i+1], pairs[i]
	}
	return pairs
}

func TestRealStaleSocket(t *testing.T) {
	bin := realDir(t)
	data, err := os.ReadFile(filepath.Join("testdata", staleSocket))
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(data), "\n\n")
	dir := workDir(t)
	v := launch(t, filepath.Join(bin, Firecracker), dir, "p1")
	v.kill()
	if err := New(v.socket).Pause(t.Context()); !errors.Is(err, ErrGone) {
		t.Errorf("a socket that a killed VMM left: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, filepath.Join(bin, Firecracker), "--api-sock", v.socket).CombinedOutput()
	want := strings.TrimSpace(strings.ReplaceAll(line, "/tmp/p.sock", v.socket))
	if err == nil || !strings.Contains(string(out), want) {
		t.Errorf("the second start: %v\n got %s\nwant %s", err, out, want)
	}
}
