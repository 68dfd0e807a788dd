package rootfs

import (
	"fmt"
	"hash/crc32"
	"io"
	"os"

	"cloche.dev/cloche/internal/template/erofs"
)

// Spool holds the files' data of a tree in one file that has no name any more.
// Every file starts on a block, and runs of zeros take no space.
type Spool struct {
	f     *os.File
	end   int64 // where the next file starts
	total int64 // bytes of all files
	buf   []byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// NewSpool makes a spool in dir.
func NewSpool(dir string) (*Spool, error) {
	f, err := os.CreateTemp(dir, "spool-")
	if err != nil {
		return nil, fmt.Errorf("make a spool: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("unlink the spool: %w", err)
	}
	return &Spool{f: f, buf: make([]byte, 256<<10)}, nil
}

// Close frees the data.
func (s *Spool) Close() error { return s.f.Close() }

// ReadAt implements io.ReaderAt. Holes after the last byte written read as
// zeros too.
func (s *Spool) ReadAt(p []byte, off int64) (int, error) {
	if off >= s.end {
		return 0, io.EOF
	}
	want := len(p)
	p = p[:min(int64(want), s.end-off)]
	n, err := s.f.ReadAt(p, off)
	if err == io.EOF {
		clear(p[n:])
		n, err = len(p), nil
	}
	if err == nil && n < want {
		err = io.EOF
	}
	return n, err
}

// add copies exactly size bytes from r and returns where they are, and their
// checksum.
func (s *Spool) add(r io.Reader, size int64) (offset int64, sum uint32, err error) {
	offset = s.end
	for at := int64(0); at < size; {
		p := s.buf[:min(size-at, int64(len(s.buf)))]
		if _, err := io.ReadFull(r, p); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return 0, 0, err
		}
		sum = crc32.Update(sum, castagnoli, p)
		if err := s.put(p, offset+at); err != nil {
			return 0, 0, err
		}
		at += int64(len(p))
	}
	s.total += size
	s.end = offset + (size+erofs.BlockSize-1)/erofs.BlockSize*erofs.BlockSize
	return offset, sum, nil
}

// put writes p without its blocks of zeros.
func (s *Spool) put(p []byte, off int64) error {
	for len(p) > 0 {
		n, zero := erofs.Run(p)
		if !zero {
			if _, err := s.f.WriteAt(p[:n], off); err != nil {
				return &spoolError{err}
			}
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// spoolError is a fault of this host and not of the tar.
type spoolError struct{ err error }

func (e *spoolError) Error() string { return "write the spool: " + e.err.Error() }
func (e *spoolError) Unwrap() error { return e.err }
