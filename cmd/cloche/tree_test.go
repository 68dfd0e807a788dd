package main

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

type entry struct {
	name, link, body string
	kind             byte
	mode             int64
}

func archive(t testing.TB, entries []entry) *tar.Reader {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		if e.mode == 0 {
			e.mode = 0o644
		}
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Size: int64(len(e.body)), Mode: e.mode}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return tar.NewReader(&b)
}

// What comes out of a sandbox is hostile: nothing of it may land outside of
// the target, and no link may lead there later.
func TestUnpackStaysBelow(t *testing.T) {
	for name, entries := range map[string][]entry{
		"dots":                 {{name: "../victim", kind: tar.TypeReg, body: "owned"}},
		"dots in the tree":     {{name: "src/../../victim", kind: tar.TypeReg, body: "owned"}},
		"absolute":             {{name: "/victim", kind: tar.TypeReg, body: "owned"}},
		"link out":             {{name: "src/l", link: "../../victim", kind: tar.TypeSymlink}},
		"absolute link":        {{name: "src/l", link: "/etc", kind: tar.TypeSymlink}},
		"through a link":       {{name: "src/l", link: "..", kind: tar.TypeSymlink}, {name: "src/l/victim", kind: tar.TypeReg, body: "owned"}},
		"through nested links": {{name: "src/a/b", link: "..", kind: tar.TypeSymlink}, {name: "src/c", link: "a/b/..", kind: tar.TypeSymlink}, {name: "src/c/victim", kind: tar.TypeReg, body: "owned"}},
		"three links":          {{name: "src/a/b", link: "..", kind: tar.TypeSymlink}, {name: "src/c", link: "a/b/..", kind: tar.TypeSymlink}, {name: "src/d", link: "c/..", kind: tar.TypeSymlink}},
		"below itself":         {{name: "src/x", link: ".", kind: tar.TypeSymlink}, {name: "src/x/x/x/l", link: "../../../..", kind: tar.TypeSymlink}},
		"hard link out":        {{name: "src/h", link: "../victim", kind: tar.TypeLink}},
		"device":               {{name: "src/null", kind: tar.TypeChar}},
	} {
		t.Run(name, func(t *testing.T) {
			outer := t.TempDir()
			victim, target := filepath.Join(outer, "victim"), filepath.Join(outer, "target")
			if err := os.WriteFile(victim, []byte("mine"), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Mkdir(target, 0o755); err != nil {
				t.Fatal(err)
			}
			_ = unpackTree(archive(t, entries), target, "src", "src", func(string) {})
			if b, err := os.ReadFile(victim); err != nil || string(b) != "mine" {
				t.Errorf("the victim is %q, %v", b, err)
			}
			list, err := os.ReadDir(outer)
			if err != nil || len(list) != 2 {
				t.Errorf("beside the target lie %v, %v", list, err)
			}
			_ = filepath.WalkDir(target, func(p string, d os.DirEntry, _ error) error {
				if d.Type()&os.ModeSymlink != 0 {
					if to, err := filepath.EvalSymlinks(p); err == nil && !strings.HasPrefix(to, target) {
						t.Errorf("%s leads to %s", p, to)
					}
				}
				return nil
			})
		})
	}
}

// A tree that was packed and unpacked is the same.
func TestTreeRoundTrip(t *testing.T) {
	src := filepath.Join(t.TempDir(), "src")
	for _, d := range []string{"a/b", "empty"} {
		if err := os.MkdirAll(filepath.Join(src, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, perm := range map[string]os.FileMode{"a/b/run": 0o755, "a/plain": 0o600} {
		if err := os.WriteFile(filepath.Join(src, name), []byte(name), perm); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("b/run", filepath.Join(src, "a/link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(src, "empty"), 0o555); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := packTree(&b, src, "src"); err != nil {
		t.Fatal(err)
	}
	dst := t.TempDir()
	if err := unpackTree(tar.NewReader(&b), dst, "src", "as", func(s string) { t.Errorf("left out: %s", s) }); err != nil {
		t.Fatal(err)
	}
	for name, perm := range map[string]os.FileMode{"a/b/run": 0o755, "a/plain": 0o600, "empty": 0o555} {
		info, err := os.Stat(filepath.Join(dst, "as", name))
		if err != nil || info.Mode().Perm() != perm {
			t.Errorf("%s: %v, %v; want %o", name, info, err, perm)
		}
	}
	if to, err := os.Readlink(filepath.Join(dst, "as/a/link")); err != nil || to != "b/run" {
		t.Errorf("the link leads to %q, %v", to, err)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add("src/a", "x", byte(tar.TypeReg), "src/b", "a", byte(tar.TypeSymlink))
	f.Add("../a", "", byte(tar.TypeReg), "src/l", "../..", byte(tar.TypeSymlink))
	f.Add("src/l", "..", byte(tar.TypeSymlink), "src/l/x", "", byte(tar.TypeDir))
	f.Fuzz(func(t *testing.T, n1, l1 string, k1 byte, n2, l2 string, k2 byte) {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range []*tar.Header{{Name: n1, Linkname: l1, Typeflag: k1, Mode: 0o644}, {Name: n2, Linkname: l2, Typeflag: k2, Mode: 0o777}} {
			if w.WriteHeader(h) != nil {
				t.Skip()
			}
		}
		_ = w.Close()
		outer := t.TempDir()
		target := filepath.Join(outer, "target")
		if err := os.Mkdir(target, 0o755); err != nil {
			t.Fatal(err)
		}
		_ = unpackTree(tar.NewReader(&b), target, "src", "src", func(string) {})
		if list, err := os.ReadDir(outer); err != nil || len(list) != 1 {
			t.Fatalf("beside the target lie %v, %v", list, err)
		}
	})
}
