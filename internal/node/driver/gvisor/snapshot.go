package gvisor

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Traits implements driver.Restorer. The file behind a machine's disk has no
// name and goes with the sentry.
func (d *Driver) Traits() driver.Traits {
	return driver.Traits{Durability: sandbox.DurabilitySnapshot}
}

// Missing implements driver.Restorer. A disk image is gVisor's own format, but
// any version of it reads it; a memory image is for the very engine that wrote it.
func (d *Driver) Missing(needs sandbox.Needs) error {
	return driver.Missing(Name, needs, func() error {
		_, err := d.engineFor(needs)
		return err
	})
}

// engineFor finds the engine that a memory image needs.
func (d *Driver) engineFor(needs sandbox.Needs) (path string, err error) {
	if have, herr := hashOf(d.o.Engine); herr == nil && have == needs.EngineHash {
		return d.o.Engine, nil
	}
	if d.o.EngineByHash == nil {
		err = sandbox.Errorf(sandbox.NotFound, "artifact_missing", "there is no other engine")
	} else {
		path, err = d.o.EngineByHash(needs.EngineHash)
	}
	if err != nil {
		return "", sandbox.Errorf(sandbox.FailedPrecondition, "needs_engine", "the snapshot needs the engine %s, which is not on this host: %w", needs.Engine, err)
	}
	return path, nil
}

// hashOf returns the hash of an engine's binary: artifacts lie in directories
// that bear it.
func hashOf(path string) (string, error) {
	if dir := filepath.Base(filepath.Dir(path)); len(dir) == hex.EncodedLen(sha256.Size) {
		if _, err := hex.DecodeString(dir); err == nil {
			return dir, nil
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// Restore implements driver.Restorer.
func (d *Driver) Restore(ctx context.Context, spec driver.Spec, image driver.Image) (driver.Machine, error) {
	if err := d.Missing(image.Needs); err != nil {
		return nil, err
	}
	path := d.o.Engine
	if image.Kind == sandbox.SnapshotMemory {
		var err error
		if path, err = d.engineFor(image.Needs); err != nil {
			return nil, err
		}
	}
	e, err := d.from(path)
	if err != nil {
		return nil, err
	}
	req := d.request(spec)
	req.Restore, req.RestoreKind = image.Dir, string(image.Kind)
	return d.bring(ctx, e, spec, req)
}

// Pause implements driver.Pauser.
func (m *machine) Pause(ctx context.Context) error { return m.e.pause(ctx, m.id) }

// Resume implements driver.Pauser.
func (m *machine) Resume(ctx context.Context) error { return m.e.resume(ctx, m.id) }

// Paused implements driver.Pauser.
func (m *machine) Paused(ctx context.Context) (bool, error) {
	rec, err := m.e.get(ctx, m.id)
	return rec.Pause == enginerpc.Paused || rec.Pause == enginerpc.Pausing, err
}

// Snapshot implements driver.Snapshotter.
func (m *machine) Snapshot(ctx context.Context, dir string, kind sandbox.SnapshotKind) (driver.Image, error) {
	image := driver.Image{Dir: dir, Kind: kind, Needs: sandbox.Needs{Driver: Name}}
	done, err := m.e.snapshot(ctx, m.id, enginerpc.SnapshotRequest{Dir: dir, Kind: string(kind)})
	if err != nil {
		return driver.Image{}, err
	}
	image.Stood = time.Duration(done.StoodNanos)
	if kind == sandbox.SnapshotDisk {
		return image, nil
	}
	path, err := m.e.binary()
	if err != nil {
		return driver.Image{}, err
	}
	image.Needs.Engine = done.Engine
	if image.Needs.EngineHash, err = hashOf(path); err != nil {
		return driver.Image{}, err
	}
	image.Needs.CPU, err = sys.CPUFeatures()
	return image, err
}
