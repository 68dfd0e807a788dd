package snapshot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// The names in a snapshot's directory that are ours.
const (
	manifestFile = "manifest.json"
	stampsFile   = "stamps.json"
	tmpPrefix    = ".tmp-"
	gonePrefix   = tmpPrefix + "gone-"
)

// Store keeps snapshots below one directory. Calls for different ids may run
// at once; those that write or delete one id are serialised by the caller.
type Store struct{ dir string }

// Open returns the store in dir, making it where it is missing.
func Open(dir string) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the snapshots' directory: %w", err)
	}
	return &Store{dir: dir}, nil
}

// Dir is where a snapshot's files are.
func (s *Store) Dir(id string) string { return filepath.Join(s.dir, id) }

// List names the snapshots that have files here, whatever state those are in.
func (s *Store) List() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, DiskError(fmt.Errorf("list the snapshots: %w", err))
	}
	var ids []string
	for _, e := range entries {
		if sandbox.ValidID(sandbox.KindSnapshot, e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}

// Delete removes a snapshot, or what there is of one. It succeeds where there
// is none. It is renamed first, so that a kill leaves nothing that looks whole.
func (s *Store) Delete(id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	gone := filepath.Join(s.dir, gonePrefix+id)
	if err := os.RemoveAll(gone); err != nil {
		return DiskError(err)
	}
	err := os.Rename(s.Dir(id), gone)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = sys.SyncDir(s.dir)
	}
	failpoint.Hit("node.snapshot.gone")
	if err == nil {
		err = os.RemoveAll(gone)
	}
	return DiskError(err)
}

// Sweep removes what an earlier process had begun to write or to remove. Nobody
// may write now.
func (s *Store) Sweep() error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return DiskError(err)
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tmpPrefix) {
			errs = append(errs, os.RemoveAll(filepath.Join(s.dir, e.Name())))
		}
	}
	return DiskError(errors.Join(errs...))
}

func checkID(id string) error {
	if sandbox.ValidID(sandbox.KindSnapshot, id) {
		return nil
	}
	return sandbox.Errorf(sandbox.Invalid, "bad_id", "%q is not a snapshot's id", id)
}

// DiskError gives what a full, read-only or broken disk answers its class;
// what it does not know, it returns as it is.
func DiskError(err error) error {
	if err == nil {
		return nil
	}
	var known *sandbox.Error
	switch {
	case errors.As(err, &known):
		return err
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sandbox.Errorf(sandbox.NoCapacity, "disk_full", "the host's disk is full: %w", err).
			WithHint("delete snapshots or sandboxes, or give the state directory more room")
	case errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EIO):
		return sandbox.Errorf(sandbox.Unavailable, "disk_failed", "the host's disk does not take writes, or fails: %w", err).
			WithHint("look at the host's kernel log")
	}
	return err
}
