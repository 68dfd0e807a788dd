package backup

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/store/sqlite"
)

// rows are what the copied store knows that has files.
type rows struct {
	at        time.Time
	sandboxes []string
	templates map[string]bool // by digest
	snapshots map[string]sandbox.SnapshotKind
}

// copyStore replaces the backup's store by a copy of what is there now, and
// tells what is in it.
func (w *writer) copyStore() (rows, error) {
	to := filepath.Join(w.to, storeName)
	if err := os.RemoveAll(to); err != nil {
		return rows{}, err
	}
	at := time.Now().UTC()
	if err := sqlite.Copy(w.ctx, filepath.Join(w.from, storeName), to); err != nil {
		return rows{}, err
	}
	size, sum, err := measure(w.ctx, to)
	if err != nil {
		return rows{}, err
	}
	w.brought(storeName, size, sum)
	// Opening a store migrates it and makes files beside it. The backup's own
	// stays as the daemon that it is a copy of would want it.
	scratch, err := os.MkdirTemp(w.to, "scratch-*")
	if err != nil {
		return rows{}, err
	}
	defer os.RemoveAll(scratch)
	path := filepath.Join(scratch, storeName)
	if err := sqlite.Copy(w.ctx, to, path); err != nil {
		return rows{}, err
	}
	r, err := read(w.ctx, path)
	r.at = at
	return r, err
}

func read(ctx context.Context, path string) (r rows, err error) {
	s, err := sqlite.Open(ctx, path, nil)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	r.templates, r.snapshots = map[string]bool{}, map[string]sandbox.SnapshotKind{}
	projects, err := s.Projects(ctx)
	if err != nil {
		return r, err
	}
	for _, p := range projects {
		list, err := s.Templates(ctx, p.ID)
		if err != nil {
			return r, err
		}
		for _, t := range list {
			r.templates[t.Digest] = true
		}
	}
	err = pages(func(p sandbox.Page) (string, error) {
		list, next, err := s.Snapshots(ctx, "", sandbox.SnapshotFilter{States: []sandbox.SnapshotState{sandbox.SnapshotReady}}, p)
		for _, n := range list {
			r.snapshots[n.ID] = n.Kind
		}
		return next, err
	})
	if err != nil {
		return r, err
	}
	return r, pages(func(p sandbox.Page) (string, error) {
		list, next, err := s.Sandboxes(ctx, "", sandbox.SandboxFilter{}, p)
		for _, sb := range list {
			if sb.State != sandbox.StateDeleted {
				r.sandboxes = append(r.sandboxes, sb.ID)
			}
		}
		return next, err
	})
}

// pages asks for every page of a list.
func pages(get func(sandbox.Page) (next string, err error)) error {
	p := sandbox.Page{Limit: 500}
	for {
		next, err := get(p)
		if err != nil || next == "" {
			return err
		}
		p.Token = next
	}
}
