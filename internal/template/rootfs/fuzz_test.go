package rootfs

import (
	"archive/tar"
	"bytes"
	"os"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/template/erofs/erofstest"
)

// FuzzImport holds any bytes to this: the import never panics, keeps its
// limits, refuses with an error of class invalid, and what it accepts becomes
// an image that the verifier accepts.
func FuzzImport(f *testing.F) {
	sparse := ent{tar.Header{Name: "s", Typeflag: tar.TypeReg, Mode: 0o644}, "x"}
	x := file("x", "1")
	x.PAXRecords = map[string]string{"SCHILY.xattr.user.a": "1"}
	all := makeTar(f, dir("./"), dir("a"), file("a/f", "data"), link("a/h", "a/f"), symlink("l", "a"), file("l/g", "2"), x, sparse,
		ent{tar.Header{Name: "p", Typeflag: tar.TypeFifo}, ""}, ent{tar.Header{Name: "n", Typeflag: tar.TypeChar}, ""})
	f.Add(all)
	f.Add(gz(f, all))
	f.Add(all[:len(all)-1500])
	f.Add(makeTar(f, file("../x", "")))
	f.Add(makeTar(f, symlink("a", "b"), symlink("b", "/a"), file("a/b/c", "")))
	f.Add([]byte("\x28\xb5\x2f\xfd\x00\x00\x01\x00\x00"))
	limits := Limits{Entries: 500, DataBytes: 4 << 20, StreamBytes: 4 << 20, NameBytes: 64 << 10}
	f.Fuzz(func(t *testing.T, raw []byte) {
		tree, spool, err := importTar(t, bytes.NewReader(raw), limits)
		if err != nil {
			if !sandbox.IsClass(err, sandbox.Invalid) {
				t.Fatalf("not an invalid tar: %v", err)
			}
			return
		}
		if spool.total > limits.DataBytes || tree.Count > limits.Entries {
			t.Fatalf("%d bytes, %d entries", spool.total, tree.Count)
		}
		path, img := writeImage(t, tree, spool)
		image, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = image.Close() }()
		if _, err := erofstest.Verify(image, img.Size); err != nil {
			t.Fatal(err)
		}
	})
}
