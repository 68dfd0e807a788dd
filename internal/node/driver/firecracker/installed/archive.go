package installed

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	maxArchive  = 512 << 20
	maxUnpacked = 4 << 30 // a release has its debug symbols in it
	maxEntries  = 1000
)

// Release are the two programs out of an upstream release archive.
type Release struct {
	Version             string // as the archive names it, without the v
	Firecracker, Jailer string // files
}

// program is what upstream calls the two in a release, like
// release-v1.15.1-x86_64/firecracker-v1.15.1-x86_64.
var program = regexp.MustCompile(`^(?:[^/]+/)?(firecracker|jailer)-v([0-9][0-9A-Za-z.+-]{0,40})-(x86_64|aarch64)$`)

// machine is what upstream calls this machine's architecture.
func machine() string {
	return map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
}

// Unpack takes the two programs out of a release archive (tar, gzip) into dir.
// Nothing else is written, and under no name that the archive gives.
func Unpack(ctx context.Context, archive, dir string) (Release, error) {
	f, err := os.Open(archive)
	if err != nil {
		return Release{}, err
	}
	defer f.Close()
	r, err := unpack(ctx, f, dir)
	var host *os.PathError
	var known *sandbox.Error
	switch {
	case ctx.Err() != nil:
		return Release{}, ctx.Err()
	case err == nil || errors.As(err, &host) || errors.As(err, &known):
		return r, err
	}
	return Release{}, sandbox.Errorf(sandbox.Invalid, "archive_invalid", "%s is no release archive of Firecracker: %w", filepath.Base(archive), err).
		WithHint("take release-vVERSION-ARCH.tgz from the upstream release")
}

func unpack(ctx context.Context, in io.Reader, dir string) (Release, error) {
	z, err := gzip.NewReader(in)
	if err != nil {
		return Release{}, err
	}
	tr := tar.NewReader(&bounded{ctx: ctx, r: z, left: maxUnpacked})
	var r Release
	for range maxEntries {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return r, r.complete()
		}
		if err != nil {
			return Release{}, err
		}
		m := program.FindStringSubmatch(strings.TrimPrefix(h.Name, "./"))
		if m == nil || h.Typeflag != tar.TypeReg {
			continue
		}
		if err := r.take(m, tr, dir); err != nil {
			return Release{}, err
		}
	}
	return Release{}, fmt.Errorf("it has more than %d entries", maxEntries)
}

// take writes a program to a file of its own.
func (r *Release) take(name []string, in io.Reader, dir string) error {
	to := map[string]*string{"firecracker": &r.Firecracker, "jailer": &r.Jailer}[name[1]]
	switch {
	case *to != "":
		return fmt.Errorf("it has %s twice", name[1])
	case name[3] != machine():
		return sandbox.Errorf(sandbox.Invalid, "archive_architecture", "the release is for %s and this machine is %s", name[3], machine()).
			WithHint("take release-v%s-%s.tgz", name[2], machine())
	case r.Version != "" && r.Version != name[2]:
		return fmt.Errorf("its programs are of versions %s and %s", r.Version, name[2])
	}
	r.Version = name[2]
	*to = filepath.Join(dir, name[1])
	return save(*to, in, maxBinary)
}

func (r *Release) complete() error {
	if r.Firecracker == "" || r.Jailer == "" {
		return errors.New("it lacks firecracker-vVERSION-ARCH or jailer-vVERSION-ARCH")
	}
	return nil
}

// save writes at most limit bytes to a new file.
func save(path string, r io.Reader, limit int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, io.LimitReader(r, limit+1))
	if err == nil && n > limit {
		err = fmt.Errorf("%s is larger than %d bytes", filepath.Base(path), limit)
	}
	return errors.Join(err, f.Close())
}
