// Package log keeps one session's output on disk: an append-only log whose
// position is the number of output bytes (stdout and stderr together) before
// it. It may begin at an offset other than 0, where a session goes on from
// another one's.
//
// A log is a directory of segment files, each named by its first offset and
// made of framed records. Invariants: what Flush has written survives the end
// of this process, what Sync has written survives a power loss; a torn tail is
// cut at the first bad record when the log is opened; offsets never change,
// so what is missing (dropped for the quota, skipped, damaged) is told to
// readers as a Gap with its exact range; a reader never makes the writer wait.
//
// Package session is its only caller. One goroutine appends; any number read.
package log

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// flushAt is how much is gathered before Append writes by itself.
const flushAt = 128 << 10

const (
	segmentSuffix = ".seg"
	defaultQuota  = 256 << 20
	maxSegment    = 16 << 20
	minSegment    = 64 << 10
)

// Options says how a log is opened.
type Options struct {
	// Quota bounds the log's bytes on disk, headers included; 0 is 256 MiB.
	// When more comes the oldest whole segments go.
	Quota int64
	// Segment is the size at which a new segment begins; 0 is 16 MiB, or an
	// eighth of a smaller quota.
	Segment int64
	// Base is the offset at which the log begins: what lies before it never was
	// in it, which readers are told as a gap.
	Base uint64
	// Sealed opens a finished log whose end is End: nothing is checked or cut
	// beforehand and nothing can be appended.
	Sealed bool
	End    uint64
}

type segment struct {
	base uint64
	size int64
}

// Log is an open log. All methods may be called concurrently; Append and Skip
// are meant for one goroutine.
type Log struct {
	dir    string
	quota  int64
	limit  int64 // size at which a segment is full
	sealed bool
	tail   *Record // the last record without width found when opening

	syncMu sync.Mutex // one Sync at a time

	writeMu  sync.Mutex // held while writing; taken before mu
	pending  []byte     // records that are not written yet, not sealed
	last     int        // where pending's last record begins; -1: none
	accepted uint64     // offset behind everything in pending
	active   *os.File   // the last segment, once something was written to it
	old      []oldFile  // full segments that are not synced yet
	dirty    bool       // something was written since the last Sync
	dirDirty bool       // a segment was made since the last Sync
	closed   bool

	mu      sync.Mutex
	segs    []segment
	bytes   int64
	written uint64
	changed chan struct{} // closed when written moves; nil while nobody waits
}

type oldFile struct {
	base uint64
	f    *os.File
}

// Open opens the log in dir, which exists, and cuts a torn tail off.
func Open(dir string, opt Options) (*Log, error) {
	l := &Log{dir: dir, quota: opt.Quota, limit: opt.Segment, sealed: opt.Sealed, last: -1}
	if l.quota <= 0 {
		l.quota = defaultQuota
	}
	if l.limit <= 0 {
		l.limit = min(maxSegment, max(minSegment, l.quota/8))
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		base, ok := parseName(e.Name())
		if !ok {
			continue
		}
		info, err := e.Info()
		if err != nil {
			return nil, err
		}
		l.segs = append(l.segs, segment{base, info.Size()})
		l.bytes += info.Size()
	}
	slices.SortFunc(l.segs, func(a, b segment) int {
		if a.base < b.base {
			return -1
		}
		return 1
	})
	if opt.Sealed {
		l.written = opt.End
	} else if err := l.cutTail(opt.Base); err != nil {
		return nil, err
	}
	l.accepted = l.written
	return l, nil
}

// cutTail checks the last segment and cuts it at the first bad record. The
// segments before it were full; what a power loss may have taken from them is
// found, and told, when they are read.
func (l *Log) cutTail(base uint64) error {
	if len(l.segs) == 0 {
		l.written = base
		return nil
	}
	s := &l.segs[len(l.segs)-1]
	f, err := os.OpenFile(l.path(s.base), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	good, end, tail, err := scan(f, s.base)
	if err != nil {
		return err
	}
	l.written, l.tail = end, tail
	if good < s.size {
		if err := f.Truncate(good); err != nil {
			return err
		}
		l.bytes -= s.size - good
		s.size = good
	}
	return nil
}

// scan reads records from r until the first that is not one. It tells how many
// bytes are good, which offset they lead to, and the last final record.
func scan(r io.Reader, base uint64) (good int64, end uint64, tail *Record, err error) {
	br := bufio.NewReaderSize(r, headerSize+MaxPayload)
	end = base
	for {
		head, err := br.Peek(headerSize)
		if err == nil {
			head, err = br.Peek(headerSize + min(payloadLen(head), MaxPayload))
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return 0, 0, nil, err
		}
		rec, n, perr := parse(head, end)
		if perr != nil {
			return good, end, tail, nil
		}
		good, end = good+int64(n), rec.End()
		switch {
		case rec.Type.Final():
			rec.Data = slices.Clone(rec.Data)
			tail = &rec
		case rec.Type.Output():
			tail = nil
		}
		if _, err := br.Discard(n); err != nil {
			return 0, 0, nil, err
		}
	}
}

func (l *Log) path(base uint64) string {
	return filepath.Join(l.dir, fmt.Sprintf("%020d%s", base, segmentSuffix))
}

func parseName(name string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, segmentSuffix)
	if !ok || len(digits) != 20 {
		return 0, false
	}
	base, err := strconv.ParseUint(digits, 10, 64)
	return base, err == nil
}

// Tail is the final record that Open found at the log's end, if any.
func (l *Log) Tail() *Record { return l.tail }

// Accepted is the offset behind everything appended.
func (l *Log) Accepted() uint64 {
	l.writeMu.Lock()
	defer l.writeMu.Unlock()
	return l.accepted
}

// Written is the offset behind everything that was written with write(2).
func (l *Log) Written() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.written
}

// First is the first offset that is kept.
func (l *Log) First() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.first()
}

func (l *Log) first() uint64 {
	if len(l.segs) == 0 {
		return l.written
	}
	return l.segs[0].base
}

// Bytes is the log's size on disk.
func (l *Log) Bytes() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bytes
}

// Changed returns a channel that is closed when more has been written. Ask
// for it before looking at what there is.
func (l *Log) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.changed == nil {
		l.changed = make(chan struct{})
	}
	return l.changed
}

// wake is called with mu held.
func (l *Log) wake() {
	if l.changed != nil {
		close(l.changed)
		l.changed = nil
	}
}
