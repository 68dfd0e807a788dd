package artifact

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"cloche.dev/cloche/internal/sandbox"
)

func open(t *testing.T) *Store {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "artifacts"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func put(t *testing.T, s *Store, name, content string) Artifact {
	t.Helper()
	a, err := s.Put(name, strings.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestPutAndGet(t *testing.T) {
	s := open(t)
	a := put(t, s, "tool", "content")
	if b := put(t, s, "tool", "content"); b != a {
		t.Errorf("the same content is %+v and then %+v", a, b)
	}
	if st, err := os.Stat(a.Path); err != nil || st.Mode().Perm() != 0o555 {
		t.Errorf("stat: %v, %v", st.Mode(), err)
	}
	if got, err := s.Get(a.Hash, "tool"); err != nil || got != a {
		t.Errorf("Get = %+v, %v", got, err)
	}
	other := put(t, s, "alias", "content")
	if all, err := s.List(); err != nil || len(all) != 2 {
		t.Errorf("List = %v, %v", all, err)
	}
	for range 2 {
		if err := s.Remove(a); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Get(a.Hash, "tool"); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("Get after Remove = %v", err)
	}
	if _, err := s.Get(other.Hash, "alias"); err != nil {
		t.Error(err)
	}
	left, err := filepath.Glob(filepath.Join(s.dir, ".put-*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}

func TestGetNoticesChanges(t *testing.T) {
	s := open(t)
	a := put(t, s, "tool", "content")
	if err := os.Chmod(a.Path, 0o755); err != nil { // the content is still right
		t.Fatal(err)
	}
	if _, err := s.Get(a.Hash, "tool"); err != nil {
		t.Errorf("after chmod: %v", err)
	}
	if err := os.Remove(a.Path + ".json"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(a.Hash, "tool"); err != nil {
		t.Errorf("without a record: %v", err)
	}
	if err := os.WriteFile(a.Path, []byte("CONTENT"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(a.Hash, "tool"); !sandbox.IsClass(err, sandbox.Internal) {
		t.Errorf("changed content: %v", err)
	}
	// Storing it again mends it.
	put(t, s, "tool", "content")
	if _, err := s.Get(a.Hash, "tool"); err != nil {
		t.Errorf("after storing it again: %v", err)
	}
}

func TestNamesAndHashes(t *testing.T) {
	s := open(t)
	for _, name := range []string{"", ".", "..", ".x", "a/b", "x.json"} {
		if _, err := s.Put(name, strings.NewReader("x")); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("Put(%q) = %v", name, err)
		}
	}
	for _, hash := range []string{"", "..", strings.Repeat("A", 64), strings.Repeat("a", 63)} {
		if _, err := s.Get(hash, "x"); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("Get(%q) = %v", hash, err)
		}
		if err := s.Remove(Artifact{Hash: hash, Name: "x"}); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("Remove(%q) = %v", hash, err)
		}
	}
}

func TestEmbedded(t *testing.T) {
	s := open(t)
	s.exe = filepath.Join(t.TempDir(), "exe")
	build := func(content string) {
		s.embedded = fstest.MapFS{GuestName: {Data: []byte(content)}}
		if err := os.WriteFile(s.exe, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	build("one")
	a, err := s.Embedded(GuestName)
	if err != nil {
		t.Fatal(err)
	}
	// A second start trusts what the first noted, and does not look inside.
	s.embedded = fstest.MapFS{}
	if b, err := s.Embedded(GuestName); err != nil || b != a {
		t.Errorf("second start: %+v, %v", b, err)
	}
	if _, err := s.Embedded(EngineName); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
		t.Errorf("what the build lacks: %v", err)
	}
	build("another")
	g, err := s.Builds(GuestName)
	if err != nil {
		t.Fatal(err)
	}
	if g.Current() == a.Hash {
		t.Error("another build carries the same")
	}
	for _, hash := range []string{a.Hash, g.Current()} {
		if p, err := g.Path(hash); err != nil || filepath.Base(p) != GuestName {
			t.Errorf("Path(%s) = %s, %v", hash, p, err)
		}
	}
}
