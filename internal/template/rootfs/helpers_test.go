package rootfs

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"cloche.dev/cloche/internal/template/erofs"
	"cloche.dev/cloche/internal/template/erofs/erofstest"
)

var when = time.Unix(1_700_000_000, 123456789)

// ent is a header in short, with the file's data.
type ent struct {
	tar.Header
	data string
}

func dir(name string) ent { return ent{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""} }

func file(name, data string) ent {
	return ent{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, data}
}

func symlink(name, to string) ent {
	return ent{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to, Mode: 0o777}, ""}
}

func link(name, to string) ent {
	return ent{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}, ""}
}

func makeTar(t testing.TB, entries ...ent) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.data))
		if h.ModTime.IsZero() {
			h.ModTime = when
		}
		h.Format = tar.FormatPAX
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// importTar imports into a spool that lives as long as the test.
func importTar(t testing.TB, r io.Reader, l Limits) (*Tree, *Spool, error) {
	t.Helper()
	spool, err := NewSpool(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = spool.Close() })
	tree, err := Import(t.Context(), r, spool, l)
	return tree, spool, err
}

// writeImage writes the tree's image and returns its path and what it is.
func writeImage(t testing.TB, tree *Tree, spool *Spool) (string, erofs.Image) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.erofs")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	img, err := erofs.Write(t.Context(), f, tree.Root, spool, 0)
	if err != nil {
		t.Fatal(err)
	}
	return path, img
}

// verified imports a tar that must be good and returns its image's files.
func verified(t *testing.T, raw []byte) (map[string]erofstest.File, *Tree) {
	t.Helper()
	tree, spool, err := importTar(t, bytes.NewReader(raw), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	path, img := writeImage(t, tree, spool)
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	files, err := erofstest.Verify(f, img.Size)
	if err != nil {
		t.Fatal(err)
	}
	return files, tree
}
