package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

var _ driver.Salvager = (*Driver)(nil)

// Halt implements driver.Salvager.
func (d *Driver) Halt(ctx context.Context, id string) error {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return sandbox.Errorf(sandbox.Invalid, "malformed_id", "%q is not the id of a sandbox", id)
	}
	rec, _ := readRecord(d.machineDir(id)) // without one the cgroup tells the same
	if err := d.jail(id).Kill(ctx, rec.Process); err != nil {
		return fmt.Errorf("halt machine %s: %w", id, err)
	}
	d.mu.Lock()
	m := d.machines[id]
	d.mu.Unlock()
	if m == nil {
		return nil
	}
	return m.over(ctx)
}

// Salvage implements driver.Salvager. The image is the disk itself under a
// second name: no process has it open, and it is root's from now on.
func (d *Driver) Salvage(_ context.Context, id, dir string) (driver.Image, error) {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return driver.Image{}, notFound(id)
	}
	to := filepath.Join(dir, diskName)
	err := os.Link(filepath.Join(d.machineDir(id), diskName), to)
	if errors.Is(err, os.ErrNotExist) {
		return driver.Image{}, notFound(id)
	}
	if err == nil {
		err = os.Chown(to, 0, 0)
	}
	if err != nil {
		return driver.Image{}, fmt.Errorf("save the disk of machine %s: %w", id, err)
	}
	return driver.Image{Dir: dir, Kind: sandbox.SnapshotDisk, Needs: sandbox.Needs{Driver: Name}}, nil
}
