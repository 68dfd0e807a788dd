package erofs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
)

// MaxImageSize is the largest image that block addresses reach.
const MaxImageSize = int64(1)<<32*BlockSize - BlockSize

// TooLargeError says that an image would pass its limit.
type TooLargeError struct{ Limit int64 }

func (e *TooLargeError) Error() string {
	return fmt.Sprintf("the image would be larger than its limit of %d bytes", e.Limit)
}

// Image tells what was written.
type Image struct {
	SHA256 [sha256.Size]byte
	Size   int64
	Inodes int
	UUID   [16]byte
}

// Write writes the image of the tree below root to f, which must be empty, and
// leaves it as long as the image. data holds the files' contents. Write changes the tree's unexported bookkeeping, so that one tree
// can be written once at a time.
func Write(ctx context.Context, f *os.File, root *Node, data io.ReaderAt, maxSize int64) (Image, error) {
	if maxSize <= 0 || maxSize > MaxImageSize {
		maxSize = MaxImageSize
	}
	l, err := newLayout(root, maxSize)
	if err != nil {
		return Image{}, err
	}
	w := &writer{layout: l, block: make([]byte, BlockSize), buf: make([]byte, 1<<20)}
	// The metadata is made twice: its hash goes into the first block.
	id := sha256.New()
	for _, n := range l.nodes {
		_, _ = id.Write(binary.LittleEndian.AppendUint32(nil, n.Sum)) // a hash never fails
	}
	if err := w.meta(ctx, func(p []byte) error { _, err := id.Write(p); return err }); err != nil {
		return Image{}, err
	}
	uuid := uuidOf(id.Sum(nil))
	out := newSink(f)
	w.first = func(block []byte) { superBlock(block, uuid, uint64(len(l.nodes)), l.blocks) }
	if err := w.meta(ctx, out.write); err != nil {
		return Image{}, err
	}
	if err := w.data(ctx, data, out.write); err != nil {
		return Image{}, err
	}
	size := int64(l.blocks) * BlockSize
	sum, err := out.finish(size)
	if err != nil {
		return Image{}, err
	}
	return Image{SHA256: sum, Size: size, Inodes: len(l.nodes), UUID: uuid}, nil
}

// uuidOf makes a UUID (version 8: of the maker's own kind) from a hash.
func uuidOf(sum []byte) (u [16]byte) {
	copy(u[:], sum)
	u[6] = u[6]&0x0f | 0x80
	u[8] = u[8]&0x3f | 0x80
	return u
}

// writer makes the parts of one image.
type writer struct {
	layout *layout
	first  func(block []byte) // completes the image's first block
	block  []byte             // scratch: one block
	buf    []byte             // scratch: whole blocks
	list   []dirent
}

// meta hands out everything before the files' data, in whole blocks.
func (w *writer) meta(ctx context.Context, emit func([]byte) error) error {
	if err := w.inodes(emit); err != nil {
		return err
	}
	for i, n := range w.layout.nodes {
		if i%4096 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		switch {
		case n.IsSymlink():
			clear(w.block)
			copy(w.block, n.Target)
			if err := emit(w.block); err != nil {
				return err
			}
		case n.IsDir():
			w.list = w.layout.dirents(n, w.list)
			// The rest of the scratch block is zero: it pads the last one.
			err := packDirents(w.list, w.block, func([]byte) error { return emit(w.block) })
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// inodes hands out the blocks of the superblock and the inode table.
func (w *writer) inodes(emit func([]byte) error) error {
	clear(w.block)
	at, first := superOffset+superSize, true
	flush := func() error {
		if first && w.first != nil {
			w.first(w.block)
		}
		first, at = false, 0
		err := emit(w.block)
		clear(w.block)
		return err
	}
	for _, n := range w.layout.nodes {
		if at == BlockSize {
			if err := flush(); err != nil {
				return err
			}
		}
		size := n.Size
		if !n.IsRegular() {
			size = metaSize(n)
		}
		putInode(w.block[at:at+inodeSize], n, uint64(size))
		at += inodeSize
	}
	return flush()
}

// data hands out the files' contents, each padded to whole blocks.
func (w *writer) data(ctx context.Context, src io.ReaderAt, emit func([]byte) error) error {
	for _, n := range w.layout.nodes {
		if !n.IsRegular() {
			continue
		}
		for off := int64(0); off < n.Size; {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			part := min(n.Size-off, int64(len(w.buf)))
			p := w.buf[:blocksOf(part)*BlockSize]
			if _, err := src.ReadAt(p[:part], n.Offset+off); err != nil {
				if errors.Is(err, io.EOF) {
					err = io.ErrUnexpectedEOF
				}
				return fmt.Errorf("read a file's data: %w", err)
			}
			clear(p[part:])
			if err := emit(p); err != nil {
				return err
			}
			off += part
		}
	}
	return nil
}

// sink writes whole blocks to a file, hashes them, and leaves holes for zeros.
type sink struct {
	f   *os.File
	off int64 // of buf
	buf []byte
	sum hash.Hash
}

func newSink(f *os.File) *sink { return &sink{f: f, buf: make([]byte, 0, 1<<20), sum: sha256.New()} }

func (s *sink) write(p []byte) error {
	if len(s.buf)+len(p) > cap(s.buf) {
		if err := s.flush(); err != nil {
			return err
		}
	}
	if len(p) >= cap(s.buf) {
		return s.put(p)
	}
	s.buf = append(s.buf, p...)
	return nil
}

func (s *sink) flush() error {
	err := s.put(s.buf)
	s.buf = s.buf[:0]
	return err
}

// put writes p at the end, without its blocks of zeros.
func (s *sink) put(p []byte) error {
	_, _ = s.sum.Write(p) // a hash never fails
	for len(p) > 0 {
		n, zero := Run(p)
		if !zero {
			if _, err := s.f.WriteAt(p[:n], s.off); err != nil {
				return fmt.Errorf("write the image: %w", err)
			}
		}
		s.off += int64(n)
		p = p[n:]
	}
	return nil
}

func (s *sink) finish(size int64) (sum [sha256.Size]byte, err error) {
	if err := s.flush(); err != nil {
		return sum, err
	}
	if s.off != size {
		return sum, fmt.Errorf("the image has %d bytes instead of %d", s.off, size)
	}
	if err := s.f.Truncate(size); err != nil {
		return sum, fmt.Errorf("size the image: %w", err)
	}
	copy(sum[:], s.sum.Sum(nil))
	return sum, nil
}

// Run returns the length of the longest start of p that is either all blocks
// of zeros or none, and which of the two.
func Run(p []byte) (n int, zero bool) {
	for n < len(p) {
		end := min(n+BlockSize, len(p))
		z := isZero(p[n:end])
		if n == 0 {
			zero = z
		} else if z != zero {
			break
		}
		n = end
	}
	return n, zero
}

var zeroBlock [BlockSize]byte

func isZero(p []byte) bool { return bytes.Equal(p, zeroBlock[:len(p)]) }
