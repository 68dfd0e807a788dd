package backup

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/node/snapshot"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
	"cloche.dev/cloche/internal/template"
)

// Options are what a backup is made with.
type Options struct {
	StateDir string // absolute
	To       string // absolute; must not be there
	WithKeys bool   // secrets too
	Version  string // of this program
}

// passes is how often the rows are copied when files that they name went away
// meanwhile: what is missing in the last pass too was missing before.
const passes = 3

// Write makes a backup. Whatever ends it early leaves nothing but, after a
// kill, a directory ".NAME.tmp-*" beside it.
func Write(ctx context.Context, o Options) (r Report, err error) {
	defer func() { err = diskError(err) }()
	if err := o.check(); err != nil {
		return r, err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(o.To), "."+filepath.Base(o.To)+".tmp-*") // 0700
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(tmp) // it has another name then, unless Write failed
	w := &writer{ctx: ctx, from: o.StateDir, to: tmp, files: map[string]file{}, linked: map[string]bool{}}
	r = Report{Dir: o.To, Version: o.Version, Keys: o.WithKeys}
	if err := w.fill(o, &r); err != nil {
		return r, err
	}
	if err := w.finish(&r); err != nil {
		return r, err
	}
	if err := syncTree(tmp); err != nil {
		return r, err
	}
	if _, err := os.Lstat(o.To); err == nil {
		return r, exists(o.To)
	}
	if err := os.Rename(tmp, o.To); err != nil {
		return r, err
	}
	return r, sys.SyncDir(filepath.Dir(o.To))
}

func (o Options) check() error {
	if _, err := os.Lstat(o.To); err == nil {
		return exists(o.To)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if within(o.To, o.StateDir) {
		return sandbox.Errorf(sandbox.Invalid, "backup_inside", "a backup can't lie inside the state directory that it is of").
			WithHint("name a directory elsewhere; on the same filesystem it needs least space")
	}
	return nil
}

func exists(dir string) error {
	return sandbox.Errorf(sandbox.Conflict, "backup_exists", "%s is there already", dir).WithHint("name a directory that is not there yet")
}

// diskError gives a full disk its class.
func diskError(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return sandbox.Errorf(sandbox.NoCapacity, "disk_full", "there is not enough space for the backup: %w", err).
			WithHint("free space, or name a directory on another disk")
	}
	return err
}

// fill brings everything. The rows are copied first and then the files that
// they name; where one went away between, both are done again.
func (w *writer) fill(o Options, r *Report) error {
	var now rows
	for range passes {
		was := r.Missing
		var err error
		if now, err = w.copyStore(); err != nil {
			return err
		}
		r.At, r.Missing = now.at, map[string]string{}
		if err := w.templates(now, r); err != nil {
			return err
		}
		if err := w.snapshots(now, r); err != nil {
			return err
		}
		if len(r.Missing) == 0 || maps.Equal(was, r.Missing) {
			break
		}
	}
	if err := w.sessions(now, r); err != nil {
		return err
	}
	r.Sandboxes = len(now.sandboxes)
	if !o.WithKeys {
		return nil
	}
	for _, name := range keyFiles {
		if err := w.copy(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// templates brings the images that rows name and drops those that none names
// any more.
func (w *writer) templates(now rows, r *Report) error {
	r.Templates = 0
	want := map[string]bool{}
	for digest := range now.templates {
		name := strings.TrimPrefix(digest, "sha256:")
		want[name] = true
		if _, ok := w.files[filepath.Join(templatesDir, name, imageName)]; !ok {
			if err := w.template(name); err != nil {
				if err = w.lost(r, digest, filepath.Join(templatesDir, name), err); err != nil {
					return err
				}
				continue
			}
		}
		r.Templates++
	}
	return w.dropOthers(templatesDir, want)
}

func (w *writer) template(name string) error {
	dir := filepath.Join(templatesDir, name)
	data, err := os.ReadFile(filepath.Join(w.from, dir, describes))
	if err != nil {
		return err
	}
	sum := sha256.Sum256(data)
	var m template.Manifest
	if hex.EncodeToString(sum[:]) != name || json.Unmarshal(data, &m) != nil {
		return damaged("its manifest was changed")
	}
	if err := w.dir(dir); err != nil {
		return err
	}
	if err := w.keep(filepath.Join(dir, describes), name); err != nil {
		return err
	}
	return w.keep(filepath.Join(dir, imageName), m.Image.SHA256)
}

// snapshots brings the files of the snapshots that are complete, and the engines
// and agents that those of memory need.
func (w *writer) snapshots(now rows, r *Report) error {
	store, err := snapshot.Open(filepath.Join(w.from, snapshotsDir))
	if err != nil {
		return err
	}
	r.Snapshots, r.LeftOut = 0, nil
	want, needed := map[string]bool{}, map[string]bool{}
	for _, id := range slices.Sorted(maps.Keys(now.snapshots)) {
		memory := now.snapshots[id] == sandbox.SnapshotMemory
		if memory && !r.Keys {
			r.LeftOut = append(r.LeftOut, id)
			continue
		}
		m, err := w.snapshot(store, id)
		if err != nil {
			if err = w.lost(r, id, filepath.Join(snapshotsDir, id), err); err != nil {
				return err
			}
			continue
		}
		want[id] = true
		r.Snapshots++
		if memory {
			needed[m.Needs.EngineHash], needed[m.Needs.Guest] = true, true
		}
	}
	if err := w.dropOthers(snapshotsDir, want); err != nil {
		return err
	}
	return w.artifacts(needed, r)
}

func (w *writer) snapshot(store *snapshot.Store, id string) (*snapshot.Manifest, error) {
	m, err := store.Read(id)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(snapshotsDir, id)
	if _, ok := w.files[filepath.Join(dir, describes)]; ok {
		return m, nil
	}
	if err := w.dir(dir); err != nil {
		return nil, err
	}
	for _, f := range m.Files {
		if err := w.keep(filepath.Join(dir, f.Name), f.SHA256); err != nil {
			return nil, err
		}
	}
	return m, w.copy(filepath.Join(dir, describes))
}

// artifacts brings those needed, and what was installed for Firecracker: no
// build of Cloche has that inside.
func (w *writer) artifacts(needed map[string]bool, r *Report) error {
	if err := w.installed(needed, r); err != nil {
		return err
	}
	store, err := artifact.Open(filepath.Join(w.from, artifactsDir))
	if err != nil {
		return err
	}
	all, err := store.List()
	if err != nil {
		return err
	}
	there := map[string]bool{"": true} // some need no engine
	for _, a := range all {
		there[a.Hash] = true
		if !needed[a.Hash] {
			continue
		}
		rel := filepath.Join(artifactsDir, a.Hash, a.Name)
		if _, ok := w.files[rel]; ok {
			continue
		}
		if err := w.dir(filepath.Dir(rel)); err != nil {
			return err
		}
		if err := w.keep(rel, a.Hash); err != nil {
			if err = w.lost(r, "artifact "+a.Hash, rel, err); err != nil {
				return err
			}
		}
	}
	for hash := range needed {
		if !there[hash] {
			r.Missing["artifact "+hash] = "it has no file on this host"
		}
	}
	return nil
}

// installed brings the records of what was installed for Firecracker, and notes
// what they need. Those of the copy count: one may be replaced at any time.
func (w *writer) installed(needed map[string]bool, r *Report) error {
	records, _, err := installed.Open(w.from, nil).Inventory()
	if sandbox.IsClass(err, sandbox.FailedPrecondition) {
		r.Missing["firecracker"], err = err.Error(), nil // but for what is damaged
	}
	if err != nil {
		return err
	}
	for _, rel := range records {
		if _, ok := w.files[rel]; ok {
			continue
		}
		if err := w.dir(filepath.Dir(rel)); err != nil {
			return err
		}
		if err := w.copy(rel); err != nil {
			return err
		}
	}
	_, artifacts, err := installed.Open(w.to, nil).Inventory()
	if err != nil {
		return err
	}
	for _, hash := range artifacts {
		needed[hash] = true
	}
	return nil
}

// damaged is an error of what is there and is not as it was made.
func damaged(text string) error {
	return sandbox.Errorf(sandbox.FailedPrecondition, "backup_source_corrupt", "%s", text)
}

// lost notes what can't be brought because it is not there, or not whole. Other
// errors end the backup.
func (w *writer) lost(r *Report, what, rel string, err error) error {
	if !errors.Is(err, fs.ErrNotExist) && !sandbox.IsClass(err, sandbox.FailedPrecondition) {
		return fmt.Errorf("copy %s: %w", rel, err)
	}
	r.Missing[what] = "it has no files on this host"
	if e := (*sandbox.Error)(nil); errors.As(err, &e) {
		r.Missing[what] = e.Message
	}
	return w.drop(rel)
}

// dropOthers removes what an earlier pass brought and no row names any more.
func (w *writer) dropOthers(dir string, want map[string]bool) error {
	entries, err := os.ReadDir(filepath.Join(w.to, dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if !want[e.Name()] {
			if err := w.drop(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// finish sums up and writes the manifest.
func (w *writer) finish(r *Report) error {
	r.Files, r.Bytes, r.Linked = len(w.files), 0, 0
	for path, f := range w.files {
		r.Bytes += f.Size
		if w.linked[path] {
			r.Linked += f.Size
		}
	}
	m := manifest{Format: format, Report: *r, Files: slices.Collect(maps.Values(w.files))}
	slices.SortFunc(m.Files, func(a, b file) int { return cmp.Compare(a.Path, b.Path) })
	return m.write(w.to)
}

// syncTree makes the names in every directory below dir durable; the files
// are.
func syncTree(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		return sys.SyncDir(path)
	})
}
