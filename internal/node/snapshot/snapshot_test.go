package snapshot

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/sandbox"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open(t testing.TB) *Store {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "snapshots"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func manifest() Manifest {
	return Manifest{
		Project: "prj", Sandbox: sandbox.NewID(sandbox.KindSandbox), Kind: sandbox.SnapshotMemory, TakenAt: time.Now().UTC(),
		Needs: sandbox.Needs{Driver: "fake", Digest: "sha256:x"}, Resources: sandbox.DefaultResources, Key: []byte("key"), Epoch: 3,
		Sessions: []sandbox.Session{{ID: "ses", ParentOffset: 7}},
	}
}

// take makes a snapshot of three files.
func take(t testing.TB, s *Store) *Manifest {
	t.Helper()
	d, err := s.Begin(sandbox.NewID(sandbox.KindSnapshot))
	if err != nil {
		t.Fatal(err)
	}
	for name, size := range map[string]int{"pages": 3 << 20, "state": 10} {
		if err := os.WriteFile(filepath.Join(d.Dir(), name), bytes.Repeat([]byte{7}, size), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(d.Dir(), "jailed"), []byte("memory"), 0o444); err != nil {
		t.Fatal(err)
	}
	m, err := d.Commit(context.Background(), manifest())
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Discard(); err != nil {
		t.Fatal(err)
	}
	return m
}

func code(err error) string {
	var e *sandbox.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

func TestASnapshotIsWhatWasCommitted(t *testing.T) {
	s := open(t)
	m := take(t, s)
	if len(m.Files) != 3 || m.Files[1].Name != "pages" || m.Files[1].Size != 3<<20 || m.SizeBytes < 3<<20 || m.Needs.Format != Format {
		t.Errorf("manifest %+v", m)
	}
	got, err := s.Verify(context.Background(), m.ID)
	if err != nil {
		t.Fatal(err)
	}
	a, _ := json.Marshal(m)
	b, _ := json.Marshal(got)
	if !bytes.Equal(a, b) {
		t.Errorf("wrote %s\n read %s", a, b)
	}
	err = filepath.WalkDir(s.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		switch perm := st.Mode().Perm(); {
		case e.Name() == "jailed" && perm == 0o444: // a jail reads it, through a hard link
		case perm&0o077 != 0:
			t.Errorf("others may use %s: %v", path, st.Mode())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if ids, err := s.List(); err != nil || !slices.Equal(ids, []string{m.ID}) {
		t.Errorf("List: %v, %v", ids, err)
	}
}

// reads tells whether Verify hashes, by making hashing fail.
func rehashes(t *testing.T, s *Store, id string) bool {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_, err := s.Verify(ctx, id)
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	return err != nil
}

func TestAFileIsHashedAgainOnlyWhenItMayHaveChanged(t *testing.T) {
	s := open(t)
	m := take(t, s)
	if rehashes(t, s, m.ID) {
		t.Error("a snapshot that was just written is hashed again")
	}
	path, link := filepath.Join(s.Dir(m.ID), "pages"), filepath.Join(s.dir, ".link")
	if err := os.Link(path, link); err != nil {
		t.Fatal(err)
	}
	filled := rehashes(t, s, m.ID)
	if err := os.Remove(link); err != nil {
		t.Fatal(err)
	}
	if filled || rehashes(t, s, m.ID) {
		t.Error("a file is hashed again because a jail got or lost a link to it")
	}
	now := time.Now()
	if err := os.Chtimes(path, now, now); err != nil {
		t.Fatal(err)
	}
	if !rehashes(t, s, m.ID) {
		t.Error("a file that may have been written to was not hashed again")
	}
	if _, err := s.Verify(context.Background(), m.ID); err != nil {
		t.Fatal(err)
	}
	if rehashes(t, s, m.ID) {
		t.Error("what was found good was not recorded")
	}
	if err := os.Remove(filepath.Join(s.Dir(m.ID), stampsFile)); err != nil {
		t.Fatal(err)
	}
	if !rehashes(t, s, m.ID) {
		t.Error("a snapshot without stamps was not hashed")
	}
}

func TestWhatIsNotWholeOrNotOursIsRefused(t *testing.T) {
	flip := func(path string, at int64) error {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		b := []byte{0}
		if _, err := f.ReadAt(b, at); err != nil {
			return err
		}
		b[0] ^= 1
		_, err = f.WriteAt(b, at)
		return err
	}
	reseal := func(dir string, change func(*Manifest)) error {
		data, err := os.ReadFile(filepath.Join(dir, manifestFile))
		if err != nil {
			return err
		}
		m, err := parse(filepath.Base(dir), data)
		if err != nil {
			return err
		}
		change(m)
		if data, err = m.encode(); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, manifestFile), data, 0o600)
	}
	for name, c := range map[string]struct {
		spoil func(dir string) error
		want  string
	}{
		"a flipped bit in a file":       {func(dir string) error { return flip(filepath.Join(dir, "pages"), 2<<20) }, "snapshot_corrupt"},
		"a flipped bit in the manifest": {func(dir string) error { return flip(filepath.Join(dir, manifestFile), 150) }, "snapshot_corrupt"},
		"a short file":                  {func(dir string) error { return os.Truncate(filepath.Join(dir, "state"), 3) }, "snapshot_corrupt"},
		"a file is missing":             {func(dir string) error { return os.Remove(filepath.Join(dir, "state")) }, "snapshot_corrupt"},
		"no manifest":                   {func(dir string) error { return os.Remove(filepath.Join(dir, manifestFile)) }, "snapshot_corrupt"},
		"an empty manifest":             {func(dir string) error { return os.Truncate(filepath.Join(dir, manifestFile), 0) }, "snapshot_corrupt"},
		"a file too many":               {func(dir string) error { return os.WriteFile(filepath.Join(dir, "more"), nil, 0o600) }, "snapshot_foreign"},
		"another's id":                  {func(dir string) error { return reseal(dir, func(m *Manifest) { m.ID = "snp_another" }) }, "snapshot_foreign"},
		"writable by others":            {func(dir string) error { return os.Chmod(filepath.Join(dir, "state"), 0o622) }, "snapshot_foreign"},
		"a link": {func(dir string) error {
			path := filepath.Join(dir, "state")
			return errors.Join(os.Rename(path, filepath.Join(t.TempDir(), "x")), os.Symlink("/etc/hostname", path))
		}, "snapshot_foreign"},
		"a newer format": {func(dir string) error { return reseal(dir, func(m *Manifest) { m.Format++ }) }, "snapshot_incompatible"},
		"a newer format that is nothing like ours": {func(dir string) error {
			return os.WriteFile(filepath.Join(dir, manifestFile), []byte(`{"format":2,"cbor":"o2"}`), 0o600)
		}, "snapshot_incompatible"},
		"a name with a slash": {func(dir string) error { return reseal(dir, func(m *Manifest) { m.Files[0].Name = "../pages" }) }, "snapshot_corrupt"},
		"nothing":             {os.RemoveAll, "snapshot_missing"},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			m := take(t, s)
			if err := c.spoil(s.Dir(m.ID)); err != nil {
				t.Fatal(err)
			}
			for range 2 { // it is not taken for good the second time
				if _, err := s.Verify(context.Background(), m.ID); code(err) != c.want || !sandbox.IsClass(err, sandbox.FailedPrecondition) {
					t.Errorf("%v, wanted %s", err, c.want)
				}
			}
		})
	}
	if os.Geteuid() == 0 {
		s := open(t)
		m := take(t, s)
		if err := os.Chown(filepath.Join(s.Dir(m.ID), "pages"), 12345, 12345); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Verify(context.Background(), m.ID); code(err) != "snapshot_foreign" {
			t.Errorf("a file of another user: %v", err)
		}
	}
}

func TestAnUnfinishedSnapshotIsNotOne(t *testing.T) {
	s := open(t)
	id := sandbox.NewID(sandbox.KindSnapshot)
	d, err := s.Begin(id)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.Dir(), "pages"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Verify(context.Background(), id); code(err) != "snapshot_missing" {
		t.Errorf("Verify: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := d.Commit(ctx, manifest()); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled commit: %v", err)
	}
	if err := s.Sweep(); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(s.dir); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

func TestADriverCannotWriteAnything(t *testing.T) {
	for name, spoil := range map[string]func(dir string) error{
		"nothing":     func(string) error { return nil },
		"a directory": func(dir string) error { return os.Mkdir(filepath.Join(dir, "d"), 0o700) },
		"a link":      func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, "l")) },
		"our name":    func(dir string) error { return os.WriteFile(filepath.Join(dir, manifestFile), nil, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			d, err := s.Begin(sandbox.NewID(sandbox.KindSnapshot))
			if err == nil {
				err = spoil(d.Dir())
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := d.Commit(context.Background(), manifest()); !sandbox.IsClass(err, sandbox.Internal) {
				t.Errorf("error %v", err)
			}
			if err := d.Discard(); err != nil {
				t.Fatal(err)
			}
			if left, _ := os.ReadDir(s.dir); len(left) != 0 {
				t.Errorf("left %v", left)
			}
		})
	}
}

func TestDelete(t *testing.T) {
	s := open(t)
	m := take(t, s)
	for range 2 {
		if err := s.Delete(m.ID); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := os.ReadDir(s.dir); len(left) != 0 {
		t.Errorf("left %v", left)
	}
	for _, bad := range []string{"", "..", "snp_../../../../../../etc", strings.Repeat("a", 24)} {
		if s.Delete(bad) == nil {
			t.Errorf("%q was taken for an id", bad)
		}
	}
}

func TestAFullDiskIsAnOrdinaryError(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root to mount a small tmpfs")
	}
	s := open(t)
	if err := syscall.Mount("none", s.dir, "tmpfs", 0, "size=64k,mode=0700"); err != nil {
		t.Skip("SKIPPED: no tmpfs can be mounted here:", err)
	}
	defer func() { _ = syscall.Unmount(s.dir, syscall.MNT_DETACH) }()
	d, err := s.Begin(sandbox.NewID(sandbox.KindSnapshot))
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(d.Dir(), "pages"))
	if err != nil {
		t.Fatal(err)
	}
	for err == nil { // until not even the manifest fits
		_, err = f.Write(make([]byte, 4096))
	}
	_ = f.Close()
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if _, err := d.Commit(context.Background(), manifest()); code(err) != "disk_full" || !sandbox.IsClass(err, sandbox.NoCapacity) {
		t.Errorf("Commit: %v", err)
	}
	if err := d.Discard(); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(s.dir); len(left) != 0 {
		t.Errorf("left %v", left)
	}
	take64 := func() error { _, err := s.Begin(sandbox.NewID(sandbox.KindSnapshot)); return err }
	if err := syscall.Mount("none", s.dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	if err := take64(); code(err) != "disk_failed" || !sandbox.IsClass(err, sandbox.Unavailable) {
		t.Errorf("Begin on a read-only disk: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	s := open(f)
	m := take(f, s)
	data, err := os.ReadFile(filepath.Join(s.Dir(m.ID), manifestFile))
	if err != nil {
		f.Fatal(err)
	}
	inner, _ := json.Marshal(m)
	f.Add(data, inner)
	f.Add([]byte(`{"format":2}`), []byte(`{}`))
	f.Add([]byte(nil), []byte(`{"format":1,"files":[{"name":"..","size":-1}]}`))
	f.Fuzz(func(t *testing.T, outer, inner []byte) {
		if got, err := parse(m.ID, outer); err == nil && got.ID != m.ID {
			t.Error("took another's manifest")
		}
		// And past the seal, which a fuzzer can't forge.
		var got Manifest
		if decode(inner, &got) != nil || got.check() != nil {
			return
		}
		got.ID = m.ID
		again, err := got.encode()
		if err != nil {
			return
		}
		back, err := parse(m.ID, again)
		if err != nil {
			t.Fatalf("what was accepted is refused when written again: %v", err)
		}
		for _, f := range back.Files {
			if filepath.Base(f.Name) != f.Name || f.Name[0] == '.' || f.Size < 0 {
				t.Errorf("file %+v", f)
			}
		}
	})
}
