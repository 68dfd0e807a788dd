package audit

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// segments is how many files the bound of a Store is spread over: the oldest is
// removed as a whole.
const segments = 8

// minSegment keeps a small bound from making a file of every entry.
const minSegment = 64 << 10

// DefaultBytes is the bound of a Store that is given none.
const DefaultBytes = 256 << 20

// Options make a Store.
type Options struct {
	Dir   string // made where it is missing
	Bytes int64  // of all files together; 0 is DefaultBytes
}

// Entry is a Record that a Store has.
type Entry struct {
	ID uint64 `json:"id"` // from 1
	Record
}

// Store keeps entries in files. Its methods may be called at once.
type Store struct {
	dir     string
	segment int64 // bytes at which a new file is begun

	mu      sync.Mutex
	files   []file // oldest first; the last one is written to
	out     *os.File
	next    uint64
	changed chan struct{} // closed and replaced when something was appended
	totals  map[Total]uint64
	closed  bool
}

// file is one of a store's files: its first entry's id is its name, and each
// line's id is one more than the line's before.
type file struct {
	first uint64
	size  int64 // of whole lines
	// marks are where every so many lines begin, so that who follows doesn't read
	// the file from its beginning each time. A file of an earlier run has none.
	marks []int64
}

// markEvery is the number of lines from mark to mark.
const markEvery = 512

// mark notes where the line of an id begins, where that is one to be marked.
func (f *file) mark(id uint64, offset int64) {
	if (id-f.first)%markEvery == 0 {
		f.marks = append(f.marks, offset)
	}
}

// begin is a line at or before the one after an id, and its offset.
func (f *file) begin(after uint64) (id uint64, offset int64) {
	if len(f.marks) == 0 || after < f.first {
		return f.first, 0
	}
	i := min(uint64(len(f.marks)-1), (after+1-f.first)/markEvery)
	return f.first + i*markEvery, f.marks[i]
}

// Total is what entries are counted by.
type Total struct {
	Kind    Kind
	Verdict Verdict
}

const (
	prefix = "audit-"
	suffix = ".jsonl"
)

func (s *Store) path(first uint64) string {
	return filepath.Join(s.dir, fmt.Sprintf("%s%020d%s", prefix, first, suffix))
}

// Open opens the store of a directory. A line that a crash left unfinished is
// cut off.
func Open(o Options) (*Store, error) {
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the audit's directory: %w", err)
	}
	if o.Bytes <= 0 {
		o.Bytes = DefaultBytes
	}
	s := &Store{
		dir: o.Dir, segment: max(minSegment, o.Bytes/segments), next: 1, changed: make(chan struct{}), totals: map[Total]uint64{},
	}
	entries, err := os.ReadDir(o.Dir)
	if err != nil {
		return nil, fmt.Errorf("list the audit's files: %w", err)
	}
	for _, e := range entries { // sorted by name, so by id
		digits, ours := strings.CutPrefix(e.Name(), prefix)
		digits, jsonl := strings.CutSuffix(digits, suffix)
		first, err := strconv.ParseUint(digits, 10, 64)
		if !ours || !jsonl || err != nil || first == 0 {
			continue
		}
		s.files = append(s.files, file{first: first})
	}
	for i := range s.files {
		if err := s.measure(&s.files[i], i == len(s.files)-1); err != nil {
			return nil, err
		}
	}
	return s, s.reopen()
}

// measure finds a file's size; of the last one also the next id, after the cut.
func (s *Store) measure(f *file, last bool) error {
	st, err := os.Stat(s.path(f.first))
	if err != nil {
		return err
	}
	f.size = st.Size()
	if !last {
		return nil
	}
	data, err := os.Open(s.path(f.first))
	if err != nil {
		return err
	}
	defer data.Close()
	r := bufio.NewReader(data)
	s.next, f.size = f.first, 0
	for {
		begin := f.size
		line, err := r.ReadSlice('\n')
		for errors.Is(err, bufio.ErrBufferFull) { // none of ours, but it counts
			f.size += int64(len(line))
			line, err = r.ReadSlice('\n')
		}
		if err != nil {
			break // what is left is not a line
		}
		f.mark(s.next, begin)
		f.size += int64(len(line))
		s.next++
	}
	return os.Truncate(s.path(f.first), f.size)
}

// reopen opens the last file for writing, or begins the first.
func (s *Store) reopen() (err error) {
	if len(s.files) == 0 {
		s.files = append(s.files, file{first: s.next})
	}
	s.out, err = os.OpenFile(s.path(s.files[len(s.files)-1].first), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	return err
}

// Append adds entries. They are in the kernel's hands when it returns; a host
// that loses power may lose the last of them.
func (s *Store) Append(records ...Record) error {
	if len(records) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fs.ErrClosed
	}
	if err := s.rotate(); err != nil {
		return err
	}
	f := &s.files[len(s.files)-1]
	var lines bytes.Buffer
	begins := make([]int64, len(records))
	for i := range records {
		begins[i] = f.size + int64(lines.Len())
		r := records[i].clip()
		line, err := Encode(Entry{ID: s.next + uint64(i), Record: r})
		if err != nil {
			return fmt.Errorf("encode an audit record: %w", err)
		}
		lines.Write(line)
		lines.WriteByte('\n')
	}
	if _, err := s.out.Write(lines.Bytes()); err != nil {
		// Half of it may be there, and no reader has seen that.
		return errors.Join(fmt.Errorf("write the audit: %w", err), os.Truncate(s.path(f.first), f.size))
	}
	f.size += int64(lines.Len())
	for i := range records {
		f.mark(s.next, begins[i])
		s.next++
		s.totals[Total{records[i].Kind, records[i].Verdict}]++
	}
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

// rotate begins a new file where the last one is full, and removes the oldest
// ones. The lock is held.
func (s *Store) rotate() error {
	if s.files[len(s.files)-1].size < s.segment {
		return nil
	}
	_ = s.out.Sync() // it is as durable as it gets; nothing is lost by going on
	_ = s.out.Close()
	s.files = append(s.files, file{first: s.next})
	for len(s.files) > segments {
		if err := os.Remove(s.path(s.files[0].first)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		s.files = slices.Delete(s.files, 0, 1)
	}
	return s.reopen()
}

// Totals counts what was appended since Open, for metrics.
func (s *Store) Totals() map[Total]uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[Total]uint64, len(s.totals))
	for k, v := range s.totals {
		all[k] = v
	}
	return all
}

// Close ends the store and whoever follows it.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	close(s.changed)
	return errors.Join(s.out.Sync(), s.out.Close())
}

// clip bounds what a record holds. Zero times and odd lengths stay what they are.
func (r Record) clip() Record {
	for _, p := range []*string{&r.Sandbox, &r.Project, &r.Profile, (*string)(&r.Kind), (*string)(&r.Verdict), &r.Rule, &r.Reason, &r.Host, &r.Scheme, &r.Method, &r.Path} {
		*p = clip(*p)
	}
	r.Injected = slices.Clone(r.Injected[:min(len(r.Injected), maxInjected)])
	for i := range r.Injected {
		r.Injected[i] = clip(r.Injected[i])
	}
	r.Dialled, r.Upstream = unzoned(r.Dialled), unzoned(r.Upstream)
	r.At = r.At.UTC().Round(0)
	if y := r.At.Year(); y < 1970 || y > 9999 { // which JSON would refuse
		r.At = time.Unix(0, 0).UTC()
	}
	return r
}

// unzoned is an address without its zone, which could be any text.
func unzoned(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().WithZone(""), a.Port())
}

// maxInjected bounds the names of secrets in one record.
const maxInjected = 32

func clip(s string) string {
	if len(s) <= MaxText {
		return s
	}
	s = s[:MaxText]
	for len(s) > 0 && !utf8.RuneStart(s[len(s)-1]) {
		s = s[:len(s)-1]
	}
	if r, size := utf8.DecodeLastRuneInString(s); r == utf8.RuneError && size == 1 {
		s = s[:len(s)-1]
	}
	return s
}
