package sys

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestAStampChangesWithTheContentAndNotWithLinks(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "image")
	if err := os.WriteFile(path, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	// Long enough ago that a later write can't fall into the same tick.
	then := time.Now().Add(-time.Hour)
	stamp := func() FileStamp {
		t.Helper()
		st, err := StampFile(path)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if open, err := StampOpen(f); err != nil || open != st {
			t.Fatalf("open it is %+v (%v), by name %+v", open, err, st)
		}
		return st
	}
	age := func() error { return os.Chtimes(path, then, then) }
	link := filepath.Join(dir, "link")
	for _, c := range []struct {
		name    string
		do      func() error
		changes bool
	}{
		{"a link more", func() error { return os.Link(path, link) }, false},
		{"a link less", func() error { return os.Remove(link) }, false},
		{"another mode", func() error { return os.Chmod(path, 0o444) }, false},
		{"a write", func() error {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt([]byte("C"), 0)
			return err
		}, true},
		{"another size", func() error { return os.Truncate(path, 3) }, true},
		{"a copy that kept the times", func() error {
			if err := os.WriteFile(link, []byte("con"), 0o444); err != nil {
				return err
			}
			if err := os.Chtimes(link, then, then); err != nil {
				return err
			}
			return os.Rename(link, path)
		}, true},
	} {
		if err := age(); err != nil {
			t.Fatal(err)
		}
		before := stamp()
		if before.Born == 0 {
			t.Errorf("no birth: %+v", before)
		}
		if err := c.do(); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if after := stamp(); (after != before) != c.changes {
			t.Errorf("%s: %+v, then %+v", c.name, before, after)
		}
	}
	if _, err := StampFile(filepath.Join(dir, "none")); !os.IsNotExist(err) {
		t.Errorf("a file that is not there: %v", err)
	}
}
