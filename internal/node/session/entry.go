package session

import (
	"cmp"
	"encoding/json"
	"sync"
	"sync/atomic"
	"time"

	"cloche.dev/cloche/internal/node/session/log"
	"cloche.dev/cloche/internal/sandbox"
)

// entry is a session in memory. An ended one at rest holds little more than
// its times and sizes: the rest is read from its meta file when asked for.
type entry struct {
	ref     Ref
	guest   string // the id by which the guest knows it
	epoch   int64  // of the machine that brought it along; 0: it was made here
	base    uint64 // offset at which its log begins
	dir     string
	project string
	created time.Time

	op    sync.Mutex  // held by whoever asks the guest to start it
	save  sync.Mutex  // held while the meta file is written
	dirty atomic.Bool // it is in Manager.dirty

	mu       sync.Mutex
	session  *sandbox.Session // nil at rest
	status   Status
	start    *Start
	exit     *Exit
	loss     *Loss
	endedAt  time.Time
	first    uint64 // once ended or at rest, as the next two
	end      uint64
	logBytes int64
	held     bool // its machine was let go and will be restored
	log      *log.Log
	refs     int // users of log beside the entry itself
	unsaved  bool
	deleted  bool // out of the index; its readers end
	shut     bool // because the manager closed
	problem  string
	follower *follower
	changed  chan struct{} // closed at every change of status; nil while nobody waits
}

func newEntry(ref Ref, dir string, m *meta) *entry {
	e := &entry{
		ref: ref, guest: cmp.Or(m.Guest, ref.Session), epoch: m.Epoch, base: m.Session.ParentOffset,
		dir: dir, project: m.Session.Project, created: m.Session.CreatedAt, status: m.Status, start: m.Start,
	}
	if m.Status.Ended() {
		e.start = nil
		e.first, e.end, e.logBytes = m.First, m.End, m.LogBytes
		if m.EndedAt != nil {
			e.endedAt = *m.EndedAt
		}
		return e
	}
	s := m.Session
	e.session = &s
	return e
}

// watch returns a channel that is closed at the next change. Called with mu.
func (e *entry) watch() <-chan struct{} {
	if e.changed == nil {
		e.changed = make(chan struct{})
	}
	return e.changed
}

// wake is called with mu held.
func (e *entry) wake() {
	if e.changed != nil {
		close(e.changed)
		e.changed = nil
	}
}

// gone tells why e can't be used any more. Called with mu held.
func (e *entry) gone() error {
	if e.shut {
		return closedError()
	}
	return sandbox.Errorf(sandbox.NotFound, "session_deleted", "session %s was deleted", e.ref.Session)
}

// meta is what is to be written. Called with mu held, of an entry that is not
// at rest.
func (e *entry) meta() *meta {
	m := &meta{Version: metaVersion, Session: *e.session, Epoch: e.epoch, Status: e.status, Start: e.start, Exit: e.exit, Loss: e.loss}
	if e.guest != e.ref.Session {
		m.Guest = e.guest
	}
	if e.status == Starting {
		m.Status = Created // the log tells that it is more
	}
	if e.status.Ended() {
		at := e.endedAt
		m.EndedAt, m.First, m.End, m.LogBytes = &at, e.first, e.end, e.logBytes
	}
	return m
}

// acquire opens the log, if need be, and keeps it open until release.
func (m *Manager) acquire(e *entry) (*log.Log, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.deleted {
		return nil, e.gone()
	}
	if e.log == nil {
		l, err := log.Open(e.dir, log.Options{Quota: m.opt.Quota, Base: e.base, Sealed: e.status.Ended(), End: e.end})
		if err != nil {
			return nil, sandbox.Errorf(sandbox.Internal, "log_unreadable", "open the log of session %s: %w", e.ref.Session, err)
		}
		e.log = l
	}
	e.refs++
	return e.log, nil
}

func (m *Manager) release(e *entry) {
	e.mu.Lock()
	e.refs--
	l := e.rest()
	e.mu.Unlock()
	m.closeLog(e, l)
}

// rest lets go of what a held, or an ended and saved session need not hold, and
// returns the log that is to be closed, if any. Called with mu held.
func (e *entry) rest() *log.Log {
	if e.deleted && e.refs == 0 {
		l := e.log
		e.log = nil
		return l
	}
	if e.refs > 0 {
		return nil
	}
	l := e.log
	if e.held && l != nil {
		e.log, e.first, e.end, e.logBytes = nil, l.First(), l.Written(), l.Bytes()
		return l
	}
	if !e.status.Ended() || e.unsaved {
		return nil
	}
	e.log, e.session, e.start, e.exit, e.loss = nil, nil, nil, nil, nil
	return l
}

func (m *Manager) closeLog(e *entry, l *log.Log) {
	if l == nil {
		return
	}
	if err := l.Close(); err != nil {
		m.opt.Log.Error("close a session's log", "session", e.ref.Session, "error", err)
	}
}

// markDirty puts e on the list of the sync loop.
func (m *Manager) markDirty(e *entry) {
	if e.dirty.CompareAndSwap(false, true) {
		m.dirtyMu.Lock()
		m.dirty[e] = struct{}{}
		m.dirtyMu.Unlock()
	}
}

// setProblem says, or with nil takes back, that recording is stuck.
func (m *Manager) setProblem(e *entry, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	e.mu.Lock()
	before := e.problem
	e.problem = text
	e.mu.Unlock()
	switch {
	case before == "" && text != "":
		m.opt.Log.Warn("recording of a session is paused: its command waits", "session", e.ref.Session, "error", text)
	case before != "" && text == "":
		m.opt.Log.Info("recording of a session goes on", "session", e.ref.Session)
	}
}

// sync makes what e has survive a power loss and, when it ended, lets it rest.
func (m *Manager) sync(e *entry) error {
	e.mu.Lock()
	l := e.log
	if l == nil && !e.unsaved || e.deleted {
		e.mu.Unlock()
		return nil
	}
	e.refs++
	e.mu.Unlock()
	defer m.release(e)
	if l != nil {
		if err := l.Sync(); err != nil {
			return err
		}
	}
	return m.saveMeta(e)
}

// saveMeta writes the meta file if it is behind.
func (m *Manager) saveMeta(e *entry) error {
	e.save.Lock()
	defer e.save.Unlock()
	e.mu.Lock()
	if !e.unsaved || e.deleted {
		e.mu.Unlock()
		return nil
	}
	e.unsaved = false
	if e.status.Ended() && e.log != nil {
		e.first, e.logBytes = e.log.First(), e.log.Bytes()
	}
	doc := e.meta()
	e.mu.Unlock()
	err := writeMeta(e.dir, doc)
	if err != nil {
		e.mu.Lock()
		e.unsaved = true
		e.mu.Unlock()
	}
	return err
}

// restore takes over what the log of a session that had not ended, by its meta
// file, knows more than that file.
func (m *Manager) restore(e *entry) error {
	l, err := m.acquire(e)
	if err != nil {
		return err
	}
	defer m.release(e)
	start, asked := l.Beginning()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.status == Created && (asked || l.Written() > 0) {
		e.status = Starting
	}
	if start != nil && e.start == nil {
		var s Start
		if json.Unmarshal(start, &s) == nil {
			e.start = &s
		}
	}
	if e.start != nil {
		e.status = Running
	}
	tail := l.Tail()
	if tail == nil {
		return nil
	}
	switch tail.Type {
	case log.Exit:
		e.exit = new(Exit)
		err = json.Unmarshal(tail.Data, e.exit)
		if err == nil {
			e.conclude(Exited, e.exit.At, tail.Offset)
		}
	case log.Lost:
		e.loss = new(Loss)
		err = json.Unmarshal(tail.Data, e.loss)
		if err == nil {
			e.conclude(Lost, e.loss.At, tail.Offset)
		}
	}
	m.markDirty(e)
	return err
}

// conclude is called with mu held.
func (e *entry) conclude(s Status, at time.Time, end uint64) {
	e.status, e.endedAt, e.end, e.unsaved, e.held = s, at, end, true, false
	if e.log != nil {
		e.first, e.logBytes = e.log.First(), e.log.Bytes()
	}
	e.wake()
}

// active tells whether e can still end.
func (e *entry) active() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return !e.status.Ended() && !e.deleted
}

// ended makes an end known whose record has been appended.
func (m *Manager) ended(e *entry, end uint64, s Status, exit *Exit, loss *Loss) {
	e.mu.Lock()
	if e.status.Ended() || e.deleted {
		e.mu.Unlock()
		return
	}
	e.exit, e.loss = exit, loss
	e.conclude(s, m.opt.Clock(), end)
	e.mu.Unlock()
	m.markDirty(e)
}

// lose ends a session as lost. A full disk does not keep it from ending: what
// could not be written is tried again by the sync loop.
func (m *Manager) lose(e *entry, l *log.Log, reason, detail string) {
	loss := &Loss{Reason: reason, Detail: text(detail), At: m.opt.Clock()}
	b, err := json.Marshal(loss)
	if err == nil {
		err = l.Append(log.Lost, b)
	}
	if err == nil {
		err = l.Sync()
	}
	m.setProblem(e, err)
	m.ended(e, l.Accepted(), Lost, nil, loss)
}
