package log

import (
	"errors"
	"os"
	"slices"
)

// Reader reads a log from its files with a cursor of its own. It holds one
// descriptor and room for one record. Not for concurrent use.
type Reader struct {
	l    *Log
	at   uint64 // everything before it has been delivered
	f    *os.File
	base uint64 // of the segment that f is
	pos  int64  // in f, behind what buf holds
	scan uint64 // offset at buf's front; < at while looking for at
	buf  []byte
	left []byte // what of buf is not parsed yet
}

// NewReader returns a reader that begins at offset at.
func (l *Log) NewReader(at uint64) *Reader { return &Reader{l: l, at: at} }

// Offset is the offset behind what was delivered.
func (r *Reader) Offset() uint64 { return r.at }

// Close releases the reader.
func (r *Reader) Close() error {
	r.buf, r.left = nil, nil
	if r.f == nil {
		return nil
	}
	err := r.f.Close()
	r.f = nil
	return err
}

// Next returns the next output record or gap; ok is false when there is no
// more now. It never waits. The record's data is valid until the next call.
func (r *Reader) Next() (rec Record, ok bool, err error) {
	for {
		bad := false
		if len(r.left) > 0 {
			rec, n, perr := parse(r.left, r.scan)
			if perr == nil {
				r.left, r.scan = r.left[n:], rec.End()
				if rec, ok := r.take(rec); ok {
					return rec, true, nil
				}
				continue
			}
			bad = errors.Is(perr, errBad)
		}
		rec, done, err := r.advance(bad)
		if err != nil || rec.Type == Gap {
			return rec, err == nil, err
		}
		if done {
			return Record{}, false, nil
		}
	}
}

// take turns a stored record into what is still to be delivered of it.
func (r *Reader) take(rec Record) (Record, bool) {
	if !rec.Type.Output() || rec.End() <= r.at {
		return Record{}, false
	}
	if rec.Offset < r.at {
		rec.Data = rec.Data[r.at-rec.Offset:]
		rec.Offset = r.at
	}
	r.at = rec.End()
	return rec, true
}

// view is where a reader stands in the log at one instant.
type view struct {
	found   bool   // there is a segment to read
	base    uint64 // of that segment
	size    int64  // of that segment
	last    bool   // it is the last one
	next    uint64 // first offset that may exist behind that segment
	written uint64
}

// look finds the reader's segment: the one it reads while that exists, else
// the last that begins at or before its cursor.
func (r *Reader) look() view {
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	v := view{written: r.l.written, next: r.l.first()}
	i := -1
	if r.f != nil {
		i = slices.IndexFunc(r.l.segs, func(s segment) bool { return s.base == r.base })
	} else {
		for j, s := range r.l.segs {
			if s.base <= r.at {
				i = j
			}
		}
	}
	if i < 0 {
		return v
	}
	v.found, v.base, v.size = true, r.l.segs[i].base, r.l.segs[i].size
	v.last = i == len(r.l.segs)-1
	v.next = v.written
	if !v.last {
		v.next = r.l.segs[i+1].base
	}
	return v
}

// advance gets more to parse, moves on to the next segment or finds a gap.
// bad says that what is left is damaged. done: there is no more now.
func (r *Reader) advance(bad bool) (gap Record, done bool, err error) {
	v := r.look()
	switch {
	case !v.found && r.f != nil: // dropped while it was being read
		r.leave()
		return Record{}, false, nil
	case !v.found:
		return r.gapTo(v.next), r.at >= v.next, nil
	case r.f == nil:
		return Record{}, false, r.enter(v)
	case !bad && r.pos < v.size:
		n, err := r.fill(v.size)
		if err != nil || n > 0 {
			return Record{}, false, err
		}
	}
	// Nothing more can be read of this segment now.
	intact := !bad && len(r.left) == 0
	gap = r.gapTo(v.next)
	if !v.last {
		r.leave()
		return gap, false, nil
	}
	if !intact || gap.Type == Gap {
		r.left, r.pos, r.scan = nil, v.size, v.written
	}
	return gap, true, nil
}

// gapTo moves the cursor to offset to and says so, if it is behind.
func (r *Reader) gapTo(to uint64) Record {
	if r.at >= to {
		return Record{}
	}
	rec := Record{Type: Gap, Offset: r.at, To: to}
	r.at = to
	return rec
}

func (r *Reader) leave() {
	_ = r.f.Close() // it was only read
	r.f, r.left = nil, nil
}

func (r *Reader) enter(v view) error {
	f, err := os.Open(r.l.path(v.base))
	if errors.Is(err, os.ErrNotExist) {
		if r.look().base == v.base {
			return err // not dropped meanwhile: removed behind our back
		}
		return nil
	}
	if err != nil {
		return err
	}
	r.f, r.base, r.pos, r.scan, r.left = f, v.base, 0, v.base, nil
	if v.last && r.at == v.written {
		r.pos, r.scan = v.size, v.written // a reader at the end needs nothing that is there
	}
	return nil
}

// fill reads on behind what is left.
func (r *Reader) fill(size int64) (int, error) {
	if r.buf == nil {
		r.buf = make([]byte, headerSize+MaxPayload)
	}
	kept := copy(r.buf, r.left)
	room := min(int64(len(r.buf)-kept), size-r.pos)
	n, err := r.f.ReadAt(r.buf[kept:kept+int(room)], r.pos)
	r.pos += int64(n)
	r.left = r.buf[:kept+n]
	if n > 0 {
		return n, nil
	}
	if errors.Is(err, os.ErrClosed) {
		return 0, err
	}
	return 0, nil // shorter than it was, or unreadable: a gap
}

// Beginning tells what the first records say, while the log still has them:
// the content of Started, and whether there is a Starting.
func (l *Log) Beginning() (started []byte, starting bool) {
	l.mu.Lock()
	kept := len(l.segs) > 0 && l.segs[0].base == 0
	l.mu.Unlock()
	if !kept {
		return nil, false
	}
	f, err := os.Open(l.path(0))
	if err != nil {
		return nil, false
	}
	defer f.Close()
	b := make([]byte, 4<<10)
	n, _ := f.ReadAt(b, 0) // what there is of it
	for b = b[:n]; ; {
		rec, n, err := parse(b, 0)
		switch {
		case err != nil || rec.Type.Output():
			return started, starting
		case rec.Type == Starting:
			starting = true
		case rec.Type == Started:
			started = slices.Clone(rec.Data)
		}
		b = b[n:]
	}
}
