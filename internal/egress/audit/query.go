package audit

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"

	"cloche.dev/cloche/internal/sandbox"
)

// The bounds of an answer.
const (
	DefaultLimit = 100
	MaxLimit     = 1000
)

// maxLine bounds a line that is read: a record with each of its strings at its
// longest and every byte of them escaped is less.
const maxLine = 1 << 20

var _ sandbox.EgressAudit = (*Store)(nil)

// EgressRecords implements sandbox.EgressAudit. A line that can't be read is
// passed over.
func (s *Store) EgressRecords(ctx context.Context, f sandbox.EgressAuditFilter) ([]sandbox.EgressRecord, error) {
	limit := f.Limit
	if limit <= 0 {
		limit = DefaultLimit
	}
	limit = min(limit, MaxLimit)
	after := uint64(max(0, f.After))
	files, _, _ := s.look()
	var found []sandbox.EgressRecord
	for i := len(files) - 1; i >= 0 && len(found) < limit; i-- {
		if i+1 < len(files) && files[i+1].first <= after+1 {
			break // all in it and before it are older
		}
		var here []sandbox.EgressRecord
		err := s.read(ctx, files[i], after, func(id uint64, line []byte) error {
			e, ok := choose(&f, id, line)
			if !ok {
				return nil
			}
			if here = append(here, e.public()); len(here) >= 2*limit {
				here = append(here[:0], here[limit:]...)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		found = append(here[max(0, len(here)+len(found)-limit):], found...)
	}
	return found, nil
}

// FollowEgress implements sandbox.EgressAudit. One who is slow keeps nobody
// waiting. It returns nil when the store is closed.
func (s *Store) FollowEgress(ctx context.Context, f sandbox.EgressAuditFilter, tell func(sandbox.EgressRecord) error) error {
	after := uint64(max(0, f.After))
	for {
		files, changed, closed := s.look()
		for i, file := range files {
			if i+1 < len(files) && files[i+1].first <= after+1 {
				continue // all in it are older
			}
			err := s.read(ctx, file, after, func(id uint64, line []byte) error {
				after = id
				if e, ok := choose(&f, id, line); ok {
					return tell(e.public())
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
		if closed {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// LastEgress implements sandbox.EgressAudit.
func (s *Store) LastEgress() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return int64(s.next - 1)
}

// look returns the files as they are, and what is closed when there is more.
func (s *Store) look() (files []file, changed <-chan struct{}, closed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]file(nil), s.files...), s.changed, s.closed
}

// choose decodes a line if f may choose it, and tells whether it does.
func choose(f *sandbox.EgressAuditFilter, id uint64, line []byte) (Entry, bool) {
	if f.Sandbox != "" && !bytes.Contains(line, []byte(f.Sandbox)) || f.Project != "" && !bytes.Contains(line, []byte(f.Project)) {
		return Entry{}, false // which spares decoding it
	}
	e, err := Decode(line)
	return e, err == nil && e.ID == id &&
		(f.Project == "" || e.Project == f.Project) && (f.Sandbox == "" || e.Sandbox == f.Sandbox) &&
		(f.Verdict == "" || string(e.Verdict) == f.Verdict || f.WouldDeny && e.WouldDeny) && (f.Kind == "" || string(e.Kind) == f.Kind) &&
		!e.At.Before(f.Since)
}

// read tells of a file's lines after an id. A file that was rotated away has
// none.
func (s *Store) read(ctx context.Context, f file, after uint64, tell func(id uint64, line []byte) error) error {
	in, err := os.Open(s.path(f.first))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer in.Close()
	id, offset := f.begin(after)
	lines := bufio.NewScanner(io.NewSectionReader(in, offset, f.size-offset))
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	for ; lines.Scan(); id++ {
		if id%1024 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
		if id <= after {
			continue
		}
		if err := tell(id, lines.Bytes()); err != nil {
			return err
		}
	}
	return lines.Err()
}

// public is the entry as the API's rooms know it.
func (e *Entry) public() sandbox.EgressRecord {
	return sandbox.EgressRecord{
		Seq: int64(e.ID), At: e.At, Sandbox: e.Sandbox, Project: e.Project, Profile: e.Profile, Version: e.Version,
		Kind: string(e.Kind), Verdict: string(e.Verdict), WouldDeny: e.WouldDeny, Rule: e.Rule, Reason: e.Reason,
		Host: e.Host, Dialled: e.Dialled, Upstream: e.Upstream, Scheme: e.Scheme, Method: e.Method, Path: e.Path,
		Status: e.Status, Injected: e.Injected, Sent: e.Sent, Received: e.Received, Duration: e.Duration, Count: e.Count,
	}
}
