package agent

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// errEscapes is the error for a name that leads out of a tree.
var errEscapes = errors.New("the name leads out of the tree")

const maxLinks = 40

// tree is a directory below which names are resolved, and never outside,
// whatever links stand there and whoever swaps them meanwhile. Relative links
// that stay inside are followed, except as the last part of a name.
//
// os.Root does the same on Linux, but not under gVisor: there
// openat(O_NOFOLLOW|O_DIRECTORY) follows a link to a directory, which os.Root
// relies on not to happen. So this opens each part with O_NOFOLLOW alone, which
// both honour, and looks at what it got.
type tree struct{ root int }

func openTree(dir string) (*tree, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: dir, Err: err}
	}
	return &tree{root: fd}, nil
}

func (t *tree) close() { _ = unix.Close(t.root) }

// at calls fn with the directory that holds name's last part, and that part.
func (t *tree) at(op, name string, fn func(dir int, base string) error) error {
	w := walk{rest: strings.Split(path.Dir(name), "/")}
	defer w.close()
	err := w.run(t.root)
	if err == nil {
		err = fn(w.top(), path.Base(name))
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: name, Err: err}
	}
	return nil
}

// walk is one resolution: the directories that it went through, and the parts to go.
type walk struct {
	dirs  []int
	rest  []string
	links int
}

func (w *walk) top() int { return w.dirs[len(w.dirs)-1] }

func (w *walk) close() {
	for _, fd := range w.dirs {
		_ = unix.Close(fd)
	}
}

func (w *walk) run(root int) error {
	fd, err := unix.FcntlInt(uintptr(root), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	w.dirs = append(w.dirs, fd)
	for len(w.rest) > 0 {
		part := w.rest[0]
		w.rest = w.rest[1:]
		if err := w.step(part); err != nil {
			return err
		}
	}
	return nil
}

func (w *walk) step(part string) error {
	switch part {
	case "", ".":
		return nil
	case "..":
		if len(w.dirs) == 1 {
			return errEscapes
		}
		_ = unix.Close(w.top())
		w.dirs = w.dirs[:len(w.dirs)-1]
		return nil
	}
	fd, err := openDirAt(w.top(), part)
	if errors.Is(err, unix.ELOOP) {
		return w.link(part)
	}
	if err == nil {
		w.dirs = append(w.dirs, fd)
	}
	return err
}

// link goes on where a symlink leads.
func (w *walk) link(part string) error {
	if w.links++; w.links > maxLinks {
		return unix.ELOOP
	}
	var buf [4096]byte
	n, err := unix.Readlinkat(w.top(), part, buf[:])
	if err != nil {
		return err
	}
	target := string(buf[:n])
	if path.IsAbs(target) {
		return errEscapes
	}
	w.rest = append(strings.Split(target, "/"), w.rest...)
	return nil
}

// openDirAt opens a directory that is no link; ELOOP tells of one.
func openDirAt(dir int, name string) (int, error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// kind returns the type bits of what stands at name, a link's own.
func (t *tree) kind(name string) (kind uint32, err error) {
	err = t.at("stat", name, func(dir int, base string) error {
		var st unix.Stat_t
		err := unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW)
		kind = st.Mode & unix.S_IFMT
		return err
	})
	return kind, err
}

// openDir opens a directory; links are followed inside the tree.
func (t *tree) openDir(name string) (*os.File, error) {
	w := walk{rest: strings.Split(name, "/")}
	defer w.close()
	if err := w.run(t.root); err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	fd, err := unix.FcntlInt(uintptr(w.top()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (t *tree) mkdir(name string, mode uint32) error {
	return t.at("mkdir", name, func(dir int, base string) error { return unix.Mkdirat(dir, base, mode) })
}

// create makes a new file.
func (t *tree) create(name string) (f *os.File, err error) {
	err = t.at("create", name, func(dir int, base string) error {
		fd, err := unix.Openat(dir, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err == nil {
			f = os.NewFile(uintptr(fd), name)
		}
		return err
	})
	return f, err
}

// remove removes a file, a link or an empty directory.
func (t *tree) remove(name string) error {
	return t.at("remove", name, func(dir int, base string) error {
		err := unix.Unlinkat(dir, base, 0)
		if err == unix.EISDIR || err == unix.EPERM {
			err = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR)
		}
		return err
	})
}

func (t *tree) symlink(target, name string) error {
	return t.at("symlink", name, func(dir int, base string) error { return unix.Symlinkat(target, dir, base) })
}

// link makes name another name of old, which is not followed.
func (t *tree) link(old, name string) error {
	return t.at("link", old, func(from int, oldBase string) error {
		return t.at("link", name, func(to int, base string) error { return unix.Linkat(from, oldBase, to, base, 0) })
	})
}

func (t *tree) lchown(name string, uid, gid int) error {
	return t.at("chown", name, func(dir int, base string) error {
		return unix.Fchownat(dir, base, uid, gid, unix.AT_SYMLINK_NOFOLLOW)
	})
}

func (t *tree) setTime(name string, when time.Time) error {
	ts := unix.NsecToTimespec(when.UnixNano())
	return t.at("chtimes", name, func(dir int, base string) error {
		return unix.UtimesNanoAt(dir, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	})
}
