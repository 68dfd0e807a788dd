package session

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"cloche.dev/cloche/internal/node/session/log"
)

const (
	syncEvery  = time.Second
	sweepEvery = 15 * time.Second
)

// Run syncs what is dirty each second, keeps projects within their bound and
// removes what is past its keeping, until ctx ends.
func (m *Manager) Run(ctx context.Context) error {
	tick := time.NewTicker(syncEvery)
	defer tick.Stop()
	var swept time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick.C:
			if err := m.syncDirty(); err != nil {
				m.opt.Log.Error("session logs could not be synced; trying again", "error", err)
			}
			if now.Sub(swept) < sweepEvery {
				continue
			}
			swept = now
			if err := m.Sweep(ctx); err != nil {
				m.opt.Log.Error("session logs could not be swept; trying again", "error", err)
			}
		}
	}
}

// syncDirty makes everything that was written so far survive a power loss.
func (m *Manager) syncDirty() error {
	m.dirtyMu.Lock()
	dirty := m.dirty
	m.dirty = make(map[*entry]struct{}, len(dirty))
	m.dirtyMu.Unlock()
	var errs []error
	for e := range dirty {
		e.dirty.Store(false)
		err := m.sync(e)
		if err != nil {
			m.markDirty(e)
			errs = append(errs, err)
		}
		e.mu.Lock()
		stuck := e.problem != ""
		e.mu.Unlock()
		if stuck || err != nil {
			m.setProblem(e, err)
		}
	}
	return errors.Join(errs...)
}

// Sweep ends sessions that nobody attached in time, removes ended ones that
// are past their retention and keeps every project within its bound.
func (m *Manager) Sweep(ctx context.Context) error {
	m.mu.Lock()
	var all []*entry
	for _, b := range m.boxes {
		for _, e := range b.sessions {
			all = append(all, e)
		}
	}
	m.mu.Unlock()
	now := m.opt.Clock()
	totals := map[string]int64{}
	var errs []error
	for _, e := range all {
		if ctx.Err() != nil {
			return nil
		}
		kept, size, err := m.age(ctx, e, now)
		errs = append(errs, err)
		if kept {
			totals[e.project] += size
		}
	}
	for project, total := range totals {
		if total > m.opt.ProjectQuota {
			errs = append(errs, m.shrink(all, project, total-m.opt.ProjectQuota))
		}
	}
	return errors.Join(errs...)
}

// age applies expiry and retention to one session.
func (m *Manager) age(ctx context.Context, e *entry, now time.Time) (kept bool, size int64, err error) {
	e.mu.Lock()
	if e.status == Created && now.Sub(e.created) >= m.opt.Expiry {
		e.conclude(Expired, now, 0)
		m.markDirty(e)
	}
	old := e.status.Ended() && now.Sub(e.endedAt) >= m.opt.Retention
	size = e.logBytes
	if e.log != nil {
		size = e.log.Bytes()
	}
	e.mu.Unlock()
	if !old {
		return true, size, nil
	}
	if m.opt.Retire != nil {
		if err := m.opt.Retire(ctx, e.ref); err != nil {
			return true, size, err
		}
	}
	m.forget(e)
	e.save.Lock() // a meta file that is being written would come back
	defer e.save.Unlock()
	return false, 0, removeSession(e.dir)
}

// shrink gives back excess bytes of a project's logs: whole segments, those of
// the sessions that ended first before all others; of running ones only if
// that was not enough.
func (m *Manager) shrink(all []*entry, project string, excess int64) error {
	type candidate struct {
		e     *entry
		ended bool
		at    time.Time
	}
	var list []candidate
	for _, e := range all {
		if e.project != project {
			continue
		}
		e.mu.Lock()
		c := candidate{e, e.status.Ended(), e.endedAt}
		if !c.ended {
			c.at = e.created
		}
		if !e.deleted {
			list = append(list, c)
		}
		e.mu.Unlock()
	}
	slices.SortFunc(list, func(a, b candidate) int {
		if a.ended != b.ended {
			if a.ended {
				return -1
			}
			return 1
		}
		return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.e.ref.Session, b.e.ref.Session))
	})
	var errs []error
	for _, c := range list {
		if excess <= 0 {
			break
		}
		freed, err := m.trim(c.e, excess)
		excess -= freed
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// trim drops the oldest segments of one log until excess bytes are given back.
func (m *Manager) trim(e *entry, excess int64) (int64, error) {
	e.mu.Lock()
	empty := e.log == nil && e.logBytes == 0
	e.mu.Unlock()
	if empty {
		return 0, nil
	}
	l, err := m.acquire(e)
	if err != nil {
		return 0, err
	}
	defer m.release(e)
	var freed int64
	for freed < excess {
		n := l.DropOldest()
		if n == 0 {
			break
		}
		freed += n
	}
	if freed == 0 {
		return 0, nil
	}
	return freed, m.trimmed(e, l)
}

// trimmed notes the new size of an ended session.
func (m *Manager) trimmed(e *entry, l *log.Log) error {
	e.save.Lock()
	defer e.save.Unlock()
	e.mu.Lock()
	if !e.status.Ended() || e.deleted {
		e.mu.Unlock()
		return nil
	}
	e.first, e.logBytes = l.First(), l.Bytes()
	first, size, unsaved := e.first, e.logBytes, e.unsaved
	e.mu.Unlock()
	if unsaved {
		return nil // the sync loop is about to write it
	}
	doc, err := readMeta(e.dir)
	if err != nil {
		return err
	}
	doc.First, doc.LogBytes = first, size
	return writeMeta(e.dir, doc)
}
