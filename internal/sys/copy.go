package sys

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// copyStep is how much CopySparse copies between two looks at its context.
const copyStep = 64 << 20

// CopySparse makes dst, an empty file, a copy of the regular file src. Where
// the filesystem can, both share their blocks until one of them is written to;
// else only what is not a hole is copied. dst then has src's size, and neither
// is synced.
func CopySparse(ctx context.Context, dst, src *os.File) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())); err == nil {
		return nil
	}
	st, err := src.Stat()
	if err != nil {
		return err
	}
	if err := dst.Truncate(st.Size()); err != nil {
		return fmt.Errorf("copy %s: %w", src.Name(), err)
	}
	for at := int64(0); at < st.Size(); {
		data, err := seekOr(src, at, unix.SEEK_DATA, st.Size())
		if err != nil {
			return err
		}
		hole, err := seekOr(src, data, unix.SEEK_HOLE, st.Size())
		if err != nil {
			return err
		}
		if err := copyRange(ctx, dst, src, data, min(hole, st.Size())); err != nil {
			return fmt.Errorf("copy %s: %w", src.Name(), err)
		}
		at = hole
	}
	return nil
}

// seekOr finds the next data or hole at or after an offset; end where there is
// none.
func seekOr(f *os.File, at int64, whence int, end int64) (int64, error) {
	if at >= end {
		return end, nil
	}
	n, err := f.Seek(at, whence)
	if errors.Is(err, unix.ENXIO) {
		return end, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look for what is in %s: %w", f.Name(), err)
	}
	return n, nil
}

func copyRange(ctx context.Context, dst, src *os.File, from, to int64) error {
	for from < to {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := src.Seek(from, io.SeekStart); err != nil {
			return err
		}
		if _, err := dst.Seek(from, io.SeekStart); err != nil {
			return err
		}
		n, err := io.CopyN(dst, src, min(to-from, copyStep)) // in the kernel, between two files
		if err != nil {
			return err
		}
		from += n
	}
	return nil
}
