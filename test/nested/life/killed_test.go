package life

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
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

// request is what a program asks of a daemon and waits for. It returns the id of
// what came of it.
type request struct {
	name string
	do   func(ctx context.Context, c *client.Client) (id string, err error)
}

// create asks for a sandbox.
var create = request{"create", func(ctx context.Context, c *client.Client) (string, error) {
	s, err := c.CreateAndWait(ctx, api.CreateSandboxRequest{
		Template: "box", Resources: api.ResourcesRequest{MemoryMib: 128, DiskMib: 32, MilliCpu: 1000},
	}, nil)
	return s.Id, err
}}

// snapshotOf asks for a memory snapshot.
func snapshotOf(id string) request {
	return request{"snapshot", func(ctx context.Context, c *client.Client) (string, error) {
		a, err := c.TakeSnapshot(ctx, id, api.SnapshotRequest{})
		if err == nil {
			_, err = c.Wait(ctx, a.Operation.Id, nil)
		}
		return a.Snapshot.Id, err
	}}
}

// verb asks for one of a sandbox's verbs.
func verb(name, id string, ask func(*client.Client, context.Context, string) (api.AcceptedSandbox, error)) request {
	return request{name, func(ctx context.Context, c *client.Client) (string, error) {
		a, err := ask(c, ctx, id)
		if err == nil {
			_, err = c.Wait(ctx, a.Operation.Id, nil)
		}
		return id, err
	}}
}

// client reaches whatever daemon there is, and waits for one as long as starting
// it takes in here.
func (h *host) client() *client.Client {
	h.t.Helper()
	key, err := os.ReadFile(filepath.Join(h.state(), "admin.key"))
	if err != nil {
		h.t.Fatal(err)
	}
	c, err := client.New(client.Options{URL: url, Key: strings.TrimSpace(string(key)), Retry: 2 * time.Minute})
	if err != nil {
		h.t.Fatal(err)
	}
	return c
}

// steps returns the failpoints that a daemon passes while it does what it is asked
// for, in the order in which they come first, and what came of that.
func (h *host) steps(r request) (steps []string, id string) {
	h.t.Helper()
	file := filepath.Join(h.dir, "hits")
	d := h.serve(failpoint.EnvHits + "=" + file)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		h.t.Fatal(err)
	}
	id, err := r.do(h.ctx, h.client())
	if err != nil {
		h.t.Fatal(err)
	}
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
	h.t.Logf("%s passes %d steps: %v", r.name, len(steps), steps)
	if len(steps) == 0 {
		h.t.Fatal("no daemon with failpoints runs here")
	}
	return steps, id
}

// met bounds the wait for a step that comes after the answer.
const met = 30 * time.Second

// killed asks a daemon that kills itself at a step. Another one follows at once,
// which goes on, and what was asked for must be done as if nothing had been.
func (h *host) killed(step string, r request) (id string, next *daemon) {
	h.t.Helper()
	began := time.Now()
	d := h.serve(failpoint.EnvKill + "=" + step)
	c, answered := h.client(), make(chan error, 1)
	go func() {
		var err error
		id, err = r.do(h.ctx, c)
		answered <- err
	}()
	var err error
	select {
	case <-d.ended:
		next = h.serve()
		err = <-answered
	case err = <-answered:
		select {
		case <-d.ended:
		case <-time.After(met):
			h.t.Errorf("%s: %s was not met again", r.name, step)
			_ = d.cmd.Process.Kill()
			<-d.ended
		}
		next = h.serve()
	}
	if err != nil {
		h.t.Fatalf("%s, killed at %s: %v", r.name, step, err)
	}
	h.t.Logf("%s, killed at %s: done after %v", r.name, step, time.Since(began).Round(time.Second/10))
	return id, next
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
	dirs := []string{h.run(), "/sys/fs/cgroup"} // one that isn't there has no trace
	for _, name := range []string{"machines", "firecracker", "net", "snapshots"} {
		dirs = append(dirs, filepath.Join(h.state(), name))
	}
	left, err := drivertest.Traces(id, []string{id, strings.ReplaceAll(id, "_", "-")}, dirs...)
	if err != nil || len(left) > 0 {
		h.t.Errorf("killed at %s: left are %q, %v", step, left, err)
	}
}

// TestFirecrackerKilled kills the daemon at each step of create, snapshot,
// suspend and restore. The command that was waiting for it succeeds, what the
// sandbox had is there, and no machine is left over.
func TestFirecrackerKilled(t *testing.T) {
	if os.Getenv("CLOCHE_TEST_FAULTS") == "" {
		t.Skip("SKIP: this is not the build of cloche that can be killed at its failpoints: run `make e2e-firecracker`")
	}
	h := newHost(t, 55*time.Minute) // of the hour that the suite has
	defer h.tellLog()
	h.putKernel()
	d := h.serve()
	h.cloche("template", "build", "box", "--tar", rootfs(t))
	d.stop()

	steps, id := h.steps(create)
	for _, step := range steps {
		id, d := h.killed(step, create)
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
	steps, old := h.steps(snapshotOf(id))
	for _, step := range steps {
		snapshot, d := h.killed(step, snapshotOf(id))
		h.machines(step, 1)
		goesOn(step)
		h.cloche("snapshot", "rm", old) // there is no room for all
		old = snapshot
		d.stop()
	}
	suspend, restore := verb("suspend", id, (*client.Client).Suspend), verb("restore", id, (*client.Client).Restore)
	down, _ := h.steps(suspend)
	up, _ := h.steps(restore)
	for i := range max(len(down), len(up)) {
		step := down[min(i, len(down)-1)]
		_, d := h.killed(step, suspend)
		h.machines(step, 0)
		d.stop()
		step = up[min(i, len(up)-1)]
		_, d = h.killed(step, restore)
		h.machines(step, 1)
		goesOn(step)
		d.stop()
	}
	d = h.serve()
	h.removed("the end", id, 0)
	d.stop()
}
