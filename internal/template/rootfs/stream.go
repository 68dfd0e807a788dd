package rootfs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"cloche.dev/cloche/internal/sandbox"
)

// maxWindow bounds what a zstd frame may make the decoder keep.
const maxWindow = 128 << 20

// stream is a tar, uncompressed and bounded on the way.
type stream struct {
	ctx    context.Context
	in     *source
	out    io.Reader
	close  func()
	limits Limits
	packed bool
	n      int64 // bytes given out
	zeros  int64 // zero bytes at the end of those
	err    error // the reason why it stopped before its end
}

// source counts the bytes of the tar as it came and keeps its error apart from
// what a decompressor makes of it.
type source struct {
	r   io.Reader
	n   int64
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.n += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// openStream looks at the first bytes and sets up the decompression.
func openStream(ctx context.Context, r io.Reader, l Limits) (*stream, error) {
	s := &stream{ctx: ctx, in: &source{r: r}, limits: l, close: func() {}}
	br := bufio.NewReaderSize(s.in, 128<<10)
	head, _ := br.Peek(6) // a short tar fails where it is read
	has := func(magic string) bool { return bytes.HasPrefix(head, []byte(magic)) }
	switch {
	case has("\x1f\x8b"):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, s.explain(err)
		}
		s.out, s.packed, s.close = z, true, func() { _ = z.Close() }
	case has("\x28\xb5\x2f\xfd"), len(head) >= 4 && head[0]&0xf0 == 0x50 && has(string(head[:1])+"\x2a\x4d\x18"):
		z, err := zstd.NewReader(br, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, s.explain(err)
		}
		s.out, s.packed, s.close = z, true, z.Close
	case has("\xfd7zXZ\x00"), has("BZh"):
		return nil, refuse("tar_compression_unsupported", "the tar is compressed with xz or bzip2").
			WithHint("send it plain, or compressed with gzip or zstd")
	default:
		s.out = br
	}
	return s, nil
}

// Read implements io.Reader within the limits.
func (s *stream) Read(p []byte) (int, error) {
	if s.err != nil {
		return 0, s.err
	}
	if s.err = s.ctx.Err(); s.err != nil {
		return 0, s.err
	}
	n, err := s.out.Read(p)
	s.n += int64(n)
	s.countZeros(p[:n])
	switch {
	case s.n > s.limits.StreamBytes:
		s.err = tooLarge("bytes when uncompressed", s.limits.StreamBytes)
	case s.packed && s.n > ratioGrace && s.n/s.limits.Ratio > s.in.n:
		s.err = refuse("tar_bomb", "the tar expands to more than %d times its size", s.limits.Ratio).
			WithHint("if that is meant, send it uncompressed")
	}
	if s.err != nil {
		return 0, s.err
	}
	return n, err
}

func (s *stream) countZeros(p []byte) {
	tail := len(bytes.TrimRight(p, "\x00"))
	if tail > 0 {
		s.zeros = 0
	}
	s.zeros += int64(len(p) - tail)
}

// explain turns what a reader said into what shall be told: this host's fault,
// the sender's, or the tar's.
func (s *stream) explain(err error) error {
	var e *sandbox.Error
	var spool *spoolError
	switch {
	case errors.As(err, &e), errors.As(err, &spool):
		return err
	case s.err != nil:
		return s.err
	case s.in.err != nil && !errors.Is(s.in.err, io.ErrUnexpectedEOF):
		return sandbox.AsError(s.in.err)
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return refuse("tar_truncated", "the tar ends too early")
	case errors.Is(err, zstd.ErrWindowSizeExceeded):
		return refuse("tar_too_large", "the tar's zstd window is larger than %d bytes", maxWindow).
			WithHint("compress it without --ultra or --long")
	}
	return refuse("tar_malformed", "this is no tar, or a damaged one: %w", err)
}

// drain reads what follows the tar's end mark, which checks the compression's
// own checksum and lets the sender finish.
func (s *stream) drain() error {
	_, err := io.Copy(io.Discard, struct{ io.Reader }{s})
	return err
}
