package backup

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// writer brings files of a state directory into a backup that is being made.
type writer struct {
	ctx      context.Context // of the one call that it lives for
	from, to string
	files    map[string]file // by path
	linked   map[string]bool
}

// brought is what a file's copy was found to be.
func (w *writer) brought(rel string, size int64, sum string) {
	w.files[rel] = file{Path: filepath.ToSlash(rel), Size: size, SHA256: sum}
}

// drop forgets and removes what lies below rel.
func (w *writer) drop(rel string) error {
	for path := range w.files {
		if within(path, rel) {
			delete(w.files, path)
			delete(w.linked, path)
		}
	}
	return os.RemoveAll(filepath.Join(w.to, rel))
}

func within(path, dir string) bool {
	rest, err := filepath.Rel(dir, path)
	return err == nil && filepath.IsLocal(rest)
}

// dir makes a directory of the backup.
func (w *writer) dir(rel string) error {
	return os.MkdirAll(filepath.Join(w.to, rel), 0o700)
}

// keep brings a file that never changes and whose content is known to hash to
// sum: as a link, else as a copy.
func (w *writer) keep(rel, sum string) error {
	if err := w.ctx.Err(); err != nil {
		return err
	}
	src, dst := filepath.Join(w.from, rel), filepath.Join(w.to, rel)
	st, err := os.Lstat(src)
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", rel)
	}
	err = os.Link(src, dst)
	switch {
	case err == nil:
		w.linked[rel] = true
	case !noLinks(err):
		return err
	default:
		if err := w.spread(src, dst, st); err != nil {
			return err
		}
	}
	w.brought(rel, st.Size(), sum)
	return nil
}

// noLinks tells whether a link failed because there can be none.
func noLinks(err error) bool {
	for _, no := range []error{syscall.EXDEV, syscall.EPERM, syscall.EMLINK, syscall.EOPNOTSUPP, syscall.ENOSYS} {
		if errors.Is(err, no) {
			return true
		}
	}
	return false
}

// The whences of lseek(2) for files with holes.
const seekData, seekHole = 3, 4

// spread copies a file and leaves its holes out.
func (w *writer) spread(src, dst string, st fs.FileInfo) (err error) {
	in, err := os.Open(filepath.Clean(src))
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(filepath.Clean(dst), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if err := out.Truncate(st.Size()); err != nil {
		return err
	}
	for at := int64(0); at < st.Size(); {
		from, err := in.Seek(at, seekData)
		if errors.Is(err, syscall.ENXIO) {
			break // nothing but a hole
		}
		if err != nil {
			return err
		}
		if at, err = in.Seek(from, seekHole); err != nil {
			return err
		}
		if err := w.stretch(in, out, from, at); err != nil {
			return err
		}
	}
	if err := out.Chmod(st.Mode().Perm()); err != nil {
		return err
	}
	return out.Sync()
}

// stretchAt is how much is copied between two looks at the context.
const stretchAt = 64 << 20

// stretch copies the bytes from `from` to `to`.
func (w *writer) stretch(in, out *os.File, from, to int64) error {
	if _, err := in.Seek(from, io.SeekStart); err != nil {
		return err
	}
	if _, err := out.Seek(from, io.SeekStart); err != nil {
		return err
	}
	for from < to {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		n, err := io.CopyN(out, in, min(stretchAt, to-from))
		if err != nil {
			return err
		}
		from += n
	}
	return nil
}

// copy brings a file that may grow or be replaced: what it holds now.
func (w *writer) copy(rel string) (err error) {
	in, err := os.OpenFile(filepath.Join(w.from, rel), os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", rel)
	}
	out, err := os.OpenFile(filepath.Join(w.to, rel), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	sum := sha256.New()
	n, err := sumUp(w.ctx, io.MultiWriter(sum, out), io.LimitReader(in, st.Size()))
	if err != nil {
		return err
	}
	w.brought(rel, n, hexOf(sum))
	return out.Sync()
}

// sumUp is io.Copy that ends with its context.
func sumUp(ctx context.Context, to io.Writer, from io.Reader) (n int64, err error) {
	for buf := make([]byte, 256<<10); ; {
		if err := ctx.Err(); err != nil {
			return n, err
		}
		got, err := from.Read(buf)
		if _, werr := to.Write(buf[:got]); werr != nil {
			return n, werr
		}
		n += int64(got)
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}

// measure is the size and hash of a file.
func measure(ctx context.Context, path string) (int64, string, error) {
	f, err := os.OpenFile(filepath.Clean(path), os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return 0, "", err
	}
	defer f.Close()
	sum := sha256.New()
	n, err := sumUp(ctx, sum, f)
	return n, hexOf(sum), err
}

func hexOf(sum hash.Hash) string { return hex.EncodeToString(sum.Sum(nil)) }
