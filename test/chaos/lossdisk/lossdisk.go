// Package lossdisk is a block device with a volatile cache that can lose its
// power: a loop device over a file that a FUSE server in this process serves,
// formatted with ext4. What was written since the last flush is kept apart, and
// is dropped when the power is cut, as a disk does it.
//
// Invariant: the file on the host holds exactly what a disk would hold that
// forgets all that it was not told to keep. The chaos suite lays the write
// paths of Cloche on it. It needs root, /dev/fuse and loop devices.
package lossdisk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// block is the unit in which unflushed data is kept.
const block = 4096

// Disk is a mounted disk that can lose its power.
type Disk struct {
	// Dir is where its filesystem is mounted.
	Dir string

	image  *os.File // what a power loss leaves
	served string   // where FUSE serves the device's file
	server *fuse.Server
	size   int64

	mu      sync.Mutex
	pending map[int64][]byte // by block: written and not flushed
	off     bool             // the power is cut: nothing is kept any more
	flushes int
}

// New makes a disk of size bytes below dir, formats and mounts it. Close ends
// it. The journal is committed by fsync alone, so that what a test shows does
// not depend on how fast it is.
func New(dir string, size int64) (d *Disk, err error) {
	d = &Disk{
		Dir: filepath.Join(dir, "mnt"), served: filepath.Join(dir, "dev"),
		size: size, pending: map[int64][]byte{},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	for _, p := range []string{d.Dir, d.served} {
		if err := os.MkdirAll(p, 0o700); err != nil {
			return nil, err
		}
	}
	if d.image, err = os.OpenFile(filepath.Join(dir, "disk.img"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return d, err
	}
	if err := d.image.Truncate(size); err != nil {
		return d, err
	}
	if err := run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.image.Name()); err != nil {
		return d, err
	}
	d.server, err = fs.Mount(d.served, &root{d: d}, &fs.Options{MountOptions: fuse.MountOptions{
		DirectMountStrict: true, FsName: "lossdisk", Name: "lossdisk", MaxWrite: 1 << 20,
	}})
	if err != nil {
		return d, fmt.Errorf("serve the disk's file: %w", err)
	}
	return d, run("mount", "-o", "loop,commit=300,noatime", filepath.Join(d.served, "disk"), d.Dir)
}

// Cut cuts the power: what is not flushed is lost, and what is written from now
// on too. It tells how much was lost and how often the disk had been flushed.
func (d *Disk) Cut() (lost int64, flushes int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	lost = int64(len(d.pending)) * block
	d.off, d.pending = true, map[int64][]byte{}
	return lost, d.flushes
}

// IsOff tells whether the power is cut.
func (d *Disk) IsOff() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.off
}

// Reboot mounts what the power loss has left in the same place, as the next
// boot would: the filesystem replays its journal.
func (d *Disk) Reboot() error {
	if err := d.leave(); err != nil {
		return err
	}
	return run("mount", "-o", "loop", d.image.Name(), d.Dir)
}

// leave unmounts the filesystem and stops the server, if they are there.
func (d *Disk) leave() error {
	var errs []error
	if mounted(d.Dir) {
		errs = append(errs, run("umount", d.Dir))
	}
	if d.server != nil {
		errs = append(errs, d.server.Unmount())
		d.server.Wait()
		d.server = nil
	}
	return errors.Join(errs...)
}

// Close takes it all back but for the image's file.
func (d *Disk) Close() error {
	err := d.leave()
	if d.image != nil {
		err = errors.Join(err, d.image.Close())
		d.image = nil
	}
	return err
}

func mounted(dir string) bool {
	var here, above syscall.Stat_t
	return syscall.Stat(dir, &here) == nil && syscall.Stat(filepath.Dir(dir), &above) == nil && here.Dev != above.Dev
}

func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// read fills p from offset on: the unflushed where there is such, else the image.
func (d *Disk) read(p []byte, offset int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.image.ReadAt(p, offset)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	for at := offset - offset%block; at < offset+int64(n); at += block {
		if b, ok := d.pending[at]; ok {
			copyAt(p[:n], offset, b, at)
		}
	}
	return n, err
}

// write keeps p apart until the next flush.
func (d *Disk) write(p []byte, offset int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.off {
		return nil // the power is cut, and nobody knows it yet
	}
	for at := offset - offset%block; at < offset+int64(len(p)); at += block {
		b, ok := d.pending[at]
		if !ok {
			b = make([]byte, block)
			if _, err := d.image.ReadAt(b, at); err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			d.pending[at] = b
		}
		copyAt(b, at, p, offset)
	}
	return nil
}

// flush makes durable what was written.
func (d *Disk) flush() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.off {
		return nil
	}
	d.flushes++
	for at, b := range d.pending {
		if _, err := d.image.WriteAt(b[:min(block, d.size-at)], at); err != nil {
			return err
		}
		delete(d.pending, at)
	}
	return nil
}

// copyAt copies what src, which lies at from, and dst, which lies at to, share.
func copyAt(dst []byte, to int64, src []byte, from int64) {
	if from < to {
		src = src[min(to-from, int64(len(src))):]
		from = to
	}
	if skip := from - to; skip < int64(len(dst)) {
		copy(dst[skip:], src)
	}
}

// root is a directory with the device's file in it.
type root struct {
	fs.Inode
	d *Disk
}

var _ = fs.NodeOnAdder((*root)(nil))

// OnAdd adds the file.
func (r *root) OnAdd(ctx context.Context) {
	r.AddChild("disk", r.NewPersistentInode(ctx, &file{d: r.d}, fs.StableAttr{Mode: syscall.S_IFREG}), true)
}

// file is the device's file.
type file struct {
	fs.Inode
	d *Disk
}

var (
	_ = fs.NodeGetattrer((*file)(nil))
	_ = fs.NodeSetattrer((*file)(nil))
	_ = fs.NodeOpener((*file)(nil))
	_ = fs.NodeReader((*file)(nil))
	_ = fs.NodeWriter((*file)(nil))
	_ = fs.NodeFsyncer((*file)(nil))
)

// Getattr tells its size.
func (f *file) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode, out.Size = syscall.S_IFREG|0o600, uint64(f.d.size)
	return 0
}

// Setattr takes new times and modes and forgets them.
func (f *file) Setattr(ctx context.Context, h fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	if size, ok := in.GetSize(); ok && size != uint64(f.d.size) {
		return syscall.EPERM
	}
	return f.Getattr(ctx, h, out)
}

// Open opens it.
func (f *file) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, 0, 0
}

// Read reads.
func (f *file) Read(_ context.Context, _ fs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	n, err := f.d.read(dest, off)
	if err != nil {
		return nil, fs.ToErrno(err)
	}
	return fuse.ReadResultData(dest[:n]), 0
}

// Write writes.
func (f *file) Write(_ context.Context, _ fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	if off+int64(len(data)) > f.d.size {
		return 0, syscall.ENOSPC
	}
	if err := f.d.write(data, off); err != nil {
		return 0, fs.ToErrno(err)
	}
	return uint32(len(data)), 0
}

// Fsync is what a flush of the loop device becomes.
func (f *file) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	return fs.ToErrno(f.d.flush())
}
