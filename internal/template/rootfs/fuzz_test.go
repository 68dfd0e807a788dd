package rootfs

import (
	"archive/tar"
	"bytes"
	"os"
	"strings"
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
	f.Fuzz(func(t *testing.T, raw []byte) { holdToContract(t, raw) })
}

// FuzzEntries is FuzzImport for well-formed tars of any entries, which random
// bytes rarely are: a line is one entry, of type, name, target and data.
func FuzzEntries(f *testing.F) {
	f.Add("5|./\n5|a\n0|a/f||data\n1|a/h|a/f\n2|l|a\n0|l/g||2\n6|p\n3|n")
	f.Add("2|a|b\n2|b|/a\n0|a/b/c||x\n1|x|a/b")
	f.Add("0|f||1\n1|l|f\n0|f||2\n5|f\n0|f/x||3\n0|f||4\n2|f|..\n0|f/y")
	f.Add("2|a|../../x/./y\n0|a/z||1\n1|b|a/z\n1|b|b\n0|.-||\n0|!||\n0|...||")
	f.Fuzz(func(t *testing.T, lines string) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for i, line := range strings.Split(lines, "\n") {
			p := append(strings.SplitN(line, "|", 4), "", "", "", "")
			if p[0] == "" || i > 1000 {
				continue
			}
			h := tar.Header{Typeflag: p[0][0], Name: p[1], Linkname: p[2], Mode: int64(i) * 37, Uid: i, ModTime: when, Format: tar.FormatPAX}
			if h.Typeflag == tar.TypeReg {
				h.Size = int64(len(p[3]))
			}
			if w.WriteHeader(&h) == nil && h.Size > 0 {
				_, _ = w.Write([]byte(p[3])) // what the writer refuses is no case
			}
		}
		_ = w.Close()
		holdToContract(t, b.Bytes())
	})
}

func holdToContract(t *testing.T, raw []byte) {
	t.Helper()
	limits := Limits{Entries: 500, DataBytes: 4 << 20, StreamBytes: 4 << 20, NameBytes: 64 << 10}
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
}
