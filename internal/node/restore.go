package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
)

// origin is the verified snapshot that a machine is made from.
type origin struct {
	manifest *snapshot.Manifest
	image    driver.Image
}

// fromMemory tells whether a machine goes on where a snapshot's stood.
func fromMemory(req sandbox.MachineRequest) bool {
	return req.Source != nil && req.Source.Kind == sandbox.SnapshotMemory
}

// branches tells whether what lives in a machine begins a new timeline.
func branches(req sandbox.MachineRequest) bool { return fromMemory(req) && !req.Source.Continue }

// origin verifies all of a request's source that can be verified before there
// is a machine. It is nil for a machine of the template alone.
func (n *Node) origin(ctx context.Context, d driver.Driver, req sandbox.MachineRequest) (*origin, error) {
	if req.Source == nil {
		return nil, nil
	}
	man, err := n.snapshots.Verify(ctx, req.Source.Snapshot)
	if err != nil {
		return nil, err
	}
	if err := fits(man, req); err != nil {
		return nil, err
	}
	if err := d.Missing(man.Needs); err != nil {
		return nil, err
	}
	guest := n.o.Guests.Current()
	if man.Kind == sandbox.SnapshotMemory {
		guest = man.Needs.Guest
	}
	if _, _, err := n.parts(ctx, req, guest); err != nil {
		return nil, err
	}
	return &origin{manifest: man, image: driver.Image{Dir: n.snapshots.Dir(man.ID), Kind: man.Kind, Needs: man.Needs, Stood: man.Stood}}, nil
}

// fits refuses a snapshot that is whole, but not for this machine.
func fits(man *snapshot.Manifest, req sandbox.MachineRequest) error {
	id := man.ID
	foreign := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_foreign", "the snapshot %s is not for this sandbox: %w", id, fmt.Errorf(format, args...))
	}
	incompatible := func(format string, args ...any) error {
		return sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_incompatible", "the snapshot %s can't be used for this sandbox: %w", id, fmt.Errorf(format, args...))
	}
	switch {
	case man.Project != req.Project:
		return foreign("it is another project's")
	case req.Source.Continue && man.Sandbox != req.Sandbox:
		return foreign("it is another sandbox's, and can't go on as this one")
	case man.Needs.Digest != req.Digest:
		return foreign("it was taken over another template")
	case man.Kind != req.Source.Kind:
		return incompatible("it is a %s snapshot", man.Kind)
	case man.Kind == sandbox.SnapshotMemory && man.Resources != req.Resources:
		return incompatible("a memory snapshot keeps its resources")
	}
	return nil
}

// parts finds the files beside a snapshot's own that a machine is made of.
func (n *Node) parts(ctx context.Context, req sandbox.MachineRequest, guest string) (image, binary string, err error) {
	if image, err = n.o.Images.Image(ctx, req.Digest); err != nil {
		return "", "", err
	}
	binary, err = n.o.Guests.Path(guest)
	if err != nil && fromMemory(req) {
		return "", "", sandbox.Errorf(sandbox.FailedPrecondition, "needs_guest", "the snapshot needs the agent %s: %w", guest, err).
			WithHint("put the artifact back; it came with the release that took the snapshot")
	}
	return image, binary, err
}

// newJournal is the intent of a machine.
func (n *Node) newJournal(req sandbox.MachineRequest, driverName string, from *origin) *journal {
	j := &journal{
		Request: req, Driver: driverName, Guest: n.o.Guests.Current(), Key: newKey(), Epoch: uint64(max(0, req.Generation)),
		GuestBoot: bootID(req.Sandbox, req.Generation), MaxProcs: n.maxProcs(req.Resources), BootID: n.o.BootID,
	}
	if from == nil {
		return j
	}
	j.Origin = from.manifest.Sandbox
	if from.manifest.Kind == sandbox.SnapshotMemory {
		j.Guest, j.MaxProcs = from.manifest.Needs.Guest, from.manifest.MaxProcs
		if from.manifest.Sandbox == req.Sandbox { // it never stopped running, as far as it can see
			j.GuestBoot = from.manifest.BootID
		}
	}
	return j
}

// machineID is a sandbox's /etc/machine-id, for all its life.
func machineID(id string) string {
	sum := sha256.Sum256([]byte("cloche machine-id " + id))
	return hex.EncodeToString(sum[:])[:32]
}

// bootID is the UUID of one boot of a sandbox.
func bootID(id string, epoch int64) string {
	sum := sha256.Sum256([]byte("cloche boot-id " + id + strconv.FormatInt(epoch, 10)))
	sum[6], sum[8] = sum[6]&0x0f|0x40, sum[8]&0x3f|0x80 // as random ones look
	h := hex.EncodeToString(sum[:16])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// replace ends the sandbox's present machine, whose timeline is abandoned, and
// brings up m in its place. All that can be verified was. Once the old machine's
// end is noted there is no way back: a failure after that leaves a sandbox
// without a machine, and its record says that it was rolled back.
func (n *Node) replace(ctx context.Context, d driver.Driver, m *machine, from *origin, old *machine, ready *bool) (sandbox.MachineStatus, error) {
	n.mu.Lock()
	j := *old.journal
	if j.End == nil {
		j.End = &sandbox.End{Reason: sandbox.EndRolledBack, Detail: "for the snapshot " + from.manifest.ID, At: time.Now().UTC()}
	}
	j.Replaces = nil
	n.mu.Unlock()
	if err := j.save(n.dir(old.id)); err != nil {
		return sandbox.MachineStatus{}, err // nothing has happened
	}
	failpoint.Hit("node.replace.noted")
	old.unlink() // before the journal changes, or a watcher would tell of another end
	old.watches.Wait()
	n.mu.Lock()
	old.journal = &j
	n.touch(old)
	n.mu.Unlock()
	n.tellEnd(ctx, old.id, *j.End)
	failpoint.Hit("node.replace.told")
	err := n.clear(ctx, old.id)
	if err == nil {
		failpoint.Hit("node.replace.cleared")
		m.journal.Replaces = &j
		var st sandbox.MachineStatus
		if st, err = n.bringUp(ctx, d, m, from, ready); err == nil {
			return st, nil
		}
	}
	return sandbox.MachineStatus{}, lost(err)
}

// lost says that a sandbox is left without its machine.
func lost(err error) error {
	return sandbox.Errorf(sandbox.AsError(err).Class, "machine_lost", "the old machine was ended and the new one did not come up: %w", err).
		WithHint("roll back again, to this snapshot or to another")
}
