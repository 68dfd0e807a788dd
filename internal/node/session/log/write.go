package log

import (
	"errors"
	"os"
	"slices"
)

// Append takes a record. It always takes it: the error is that of writing,
// after which what was taken is kept in memory and Flush tries again; the
// caller must not append more before a Flush succeeded, or memory grows.
// Output of the same stream becomes one record, up to MaxPayload.
func (l *Log) Append(t Type, data []byte) error {
	l.writeMu.Lock()
	defer l.writeMu.Unlock()
	if l.sealed || l.closed {
		return os.ErrClosed
	}
	if !t.Output() {
		l.begin(t, len(data))
		l.pending = append(l.pending, data...)
		l.last = -1 // never extended
		return nil
	}
	var failed error
	for len(data) > 0 {
		room := 0
		if l.last >= 0 && Type(l.pending[l.last+8]) == t {
			room = MaxPayload - payloadLen(l.pending[l.last:])
		}
		if room == 0 {
			l.begin(t, 0)
			room = MaxPayload
		}
		n := min(room, len(data))
		l.pending = append(l.pending, data[:n]...)
		setPayloadLen(l.pending[l.last:], payloadLen(l.pending[l.last:])+n)
		l.accepted += uint64(n)
		data = data[n:]
		if failed == nil && len(l.pending) >= flushAt {
			failed = l.flush()
		}
	}
	return failed
}

func (l *Log) begin(t Type, length int) {
	l.last = len(l.pending)
	l.pending = appendHeader(l.pending, t, l.accepted, length)
}

// Flush writes what was appended. When it fails nothing of it has become part
// of the log, and the next Flush tries again.
func (l *Log) Flush() error {
	l.writeMu.Lock()
	defer l.writeMu.Unlock()
	return l.flush()
}

func (l *Log) flush() error {
	if len(l.pending) == 0 {
		return nil
	}
	if l.closed {
		return os.ErrClosed
	}
	if err := l.openActive(); err != nil {
		return err
	}
	l.makeRoom(int64(len(l.pending)))
	seal(l.pending)
	at := l.segs[len(l.segs)-1].size
	if _, err := l.active.WriteAt(l.pending, at); err != nil {
		// A retry writes to the same place, so that this is only to give the
		// blocks back and to keep the file free of half records.
		return errors.Join(err, l.active.Truncate(at))
	}
	l.dirty = true
	l.mu.Lock()
	l.segs[len(l.segs)-1].size += int64(len(l.pending))
	l.bytes += int64(len(l.pending))
	l.written = l.accepted
	l.wake()
	l.mu.Unlock()
	l.last = -1
	if cap(l.pending) > 2*flushAt {
		l.pending = nil
	} else {
		l.pending = l.pending[:0]
	}
	return nil
}

// openActive makes sure that active is a segment with room in it. segs is only
// changed by holders of writeMu, so that reading it here needs no mu.
func (l *Log) openActive() error {
	if n := len(l.segs); n > 0 && l.segs[n-1].size < l.limit {
		if l.active != nil {
			return nil
		}
		f, err := os.OpenFile(l.path(l.segs[n-1].base), os.O_RDWR, 0)
		l.active = f
		return err
	}
	return l.addSegment(l.written)
}

// addSegment begins a segment at base.
func (l *Log) addSegment(base uint64) error {
	f, err := os.OpenFile(l.path(base), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if l.active != nil {
		l.old = append(l.old, oldFile{l.segs[len(l.segs)-1].base, l.active})
	}
	l.active, l.dirty, l.dirDirty = f, true, true
	l.mu.Lock()
	l.segs = append(l.segs, segment{base: base})
	l.mu.Unlock()
	return nil
}

// makeRoom drops the oldest segments until n more bytes fit the quota.
func (l *Log) makeRoom(n int64) {
	for len(l.segs) > 1 && l.bytes+n > l.quota {
		if l.dropOldest() == 0 {
			return
		}
	}
}

// DropOldest removes the oldest segment and returns how many bytes that gave
// back. The segment that is being written stays; of a sealed log any may go.
func (l *Log) DropOldest() int64 {
	l.writeMu.Lock()
	defer l.writeMu.Unlock()
	if len(l.segs) == 0 || (len(l.segs) == 1 && !l.sealed) {
		return 0
	}
	return l.dropOldest()
}

// dropOldest is called with writeMu held. mu is held meanwhile, so that a
// reader that misses the file finds that its segment is gone.
func (l *Log) dropOldest() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.segs[0]
	if err := os.Remove(l.path(s.base)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0
	}
	if i := slices.IndexFunc(l.old, func(o oldFile) bool { return o.base == s.base }); i >= 0 {
		_ = l.old[i].f.Close() // its content is gone anyway
		l.old = slices.Delete(l.old, i, i+1)
	}
	l.segs = slices.Delete(l.segs, 0, 1)
	l.bytes -= s.size
	l.wake()
	return s.size
}

// Skip moves the end of the log to offset to, which readers will be told as a
// gap: output that nobody has any more.
func (l *Log) Skip(to uint64) error {
	l.writeMu.Lock()
	defer l.writeMu.Unlock()
	if err := l.flush(); err != nil {
		return err
	}
	if to <= l.accepted || l.sealed || l.closed {
		return nil
	}
	if err := l.addSegment(to); err != nil {
		return err
	}
	l.mu.Lock()
	l.written = to
	l.wake()
	l.mu.Unlock()
	l.accepted = to
	return nil
}

// Sync flushes and makes what was written survive a power loss.
func (l *Log) Sync() error {
	l.syncMu.Lock()
	defer l.syncMu.Unlock()
	l.writeMu.Lock()
	err := l.flush()
	if err != nil || !l.dirty {
		l.writeMu.Unlock()
		return err
	}
	old, active, dir := l.old, l.active, l.dirDirty
	l.old, l.dirty, l.dirDirty = nil, false, false
	l.writeMu.Unlock()

	for _, o := range old {
		err = errors.Join(err, syncFile(o.f), o.f.Close())
	}
	if active != nil {
		// A rotation meanwhile leaves it open (in l.old); only Close closes
		// it, and Close waits for syncMu.
		err = errors.Join(err, syncFile(active))
	}
	if dir {
		err = errors.Join(err, syncDir(l.dir))
	}
	if err != nil {
		l.writeMu.Lock()
		l.dirty = true
		l.dirDirty = l.dirDirty || dir
		l.writeMu.Unlock()
		return err
	}
	return nil
}

// Close closes the log without syncing it. What could not be flushed is lost,
// as it would be if the process ended; nobody acknowledged it.
func (l *Log) Close() error {
	l.syncMu.Lock()
	defer l.syncMu.Unlock()
	l.writeMu.Lock()
	defer l.writeMu.Unlock()
	if l.closed {
		return nil
	}
	err := l.flush()
	l.closed = true
	for _, o := range l.old {
		err = errors.Join(err, o.f.Close())
	}
	l.old = nil
	if l.active != nil {
		err = errors.Join(err, l.active.Close())
		l.active = nil
	}
	return err
}

// syncFile syncs f, unless its segment was dropped meanwhile.
func syncFile(f *os.File) error {
	if err := f.Sync(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
