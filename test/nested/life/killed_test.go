package life

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/node/driver/drivertest"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/test/nested"
)

// putKernel installs what the nested run has unpacked already, which takes
// minutes in here.
func (h *host) putKernel() {
	h.t.Helper()
	artifacts, err := artifact.Open(filepath.Join(h.state(), "artifacts"))
	if err != nil {
		h.t.Fatal(err)
	}
	image, err := os.Open(filepath.Join(nested.Prebuilt, "vmlinux"))
	if err != nil {
		h.t.Fatal(err)
	}
	defer image.Close()
	modules, err := os.Open(filepath.Join(nested.Prebuilt, "modules"))
	if err != nil {
		h.t.Fatal(err)
	}
	defer modules.Close()
	if _, err := installed.Open(h.state(), artifacts).PutKernel(h.ctx, "prebuilt", image, modules); err != nil {
		h.t.Fatal(err)
	}
}

// steps returns the failpoints that a daemon passes while it does what the
// command line is asked for, in the order in which they come first, and what
// that prints.
func (h *host) steps(args ...string) (steps []string, out string) {
	h.t.Helper()
	file := filepath.Join(h.dir, "hits")
	d := h.serve(failpoint.EnvHits + "=" + file)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		h.t.Fatal(err)
	}
	out = h.cloche(args...)
	data, err := os.ReadFile(file)
	if err != nil {
		h.t.Fatal(err)
	}
	d.stop()
	for _, step := range strings.Fields(string(data)) {
		if !slices.Contains(steps, step) {
			steps = append(steps, step)
		}
	}
	h.t.Logf("%s passes %d steps: %v", args[0], len(steps), steps)
	return steps, out
}

// met bounds the wait for a step that comes after the answer.
const met = 5 * time.Second

// killed asks a daemon that kills itself at a step. Another one follows at once,
// which goes on, and what was asked for must be done as if nothing had been.
func (h *host) killed(step string, args ...string) (out string, next *daemon) {
	h.t.Helper()
	d := h.serve(failpoint.EnvKill + "=" + step)
	type answer struct {
		out string
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		out, err := h.try(args...)
		answered <- answer{out, err}
	}()
	var a answer
	select {
	case <-d.ended:
		next = h.serve()
		a = <-answered
	case a = <-answered:
		select {
		case <-d.ended:
		case <-time.After(met):
			h.t.Logf("%s was not met again; the daemon is killed after it", step)
			_ = d.cmd.Process.Kill()
			<-d.ended
		}
		next = h.serve()
	}
	if a.err != nil {
		h.t.Errorf("killed at %s: %v", step, a.err)
	}
	return a.out, next
}

// machines demands that there are n of them, soon.
func (h *host) machines(step string, n int) {
	h.t.Helper()
	for range 300 {
		if len(h.vms()) == n {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	h.t.Errorf("killed at %s: there are %d VMMs, not %d", step, len(h.vms()), n)
}

// removed deletes a sandbox and looks for anything of its machines; rest is how
// many those of others are.
func (h *host) removed(step, id string, rest int) {
	h.t.Helper()
	h.cloche("rm", id)
	h.machines(step, rest)
	dirs := []string{h.run(), "/sys/fs/cgroup"}
	for _, name := range []string{"machines", "firecracker", "net", "snapshots"} {
		if dir := filepath.Join(h.state(), name); exists(dir) {
			dirs = append(dirs, dir)
		}
	}
	left, err := drivertest.Traces(id, []string{id, strings.ReplaceAll(id, "_", "-")}, dirs...)
	if err != nil || len(left) > 0 {
		h.t.Errorf("killed at %s: left are %q, %v", step, left, err)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// TestFirecrackerKilled kills the daemon at each step of create, snapshot,
// suspend and restore. The command that was waiting for it succeeds, what the
// sandbox had is there, and no machine is left over.
func TestFirecrackerKilled(t *testing.T) {
	if os.Getenv("CLOCHE_TEST_FAULTS") == "" {
		t.Skip("SKIP: this is not the build of cloche that can be killed at its failpoints: run `make e2e-firecracker`")
	}
	h := newHost(t, time.Hour)
	defer h.tellLog()
	h.putKernel()
	d := h.serve()
	h.cloche("template", "build", "box", "--tar", rootfs(t))
	d.stop()

	create := []string{"create", "box", "--memory", "128MiB", "--disk", "32MiB", "--cpu", "1"}
	steps, id := h.steps(create...)
	for _, step := range steps {
		id, d := h.killed(step, create...)
		h.machines(step, 2)
		if said := h.sh(id, "echo $((6 * 7))"); said != "42" {
			t.Errorf("killed at %s: it says %q", step, said)
		}
		h.removed(step, id, 1)
		d.stop()
	}

	d = h.serve()
	h.begin(id)
	last := h.count(id)
	d.stop()
	goesOn := func(step string) {
		t.Helper()
		n := h.count(id)
		if n <= last {
			t.Errorf("killed at %s: the loop is at %d and was at %d", step, n, last)
		}
		last = n
	}
	steps, _ = h.steps("snapshot", "create", id)
	for _, step := range steps {
		snapshot, d := h.killed(step, "snapshot", "create", id)
		h.machines(step, 1)
		goesOn(step)
		h.cloche("snapshot", "rm", snapshot)
		d.stop()
	}
	suspend, _ := h.steps("suspend", id)
	restore, _ := h.steps("restore", id)
	for i := range max(len(suspend), len(restore)) {
		step := suspend[min(i, len(suspend)-1)]
		_, d := h.killed(step, "suspend", id)
		h.machines(step, 0)
		d.stop()
		step = restore[min(i, len(restore)-1)]
		_, d = h.killed(step, "restore", id)
		h.machines(step, 1)
		goesOn(step)
		d.stop()
	}
	d = h.serve()
	h.removed("the end", id, 0)
	d.stop()
}
