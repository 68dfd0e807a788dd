package chaos

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/api"
)

// TestAReadOnlyDisk lets the kernel take the disk under the daemon for broken,
// as it does after errors: it then takes no writes. What is asked is answered
// with an ordinary error, reading goes on, a daemon that starts on it says
// why it can't, and when the disk is well again nothing is lost.
func TestAReadOnlyDisk(t *testing.T) {
	w := newWorld(t, settings{}, 8<<30)
	w.disk.settle(t) // what the seed was unpacked to; the daemon syncs for itself
	k := &worker{world: w, rnd: newRand(seedOf(t), 0)}
	kept := map[string]string{}
	for verb, state := range map[string]string{"suspend": "suspended", "stop": "stopped"} {
		id := w.d.Must("create", "base")
		w.d.Must("exec", "-u", "root", id, "--", "sh", "-c", "echo "+verb+" > /var/tmp/kept")
		k.demand(t, id, verb)
		kept[id] = state
	}

	w.disk.abort(t)
	for id, state := range kept {
		if s, err := w.row(id); err != nil || string(s.State) != state {
			t.Errorf("reading %s from a read-only disk: %s, %v", id, s.State, err)
		}
		for _, verb := range []string{"wake", "rollback"} {
			k.refusedByDisk(t, "/v1/sandboxes/"+id+"/"+verb)
		}
	}
	k.refusedByDisk(t, "/v1/sandboxes")

	w.d.Kill9()
	if err := w.d.TryServe(); err == nil {
		t.Log("the daemon starts on a read-only disk")
		w.d.Kill9()
	} else if how := w.d.How(); !strings.HasPrefix(how, "exit status ") || how == "exit status 2" { // 2 is a panic's
		t.Errorf("on a read-only disk the daemon ends as %q: %v", how, err)
	}
	for _, p := range w.d.ControlProcesses() { // it runs from a file on that disk
		if pid, err := strconv.Atoi(p); err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	w.disk.repair(t)
	w.d.Serve()
	for id := range kept {
		k.demand(t, id, "wake")
		if got := w.d.Must("exec", "-u", "root", id, "--", "cat", "/var/tmp/kept"); kept[id] == "suspended" && got != "suspend" || kept[id] == "stopped" && got != "stop" {
			t.Errorf("%s was %s, and its file holds %q", id, kept[id], got)
		}
	}
}

// demand asks a sandbox for a verb, and demands its success.
func (k *worker) demand(t *testing.T, id, verb string) {
	t.Helper()
	var ans accept
	if r, _, err := k.ask(k.rnd, "POST", "/v1/sandboxes/"+id+"/"+verb, nil, &ans); r != nil || err != nil {
		t.Fatal(verb, r, err)
	}
	if op, err := k.wait(ans.Operation.Id); err != nil || op.State != api.OperationSucceeded {
		t.Fatalf("the %s ended as %s: %v", verb, outcome(op), err)
	}
}

// refusedByDisk posts and demands an error that says that a later try may help,
// or what the request itself lacks; never one that calls it Cloche's fault.
func (k *worker) refusedByDisk(t *testing.T, path string) {
	t.Helper()
	var body any
	switch path {
	case "/v1/sandboxes":
		body = api.CreateSandboxRequest{Template: "base"}
	default:
		if path[len(path)-8:] == "rollback" {
			body = api.RollbackRequest{Snapshot: "snp_aaaaaaaaaaaaaaaaaaaa"}
		}
	}
	_, r, err := k.once("POST", path, "read-only-"+path[len(path)-6:], body)
	switch {
	case err != nil:
		t.Errorf("%s on a read-only disk: %v", path, err)
	case r == nil:
		t.Errorf("%s was accepted on a read-only disk", path)
	case r.Class == api.ClassInternal:
		t.Errorf("%s on a read-only disk: %s", path, r)
	default:
		t.Logf("%s on a read-only disk: %s", path, r)
	}
}

// abort makes the filesystem take no writes any more, as after an error.
func (d *disk) abort(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("mount", "-o", "remount,abort", d.dir).CombinedOutput(); err != nil {
		t.Skipf("SKIP: NOT CHECKED: the kernel can't give the disk up: %v %s", err, out)
	}
}

// settle writes all that is cached to the disk.
func (d *disk) settle(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("sync", "-f", d.dir).CombinedOutput(); err != nil {
		t.Fatalf("sync: %v %s", err, out)
	}
}

// repair checks the filesystem and mounts it again.
func (d *disk) repair(t *testing.T) {
	t.Helper()
	var out []byte
	var err error
	for range 100 { // killed processes let go of it in their own time
		if out, err = exec.Command("umount", d.dir).CombinedOutput(); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		t.Fatalf("umount: %v %s", err, out)
	}
	_ = exec.Command("fsck.ext4", "-y", d.img).Run() // it says by its exit code that it repaired
	if out, err := exec.Command("mount", "-o", "loop", d.img, d.dir).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v %s", err, out)
	}
}
