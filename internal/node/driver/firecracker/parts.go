package firecracker

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"cloche.dev/cloche/internal/node/driver/firecracker/kernel"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// keepParts is how many of the files of one kind are kept that can be made
// again. Users choose the sizes of disks, so there is a bound.
const keepParts = 8

// shareKernel shows the jail what boots.
func (m *machine) shareKernel(ctx context.Context, p plan) error {
	if err := m.jail.Share(ctx, p.kernel.Image, "vmlinux"); err != nil {
		return err
	}
	for again := false; ; again = true {
		path, err := m.d.initrd(p)
		if err == nil {
			err = m.jail.Share(ctx, path, "initrd")
		}
		if again || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		// Another machine's pushed it out at this moment.
	}
}

// putDisk makes the machine's disk: an empty one, or its image's.
func (m *machine) putDisk(ctx context.Context, p plan) error {
	if p.image != nil {
		source := filepath.Join(p.image.Dir, diskName)
		st, err := os.Lstat(source)
		if err != nil {
			return err
		}
		if want := int64(p.spec.Resources.DiskMiB) * mib; st.Size() != want || !st.Mode().IsRegular() {
			return sandbox.Errorf(sandbox.FailedPrecondition, "image_damaged", "the snapshot's disk has %d bytes, and the machine's %d", st.Size(), want)
		}
		return m.jail.PutDisk(ctx, source, diskName)
	}
	for again := false; ; again = true {
		path, err := m.d.emptyDisk(ctx, p.spec.Resources.DiskMiB)
		if err == nil {
			err = m.jail.PutDisk(ctx, path, diskName)
		}
		if again || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
}

// part returns a file that can be made again, making it where it is missing.
// make writes it to a new file, of the same directory.
func (d *Driver) part(kind, name string, make func(path string) error) (string, error) {
	dir := filepath.Join(d.o.StateDir, Name, kind)
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	d.makes.Lock()
	defer d.makes.Unlock()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	prune(dir)
	work, err := os.MkdirTemp(dir, ".make-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	made := filepath.Join(work, name)
	if err := make(made); err != nil {
		return "", err
	}
	f, err := os.Open(made)
	if err != nil {
		return "", err
	}
	// After a crash it is whole, or not there.
	if err := errors.Join(f.Chmod(0o444), f.Sync(), f.Close(), os.Rename(made, path)); err != nil {
		return "", err
	}
	return path, nil
}

// makeTime is longer than anything takes to be made: what is older was left by
// a process that died.
const makeTime = time.Hour

// prune removes the oldest files of a kind, so that there is room for one more.
func prune(dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return // then nothing can be made there either
	}
	var files []fs.FileInfo
	for _, e := range entries {
		st, err := e.Info()
		switch {
		case err != nil:
		case !st.IsDir():
			files = append(files, st)
		case time.Since(st.ModTime()) > makeTime:
			_ = os.RemoveAll(filepath.Join(dir, e.Name()))
		}
	}
	slices.SortFunc(files, func(a, b fs.FileInfo) int { return a.ModTime().Compare(b.ModTime()) })
	for len(files) >= keepParts {
		_ = os.Remove(filepath.Join(dir, files[0].Name())) // whoever has a link keeps the file
		files = files[1:]
	}
}

// initrd returns the initramfs of a kernel and a guest binary.
func (d *Driver) initrd(p plan) (string, error) {
	guest, err := d.hashOf(p.spec.Guest)
	if err != nil {
		return "", err
	}
	return d.part("initrd", p.kernel.Hash+"-"+guest, func(path string) error {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		return errors.Join(kernel.Initrd(f, p.kernel.Modules, p.spec.Guest), f.Close())
	})
}

// hashed is the hash of a file as it was.
type hashed struct {
	stamp sys.FileStamp
	hash  string
}

// hashOf returns the hash of a guest binary. Artifacts lie in directories that
// bear it; what doesn't is hashed once.
func (d *Driver) hashOf(path string) (string, error) {
	if dir := filepath.Base(filepath.Dir(path)); len(dir) == hex.EncodedLen(sha256.Size) {
		if _, err := hex.DecodeString(dir); err == nil {
			return dir, nil
		}
	}
	stamp, err := sys.StampFile(path)
	if err != nil {
		return "", err
	}
	d.mu.Lock()
	known, ok := d.hashes[path]
	d.mu.Unlock()
	if ok && known.stamp == stamp {
		return known.hash, nil
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
	known = hashed{stamp, hex.EncodeToString(h.Sum(nil))}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.hashes) >= 64 { // whoever has that many is a test
		d.hashes = map[string]hashed{}
	}
	d.hashes[path] = known
	return known.hash, nil
}

// lazyAbove is the size, in MiB, above which the inode tables of a disk are
// left to the guest's kernel to clear: that costs a guest writes in its first
// minutes, and here a second and much of the disk.
const lazyAbove = 64 << 10

// emptyDisk returns a formatted, empty disk, a sparse file.
func (d *Driver) emptyDisk(ctx context.Context, size int) (string, error) {
	return d.part("disks", strconv.Itoa(size)+".ext4", func(path string) error {
		raw := path + ".raw"
		f, err := os.OpenFile(raw, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		defer f.Close()
		if err := f.Truncate(int64(size) * mib); err != nil {
			return sandbox.Errorf(sandbox.NoCapacity, "disk_too_large", "the host's filesystem takes no file of %d MiB: %w", size, err)
		}
		if err := format(ctx, raw, size); err != nil {
			return err
		}
		// What was allocated and never written to is a hole in the copy.
		out, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		return errors.Join(sys.CopySparse(ctx, out, f), out.Close())
	})
}

// features are those of ext4 that every kernel has that a sandbox boots, so that
// newer tools don't choose others.
const features = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum"

// format makes an ext4 filesystem that gives all of its blocks to anybody. Its
// UUID is the same each time, as its copies have the same one anyway.
func format(ctx context.Context, path string, size int) error {
	later, perInode := "0", "16384"
	if size > lazyAbove {
		later = "1"
	}
	if size < 512 { // as mke2fs has it for small ones
		perInode = "4096"
	}
	tool, err := findTool("mkfs.ext4")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, tool, "-q", "-F", "-b", "4096", "-I", "256", "-i", perInode, "-m", "0", "-O", features,
		"-U", "c10c8e00-0000-4000-8000-000000000000",
		"-E", "nodiscard,root_owner=0:0,lazy_itable_init="+later+",lazy_journal_init="+later, path)
	cmd.Env = []string{"LC_ALL=C"}
	out, err := cmd.CombinedOutput()
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("format a disk: %w: %s", err, bytes.TrimSpace(out[:min(len(out), 512)]))
	}
	return nil
}

// findTool finds a program of the system administrator's, whose directories a
// service's PATH may lack.
func findTool(name string) (string, error) {
	for _, path := range []string{name, "/usr/sbin/" + name, "/sbin/" + name} {
		if found, err := exec.LookPath(path); err == nil {
			return found, nil
		}
	}
	return "", sandbox.Errorf(sandbox.FailedPrecondition, "mkfs_missing", "%s is missing, which formats sandboxes' disks", name).
		WithHint("install e2fsprogs")
}
