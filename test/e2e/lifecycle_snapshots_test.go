package e2e

import (
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/test/harness"
)

// snapshots lists a sandbox's snapshots by id; of all where it has no id.
func (b box) snapshots() map[string]api.Snapshot {
	b.t.Helper()
	var list api.SnapshotList
	path := "/v1/snapshots?limit=1000"
	if b.id != "" {
		path += "&sandbox=" + b.id
	}
	b.want(200, &list, "GET", path, nil)
	all := map[string]api.Snapshot{}
	for _, s := range list.Items {
		all[s.Id] = s
	}
	return all
}

// TestSnapshotTree takes named snapshots on two timelines, makes sandboxes from
// them, and deletes them: parents, sizes and refusals are as documented, and
// a named snapshot outlives its sandbox.
func TestSnapshotTree(t *testing.T) {
	d := harness.Start(t)
	b := newBox(t, d, map[string]any{"env": map[string]string{"WHO": "first"}})
	b.script("echo 1 > /srv/file")
	one := b.snapshot("one", "memory")
	b.script("echo 2 > /srv/file")
	two := b.snapshot("two", "disk")
	b.rollback(one)
	if out := b.script("cat /srv/file"); out != "1" {
		t.Errorf("after a rollback to the first: %q", out)
	}
	b.refused(409, api.ClassFailedPrecondition, "DELETE", "/v1/snapshots/"+one, nil) // it is the recovery point
	b.script("echo 3 > /srv/file")
	three := b.snapshot("three", "memory")

	tree := b.snapshots()
	for id, want := range map[string][3]string{one: {"one", "", "memory"}, two: {"two", one, "disk"}, three: {"three", one, "memory"}} {
		s := tree[id]
		if s.Name != want[0] || s.Parent != want[1] || string(s.Kind) != want[2] || s.State != api.SnapshotReady || s.SizeBytes <= 0 || s.TakenAt.IsZero() ||
			s.Purpose != "named" || s.Sandbox != b.id || s.Needs == nil || s.Needs.Driver != "gvisor" {
			t.Errorf("snapshot %s: %+v", want[0], s)
		}
	}
	if got := b.get(); got.Base != three || got.RecoveryPoint == nil || got.RecoveryPoint.Snapshot != three || got.RecoveryPoint.At.IsZero() {
		t.Errorf("the sandbox: base %s, recovery point %+v", got.Base, got.RecoveryPoint)
	}
	t.Logf("sizes: memory %d KiB, disk %d KiB", tree[one].SizeBytes>>10, tree[two].SizeBytes>>10)

	for id, want := range map[string]string{one: "1", two: "2", three: "3"} {
		k := newBox(t, d, map[string]any{"snapshot": id, "env": map[string]string{"WHO": "child"}})
		if out := k.script("cat /srv/file; echo $WHO"); out != want+"\nchild" {
			t.Errorf("a sandbox made from %s: %q", tree[id].Name, out)
		}
		s := k.get()
		if s.Source != id || s.Base != id {
			t.Errorf("a sandbox made from %s: %+v", tree[id].Name, s)
		}
		k.refused(409, api.ClassFailedPrecondition, "DELETE", "/v1/snapshots/"+id, nil)
		if id == two {
			four := k.snapshot("four", "disk")
			if s := k.snapshots()[four]; s.Parent != two {
				t.Errorf("the parent of the child's snapshot: %+v", s)
			}
		}
		k.verb("delete")
	}
	b.want(202, nil, "DELETE", "/v1/snapshots/"+one, nil)
	if tree = b.snapshots(); tree[two].Parent != "" || tree[three].Parent != "" || tree[one].Id != "" {
		t.Errorf("after the first was deleted: %+v", tree)
	}
	b.verb("delete")
	k := newBox(t, d, map[string]any{"snapshot": three})
	if out := k.script("cat /srv/file"); out != "3" {
		t.Errorf("a sandbox made from a snapshot whose sandbox is gone: %q", out)
	}
	k.verb("delete")
	b.id = ""
	for id := range b.snapshots() {
		b.want(202, nil, "DELETE", "/v1/snapshots/"+id, nil)
	}
	eventually(t, "the snapshots' files go", 30*time.Second, func() bool { return len(filesOf(d, "snapshots")) == 0 })
	b.refused(404, api.ClassNotFound, "GET", "/v1/snapshots/"+three, nil)
	b.refused(404, api.ClassNotFound, "POST", "/v1/sandboxes", map[string]any{"snapshot": three})
}

// TestStopKeepsTheDisk stops and starts a sandbox: the disk is kept, memory is
// not, it is another boot, and its sessions have ended.
func TestStopKeepsTheDisk(t *testing.T) {
	d := harness.Start(t)
	c := newClient(t, d, d.Key)
	b := newBox(t, d, nil)
	ids := func() []string {
		return strings.Fields(b.script("cat /etc/machine-id /proc/sys/kernel/random/boot_id; hostname; cat /run/cloche/generation"))
	}
	before := ids()
	b.script("echo kept > /srv/kept; echo gone > /dev/shm/gone")
	polite := b.start("bash", "-c", "trap 'echo bye; exit 3' TERM; echo on; while :; do sleep 0.05; done")
	rude := b.start("bash", "-c", "trap '' TERM; echo on; while :; do sleep 0.05; done")
	for _, ses := range []string{polite, rude} {
		eventually(t, "the session runs", 20*time.Second, func() bool {
			i, err := c.Session(b.id, ses).Get(t.Context())
			return err == nil && i.OffsetNext > 0
		})
	}
	begin := time.Now()
	b.done(b.do("POST", b.path("/stop?grace_seconds=2"), nil).answer(t).Operation.Id)
	t.Logf("a stop with a grace of 2 s and a session that ignores it took %.1f s", time.Since(begin).Seconds())
	if i, err := c.Session(b.id, polite).Get(t.Context()); err != nil || i.State != api.SessionExited || i.Exit == nil || i.Exit.Code != 3 {
		t.Errorf("a session that heeds SIGTERM: %+v, %v", i, err)
	}
	if i, err := c.Session(b.id, rude).Get(t.Context()); err != nil || i.State != api.SessionLost {
		t.Errorf("a session that does not: %+v, %v", i, err)
	}
	if s := b.get(); s.State != api.SandboxStopped || b.sentry() != 0 {
		t.Errorf("stopped as %+v", s)
	}
	b.verb("start")
	after := ids()
	if out := b.script("cat /srv/kept; ls /dev/shm"); out != "kept" {
		t.Errorf("after the start: %q", out)
	}
	if after[0] != before[0] || after[1] == before[1] || after[2] != before[2] || after[3] == before[3] {
		t.Errorf("machine-id, boot_id, hostname, generation were %v and are %v", before, after)
	}
	if n := b.script(`cat /proc/[0-9]*/cmdline | tr '\0' ' ' | grep -c 'echo b[y]e' || true`); n != "0" {
		t.Errorf("%s processes live on", n)
	}
}

// filesOf lists a directory of the daemon's state.
func filesOf(d *harness.Daemon, dir string) []string {
	names := slices.Collect(dirNames(d.State + "/" + dir))
	return slices.DeleteFunc(names, func(n string) bool { return n == "tmp" })
}
