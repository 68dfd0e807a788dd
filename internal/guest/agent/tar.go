package agent

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guestapi/guestv1"
)

// TarOut implements the service. A directory's entries are named from it on
// ("./", "./a", …); anything else is one entry with its base name.
func (a *Agent) TarOut(ctx context.Context, req *connect.Request[guestv1.TarOutRequest], stream *connect.ServerStream[guestv1.Chunk]) error {
	path, err := cleanPath(req.Msg.GetPath())
	if err != nil {
		return err
	}
	st, err := os.Lstat(path)
	if err != nil {
		return fileError(err)
	}
	out := &chunked{send: stream.Send, buf: make([]byte, 0, chunkSize)}
	w := &tarWriter{ctx: ctx, tar: tar.NewWriter(out), links: map[inode]string{}, buf: make([]byte, 64<<10)}
	if st.IsDir() {
		err = filepath.WalkDir(path, func(at string, _ fs.DirEntry, err error) error {
			if err != nil {
				return vanished(err)
			}
			rel, err := filepath.Rel(path, at)
			if err != nil {
				return err
			}
			return w.add(at, "./"+rel)
		})
	} else {
		err = w.add(path, filepath.Base(path))
	}
	if err = errors.Join(err, w.tar.Close()); err != nil {
		return fileError(err)
	}
	return out.flush()
}

// vanished forgives what was there a moment ago: the tree lives on meanwhile.
func vanished(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// chunked gathers small writes into chunks.
type chunked struct {
	send func(*guestv1.Chunk) error
	buf  []byte
}

// Write implements io.Writer.
func (c *chunked) Write(p []byte) (int, error) {
	for n := 0; n < len(p); {
		k := min(len(p)-n, cap(c.buf)-len(c.buf))
		c.buf = append(c.buf, p[n:n+k]...)
		n += k
		if len(c.buf) == cap(c.buf) {
			if err := c.flush(); err != nil {
				return n, err
			}
		}
	}
	return len(p), nil
}

func (c *chunked) flush() error {
	if len(c.buf) == 0 {
		return nil
	}
	err := c.send(&guestv1.Chunk{Data: c.buf})
	c.buf = c.buf[:0]
	return err
}

type inode struct{ dev, ino uint64 }

type tarWriter struct {
	ctx   context.Context
	tar   *tar.Writer
	links map[inode]string // names of files that have several
	buf   []byte
}

// add writes one entry. Sockets are left out: they mean nothing elsewhere.
func (w *tarWriter) add(at, name string) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	st, err := os.Lstat(at)
	if err != nil {
		return vanished(err)
	}
	if st.Mode()&fs.ModeSocket != 0 {
		return nil
	}
	target := ""
	if st.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(at); err != nil {
			return vanished(err)
		}
	}
	var f *os.File
	if st.Mode().IsRegular() {
		if f, st, err = openRegular(at, os.O_RDONLY|unix.O_NOFOLLOW); err != nil {
			return vanished(err)
		}
		defer f.Close()
	}
	h, err := tar.FileInfoHeader(st, target)
	if err != nil {
		return err
	}
	h.Name, h.Format, h.Uname, h.Gname = name, tar.FormatPAX, "", ""
	if st.IsDir() {
		h.Name += "/"
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if ok && f != nil && sys.Nlink > 1 {
		id := inode{sys.Dev, sys.Ino}
		if first, seen := w.links[id]; seen {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			f = nil
		} else {
			w.links[id] = name
		}
	}
	if err := w.tar.WriteHeader(h); err != nil || f == nil {
		return err
	}
	return w.content(f, h.Size)
}

// content writes exactly size bytes: a file that grows is cut, one that
// shrinks is filled up with zeros, as its header has been sent.
func (w *tarWriter) content(f *os.File, size int64) error {
	n, err := io.CopyBuffer(struct{ io.Writer }{w.tar}, &ctxReader{w.ctx, io.LimitReader(f, size)}, w.buf)
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	clear(w.buf)
	for n < size {
		k, err := w.tar.Write(w.buf[:min(int64(len(w.buf)), size-n)])
		if err != nil {
			return err
		}
		n += int64(k)
	}
	return nil
}

type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

// Read implements io.Reader.
func (r *ctxReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}
