package node

import (
	"reflect"
	"testing"

	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

func (r *rig) checkpoint(id string) sandbox.SnapshotStatus {
	r.t.Helper()
	st, err := r.n.CheckpointMachine(background, snap(id, 1, sandbox.SnapshotDisk))
	r.must(err)
	return st
}

func TestACheckpointIsTakenWhenSomethingMayHaveChanged(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	id := req.Sandbox
	step := func(what string, unchanged bool) sandbox.SnapshotStatus {
		t.Helper()
		st := r.checkpoint(id)
		if st.Unchanged != unchanged {
			t.Errorf("%s: %+v", what, st)
		}
		if got := len(r.files()) > 0 && !unchanged; !unchanged && !got {
			t.Errorf("%s: no files", what)
		}
		return st
	}
	step("the first", false)
	step("nothing happened", true)
	if _, err := r.n.Client(background, id); err != nil {
		t.Fatal(err)
	}
	step("somebody looked", true)
	r.write(id, "/a")
	step("a directory was made", false)
	last := step("nothing happened", true)
	if last.SizeBytes != 0 {
		t.Errorf("an unchanged one has %d bytes", last.SizeBytes)
	}

	r.h.start(id)
	step("a session runs", false)
	step("it runs still", false)
	r.must(r.h.Terminate(background, id, 0))
	step("it ended since", false)
	step("nothing happened", true)

	m := r.d.machine(id)
	m.mu.Lock()
	m.others = 1
	m.mu.Unlock()
	step("something runs in the guest", false)
	m.mu.Lock()
	m.others = 0
	m.mu.Unlock()
	step("it ended since", false)
	step("nothing happened", true)

	_, conn, err := r.n.Extra(background, id)
	r.must(err)
	step("a transfer is under way", false)
	step("it is still", false)
	_ = conn.Close()
	step("it ended since", false)
	step("nothing happened", true)

	r.restart()
	step("nobody knows", false)
	step("nothing happened", true)
	ids, err := r.n.ListSnapshots(background)
	r.must(err)
	for _, s := range ids { // control could not note it, and throws it away
		r.must(r.n.DeleteSnapshot(background, s))
	}
	step("the last one is gone", false)
}

func TestACheckpointGivesWay(t *testing.T) {
	r := newRig(t)
	req := request(1)
	r.create(req)
	id := req.Sandbox
	r.d.block, r.d.begun = make(chan struct{}), make(chan struct{})
	failed := make(chan error, 1)
	go func() {
		_, err := r.n.CheckpointMachine(background, snap(id, 1, sandbox.SnapshotDisk))
		failed <- err
	}()
	<-r.d.begun
	if _, err := r.n.CheckpointMachine(background, snap(id, 1, sandbox.SnapshotDisk)); code(err) != "superseded" {
		t.Errorf("a second checkpoint: %v", err)
	}
	r.must(r.n.PauseMachine(background, id, 1)) // of the same generation
	if err := <-failed; code(err) != "superseded" || !sandbox.IsClass(err, sandbox.Unavailable) {
		t.Errorf("the checkpoint answered %v", err)
	}
	if files := r.files(); len(files) != 0 {
		t.Errorf("left %v", files)
	}
	if _, err := r.n.CheckpointMachine(background, snap(id, 1, sandbox.SnapshotDisk)); code(err) != "paused" {
		t.Errorf("a checkpoint of a paused machine: %v", err)
	}
	r.d.block, r.d.begun = make(chan struct{}), make(chan struct{})
	go func() {
		_, err := r.n.SnapshotMachine(background, snap(id, 2, sandbox.SnapshotDisk))
		failed <- err
	}()
	<-r.d.begun
	if _, err := r.n.CheckpointMachine(background, snap(id, 2, sandbox.SnapshotDisk)); code(err) != "superseded" {
		t.Errorf("a checkpoint beside a verb: %v", err)
	}
	close(r.d.block)
	r.must(<-failed)
	r.d.block = nil
	q := snap(id, 2, sandbox.SnapshotDisk)
	q.Hold = true
	r.snapshot(q)
	if _, err := r.n.CheckpointMachine(background, snap(id, 2, sandbox.SnapshotDisk)); code(err) != "superseded" {
		t.Errorf("a checkpoint of a machine that is held: %v", err)
	}
	if loadWish(r.n.dir(id)).Held != q.Snapshot {
		t.Error("the checkpoint let go of it")
	}
	if _, err := r.n.CheckpointMachine(background, snap(id, 2, sandbox.SnapshotMemory)); code(err) != "bad_kind" {
		t.Errorf("a checkpoint of memory: %v", err)
	}
}

// TestEveryCallOfTheGuestIsClassified makes whoever adds one say whether it may
// change the guest's disk without a session or an extra connection.
func TestEveryCallOfTheGuestIsClassified(t *testing.T) {
	counts := map[string]bool{
		"Setup": false, "OpenExtra": false, "Start": true, "Follow": false, "Ack": false, "Stdin": false, "Signal": false, "Resize": false, "Sessions": false, "Sync": false, "Freeze": false,
		"Stat": false, "List": false, "Mkdir": true, "Move": true, "Remove": true,
		"Read": false, "Write": false, "TarOut": false, "TarIn": false, "Tunnel": false, // on extra connections only
	}
	api := reflect.TypeFor[guestv1connect.GuestClient]()
	for i := range api.NumMethod() {
		if _, ok := counts[api.Method(i).Name]; !ok {
			t.Errorf("may %s change the guest's disk? Then counted must have it", api.Method(i).Name)
		}
	}
	own := map[string]bool{}
	for _, name := range []string{"Start", "Mkdir", "Move", "Remove"} {
		own[name] = true
	}
	for name, counted := range counts {
		if counted != own[name] {
			t.Errorf("%s: counted %v", name, counted)
		}
	}
}
