package agent

import (
	"context"
	"crypto/rand"
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

const chunkSize = 256 << 10

// openRegular opens an existing regular file. Anything else (a FIFO would
// block, a device is none of our business) is refused.
func openRegular(path string, flags int) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, flags|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	st, err := f.Stat()
	switch {
	case err != nil:
	case st.IsDir():
		err = &fs.PathError{Op: "open", Path: path, Err: unix.EISDIR}
	case !st.Mode().IsRegular():
		err = sandbox.Errorf(sandbox.FailedPrecondition, "not_a_file", "%s is no regular file", path)
	default:
		return f, st, nil
	}
	_ = f.Close()
	return nil, nil, err
}

// Read implements the service.
func (a *Agent) Read(ctx context.Context, req *connect.Request[guestv1.ReadRequest], stream *connect.ServerStream[guestv1.Chunk]) error {
	m := req.Msg
	path, err := cleanPath(m.GetPath())
	if err != nil {
		return err
	}
	if m.GetOffset() > 1<<62 {
		return sandbox.Errorf(sandbox.Invalid, "bad_range", "no file has a byte %d", m.GetOffset())
	}
	f, _, err := openRegular(path, os.O_RDONLY)
	if err != nil {
		return fileError(err)
	}
	defer f.Close()
	if _, err := f.Seek(int64(m.GetOffset()), io.SeekStart); err != nil {
		return fileError(err)
	}
	var r io.Reader = f
	if !m.GetWhole() {
		r = io.LimitReader(f, int64(min(m.GetLength(), 1<<62)))
	}
	return sendAll(ctx, r, stream.Send)
}

// sendAll sends r in chunks to its end.
func sendAll(ctx context.Context, r io.Reader, send func(*guestv1.Chunk) error) error {
	buf := make([]byte, chunkSize)
	for ctx.Err() == nil {
		n, err := r.Read(buf)
		if n > 0 {
			if err := send(&guestv1.Chunk{Data: buf[:n]}); err != nil {
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

// received is the rest of a client stream as a reader. It ends cleanly only
// where the client closed its side, so a broken transfer is never complete.
type received struct {
	next func() ([]byte, error)
	rest []byte
}

// Read implements io.Reader.
func (r *received) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		var err error
		if r.rest, err = r.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Write implements the service.
func (a *Agent) Write(_ context.Context, stream *connect.ClientStream[guestv1.WriteRequest]) (*connect.Response[guestv1.WriteResponse], error) {
	if !stream.Receive() {
		return nil, orMissing(stream.Err())
	}
	open, first := stream.Msg().GetOpen(), stream.Msg().GetData()
	path, err := cleanPath(open.GetPath())
	if err != nil {
		return nil, err
	}
	own, err := owner(open.GetUser())
	if err != nil {
		return nil, err
	}
	r := &received{rest: first, next: func() ([]byte, error) {
		if stream.Receive() {
			return stream.Msg().GetData(), nil
		}
		return nil, orEOF(stream.Err())
	}}
	if open.GetParents() {
		if err := makeDirs(filepath.Dir(path), 0o755, own); err != nil {
			return nil, fileError(err)
		}
	}
	var n int64
	if open.GetAtOffset() {
		n, err = writeAt(path, open, own, r)
	} else {
		n, err = replaceFile(path, open.GetMode()&bitsOfMode, own, r)
	}
	if err != nil {
		return nil, fileError(err)
	}
	return connect.NewResponse(&guestv1.WriteResponse{Written: uint64(n)}), nil
}

func orMissing(err error) error {
	if err != nil {
		return err
	}
	return sandbox.Errorf(sandbox.Invalid, "no_open", "the first message must say what is to be written")
}

func orEOF(err error) error {
	if err != nil {
		return err
	}
	return io.EOF
}

// writeAt writes into a file in place, and makes it where it is missing.
func writeAt(path string, open *guestv1.WriteOpen, own *account, r io.Reader) (int64, error) {
	if open.GetOffset() > 1<<62 {
		return 0, sandbox.Errorf(sandbox.Invalid, "bad_range", "no file has a byte %d", open.GetOffset())
	}
	f, _, err := openRegular(path, os.O_WRONLY)
	if errors.Is(err, unix.ENOENT) {
		if f, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err == nil {
			err = dress(f, orDefault(open.GetMode()&bitsOfMode), own)
		}
	}
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(io.NewOffsetWriter(f, int64(open.GetOffset())), r)
	return n, errors.Join(err, f.Close())
}

func orDefault(mode uint32) uint32 {
	if mode == 0 {
		return 0o644
	}
	return mode
}

// replaceFile writes a file beside path and renames it over path once it is
// complete. A symlink is followed; what was there before lends its mode and
// owner where the request names none.
func replaceFile(path string, mode uint32, own *account, r io.Reader) (int64, error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	st, err := os.Lstat(path)
	switch {
	case err == nil && st.IsDir():
		return 0, &fs.PathError{Op: "write", Path: path, Err: unix.EISDIR}
	case err == nil && st.Mode().Type()&^fs.ModeSymlink != 0:
		return 0, sandbox.Errorf(sandbox.FailedPrecondition, "not_a_file", "%s is no regular file", path)
	case err == nil && st.Mode().IsRegular():
		if sys, ok := st.Sys().(*syscall.Stat_t); ok {
			if mode == 0 {
				mode = sys.Mode & bitsOfMode
			}
			if own == nil {
				own = &account{uid: sys.Uid, gid: sys.Gid}
			}
		}
	}
	tmp := filepath.Join(filepath.Dir(path), ".cloche-"+strings.ToLower(rand.Text()))
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(f, r)
	if err == nil {
		err = dress(f, orDefault(mode), own)
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		_ = os.Remove(tmp)
		return 0, err
	}
	return n, nil
}
