package kernel

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

const (
	maxWindow  = 256 << 20 // of zstd and xz: what the largest levels use
	maxData    = 4 << 30   // of a package, uncompressed
	maxEntries = 50_000
)

// wanted are the names in a package that are unpacked: a kernel's image and
// what belongs to its modules. Some distributions have lib below usr.
var wanted = regexp.MustCompile(`^(boot/vmlinu[xz]-[A-Za-z0-9._+~-]+|(usr/)?lib/modules/[A-Za-z0-9._+~-]+/(modules\.[a-z.]+|kernel/[A-Za-z0-9._+~/-]+\.ko(\.xz|\.zst|\.gz)?))$`)

// unpackDeb unpacks what a kernel needs of the Debian package src into dir.
// Only regular files with plain names are taken, so nothing can lie outside of
// dir or lead there.
func unpackDeb(ctx context.Context, src, dir string) error {
	f, err := os.Open(src)
	if err != nil {
		return err
	}
	defer f.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close() //nolint:errcheck // nothing is pending in it
	data, done, err := debData(f)
	if err == nil {
		defer done()
		err = unpackTar(root, &bounded{ctx: ctx, r: data, left: maxData})
	}
	if err == nil || ctx.Err() != nil {
		return errors.Join(ctx.Err(), err)
	}
	var host *os.PathError
	if errors.As(err, &host) && !errors.Is(err, syscall.EEXIST) && !errors.Is(err, syscall.ENOTDIR) {
		return err // this host's disk, not names of the package that exclude each other
	}
	return invalid("%s is no Debian package with a kernel: %w", filepath.Base(src), err)
}

// debData finds the files' archive in a package.
func debData(r io.Reader) (data io.Reader, done func(), err error) {
	a, err := newArReader(r)
	if err != nil {
		return nil, nil, err
	}
	for first := true; ; first = false {
		name, _, err := a.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil, nil, errors.New("it has no data.tar")
		case err != nil:
			return nil, nil, err
		case first && name != "debian-binary":
			return nil, nil, errors.New("it does not begin with debian-binary")
		case name == "data.tar":
			return a, func() {}, nil
		case strings.HasPrefix(name, "data.tar."):
			return decompress(strings.TrimPrefix(name, "data.tar"), a)
		}
	}
}

// decompress reads what is compressed as a file's suffix says.
func decompress(suffix string, r io.Reader) (out io.Reader, done func(), err error) {
	switch suffix {
	case "":
		return r, func() {}, nil
	case ".xz":
		br := bufio.NewReaderSize(r, 64<<10)
		head, _ := br.Peek(maxXZHead) // what is short fails where it is read
		if h, err := parseXZHead(head); err == nil && h.dict > maxWindow {
			return nil, nil, fmt.Errorf("its xz dictionary has %d bytes", h.dict)
		}
		out, err = xz.NewReader(br)
		return out, func() {}, err
	case ".zst":
		z, err := zstd.NewReader(r, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, nil, err
		}
		return z, z.Close, nil
	case ".gz":
		out, err = gzip.NewReader(r)
		return out, func() {}, err
	}
	return nil, nil, fmt.Errorf("it is compressed as %q, which is not known", suffix)
}

func unpackTar(root *os.Root, r io.Reader) error {
	tr := tar.NewReader(r)
	for range maxEntries {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := path.Clean(strings.TrimPrefix(h.Name, "./"))
		if h.Typeflag != tar.TypeReg || !wanted.MatchString(name) || !filepath.IsLocal(name) {
			continue
		}
		if err := unpackFile(root, name, tr); err != nil {
			return err
		}
	}
	return fmt.Errorf("it has more than %d entries", maxEntries)
}

func unpackFile(root *os.Root, name string, r io.Reader) error {
	if err := root.MkdirAll(path.Dir(name), 0o700); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, io.LimitReader(r, maxImage+1))
	if n > maxImage {
		err = fmt.Errorf("%s is larger than %d bytes", name, maxImage)
	}
	return errors.Join(err, f.Close())
}

// bounded reads until the context ends or too much was read.
type bounded struct {
	ctx  context.Context
	r    io.Reader
	left int64
}

// Read implements io.Reader.
func (b *bounded) Read(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := b.r.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, errors.New("it is too large when uncompressed")
	}
	return n, err
}
