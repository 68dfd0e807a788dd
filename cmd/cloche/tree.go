package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// packTree writes the tree at dir as a tar whose names begin with name. Owners
// are left out: whoever unpacks it decides.
func packTree(w io.Writer, dir, name string) error {
	tw := tar.NewWriter(w)
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		return packEntry(tw, p, path.Join(name, filepath.ToSlash(rel)), d)
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func packEntry(tw *tar.Writer, file, name string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	var target string
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		if target, err = os.Readlink(file); err != nil {
			return err
		}
	case !info.Mode().IsRegular() && !info.IsDir():
		return nil // sockets, pipes and devices are not copied
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return err
	}
	h.Name, h.Uname, h.Gname, h.Uid, h.Gid = name, "", "", 0, 0
	h.Format = tar.FormatPAX
	if info.IsDir() {
		h.Name += "/"
	}
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return nil
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	n, err := io.Copy(tw, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size {
		err = &os.PathError{Op: "read", Path: file, Err: errors.New("the file shrank while it was copied")}
	}
	return err
}

// localTarget says where something called name goes when it is copied to `to`:
// into it where that is a directory, else to that name.
func localTarget(to, name string) (dir, as string, err error) {
	info, err := os.Stat(to)
	switch {
	case err == nil && info.IsDir():
		if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
			return "", "", usage("%q is no name for a file here", name)
		}
		return to, name, nil
	case err == nil || errors.Is(err, fs.ErrNotExist) && !strings.HasSuffix(to, "/"):
		return filepath.Dir(to), filepath.Base(to), nil
	}
	return "", "", err
}

// writeLocal writes one file that came out of a sandbox, whole or not at all.
func writeLocal(to, name string, r io.Reader, mode string) error {
	dir, name, err := localTarget(to, name)
	if err != nil {
		return err
	}
	perm := fs.FileMode(0o644)
	if v, err := strconv.ParseUint(mode, 8, 32); err == nil {
		perm = fs.FileMode(v & 0o777)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return writeIn(root, name, r, perm)
}

// writeIn writes a file below root: beside itself first, then renamed, so that
// nothing is followed and nothing is half there.
func writeIn(root *os.Root, name string, r io.Reader, perm fs.FileMode) (err error) {
	part := name + ".cloche-part"
	_ = root.Remove(part)
	f, err := root.OpenFile(part, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = root.Remove(part)
		}
	}()
	if _, err = io.Copy(f, r); err != nil {
		return err
	}
	if err = f.Chmod(perm); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	return root.Rename(part, name)
}

// unpackTree unpacks a tar from a sandbox, which is hostile, into dir: its
// topmost name becomes `as`. Nothing is written outside of dir: os.Root keeps
// every name below it, and nothing is written through a link. Devices, set-id
// bits and owners are dropped, and so are links that lead out of the tree, so
// that whoever reads the tree later stays in it too.
func unpackTree(tr *tar.Reader, dir, top, as string, leftOut func(string)) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	u := unpacker{root: root, top: top, as: as, leftOut: leftOut, real: map[string]bool{".": true}}
	if err := u.directory(as); err != nil {
		return err
	}
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return u.finish()
		}
		if err != nil {
			return err
		}
		if err := u.entry(h, tr); err != nil {
			return fmt.Errorf("%s: %w", line(h.Name), err)
		}
	}
}

type unpacker struct {
	root    *os.Root
	top, as string
	leftOut func(string)
	dirs    []dirMode       // whose permissions are set last, so that what is below can be written
	real    map[string]bool // directories that are no links; none is ever replaced
}

type dirMode struct {
	name string
	perm fs.FileMode
}

// local turns a name of the archive into one below root; false when it is none.
func (u *unpacker) local(name string) (string, bool) {
	clean := path.Clean(strings.TrimPrefix(name, "./"))
	if clean == "." || clean == u.top {
		return u.as, true
	}
	if rest, ok := strings.CutPrefix(clean, u.top+"/"); ok {
		clean = rest
	}
	if !filepath.IsLocal(clean) {
		return "", false
	}
	return path.Join(u.as, clean), true
}

func (u *unpacker) entry(h *tar.Header, r io.Reader) error {
	name, ok := u.local(h.Name)
	if !ok {
		u.leftOut(h.Name + " (it leads out of the tree)")
		return nil
	}
	perm := fs.FileMode(h.Mode & 0o777)
	switch h.Typeflag {
	case tar.TypeDir:
		u.dirs = append(u.dirs, dirMode{name, perm})
		return u.directory(name)
	case tar.TypeReg:
		if err := u.parents(name); err != nil {
			return err
		}
		return writeIn(u.root, name, r, perm)
	case tar.TypeSymlink:
		if !u.leadsInside(name, h.Linkname) {
			u.leftOut(h.Name + " → " + h.Linkname + " (a link that leads out of the tree)")
			return nil
		}
		if err := u.clear(name); err != nil {
			return err
		}
		return u.root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		old, ok := u.local(h.Linkname)
		if !ok {
			u.leftOut(h.Name + " (a link that leads out of the tree)")
			return nil
		}
		if err := u.parents(old); err != nil {
			return err
		}
		if err := u.clear(name); err != nil {
			return err
		}
		return u.root.Link(old, name)
	}
	u.leftOut(h.Name + " (neither a file, a directory nor a link)")
	return nil
}

// leadsInside tells whether a symbolic link called name stays in the tree. Its
// target may climb first and then descend, but not climb again: what it
// descends through may be links, which stay in the tree by the same rule, and
// whose parents are not those that the text of the target suggests.
func (u *unpacker) leadsInside(name, target string) bool {
	if target == "" || path.IsAbs(target) {
		return false
	}
	descended := false
	for part := range strings.SplitSeq(target, "/") {
		switch part {
		case "", ".":
		case "..":
			if descended {
				return false
			}
		default:
			descended = true
		}
	}
	to := path.Join(path.Dir(name), target)
	return to == u.as || strings.HasPrefix(to, u.as+"/")
}

// parents makes the directories above a name.
func (u *unpacker) parents(name string) error { return u.directory(path.Dir(name)) }

// directory makes a directory and those above it, where they are missing, and
// refuses a link in their place.
func (u *unpacker) directory(name string) error {
	if u.real[name] {
		return nil
	}
	if err := u.parents(name); err != nil {
		return err
	}
	info, err := u.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = u.root.Mkdir(name, 0o755)
	case err == nil && !info.IsDir():
		err = &os.PathError{Op: "make", Path: name, Err: errors.New("something that is no directory is in its place")}
	}
	if err == nil {
		u.real[name] = true
	}
	return err
}

// clear makes room for a link: what is there is removed, unless it is a
// directory.
func (u *unpacker) clear(name string) error {
	if err := u.parents(name); err != nil {
		return err
	}
	info, err := u.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.IsDir():
		return &os.PathError{Op: "link", Path: name, Err: errors.New("a directory is in its place")}
	}
	return u.root.Remove(name)
}

func (u *unpacker) finish() error {
	for i := len(u.dirs) - 1; i >= 0; i-- {
		if err := u.root.Chmod(u.dirs[i].name, u.dirs[i].perm); err != nil {
			return err
		}
	}
	return nil
}
