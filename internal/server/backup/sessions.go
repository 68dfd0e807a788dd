package backup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// metaName is the file that makes a directory a session.
const metaName = "meta.json"

// sessions copies the logs of the sandboxes that have rows.
func (w *writer) sessions(now rows, r *Report) error {
	for _, id := range now.sandboxes {
		box := filepath.Join(sessionsDir, id)
		entries, err := os.ReadDir(filepath.Join(w.from, box))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := w.dir(box); err != nil {
			return err
		}
		for _, e := range entries {
			rel := filepath.Join(box, e.Name())
			switch {
			case e.IsDir() && sandbox.ValidID(sandbox.KindSession, e.Name()):
				ok, err := w.session(rel)
				if err != nil {
					return err
				}
				if ok {
					r.Sessions++
				}
			case e.Type().IsRegular():
				if err := w.copy(rel); err != nil && !errors.Is(err, fs.ErrNotExist) {
					return err
				}
			}
		}
	}
	return nil
}

// session copies one session's log while it may be written to. The meta file
// comes first: what it says of an ended session was in the log by then. What is
// copied of the log is a prefix, since a segment is complete before the next
// one is made, and the list is taken once. A segment that goes meanwhile, for
// the log's quota, is a gap like any other. ok is false where the session is
// being removed.
func (w *writer) session(rel string) (ok bool, err error) {
	if err := w.dir(rel); err != nil {
		return false, err
	}
	err = w.copy(filepath.Join(rel, metaName))
	if errors.Is(err, fs.ErrNotExist) {
		return false, w.drop(rel)
	}
	if err != nil {
		return false, err
	}
	return true, w.logs(rel)
}

// logs copies a session's other files, in the order of their names, which is
// that of their offsets.
func (w *writer) logs(rel string) error {
	entries, err := os.ReadDir(filepath.Join(w.from, rel))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	for _, e := range entries {
		path := filepath.Join(rel, e.Name())
		switch {
		case e.Name() == metaName || strings.HasSuffix(e.Name(), ".tmp"):
		case e.IsDir():
			if err := w.dir(path); err != nil {
				return err
			}
			if err := w.logs(path); err != nil {
				return err
			}
		case e.Type().IsRegular():
			if err := w.copy(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}
