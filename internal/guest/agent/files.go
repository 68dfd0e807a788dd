package agent

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	listBatch  = 1000
	bitsOfMode = 0o7777
)

// cleanPath checks and cleans a path of a request.
func cleanPath(p string) (string, error) {
	if !filepath.IsAbs(p) || strings.ContainsRune(p, 0) || len(p) > 4096 {
		return "", sandbox.Errorf(sandbox.Invalid, "bad_path", "%.200q is not an absolute path", p)
	}
	return filepath.Clean(p), nil
}

// fileError classes what the kernel said about a path.
func fileError(err error) error {
	var own *sandbox.Error
	if err == nil || errors.As(err, &own) {
		return err
	}
	for _, k := range []struct {
		errno error
		class sandbox.Class
		code  string
	}{
		{unix.ENOENT, sandbox.NotFound, "no_such_file"},
		{unix.EEXIST, sandbox.Conflict, "file_exists"},
		{unix.ENOTDIR, sandbox.FailedPrecondition, "not_a_directory"},
		{unix.EISDIR, sandbox.FailedPrecondition, "is_a_directory"},
		{unix.ENOTEMPTY, sandbox.FailedPrecondition, "directory_not_empty"},
		{unix.EXDEV, sandbox.FailedPrecondition, "other_filesystem"},
		{unix.EBUSY, sandbox.FailedPrecondition, "file_busy"},
		{unix.EACCES, sandbox.Denied, "file_denied"},
		{unix.EPERM, sandbox.Denied, "file_denied"},
		{unix.EROFS, sandbox.Denied, "read_only"},
		{unix.ENOSPC, sandbox.Quota, "disk_full"},
		{unix.EDQUOT, sandbox.Quota, "disk_full"},
		{unix.ENAMETOOLONG, sandbox.Invalid, "bad_path"},
		{unix.ELOOP, sandbox.Invalid, "bad_path"},
		{unix.EINVAL, sandbox.Invalid, "bad_path"},
	} {
		if errors.Is(err, k.errno) {
			return sandbox.Errorf(k.class, k.code, "%w", err)
		}
	}
	return err
}

// owner is who shall own what is created; nil leaves it to be root's.
func owner(user string) (*account, error) {
	if user == "" {
		return nil, nil
	}
	a, err := resolveUser(user)
	return &a, err
}

func info(st fs.FileInfo, target string) *guestv1.FileInfo {
	out := &guestv1.FileInfo{
		Name: strings.ToValidUTF8(st.Name(), "\uFFFD"), Type: "other", Size: uint64(max(st.Size(), 0)),
		MtimeUnixNano: st.ModTime().UnixNano(), Target: strings.ToValidUTF8(target, "\uFFFD"),
	}
	switch st.Mode().Type() {
	case 0:
		out.Type = "file"
	case fs.ModeDir:
		out.Type = "dir"
	case fs.ModeSymlink:
		out.Type = "symlink"
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		out.Mode, out.Uid, out.Gid = sys.Mode&bitsOfMode, sys.Uid, sys.Gid
	}
	return out
}

// Stat implements the service.
func (a *Agent) Stat(_ context.Context, req *connect.Request[guestv1.StatRequest]) (*connect.Response[guestv1.StatResponse], error) {
	path, err := cleanPath(req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	stat := os.Lstat
	if req.Msg.GetFollow() {
		stat = os.Stat
	}
	st, err := stat(path)
	if err != nil {
		return nil, fileError(err)
	}
	target := ""
	if st.Mode().Type() == fs.ModeSymlink {
		if target, err = os.Readlink(path); err != nil {
			return nil, fileError(err)
		}
	}
	return connect.NewResponse(&guestv1.StatResponse{Info: info(st, target)}), nil
}

// List implements the service. Entries come in the directory's own order; one
// that vanishes meanwhile is left out.
func (a *Agent) List(ctx context.Context, req *connect.Request[guestv1.ListRequest], stream *connect.ServerStream[guestv1.ListResponse]) error {
	path, err := cleanPath(req.Msg.GetPath())
	if err != nil {
		return err
	}
	dir, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return fileError(err)
	}
	defer dir.Close()
	for ctx.Err() == nil {
		entries, err := dir.ReadDir(listBatch)
		batch := new(guestv1.ListResponse)
		for _, e := range entries {
			st, err := e.Info()
			if err != nil {
				continue
			}
			target := ""
			if st.Mode().Type() == fs.ModeSymlink {
				target, _ = os.Readlink(filepath.Join(path, e.Name())) // it may have vanished
			}
			batch.Entries = append(batch.Entries, info(st, target))
		}
		if len(batch.Entries) > 0 {
			if err := stream.Send(batch); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fileError(err)
		}
	}
	return ctx.Err()
}

// Mkdir implements the service. With parents, what exists is left as it is.
func (a *Agent) Mkdir(_ context.Context, req *connect.Request[guestv1.MkdirRequest]) (*connect.Response[guestv1.MkdirResponse], error) {
	m := req.Msg
	path, err := cleanPath(m.GetPath())
	if err != nil {
		return nil, err
	}
	own, err := owner(m.GetUser())
	if err != nil {
		return nil, err
	}
	mode := m.GetMode() & bitsOfMode
	if mode == 0 {
		mode = 0o755
	}
	if m.GetParents() {
		err = makeDirs(path, mode, own)
	} else {
		err = makeDir(path, mode, own)
	}
	return connect.NewResponse(&guestv1.MkdirResponse{}), fileError(err)
}

func makeDir(path string, mode uint32, own *account) error {
	if err := os.Mkdir(path, 0o700); err != nil {
		return err
	}
	fd, err := openDirAt(unix.AT_FDCWD, path)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	dir := os.NewFile(uintptr(fd), path)
	defer dir.Close()
	return dress(dir, mode, own)
}

// dress gives an open file its owner and mode, in the order that keeps set-id bits.
func dress(f *os.File, mode uint32, own *account) error {
	if own != nil {
		if err := f.Chown(int(own.uid), int(own.gid)); err != nil {
			return err
		}
	}
	return unix.Fchmod(int(f.Fd()), mode)
}

// makeDirs makes path and what is missing above it. Missing parents get mode 0755.
func makeDirs(path string, mode uint32, own *account) error {
	st, err := os.Stat(path)
	if err == nil {
		if !st.IsDir() {
			return &fs.PathError{Op: "mkdir", Path: path, Err: unix.ENOTDIR}
		}
		return nil
	}
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	if err := makeDirs(filepath.Dir(path), 0o755, own); err != nil {
		return err
	}
	err = makeDir(path, mode, own)
	if errors.Is(err, unix.EEXIST) { // another request was faster
		if st, serr := os.Stat(path); serr == nil && st.IsDir() {
			return nil
		}
	}
	return err
}

// Move implements the service; it replaces a file, or an empty directory by a directory.
func (a *Agent) Move(_ context.Context, req *connect.Request[guestv1.MoveRequest]) (*connect.Response[guestv1.MoveResponse], error) {
	from, err := cleanPath(req.Msg.GetFrom())
	if err != nil {
		return nil, err
	}
	to, err := cleanPath(req.Msg.GetTo())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&guestv1.MoveResponse{}), fileError(os.Rename(from, to))
}

// Remove implements the service. It does not follow a symlink.
func (a *Agent) Remove(_ context.Context, req *connect.Request[guestv1.RemoveRequest]) (*connect.Response[guestv1.RemoveResponse], error) {
	path, err := cleanPath(req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if path == "/" {
		return nil, sandbox.Errorf(sandbox.Invalid, "bad_path", "the root directory can't be removed")
	}
	if _, err := os.Lstat(path); err != nil {
		return nil, fileError(err)
	}
	remove := os.Remove
	if req.Msg.GetRecursive() {
		remove = os.RemoveAll
	}
	return connect.NewResponse(&guestv1.RemoveResponse{}), fileError(remove(path))
}
