package kernel

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
)

// Names in the initramfs, which the guest's first process reads.
const (
	ModulesDir = "modules" // holds NNN-NAME.ko, to be loaded in the order of names
	Init       = "init"    // the guest binary
)

// maxGuest bounds the guest binary.
const maxGuest = 256 << 20

// WriteModules writes archive 1 of an initramfs: a gzipped cpio archive (newc,
// see the kernel's Documentation/driver-api/early-userspace/buffer-format.rst)
// with a file for each module, numbered as they are given.
func WriteModules(w io.Writer, modules []Module) error {
	if len(modules) > maxModules {
		return invalid("%d modules are more than %d", len(modules), maxModules)
	}
	return writeArchive(w, gzip.BestCompression, func(c *cpioWriter) error {
		if err := c.dir(ModulesDir); err != nil {
			return err
		}
		for i, m := range modules {
			name := fmt.Sprintf("%s/%03d-%s.ko", ModulesDir, i, m.Name)
			if err := c.file(name, 0o644, int64(len(m.Data))); err != nil {
				return err
			}
			if _, err := c.Write(m.Data); err != nil {
				return err
			}
		}
		return nil
	})
}

// Initrd writes an initramfs: archive 1 as it is in the file modulesArchive,
// or an empty one where that is "", and behind it archive 2, which holds the
// file guest as /init. The kernel unpacks both, one over the other. Archive 2
// also has /dev/null: where a kernel has no console, /init begins without a
// descriptor, and a Go program then opens this or ends.
func Initrd(w io.Writer, modulesArchive, guest string) error {
	if err := copyModules(w, modulesArchive); err != nil {
		return fmt.Errorf("write the modules of an initramfs: %w", err)
	}
	g, err := os.Open(guest)
	if err != nil {
		return err
	}
	defer g.Close()
	info, err := g.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Size() > maxGuest {
		return invalid("the guest binary %s is no file of at most %d bytes", guest, maxGuest)
	}
	// It is read once, at boot, so time counts more than size.
	return writeArchive(w, gzip.BestSpeed, func(c *cpioWriter) error {
		if err := errors.Join(c.dir("dev"), c.device("dev/null", 0o666, 1, 3), c.file(Init, 0o755, info.Size())); err != nil {
			return err
		}
		_, err := io.CopyN(c, g, info.Size())
		return err
	})
}

func copyModules(w io.Writer, archive string) error {
	if archive == "" {
		return WriteModules(w, nil)
	}
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(w, f)
	return err
}

// writeArchive writes a whole gzipped archive. No time, name or owner of this
// host is in it.
func writeArchive(w io.Writer, level int, fill func(*cpioWriter) error) error {
	z, err := gzip.NewWriterLevel(w, level)
	if err != nil {
		return err
	}
	c := &cpioWriter{w: bufio.NewWriterSize(z, 64<<10)}
	if err := fill(c); err != nil {
		return err
	}
	return errors.Join(c.close(), c.w.Flush(), z.Close())
}

// cpioWriter writes a cpio archive in the format newc.
type cpioWriter struct {
	w    *bufio.Writer
	ino  int
	left int64 // of the current file
	pad  int   // bytes of padding that follow it
}

// entry begins an entry: 13 numbers of 8 hexadecimal digits, then the name,
// each padded to four bytes.
func (c *cpioWriter) entry(name string, mode int, size int64, major, minor int) error {
	if err := c.end(); err != nil {
		return err
	}
	if size > 1<<32-1 {
		return fmt.Errorf("%s is too large for a cpio archive", name)
	}
	c.ino++
	_, err := fmt.Fprintf(c.w, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		c.ino, mode, 0, 0, 1, 0, size, 0, 0, major, minor, len(name)+1, 0, name)
	if err == nil {
		err = c.zeros(padding(110 + int64(len(name)) + 1))
	}
	c.left, c.pad = size, padding(size)
	return err
}

func (c *cpioWriter) dir(name string) error { return c.entry(name, 0o040755, 0, 0, 0) }

// device adds a character device.
func (c *cpioWriter) device(name string, perm, major, minor int) error {
	return c.entry(name, 0o020000|perm, 0, major, minor)
}

func (c *cpioWriter) file(name string, perm int, size int64) error {
	return c.entry(name, 0o100000|perm, size, 0, 0)
}

// Write writes to the current file.
func (c *cpioWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > c.left {
		return 0, errors.New("more was written to a cpio archive's file than its size")
	}
	n, err := c.w.Write(p)
	c.left -= int64(n)
	return n, err
}

// end ends the current file.
func (c *cpioWriter) end() error {
	if c.left > 0 {
		return errors.New("less was written to a cpio archive's file than its size")
	}
	n := c.pad
	c.pad = 0
	return c.zeros(n)
}

func (c *cpioWriter) zeros(n int) error {
	_, err := c.w.Write(make([]byte, n))
	return err
}

func (c *cpioWriter) close() error { return errors.Join(c.entry("TRAILER!!!", 0, 0, 0, 0), c.end()) }

func padding(n int64) int { return int((4 - n%4) % 4) }
