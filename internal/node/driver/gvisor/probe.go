package gvisor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// Probe implements driver.Driver: it makes a real machine over an empty image,
// whose PID 1 is the guest binary, sees it answer, and discards it.
func (d *Driver) Probe(ctx context.Context) driver.Capability {
	c := driver.Capability{}
	took, err := d.probe(ctx, &c)
	if err != nil {
		c.Reason = fmt.Sprintf("a gVisor sandbox can't be run here: %v", err)
		c.Hint = "see the engine's log below " + filepath.Join(d.o.RunDir, Name)
		var e *sandbox.Error
		if errors.As(err, &e) && e.Hint != "" {
			c.Hint = e.Hint
		}
		return c
	}
	c.OK = true
	c.Reason = fmt.Sprintf("a gVisor sandbox (systrap) was made, ran and was removed in %d ms", took.Milliseconds())
	return c
}

func (d *Driver) probe(ctx context.Context, c *driver.Capability) (took time.Duration, err error) {
	if os.Geteuid() != 0 {
		return 0, sandbox.Errorf(sandbox.FailedPrecondition, "not_root", "it needs root").WithHint("run as root")
	}
	c.Checks = append(c.Checks, fmt.Sprintf("cgroup v%d", d.tree.Version()))
	dir, err := os.MkdirTemp("", "cloche-probe-")
	if err != nil {
		return 0, err
	}
	id := sandbox.NewID(sandbox.KindSandbox)
	// What was made is removed even if ctx ends while it runs.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	defer func() {
		err = errors.Join(err, d.Discard(undo, id), d.o.Networks.Delete(undo, id), os.RemoveAll(dir))
	}()
	image := filepath.Join(dir, "empty.erofs")
	if err := os.WriteFile(image, emptyImage(), 0o600); err != nil {
		return 0, err
	}
	netns, err := d.o.Networks.Create(ctx, id)
	if err != nil {
		return 0, fmt.Errorf("make a network namespace: %w", err)
	}
	c.Checks = append(c.Checks, "a network namespace was made")
	started := time.Now()
	m, err := d.Create(ctx, driver.Spec{
		ID: id, Image: image, Guest: d.o.Guest, NetNS: netns, Hostname: "probe",
		Resources: sandbox.Resources{MilliCPU: 1000, MemoryMiB: 128, DiskMiB: 16},
	})
	if err != nil {
		return 0, err
	}
	c.Checks = append(c.Checks, "a sandbox was made and its PID 1 started")
	if err := m.Kill(ctx); err != nil {
		return 0, fmt.Errorf("end the sandbox: %w", err)
	}
	c.Checks = append(c.Checks, "it was ended: "+string(m.End().Reason))
	return time.Since(started), nil
}

// emptyImage returns an EROFS image that holds an empty root directory.
func emptyImage() []byte {
	const (
		block   = 4096
		superAt = 1024
		metaAt  = block     // the block with the root's inode
		dataAt  = 2 * block // the block with its entries
	)
	img := make([]byte, 3*block)
	le := binary.LittleEndian
	super := img[superAt:]
	le.PutUint32(super[0:], 0xE0F5E1E2) // magic
	super[12] = 12                      // block size, as a power of two
	le.PutUint16(super[14:], 0)         // number of the root's inode
	le.PutUint64(super[16:], 1)         // inodes
	le.PutUint32(super[36:], 3)         // blocks
	le.PutUint32(super[40:], metaAt/block)
	inode := img[metaAt:]             // compact, its data in whole blocks
	le.PutUint16(inode[4:], 0o40755)  // mode
	le.PutUint16(inode[6:], 2)        // links
	le.PutUint32(inode[8:], 2*12+1+2) // size: two entries and their names
	le.PutUint32(inode[16:], dataAt/block)
	entries := img[dataAt:]
	for i, nameAt := range []uint16{24, 25} { // "." and "..", both the root
		le.PutUint16(entries[i*12+8:], nameAt)
		entries[i*12+10] = 2 // a directory
	}
	copy(entries[24:], "...")
	return img
}
