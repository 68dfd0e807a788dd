package snapshot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// stamps is what the files looked like when they were known to be good. It is
// kept beside the manifest, since it is about this disk and not about the
// snapshot, and may be lost.
type stamps map[string]sys.FileStamp

// Verify returns a snapshot's manifest when the snapshot is whole and ours. It
// refuses others with FailedPrecondition: "snapshot_missing",
// "snapshot_corrupt", "snapshot_foreign" or, for a newer format,
// "snapshot_incompatible".
func (s *Store) Verify(ctx context.Context, id string) (*Manifest, error) {
	m, err := s.Read(id)
	if err != nil {
		return nil, err
	}
	now, err := s.look(m)
	if err != nil {
		return nil, err
	}
	if s.recorded(id, now) {
		return m, nil
	}
	for _, f := range m.Files {
		got, err := measure(ctx, filepath.Join(s.Dir(id), f.Name))
		if err != nil {
			return nil, DiskError(fmt.Errorf("read the snapshot %s: %w", id, err))
		}
		if got != f {
			return nil, corrupt(id, "the content of %s has changed", f.Name)
		}
	}
	// What was there before it was hashed, so that a change meanwhile shows.
	_ = s.record(id, now)
	return m, nil
}

// Read returns a snapshot's manifest without a look at its files.
func (s *Store) Read(id string) (*Manifest, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	if st, err := os.Lstat(s.Dir(id)); err == nil && (!st.IsDir() || !ours(st)) {
		return nil, foreign(id, "its directory is somebody else's")
	}
	f, err := os.OpenFile(filepath.Join(s.Dir(id), manifestFile), os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if _, derr := os.Lstat(s.Dir(id)); derr == nil {
			return nil, corrupt(id, "it has no manifest")
		}
		return nil, missing(id)
	}
	if errors.Is(err, syscall.ELOOP) {
		return nil, foreign(id, "its manifest is a link")
	}
	if err != nil {
		return nil, DiskError(err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return nil, DiskError(fmt.Errorf("read the snapshot's manifest: %w", err))
	}
	if len(data) > maxManifest {
		return nil, corrupt(id, "its manifest is too large")
	}
	return parse(id, data)
}

// look takes the stamps of a snapshot's files, and refuses it when there are
// others than the manifest says.
func (s *Store) look(m *Manifest) (stamps, error) {
	entries, err := os.ReadDir(s.Dir(m.ID))
	if err != nil {
		return nil, DiskError(err)
	}
	there := map[string]bool{}
	for _, e := range entries {
		there[e.Name()] = true
	}
	now := stamps{}
	for _, f := range m.Files {
		path := filepath.Join(s.Dir(m.ID), f.Name)
		st, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil, corrupt(m.ID, "%s is missing", f.Name)
		case err != nil:
			return nil, DiskError(err)
		case !st.Mode().IsRegular() || !ours(st):
			return nil, foreign(m.ID, "%s is somebody else's, or no file", f.Name)
		case st.Size() != f.Size:
			return nil, corrupt(m.ID, "%s has %d bytes instead of %d", f.Name, st.Size(), f.Size)
		}
		if now[f.Name], err = sys.StampFile(path); err != nil {
			return nil, DiskError(err)
		}
		delete(there, f.Name)
	}
	for name := range there {
		if name != manifestFile && name != stampsFile && name[0] != '.' {
			return nil, foreign(m.ID, "%q does not belong to it", name)
		}
	}
	return now, nil
}

// ours tells whether a file was made by this daemon's user and only that one
// can write to it.
func ours(st fs.FileInfo) bool {
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && int(sys.Uid) == os.Geteuid() && st.Mode().Perm()&0o022 == 0
}

func (s *Store) recorded(id string, now stamps) bool {
	data, err := os.ReadFile(filepath.Join(s.Dir(id), stampsFile))
	var was stamps
	if err != nil || json.Unmarshal(data, &was) != nil || len(was) != len(now) {
		return false
	}
	for name, st := range now {
		if was[name] != st {
			return false
		}
	}
	return true
}

// record is not synced: without it a snapshot is hashed again. It is renamed,
// since several may verify the same snapshot at once.
func (s *Store) record(id string, now stamps) error {
	data, err := json.Marshal(now)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(s.Dir(id), "."+stampsFile+"-*")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(s.Dir(id), stampsFile))
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

func missing(id string) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "snapshot_missing", "the snapshot %s has no files on this host", id)
}
