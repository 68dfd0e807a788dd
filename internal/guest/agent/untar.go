package agent

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

// maxLateTimes bounds the directories whose times are set at the end; beyond
// it they keep the time of their last change.
const maxLateTimes = 100_000

// TarIn implements the service. Nothing is ever written outside the given
// directory, whatever the tar says and whoever swaps links meanwhile: every
// access goes through a tree.
func (a *Agent) TarIn(ctx context.Context, stream *connect.ClientStream[guestv1.TarInRequest]) (*connect.Response[guestv1.TarInResponse], error) {
	if !stream.Receive() {
		return nil, orMissing(stream.Err())
	}
	open, first := stream.Msg().GetOpen(), stream.Msg().GetData()
	dir, err := cleanPath(open.GetPath())
	if err != nil {
		return nil, err
	}
	own, err := owner(open.GetUser())
	if err != nil {
		return nil, err
	}
	if err := makeDirs(dir, 0o755, own); err != nil {
		return nil, fileError(err)
	}
	root, err := openTree(dir)
	if err != nil {
		return nil, fileError(err)
	}
	defer root.close()
	r := &received{rest: first, next: func() ([]byte, error) {
		if stream.Receive() {
			return stream.Msg().GetData(), nil
		}
		return nil, orEOF(stream.Err())
	}}
	x := &extractor{root: root, own: own, late: map[string]time.Time{}, buf: make([]byte, len(zeros))}
	if err := x.run(ctx, r); err != nil {
		return nil, fileError(err)
	}
	return connect.NewResponse(&guestv1.TarInResponse{Entries: x.entries}), nil
}

type extractor struct {
	root    *tree
	own     *account
	entries uint64
	late    map[string]time.Time
	buf     []byte
}

func (x *extractor) run(ctx context.Context, r io.Reader) error {
	t := tar.NewReader(r)
	for ctx.Err() == nil {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			x.setLate()
			_, err = io.Copy(io.Discard, r) // what follows the end mark
			return err
		}
		if err != nil {
			return malformedTar(err)
		}
		if err := x.entry(h, t); err != nil {
			return err
		}
		x.entries++
	}
	return ctx.Err()
}

func malformedTar(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrFieldTooLong) {
		return sandbox.Errorf(sandbox.Invalid, "bad_tar", "this is no complete tar: %w", err)
	}
	return err
}

// localName turns a name of the tar into one below the root. A leading slash
// is dropped, as tar does; ".." is refused.
func localName(name string) (string, error) {
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", sandbox.Errorf(sandbox.Invalid, "tar_escape", "the entry %.200q leads out of the tree", name)
		}
	}
	if strings.ContainsRune(name, 0) || len(name) > 4096 {
		return "", sandbox.Errorf(sandbox.Invalid, "bad_tar", "the entry %.200q has no usable name", name)
	}
	return path.Join(".", strings.TrimLeft(name, "/")), nil
}

func (x *extractor) entry(h *tar.Header, content io.Reader) error {
	name, err := localName(h.Name)
	if err != nil {
		return err
	}
	if dir := path.Dir(name); dir != "." {
		if err := x.parents(dir); err != nil {
			return x.refused(h, err)
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		err = x.dir(h, name)
	case tar.TypeReg, tar.TypeGNUSparse:
		err = x.file(h, name, content)
	case tar.TypeSymlink:
		if err = x.clear(name); err == nil {
			err = x.root.symlink(h.Linkname, name)
		}
		if err == nil {
			uid, gid := x.ids(h)
			err = x.root.lchown(name, uid, gid)
		}
		if err == nil {
			err = x.root.setTime(name, h.ModTime)
		}
	case tar.TypeLink:
		err = x.link(h, name)
	case tar.TypeXGlobalHeader:
	default:
		err = sandbox.Errorf(sandbox.Invalid, "tar_entry_unsupported", "the entry %.200q is a device or FIFO, which is not unpacked", h.Name)
	}
	return x.refused(h, err)
}

// refused names the entry that leads out of the tree.
func (x *extractor) refused(h *tar.Header, err error) error {
	if errors.Is(err, errEscapes) {
		return sandbox.Errorf(sandbox.Invalid, "tar_escape", "the entry %.200q leads out of the tree through a link", h.Name)
	}
	return err
}

// parents makes missing directories; they belong to whom the tree is given to.
func (x *extractor) parents(dir string) error {
	f, err := x.root.openDir(dir)
	if err == nil {
		return f.Close()
	}
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	if up := path.Dir(dir); up != "." {
		if err := x.parents(up); err != nil {
			return err
		}
	}
	if err := x.root.mkdir(dir, 0o755); err != nil {
		return err
	}
	if x.own != nil {
		return x.root.lchown(dir, int(x.own.uid), int(x.own.gid))
	}
	return nil
}

// clear removes what stands at name, unless that is a directory with content.
func (x *extractor) clear(name string) error {
	err := x.root.remove(name)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func (x *extractor) ids(h *tar.Header) (uid, gid int) {
	if x.own != nil {
		return int(x.own.uid), int(x.own.gid)
	}
	return h.Uid, h.Gid
}

func (x *extractor) dress(f *os.File, h *tar.Header) error {
	uid, gid := x.ids(h)
	if err := f.Chown(uid, gid); err != nil {
		return err
	}
	return unix.Fchmod(int(f.Fd()), uint32(h.Mode)&bitsOfMode)
}

func (x *extractor) dir(h *tar.Header, name string) error {
	kind, err := x.root.kind(name)
	switch {
	case errors.Is(err, unix.ENOENT):
		err = x.root.mkdir(name, 0o700)
	case err == nil && kind != unix.S_IFDIR && !x.leadsToDir(name):
		if err = x.root.remove(name); err == nil {
			err = x.root.mkdir(name, 0o700)
		}
	}
	if err != nil {
		return err
	}
	f, err := x.root.openDir(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if len(x.late) < maxLateTimes {
		x.late[name] = h.ModTime
	}
	if name == "." { // the tree's own top exists already and keeps its owner and mode
		return nil
	}
	return x.dress(f, h)
}

// leadsToDir tells whether name is a link to a directory of the tree, which
// an entry for a directory leaves in place.
func (x *extractor) leadsToDir(name string) bool {
	f, err := x.root.openDir(name)
	if err != nil {
		return false
	}
	_ = f.Close()
	return true
}

func (x *extractor) file(h *tar.Header, name string, content io.Reader) error {
	if err := x.clear(name); err != nil {
		return err
	}
	f, err := x.root.create(name)
	if err != nil {
		return err
	}
	err = x.fill(f, content, h.Size)
	if err == nil {
		err = x.dress(f, h)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		_ = x.root.remove(name) // half a file is worse than none
		return err
	}
	return x.root.setTime(name, h.ModTime)
}

// fill writes content and leaves holes where it is zero.
func (x *extractor) fill(f *os.File, content io.Reader, size int64) error {
	var at int64
	for {
		n, err := io.ReadFull(content, x.buf)
		if n > 0 && !allZero(x.buf[:n]) {
			if _, err := f.WriteAt(x.buf[:n], at); err != nil {
				return err
			}
		}
		at += int64(n)
		if err == io.EOF || err == io.ErrUnexpectedEOF && at == size {
			return f.Truncate(at)
		}
		if err != nil {
			return malformedTar(err)
		}
	}
}

var zeros [64 << 10]byte

func allZero(b []byte) bool { return bytes.Equal(b, zeros[:len(b)]) }

func (x *extractor) link(h *tar.Header, name string) error {
	target, err := localName(h.Linkname)
	if err != nil {
		return err
	}
	if target == name {
		return nil
	}
	kind, err := x.root.kind(target)
	if err != nil {
		return err
	}
	if kind == unix.S_IFDIR {
		return &fs.PathError{Op: "link", Path: target, Err: unix.EISDIR}
	}
	if err := x.clear(name); err != nil {
		return err
	}
	return x.root.link(target, name)
}

// setLate sets the directories' times, which their entries had changed. One
// that has gone meanwhile needs none.
func (x *extractor) setLate() {
	for name, t := range x.late {
		_ = x.root.setTime(name, t)
	}
}
