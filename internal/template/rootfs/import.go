package rootfs

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"math"
	"strings"

	"cloche.dev/cloche/internal/template/erofs"
)

// maxMtime is the last second that a 64-bit count of nanoseconds holds.
const maxMtime = math.MaxInt64/1_000_000_000 - 1

// Import reads a tar (plain, gzip or zstd) to its end. The files' data goes
// into spool. The tree's directories are sorted when it returns.
func Import(ctx context.Context, r io.Reader, spool *Spool, l Limits) (*Tree, error) {
	l = l.withDefaults()
	s, err := openStream(ctx, r, l)
	if err != nil {
		return nil, err
	}
	defer s.close()
	im := &importer{tree: newTree(l), spool: spool, tar: tar.NewReader(s), limits: l}
	if err := im.run(s); err != nil {
		return nil, s.explain(err)
	}
	im.tree.finish()
	return im.tree, nil
}

// importer carries one import.
type importer struct {
	tree    *Tree
	spool   *Spool
	tar     *tar.Reader
	limits  Limits
	headers int
}

func (im *importer) run(s *stream) error {
	for {
		h, err := im.tar.Next()
		switch {
		case errors.Is(err, io.EOF):
			if s.zeros < 512 {
				return refuse("tar_truncated", "the tar has no end mark: it was cut off")
			}
			if im.headers == 0 {
				return refuse("tar_empty", "the tar has no entries")
			}
			return s.drain()
		case err != nil && !errors.Is(err, tar.ErrInsecurePath):
			return err
		}
		if im.headers++; im.headers > im.limits.Entries {
			return tooLarge("entries", int64(im.limits.Entries))
		}
		if err := im.entry(h); err != nil {
			return err
		}
	}
}

// entry puts one header's entry into the tree.
func (im *importer) entry(h *tar.Header) error {
	switch h.Typeflag {
	case tar.TypeXGlobalHeader, 'V': // a comment, a volume's label
		return nil
	case tar.TypeChar, tar.TypeBlock:
		im.tree.Dropped[DroppedDevice]++
		return nil
	case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeFifo, tar.TypeCont, tar.TypeGNUSparse:
	default:
		return refuse("tar_entry_unsupported", "%q is an entry of the unknown type %q", quoted(h.Name), h.Typeflag)
	}
	parts, err := split(h.Name)
	if err != nil {
		return err
	}
	n, err := im.node(h)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		if h.Typeflag != tar.TypeDir {
			return refuse("tar_bad_name", "the root itself (%q) must be a directory", quoted(h.Name))
		}
		retouch(im.tree.Root, &n)
		return nil
	}
	dir, err := im.tree.walk(parts[:len(parts)-1], true, n.Mtime)
	if err != nil {
		return err
	}
	name := parts[len(parts)-1]
	switch h.Typeflag {
	case tar.TypeLink:
		return im.link(h, dir, name)
	case tar.TypeDir:
		// A directory over a directory keeps what is in it.
		if old := im.tree.lookup(dir, name); old != nil && old.IsDir() {
			retouch(old, &n)
			return nil
		}
	case tar.TypeSymlink:
		if err := im.tree.charge(len(n.Target)); err != nil {
			return err
		}
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		if err := im.data(h, &n); err != nil {
			return err
		}
	}
	node, err := im.tree.add(n)
	if err != nil {
		return err
	}
	return im.tree.set(dir, name, node)
}

// node makes the inode that a header describes.
func (im *importer) node(h *tar.Header) (n erofs.Node, err error) {
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) >= math.MaxUint32 || int64(h.Gid) >= math.MaxUint32 {
		return n, refuse("tar_bad_owner", "%q belongs to %d:%d, which is no user or group", quoted(h.Name), h.Uid, h.Gid)
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "SCHILY.xattr.") || strings.HasPrefix(key, "SCHILY.acl.") || strings.HasPrefix(key, "LIBARCHIVE.xattr.") {
			im.tree.Dropped[DroppedXattr]++
		}
	}
	n.UID, n.GID = uint32(h.Uid), uint32(h.Gid)
	n.Mode = uint16(h.Mode&0o7777) | erofs.ModeRegular
	n.Mtime, n.MtimeNsec = h.ModTime.Unix(), uint32(h.ModTime.Nanosecond())
	if n.Mtime < 0 || n.Mtime > maxMtime {
		im.tree.Dropped[DroppedTime]++
		n.Mtime, n.MtimeNsec = min(max(n.Mtime, 0), maxMtime), 0
	}
	switch h.Typeflag {
	case tar.TypeDir:
		n.Mode = uint16(h.Mode&0o7777) | erofs.ModeDir
	case tar.TypeFifo:
		n.Mode = uint16(h.Mode&0o7777) | erofs.ModeFifo
	case tar.TypeSymlink:
		n.Mode = 0o777 | erofs.ModeSymlink // a link's own mode means nothing
		if h.Linkname == "" || len(h.Linkname) > erofs.MaxTargetLen || strings.ContainsRune(h.Linkname, 0) {
			return n, refuse("tar_bad_link", "the symbolic link %q has a target that is empty, too long or not a name", quoted(h.Name))
		}
		n.Target = h.Linkname
	}
	return n, nil
}

// data spools a regular file's contents. What the header claims is checked
// first: a sparse file's holes are in its size, but not in the tar.
func (im *importer) data(h *tar.Header, n *erofs.Node) error {
	if h.Size > im.limits.DataBytes-im.spool.total {
		return tooLarge("bytes in its files, holes included", im.limits.DataBytes)
	}
	off, sum, err := im.spool.add(im.tar, h.Size)
	n.Size, n.Offset, n.Sum = h.Size, off, sum
	return err
}

// link gives an entry that came before another name. Later changes of either
// name leave the other alone, as on a disk.
func (im *importer) link(h *tar.Header, dir *erofs.Node, name string) error {
	parts, err := split(h.Linkname)
	if err != nil {
		return err
	}
	var target *erofs.Node
	if len(parts) > 0 {
		from, err := im.tree.walk(parts[:len(parts)-1], false, 0)
		if err != nil {
			return err
		}
		if from != nil {
			target = im.tree.lookup(from, parts[len(parts)-1])
		}
	}
	switch {
	case len(parts) == 0 || target != nil && target.IsDir():
		return refuse("tar_bad_link", "%q is a hard link to the directory %q", quoted(h.Name), quoted(h.Linkname))
	case target == nil:
		return refuse("tar_link_missing", "%q is a hard link to %q, which is not in the tar before it", quoted(h.Name), quoted(h.Linkname))
	}
	return im.tree.set(dir, name, target)
}

// retouch gives an existing directory a later entry's attributes.
func retouch(dir, n *erofs.Node) {
	dir.Mode, dir.UID, dir.GID = n.Mode, n.UID, n.GID
	dir.Mtime, dir.MtimeNsec = n.Mtime, n.MtimeNsec
}
