package rootfs

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"cloche.dev/cloche/internal/sandbox"
)

func TestImportKeepsEverything(t *testing.T) {
	long := strings.Repeat("n", 255)
	suid := file("usr/bin/su", "x")
	suid.Mode, suid.Uid, suid.Gid = 0o4755, 70000, 4_000_000_000
	sticky := dir("tmp")
	sticky.Mode = 0o1777
	fifo := ent{tar.Header{Name: "run/fifo", Typeflag: tar.TypeFifo, Mode: 0o600}, ""}
	root := dir("./")
	root.Mode = 0o711
	big := file("big", strings.Repeat("0123456789abcdef", 300))
	files, tree := verified(t, makeTar(t, root, suid, sticky, fifo, big,
		file("a/"+long, "long"), link("a/hard", "usr/bin/su"), link("a/hard2", "./a/hard"),
		symlink("a/abs", "/etc/passwd"), symlink("a/out", "../../../../etc"), file("empty", ""),
		file("!before-dots", "1"), file(".-between", "2"), file("..x", "3")))
	for name, want := range map[string]string{
		".": "40711 2+ 0:0", "usr/bin/su": "104755 3 70000:4000000000 x", "a/hard": "104755 3 70000:4000000000 x",
		"tmp": "41777 2 0:0", "run/fifo": "10600 1 0:0", "a/" + long: "100644 1 0:0 long", "a/abs": "120777 1 0:0 /etc/passwd",
		"a/out": "120777 1 0:0 ../../../../etc", "empty": "100644 1 0:0", "usr": "40755 3 0:0", "!before-dots": "100644 1 0:0 1",
	} {
		f, ok := files[name]
		got := fmt.Sprintf("%o %d %d:%d", f.Mode, f.Nlink, f.UID, f.GID)
		if name == "." {
			got = fmt.Sprintf("%o 2+ %d:%d", f.Mode, f.UID, f.GID)
		}
		if f.Mode>>12 != 4 && f.Size > 0 {
			got += " " + string(f.Data)
		}
		if !ok || got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
		if f.Mtime != when.Unix() || name != "usr" && f.MtimeNsec != uint32(when.Nanosecond()) { // usr was made on the way
			t.Errorf("%s: modified at %d.%d", name, f.Mtime, f.MtimeNsec)
		}
	}
	if files["usr/bin/su"].Nid != files["a/hard"].Nid || files["a/hard2"].Nid != files["a/hard"].Nid {
		t.Error("hard links are not one inode")
	}
	if len(tree.Dropped) != 0 {
		t.Errorf("dropped %v", tree.Dropped)
	}
}

func TestImportDuplicates(t *testing.T) {
	late := dir("d")
	late.Mode = 0o700
	files, _ := verified(t, makeTar(t,
		file("f", "first"), link("l", "f"), file("f", "second"), // the link keeps the first
		dir("d"), file("d/in", "1"), late, // a directory over one merges
		dir("gone"), file("gone/in", "1"), file("gone", "now a file"),
		symlink("s", "d"), dir("s"), file("s/in", "not in d")))
	if string(files["f"].Data) != "second" || string(files["l"].Data) != "first" || files["f"].Nlink != 1 {
		t.Errorf("the last entry didn't win: %q %q", files["f"].Data, files["l"].Data)
	}
	if files["d"].Mode != 0o40700 || string(files["d/in"].Data) != "1" {
		t.Error("a directory over a directory must merge")
	}
	if _, ok := files["gone/in"]; ok || string(files["gone"].Data) != "now a file" {
		t.Error("a file over a directory must take its place")
	}
	if string(files["s/in"].Data) != "not in d" || files["s"].Mode>>12 != 4 {
		t.Error("a directory over a symbolic link must take its place")
	}
}

func TestImportUnderSymlinkStaysInside(t *testing.T) {
	files, _ := verified(t, makeTar(t,
		symlink("bin", "usr/bin"), file("bin/x", "1"),
		symlink("out", "../../../../etc"), file("out/y", "2"),
		symlink("abs", "/etc"), file("abs/z", "3"), link("hard", "abs/z")))
	for name, data := range map[string]string{"usr/bin/x": "1", "etc/y": "2", "etc/z": "3", "hard": "3"} {
		if string(files[name].Data) != data {
			t.Errorf("%s: %q", name, files[name].Data)
		}
	}
}

func TestImportDropsAndCounts(t *testing.T) {
	x := file("x", "1")
	x.PAXRecords = map[string]string{"SCHILY.xattr.user.a": "1", "SCHILY.xattr.security.capability": "2"}
	old, far := file("old", ""), file("far", "")
	old.ModTime, far.ModTime = time.Unix(-5, 0), time.Unix(1<<35, 0)
	files, tree := verified(t, makeTar(t, x, old, far, ent{tar.Header{Name: "dev/sda", Typeflag: tar.TypeBlock}, ""},
		ent{tar.Header{Name: "dev/null", Typeflag: tar.TypeChar}, ""}))
	if tree.Dropped[DroppedDevice] != 2 || tree.Dropped[DroppedXattr] != 2 || tree.Dropped[DroppedTime] != 2 {
		t.Errorf("dropped %v", tree.Dropped)
	}
	if _, ok := files["dev/sda"]; ok {
		t.Error("a device node came through")
	}
}

func TestImportRefuses(t *testing.T) {
	deep := strings.Repeat("d/", 2047)
	loop := []ent{symlink("a", "b"), symlink("b", "a"), file("a/x", "")}
	owner := file("x", "")
	owner.Uid = math.MaxUint32
	good := makeTar(t, file("x", strings.Repeat("x", 3000)))
	for _, tc := range []struct {
		name, code string
		raw        []byte
	}{
		{"dotdot", "tar_path_escapes", makeTar(t, file("../x", ""))},
		{"dotdot inside", "tar_path_escapes", makeTar(t, file("a/../x", ""))},
		{"hard link out", "tar_path_escapes", makeTar(t, link("x", "../../etc/shadow"))},
		{"hard link to nothing", "tar_link_missing", makeTar(t, link("x", "/etc/shadow"))},
		{"hard link to a directory", "tar_bad_link", makeTar(t, dir("d"), link("x", "d"))},
		{"hard link to the root", "tar_bad_link", makeTar(t, link("x", "/"))},
		{"symlink loop", "tar_link_loop", makeTar(t, loop...)},
		{"under a file", "tar_not_a_directory", makeTar(t, file("f", ""), file("f/x", ""))},
		{"root is a file", "tar_bad_name", makeTar(t, file(".", ""))},
		{"long name", "tar_name_too_long", makeTar(t, file(strings.Repeat("n", 256), ""))},
		{"long path", "tar_name_too_long", makeTar(t, file(strings.Repeat("d/", 2048)+"x", ""))},
		{"deep through links", "tar_too_deep", makeTar(t, dir(deep), symlink("l", "/"+deep[:len(deep)-1]), file("l/a/b/c", ""))},
		{"long link", "tar_bad_link", makeTar(t, symlink("x", strings.Repeat("t", 4096)))},
		{"owner", "tar_bad_owner", makeTar(t, owner)},
		{"empty", "tar_truncated", nil},
		{"no entries", "tar_empty", make([]byte, 1024)},
		{"no tar", "tar_malformed", bytes.Repeat([]byte("hello "), 500)},
		{"cut in data", "tar_truncated", good[:2000]},
		{"cut at the end mark", "tar_truncated", good[:len(good)-1024]},
		{"xz", "tar_compression_unsupported", []byte("\xfd7zXZ\x00abcdefgh")},
		{"huge claim", "tar_too_large", hugeHeader(t, 1<<40)},
		{"damaged gzip", "tar_malformed", damaged(gz(t, good))},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, spool, err := importTar(t, bytes.NewReader(tc.raw), Limits{})
			var e *sandbox.Error
			if !errors.As(err, &e) || e.Class != sandbox.Invalid || e.Code != tc.code {
				t.Fatalf("got %v, want %s", err, tc.code)
			}
			if len(e.Message) > 500 {
				t.Errorf("a message of %d bytes", len(e.Message))
			}
			if spool.total > 1<<20 {
				t.Errorf("%d bytes were spooled", spool.total)
			}
		})
	}
}

func hugeHeader(t *testing.T, size int64) []byte {
	var b bytes.Buffer
	if err := tar.NewWriter(&b).WriteHeader(&tar.Header{Name: "x", Size: size, Mode: 0o644}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func gz(t testing.TB, raw []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(raw); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func damaged(p []byte) []byte {
	p[len(p)-5] ^= 0xff // the checksum
	return p
}

func TestImportLimits(t *testing.T) {
	many := make([]ent, 100)
	for i := range many {
		many[i] = file(fmt.Sprintf("d/%03d", i), "0123456789")
	}
	raw := makeTar(t, many...)
	for name, l := range map[string]Limits{
		"entries": {Entries: 50}, "data": {DataBytes: 500}, "stream": {StreamBytes: 20 << 10}, "names": {NameBytes: 200},
	} {
		if _, _, err := importTar(t, bytes.NewReader(raw), l); !strings.Contains(fmt.Sprint(err), "more than") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := importTar(t, bytes.NewReader(raw), Limits{}); err != nil {
		t.Error(err)
	}
}

// zeroTar is a plain file of that many zero bytes in a tar, made as it is read.
func zeroTar(t *testing.T, size int64) io.Reader {
	return io.MultiReader(bytes.NewReader(hugeHeader(t, size)), io.LimitReader(zeroReader{}, size), bytes.NewReader(make([]byte, 1024)))
}

type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestImportRefusesBomb(t *testing.T) {
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(w, zeroTar(t, 512<<20)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	_, spool, err := importTar(t, &b, Limits{})
	var e *sandbox.Error
	if !errors.As(err, &e) || e.Code != "tar_bomb" {
		t.Fatalf("got %v", err)
	}
	if n := diskUse(t, spool); n > 1<<20 {
		t.Errorf("the bomb took %d bytes of disk", n)
	}
}

func TestImportCompressed(t *testing.T) {
	raw := makeTar(t, file("x", "data"))
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, packed := range map[string][]byte{"plain": raw, "gzip": gz(t, raw), "zstd": enc.EncodeAll(raw, nil)} {
		files, _ := verified(t, packed)
		if string(files["x"].Data) != "data" {
			t.Errorf("%s: %q", name, files["x"].Data)
		}
	}
}

func TestImportSaysWhoFailed(t *testing.T) {
	raw := makeTar(t, file("x", "data"))
	broken := errors.New("the network is gone")
	if _, _, err := importTar(t, io.MultiReader(bytes.NewReader(raw[:600]), errReader{broken}), Limits{}); !errors.Is(err, broken) {
		t.Errorf("the sender's error became %v", err)
	}
	spool, err := NewSpool(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = spool.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Import(ctx, bytes.NewReader(raw), spool, Limits{}); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled import says %v", err)
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }
