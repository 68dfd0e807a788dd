// Package kernel makes guest kernels out of what distributions ship: the
// uncompressed image that a VMM boots and the modules that it lacks to run a
// sandbox, as the first archive of an initramfs.
//
// Nothing of a package is run or installed here. What is read is bounded, and
// nothing is written outside of the directory that the caller names. The same
// input gives the same bytes, so that what is made can be addressed by its
// content. `cloche kernel install` calls Download and Build, the driver calls
// Initrd; where kernels are kept is not known here.
package kernel

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	maxImage   = 256 << 20 // of an image, compressed or not
	maxModule  = 64 << 20  // of a module, uncompressed
	maxModules = 512       // in one initramfs
)

// needed are the modules that the guest's first process can't do without, in
// the order in which they are loaded after what they depend on: the bus by
// which a VMM shows its devices, the disks, the way to the host, random bytes,
// the network, and the three filesystems that a sandbox's root is made of.
var needed = []string{
	"virtio_mmio", "virtio_blk", "vmw_vsock_virtio_transport", "virtio_rng", "virtio_net", "erofs", "overlay", "ext4",
}

// Files are what Build made.
type Files struct {
	Name    string   // the kernel's release, like 6.1.0-57-cloud-amd64; for a bare image with its hash's beginning
	Image   string   // file: an ELF image for x86-64
	Modules string   // file: archive 1 of the initramfs; "" where the image needs none
	Loads   []string // the modules in it, in the order of loading
}

// Build makes a kernel's files in dir, which it does not clear afterwards. Each
// source is a Debian package (.deb), or a directory with the tree of one
// (boot/vmlinuz-V, lib/modules/V); several are one kernel in several packages.
// Or the only source is a bare image, ELF or bzImage, with everything built in.
//
// An error of class Invalid says that a source is no kernel that can be used
// here, one of FailedPrecondition that it lacks a module.
func Build(ctx context.Context, sources []string, dir string) (Files, error) {
	if len(sources) == 0 {
		return Files{}, invalid("there is no kernel package")
	}
	if len(sources) == 1 {
		bare, err := isImage(sources[0])
		if err != nil {
			return Files{}, err
		}
		if bare {
			return buildBare(sources[0], dir)
		}
	}
	root, err := openSources(ctx, sources, dir)
	if err != nil {
		return Files{}, err
	}
	defer root.Close() //nolint:errcheck // it is only read
	t, err := findTree(root.FS())
	if err != nil {
		return Files{}, err
	}
	f := Files{Name: t.release, Image: filepath.Join(dir, "vmlinux")}
	image, err := t.readImage()
	if err != nil {
		return Files{}, err
	}
	if err := os.WriteFile(f.Image, image, 0o600); err != nil {
		return Files{}, err
	}
	mods, err := t.resolve(needed)
	if err != nil || len(mods) == 0 {
		return f, err
	}
	for _, m := range mods {
		f.Loads = append(f.Loads, m.Name)
	}
	f.Modules = filepath.Join(dir, "modules")
	return f, writeFile(f.Modules, func(w io.Writer) error { return WriteModules(w, mods) })
}

// openSources returns the one tree of all sources: a directory as it is, what
// packages hold unpacked below dir.
func openSources(ctx context.Context, sources []string, dir string) (*os.Root, error) {
	tree := filepath.Join(dir, "tree")
	for _, src := range sources {
		info, err := os.Stat(src)
		if err != nil {
			return nil, err
		}
		if info.IsDir() {
			if len(sources) > 1 {
				return nil, invalid("%s is a directory, which goes with no other package", src)
			}
			return os.OpenRoot(src)
		}
		if err := os.MkdirAll(tree, 0o700); err != nil {
			return nil, err
		}
		if err := unpackDeb(ctx, src, tree); err != nil {
			return nil, err
		}
	}
	return os.OpenRoot(tree)
}

// buildBare takes an image alone. Its name holds its hash, since two that people
// build themselves are often of the same release.
func buildBare(src, dir string) (Files, error) {
	in, err := os.Open(src)
	if err != nil {
		return Files{}, err
	}
	defer in.Close()
	image, err := readAll(in, filepath.Base(src), maxImage)
	if err != nil {
		return Files{}, err
	}
	image, release, err := extract(image)
	if err != nil {
		return Files{}, err
	}
	sum := sha256.Sum256(image)
	f := Files{Name: release + "-" + hex.EncodeToString(sum[:4]), Image: filepath.Join(dir, "vmlinux")}
	return f, os.WriteFile(f.Image, image, 0o600)
}

// isImage tells whether a source is neither a package nor a directory.
func isImage(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || info.IsDir() {
		return false, err
	}
	_, err = newArReader(f)
	return err != nil, nil //nolint:nilerr // it is told from a package by this
}

// readAll reads all of r, which may be at most limit bytes of what name is.
func readAll(r io.Reader, name string, limit int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = invalid("%s is larger than %d bytes", name, limit)
	}
	return b, err
}

// writeFile makes a file of what write writes.
func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

// moduleName is a module's name as the kernel says it: files and modules.dep
// have - and _ alike.
func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

func invalid(format string, args ...any) *sandbox.Error {
	return sandbox.Errorf(sandbox.Invalid, "kernel_invalid", format, args...).
		WithHint("`cloche kernel install` without flags takes the distribution's cloud kernel, which fits")
}
