package firecracker

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/node/driver/firecracker/jail"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// The files of a memory image, beside the disk.
const (
	stateName = "state"
	memName   = "mem"
	roomName  = "snap" // where a VMM writes them
)

// Traits implements driver.Restorer. A disk is a file, and the guest's flushes
// reach it; what its kernel has not flushed is in its page cache.
func (d *Driver) Traits() driver.Traits {
	return driver.Traits{Durability: sandbox.DurabilityCrash, CachesDisk: true, OwnKernel: true}
}

// Missing implements driver.Restorer. A disk image is an ext4 filesystem, which
// any version reads; a memory image is for the very VMM that wrote it.
func (d *Driver) Missing(needs sandbox.Needs) error {
	return driver.Missing(Name, needs, func() error {
		_, err := d.pairFor(needs)
		return err
	})
}

// pairFor finds the Firecracker that a memory image needs.
func (d *Driver) pairFor(needs sandbox.Needs) (installed.Pair, error) {
	pair, err := d.o.ByHash(needs.EngineHash)
	if err == nil {
		err = d.o.AllowVersion(pair.Version)
	}
	if err != nil {
		return pair, sandbox.Errorf(sandbox.FailedPrecondition, "needs_engine", "the snapshot needs %s, which can't be used on this host: %w", needs.Engine, err).
			WithHint("install that release again with `cloche firecracker install`")
	}
	return pair, nil
}

// Restore implements driver.Restorer. The files of the image are linked into the
// jail and left as they are; what was read for good is taken out of it again.
func (d *Driver) Restore(ctx context.Context, spec driver.Spec, image driver.Image) (driver.Machine, error) {
	if err := d.Missing(image.Needs); err != nil {
		return nil, err
	}
	if err := check(spec); err != nil {
		return nil, err
	}
	p := plan{spec: spec, image: &image}
	var err error
	if p.loads() {
		p.pair, err = d.pairFor(image.Needs)
	} else {
		err = d.current(&p)
	}
	if err != nil {
		return nil, err
	}
	return d.bring(ctx, p)
}

// shareImage shows the jail a memory image.
func (m *machine) shareImage(ctx context.Context, p plan) error {
	st, err := os.Lstat(filepath.Join(p.image.Dir, memName))
	if err != nil {
		return err
	}
	// A shorter file would end the machine when it comes to what is missing.
	if want := int64(p.spec.Resources.MemoryMiB) * mib; st.Size() != want || !st.Mode().IsRegular() {
		return sandbox.Errorf(sandbox.FailedPrecondition, "image_damaged", "the snapshot's memory has %d bytes, and the machine's %d", st.Size(), want)
	}
	for _, name := range []string{stateName, memName} {
		if err := m.jail.Share(ctx, filepath.Join(p.image.Dir, name), name); err != nil {
			return err
		}
	}
	return nil
}

// load has the VMM go on from the image in its jail. Where it can't, its process
// is of no use any more.
func (m *machine) load(ctx context.Context) error {
	// It is there before the guest can dial it.
	if _, err := m.Guest(); err != nil {
		return err
	}
	asked, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	err := m.whenThere(asked, func(ctx context.Context) error { return m.client.Load(ctx, "/"+stateName, "/"+memName) })
	if err != nil {
		var f *vmm.Fault
		if errors.As(err, &f) {
			return sandbox.Errorf(sandbox.FailedPrecondition, "image_refused", "Firecracker refuses the snapshot: %w", f)
		}
		return err
	}
	m.d.at("make.loaded")
	// Before the guest goes on: who is in there may be hostile already.
	if err := m.seal(); err != nil {
		return err
	}
	// Images of machines that had no network leave the tap without a VMM at it. The
	// kernel takes its time to move it; until it has, the guest reaches nobody.
	moved := make(chan error, 1)
	go func() { moved <- m.d.o.Networks.MoveTap(ctx, m.id) }()
	err = m.client.Resume(asked)
	if err == nil {
		m.shareWhenDialled()
	}
	return errors.Join(err, <-moved)
}

// Pause implements driver.Pauser.
func (m *machine) Pause(ctx context.Context) error { return m.ask(ctx, m.client.Pause) }

// Resume implements driver.Pauser.
func (m *machine) Resume(ctx context.Context) error { return m.ask(ctx, m.client.Resume) }

// Paused implements driver.Pauser.
func (m *machine) Paused(ctx context.Context) (paused bool, err error) {
	err = m.ask(ctx, func(ctx context.Context) error {
		info, err := m.client.Info(ctx)
		paused = info.State == vmm.Paused
		return err
	})
	return paused, err
}

// ask makes a request that a VMM answers at once, when it can be asked at all.
func (m *machine) ask(ctx context.Context, request func(context.Context) error) error {
	if m.met != nil {
		select {
		case <-m.met:
		case <-m.exited:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	bounded, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	err := request(bounded)
	if err == nil || ctx.Err() != nil {
		return err
	}
	if end := m.End(); end.Reason != "" {
		return sandbox.Errorf(sandbox.NotFound, "machine_ended", "the machine %s has ended: %s %s", m.id, end.Reason, end.Detail)
	}
	return err
}

// Snapshot implements driver.Snapshotter.
func (m *machine) Snapshot(ctx context.Context, dir string, kind sandbox.SnapshotKind) (driver.Image, error) {
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		return driver.Image{}, sandbox.Errorf(sandbox.Invalid, "no_directory", "the image's directory %s is none: %w", dir, err)
	}
	paused, err := m.Paused(ctx)
	if err != nil {
		return driver.Image{}, err
	}
	image := driver.Image{Dir: dir, Kind: kind, Needs: sandbox.Needs{Driver: Name}}
	if kind == sandbox.SnapshotMemory {
		image.Needs.Engine, image.Needs.EngineHash = Name+" "+m.record().Version, m.record().Hash
		if image.Needs.CPU, err = sys.CPUFeatures(); err != nil {
			return driver.Image{}, err
		}
	}
	var room *jail.Room
	if kind == sandbox.SnapshotMemory {
		if room, err = m.prepareRoom(); err != nil {
			return driver.Image{}, err
		}
		defer func() { _ = room.Close() }()
	}
	begun := time.Now()
	if !paused {
		err = m.hold(ctx)
	} else if room != nil {
		err = m.note(func(r *record) { r.Saving = true })
	}
	if err != nil {
		return driver.Image{}, err
	}
	err = m.take(ctx, dir, room)
	// Whether or not there is an image, and whoever still waits for it.
	if paused {
		err = errors.Join(err, m.stay(ctx))
	} else {
		err = errors.Join(err, m.goOn(context.WithoutCancel(ctx)))
	}
	image.Stood = time.Since(begun)
	if err == nil && room != nil {
		err = m.move(ctx, dir, room)
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return driver.Image{}, err
	}
	return image, nil
}

// hold makes the machine stand still for a snapshot, and notes before that it is
// to go on.
func (m *machine) hold(ctx context.Context) error {
	if err := m.note(func(r *record) { r.Held = true }); err != nil {
		return err
	}
	m.d.at("snapshot.noted")
	if m.d.test.noPause {
		return nil
	}
	if err := m.Pause(ctx); err != nil {
		return errors.Join(err, m.goOn(context.WithoutCancel(ctx)))
	}
	m.d.at("snapshot.paused")
	return nil
}

// goOn undoes hold. A VMM that still writes an image whose asker is gone answers
// when it has written it.
func (m *machine) goOn(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	if err := m.client.Resume(bounded); err != nil {
		return m.unlessOver(err)
	}
	m.d.at("snapshot.resumed")
	return m.note(func(r *record) { r.Held, r.Saving = false, false })
}

// stay is goOn for a machine that stood still before: only that it is being
// written is over. When ctx has ended it is not waited for that long, since what
// comes next may be the machine's end; whoever finds it later sees that it was.
func (m *machine) stay(ctx context.Context) error {
	if !m.record().Saving {
		return nil
	}
	patience := saveTimeout
	if ctx.Err() != nil {
		patience = askTimeout
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	if _, err := m.client.Info(bounded); err != nil {
		return m.unlessOver(err)
	}
	return m.note(func(r *record) { r.Saving = false })
}

// unlessOver is err, but for a machine that has ended: there is nothing left of it
// to go on.
func (m *machine) unlessOver(err error) error {
	if end := m.End(); end.Reason != "" {
		return nil
	}
	return err
}

// prepareRoom makes the room that a VMM writes a memory image into.
func (m *machine) prepareRoom() (*jail.Room, error) {
	rec := m.record()
	room, err := m.jail.MakeRoom(roomName, rec.UID)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(room.Reserve(memName, int64(rec.Resources.MemoryMiB)*mib), room.Reserve(stateName, 0)); err != nil {
		_ = room.Close()
		return nil, err
	}
	return room, nil
}

// take takes the state of a machine that stands still: all of it into its room,
// where there is one, and its disk into the image's directory.
func (m *machine) take(ctx context.Context, dir string, room *jail.Room) error {
	if room != nil {
		asked, cancel := context.WithTimeout(ctx, saveTimeout)
		defer cancel()
		if err := m.client.Save(asked, room.Path(stateName), room.Path(memName)); err != nil {
			return fullDisk(err)
		}
		m.d.at("snapshot.saved")
	}
	if err := m.jail.CopyDisk(ctx, diskName, filepath.Join(dir, diskName)); err != nil {
		return err
	}
	m.d.at("snapshot.copied")
	return nil
}

// move moves what the VMM has written into the image's directory.
func (m *machine) move(ctx context.Context, dir string, room *jail.Room) error {
	for _, name := range []string{stateName, memName} {
		if err := room.Take(ctx, name, dir, 0o444); err != nil {
			return err
		}
	}
	m.d.at("snapshot.moved")
	return nil
}

// noSpace is how a VMM tells of ENOSPC; it has no other way.
const noSpace = "(os error 28)"

// fullDisk gives a VMM's refusal for want of space its class.
func fullDisk(err error) error {
	var f *vmm.Fault
	if errors.As(err, &f) && strings.Contains(f.Message, noSpace) {
		return sandbox.Errorf(sandbox.NoCapacity, "disk_full", "the host's disk is full: %w", f).
			WithHint("free space where the state directory lies")
	}
	return err
}
