package node

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// keeper is a driver whose machines' disks outlive them.
type keeper struct {
	*fakeDriver
	salvages, halts atomic.Int64
	broken          atomic.Bool // adoption fails
}

var _ driver.Salvager = (*keeper)(nil)

func (k *keeper) Adopt(ctx context.Context, id string) (driver.Machine, error) {
	if k.broken.Load() {
		return nil, errors.New("it does not answer")
	}
	return k.fakeDriver.Adopt(ctx, id)
}

func (k *keeper) Halt(_ context.Context, id string) error {
	k.halts.Add(1)
	if m := k.machine(id); m != nil {
		m.end(sandbox.EndKilled)
	}
	return nil
}

func (k *keeper) Salvage(_ context.Context, id, dir string) (driver.Image, error) {
	k.salvages.Add(1)
	m := k.machine(id)
	switch {
	case m == nil:
		return driver.Image{}, sandbox.Errorf(sandbox.NotFound, "machine_not_found", "nothing is left")
	case k.failing("salvage") != nil:
		return driver.Image{}, errors.New("it can't be read")
	}
	select {
	case <-m.exited:
	default:
		return driver.Image{}, sandbox.Errorf(sandbox.FailedPrecondition, "machine_lives", "it lives")
	}
	data, err := json.Marshal(fakeImage{Disk: m.look().Disk})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "image"), data, 0o600)
	}
	return driver.Image{Dir: dir, Kind: sandbox.SnapshotDisk, Needs: sandbox.Needs{Driver: "fake"}}, err
}

func withKeeper(t *testing.T) (*rig, *keeper) {
	r := newRig(t)
	k := &keeper{fakeDriver: r.d}
	r.more = func(o *Options) { o.Drivers = []driver.Driver{k} }
	r.restart()
	return r, k
}

// ended waits until the node knows that a sandbox's machine has ended.
func (r *rig) ended(id string) sandbox.End {
	r.t.Helper()
	for range 5000 {
		if st := r.n.statusOf(r.n.known(id)); st.End != nil {
			return *st.End
		}
		time.Sleep(time.Millisecond)
	}
	r.t.Fatal("the machine never ends")
	return sandbox.End{}
}

func TestTheDiskOfAMachineThatEndedIsSavedAndGoneOnFrom(t *testing.T) {
	r, k := withKeeper(t)
	req := request(1)
	id := req.Sandbox
	r.create(req)
	r.write(id, "/a")
	disk := snap(id, 2, sandbox.SnapshotDisk)
	r.d.machine(id).end(sandbox.EndOOM)
	end := r.ended(id)
	memory := snap(id, 2, sandbox.SnapshotMemory)
	if _, err := r.n.SnapshotMachine(background, memory); code(err) != "no_machine" {
		t.Errorf("its memory: %v", err)
	}
	k.fails["salvage"] = errors.New("once")
	if _, err := r.n.SnapshotMachine(background, disk); err == nil || code(err) == "no_machine" {
		t.Errorf("a disk that can't be read: %v", err)
	}
	if len(r.files()) > 0 {
		t.Errorf("a failure left %v", r.files())
	}
	st := r.snapshot(disk)
	if st.Snapshot != disk.Snapshot || st.Unchanged || st.Kind != sandbox.SnapshotDisk || st.TakenAt.IsZero() {
		t.Errorf("%+v", st)
	}
	r.restart()
	if again := r.snapshot(disk); again.Snapshot != st.Snapshot || k.salvages.Load() != 2 {
		t.Errorf("asked again: %+v, salvaged %d times", again, k.salvages.Load())
	}
	check := snap(id, 2, sandbox.SnapshotDisk)
	if st, err := r.n.CheckpointMachine(background, check); err != nil || !st.TakenAt.Equal(end.At) {
		t.Errorf("as a checkpoint, after a restart: %+v %v", st, err)
	}
	req.Generation, req.Source = 3, &sandbox.Source{Snapshot: disk.Snapshot, Kind: sandbox.SnapshotDisk}
	r.create(req)
	if got := r.d.machine(id).look().Disk; !slices.Contains(got, "/a") {
		t.Errorf("it goes on with %v", got)
	}
	if st := r.snapshot(snap(id, 4, sandbox.SnapshotDisk)); st.TakenAt.IsZero() || k.salvages.Load() != 3 {
		t.Errorf("a machine that lives was salvaged: %+v", st)
	}
}

func TestAMachineThatCannotBeAdoptedKeepsItsDisk(t *testing.T) {
	r, k := withKeeper(t)
	req := request(1)
	id := req.Sandbox
	r.create(req)
	r.write(id, "/a")
	k.broken.Store(true)
	r.restart()
	if k.halts.Load() == 0 || !r.d.has(id) || r.n.known(id).journal.End == nil {
		t.Errorf("halted %d times, kept %v", k.halts.Load(), r.d.has(id))
	}
	if _, err := r.n.SnapshotMachine(background, snap(id, 2, sandbox.SnapshotDisk)); err != nil {
		t.Error(err)
	}
	r.must(r.n.DeleteMachine(background, id, 3))
	r.nothingOf(id)
	gone := snap(id, 4, sandbox.SnapshotDisk)
	if _, err := r.n.SnapshotMachine(background, gone); code(err) != "no_machine" {
		t.Errorf("of nothing: %v", err)
	}
}
