package installed

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// nameGrammar is what kernels and versions may be called: they are the names of
// their records' files.
var nameGrammar = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._+~-]{0,126}$`)

const (
	maxRecord = 64 << 10
	lockWait  = 10 * time.Second // a change of records takes milliseconds
)

func (s *Store) pairDir() string   { return filepath.Join(s.dir, "versions") }
func (s *Store) kernelDir() string { return filepath.Join(s.dir, "kernels") }

func (s *Store) pairFile(version string) string { return filepath.Join(s.pairDir(), version+".json") }

func (s *Store) kernelFile(name string) string { return filepath.Join(s.kernelDir(), name+".json") }
func (s *Store) currentFile() string           { return filepath.Join(s.dir, "current") }

func validHash(h string) bool {
	b, err := hex.DecodeString(h)
	return err == nil && len(b) == 32 && strings.ToLower(h) == h
}

var errRecord = errors.New("it says nothing that makes sense")

func (r PairRecord) check() error {
	if !nameGrammar.MatchString(r.Version) || !validHash(r.Firecracker) || !validHash(r.Jailer) {
		return errRecord
	}
	return nil
}

func (k KernelRecord) check() error {
	if !nameGrammar.MatchString(k.Name) || !validHash(k.Vmlinux) || k.Modules != "" && !validHash(k.Modules) {
		return errRecord
	}
	return nil
}

// damaged is the error for a record that can't be used.
func damaged(file string, err error) error {
	if err == nil {
		err = errRecord
	}
	command := "firecracker"
	if filepath.Base(filepath.Dir(file)) == "kernels" {
		command = "kernel"
	}
	return sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_record", "the record %s is damaged: %w", file, err).
		WithHint("install again what it is about with `cloche %s install`", command)
}

// Selection returns what new machines get.
func (s *Store) Selection() (Selection, error) {
	var sel Selection
	err := read(s.currentFile(), &sel)
	if errors.Is(err, fs.ErrNotExist) {
		return Selection{}, nil
	}
	if err != nil {
		return Selection{}, err
	}
	for _, name := range []string{sel.Version, sel.Kernel} {
		if name != "" && !nameGrammar.MatchString(name) {
			return Selection{}, damaged(s.currentFile(), nil)
		}
	}
	return sel, nil
}

// ListedPair is a pair in a list.
type ListedPair struct {
	PairRecord
	Current bool `json:"current"`
}

// ListedKernel is a kernel in a list.
type ListedKernel struct {
	KernelRecord
	Current bool `json:"current"`
}

// Pairs returns all pairs, the newest first. Some may have the same version:
// different builds of it.
func (s *Store) Pairs() ([]ListedPair, error) {
	sel, err := s.Selection()
	if err != nil {
		return nil, err
	}
	all, files, err := readAll[PairRecord](s.pairDir())
	if err != nil {
		return nil, err
	}
	out := []ListedPair{}
	for i, r := range all {
		current := files[i] == s.pairFile(sel.Version)
		at := slices.IndexFunc(out, func(o ListedPair) bool { return o.Firecracker == r.Firecracker && o.Jailer == r.Jailer })
		switch {
		case at < 0:
			out = append(out, ListedPair{r, current})
		case current: // one pair may have two records, as when it was installed again
			out[at] = ListedPair{r, true}
		}
	}
	slices.SortStableFunc(out, func(a, b ListedPair) int { return b.InstalledAt.Compare(a.InstalledAt) })
	return out, nil
}

// Kernels returns all kernels, the newest first.
func (s *Store) Kernels() ([]ListedKernel, error) {
	sel, err := s.Selection()
	if err != nil {
		return nil, err
	}
	all, _, err := readAll[KernelRecord](s.kernelDir())
	if err != nil {
		return nil, err
	}
	out := []ListedKernel{}
	for _, r := range all {
		out = append(out, ListedKernel{r, r.Name == sel.Kernel})
	}
	slices.SortStableFunc(out, func(a, b ListedKernel) int { return b.InstalledAt.Compare(a.InstalledAt) })
	return out, nil
}

// Inventory returns the paths of all records, below the state directory, and the
// hashes of the artifacts that they name: what a copy of that directory must have
// of both to go on as this one. A damaged record is an error that comes with the
// others.
func (s *Store) Inventory() (records, artifacts []string, err error) {
	pairs, records, err := readAll[PairRecord](s.pairDir())
	for _, p := range pairs {
		artifacts = append(artifacts, p.Firecracker, p.Jailer)
	}
	kernels, files, kerr := readAll[KernelRecord](s.kernelDir())
	for _, k := range kernels {
		artifacts = append(artifacts, k.Vmlinux)
		if k.Modules != "" {
			artifacts = append(artifacts, k.Modules)
		}
	}
	records = append(records, files...)
	if _, serr := os.Lstat(s.currentFile()); serr == nil {
		records = append(records, s.currentFile())
	}
	for i, r := range records {
		rel, rerr := filepath.Rel(s.state, r)
		records[i], err = rel, errors.Join(err, rerr)
	}
	return records, artifacts, errors.Join(err, kerr)
}

// readAll reads all records in a directory and returns their files too. A
// damaged one is an error that comes with the others.
func readAll[R interface{ check() error }](dir string) (all []R, files []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	err = nil
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") || filepath.Ext(e.Name()) != ".json" {
			continue // a process died while it wrote it
		}
		file := filepath.Join(dir, e.Name())
		var r R
		bad := read(file, &r)
		if bad == nil {
			if bad = r.check(); bad != nil {
				bad = damaged(file, bad)
			}
		}
		if bad != nil {
			err = bad
			continue
		}
		all, files = append(all, r), append(files, file)
	}
	return all, files, err
}

// read reads a record.
func read(file string, v any) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, v); err != nil {
		return damaged(file, err)
	}
	return nil
}

func write(file string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return sys.WriteFileAtomic(file, append(data, '\n'), 0o600)
}

// change does something to the records that no other process can come between,
// and then writes what is current if that has changed. A selection that is
// damaged begins anew.
func (s *Store) change(ctx context.Context, do func(*Selection) error) error {
	if err := s.make(); err != nil {
		return err
	}
	unlock, err := lock(ctx, filepath.Join(s.dir, "records.lock"), lockWait)
	if err != nil {
		return err
	}
	defer unlock()
	old, err := s.Selection()
	sel := old
	if err := do(&sel); err != nil {
		return err
	}
	if err == nil && sel == old {
		return nil
	}
	return write(s.currentFile(), sel)
}

// lock takes a lock that other processes hold for a short time.
func lock(ctx context.Context, file string, wait time.Duration) (unlock func(), err error) {
	waited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		f, err := sys.TryLock(file)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, sys.ErrLocked) {
			return nil, err
		}
		select {
		case <-tick.C:
		case <-waited.Done():
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return nil, sandbox.Errorf(sandbox.Conflict, "install_running", "another install is running on this state directory").
				WithHint("try again when it has ended")
		}
	}
}

// workPrefix begins the names of directories of installs that run.
const workPrefix = ".install-"

// Work makes a directory for the files of one install and takes it away when
// done is called. One install has one at a time, and what earlier ones left
// that were killed is removed.
func (s *Store) Work(ctx context.Context) (dir string, done func(), err error) {
	if err := s.make(); err != nil {
		return "", nil, err
	}
	unlock, err := lock(ctx, filepath.Join(s.dir, "install.lock"), 0)
	if err != nil {
		return "", nil, err
	}
	left, err := filepath.Glob(filepath.Join(s.dir, workPrefix+"*"))
	for _, old := range left {
		err = errors.Join(err, os.RemoveAll(old))
	}
	if err == nil {
		dir, err = os.MkdirTemp(s.dir, workPrefix)
	}
	if err != nil {
		unlock()
		return "", nil, fmt.Errorf("make a directory for an install: %w", err)
	}
	return dir, func() { _ = os.RemoveAll(dir); unlock() }, nil
}
