package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"cloche.dev/cloche/internal/sandbox"
)

// Manager keeps the sessions of one node.
type Manager struct {
	opt  Options
	ctx  context.Context // of the followers; ends with Close
	stop context.CancelFunc
	wg   sync.WaitGroup // followers

	mu     sync.Mutex
	boxes  map[string]*box
	closed bool

	dirtyMu sync.Mutex
	dirty   map[*entry]struct{}

	recorded atomic.Uint64 // bytes of output since New
}

// Counts tells how many sessions there are, by status.
func (m *Manager) Counts() map[string]int {
	m.mu.Lock()
	defer m.mu.Unlock()
	counts := map[string]int{}
	for _, b := range m.boxes {
		for _, e := range b.sessions {
			e.mu.Lock()
			counts[string(e.status)]++
			e.mu.Unlock()
		}
	}
	return counts
}

// Recorded tells how many bytes of output were recorded since New.
func (m *Manager) Recorded() uint64 { return m.recorded.Load() }

// box is what is known of one sandbox.
type box struct {
	sessions map[string]*entry
	end      *sandbox.End // its machine ended and no new one has said hello
	held     bool         // its machine was let go to be restored, and has not said hello again
}

// New makes a Manager of the sessions under opt.Dir. Sessions that were
// running are followed again once their machine says hello (MachineReady).
func New(opt Options) (*Manager, error) {
	if opt.Dir == "" || opt.Guests == nil {
		return nil, errors.New("session: Dir and Guests are required")
	}
	opt.setDefaults()
	if err := os.MkdirAll(opt.Dir, 0o700); err != nil {
		return nil, err
	}
	m := &Manager{opt: opt, boxes: map[string]*box{}, dirty: map[*entry]struct{}{}}
	m.ctx, m.stop = context.WithCancel(context.Background())
	if err := m.recover(); err != nil {
		m.stop()
		return nil, err
	}
	return m, nil
}

// recover finds the sessions on disk. Only the logs of those that had not
// ended are opened.
func (m *Manager) recover() error {
	boxes, err := os.ReadDir(m.opt.Dir)
	if err != nil {
		return err
	}
	for _, b := range boxes {
		dir := filepath.Join(m.opt.Dir, b.Name())
		if !sandbox.ValidID(sandbox.KindSandbox, b.Name()) {
			if filepath.Ext(b.Name()) == deletedSuffix {
				if err := os.RemoveAll(dir); err != nil {
					return err
				}
			}
			continue
		}
		sessions, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		if slices.ContainsFunc(sessions, func(e os.DirEntry) bool { return e.Name() == heldName }) {
			m.box(b.Name()).held = true
		}
		for _, s := range sessions {
			if !sandbox.ValidID(sandbox.KindSession, s.Name()) {
				continue
			}
			if err := m.recoverSession(Ref{b.Name(), s.Name()}); err != nil {
				return fmt.Errorf("session %s: %w", s.Name(), err)
			}
		}
	}
	return nil
}

func (m *Manager) recoverSession(ref Ref) error {
	dir := m.sessionDir(ref)
	doc, err := readMeta(dir)
	if errors.Is(err, os.ErrNotExist) {
		return removeSession(dir)
	}
	if err == nil && (doc.Session.ID != ref.Session || doc.Session.Sandbox != ref.Sandbox) {
		err = errors.New("the meta file is of another session")
	}
	if err != nil {
		// One broken file must not keep a node from starting; what is there
		// stays for people to look at.
		m.opt.Log.Error("a session's meta file is unreadable; the session is left alone", "session", ref.Session, "error", err)
		return nil
	}
	e := newEntry(ref, dir, doc)
	if !doc.Status.Ended() {
		e.held = m.box(ref.Sandbox).held
		if err := m.restore(e); err != nil {
			m.opt.Log.Error("a session's log could not be taken up", "session", ref.Session, "error", err)
		}
	}
	m.box(ref.Sandbox).sessions[ref.Session] = e
	return nil
}

func (m *Manager) sessionDir(ref Ref) string {
	return filepath.Join(m.opt.Dir, ref.Sandbox, ref.Session)
}

// box is called with mu held (or before anybody else knows m).
func (m *Manager) box(id string) *box {
	b := m.boxes[id]
	if b == nil {
		b = &box{sessions: map[string]*entry{}}
		m.boxes[id] = b
	}
	return b
}

func (m *Manager) get(ref Ref) (*entry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if b := m.boxes[ref.Sandbox]; b != nil {
		if e := b.sessions[ref.Session]; e != nil {
			return e, nil
		}
	}
	return nil, notFound(ref)
}

// entries lists a sandbox's sessions.
func (m *Manager) entries(sandboxID string) []*entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	b := m.boxes[sandboxID]
	if b == nil {
		return nil
	}
	list := make([]*entry, 0, len(b.sessions))
	for _, e := range b.sessions {
		list = append(list, e)
	}
	return list
}

// Register makes a session known: it may then be read and started. It is
// idempotent.
func (m *Manager) Register(_ context.Context, s sandbox.Session) error {
	ref := Ref{s.Sandbox, s.ID}
	if !sandbox.ValidID(sandbox.KindSandbox, s.Sandbox) || !sandbox.ValidID(sandbox.KindSession, s.ID) {
		return sandbox.Errorf(sandbox.Invalid, "bad_id", "%q in %q is not a session's id", s.ID, s.Sandbox)
	}
	if s.CreatedAt.IsZero() {
		s.CreatedAt = m.opt.Clock()
	}
	dir := m.sessionDir(ref)
	e := newEntry(ref, dir, &meta{Session: s, Status: Created})
	e.op.Lock() // nobody starts it before its meta file is there
	defer e.op.Unlock()
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return closedError()
	}
	b := m.box(s.Sandbox)
	if known := b.sessions[s.ID]; known != nil {
		m.mu.Unlock()
		known.op.Lock() // the first Register may be under way
		defer known.op.Unlock()
		_, err := m.get(ref)
		return err
	}
	e.held = b.held
	b.sessions[s.ID] = e
	m.mu.Unlock()
	return m.make(e)
}

// make gives a session that is in the index already its directory and meta
// file, or takes it out again.
func (m *Manager) make(e *entry) error {
	err := m.makeDir(e.dir)
	if err == nil {
		err = writeMeta(e.dir, e.meta())
	}
	if err == nil {
		return nil
	}
	m.forget(e)
	return errors.Join(sandbox.Errorf(diskClass(err), "log_not_made", "make the log of session %s: %w", e.ref.Session, err), removeSession(e.dir))
}

// diskClass is the class of what a disk answers: full and failing ones are
// ordinary, and the same call may succeed later.
func diskClass(err error) sandbox.Class {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sandbox.NoCapacity
	case errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EIO):
		return sandbox.Unavailable
	}
	return sandbox.Internal
}

// makeDir makes a session's directory, durably.
func (m *Manager) makeDir(dir string) error {
	parent := filepath.Dir(dir)
	err := os.Mkdir(parent, 0o700)
	if err == nil {
		err = syncDir(m.opt.Dir)
	} else if errors.Is(err, os.ErrExist) {
		err = nil
	}
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return syncDir(parent)
}

// forget takes e out of the index and ends its readers.
func (m *Manager) forget(e *entry) {
	m.mu.Lock()
	if b := m.boxes[e.ref.Sandbox]; b != nil && b.sessions[e.ref.Session] == e {
		delete(b.sessions, e.ref.Session)
		if len(b.sessions) == 0 && b.end == nil && !b.held {
			delete(m.boxes, e.ref.Sandbox)
		}
	}
	m.mu.Unlock()
	e.mu.Lock()
	e.deleted = true
	e.wake()
	l := e.rest()
	e.mu.Unlock()
	m.closeLog(e, l)
}

// State tells what is known of a session.
func (m *Manager) State(ref Ref) (State, error) {
	e, err := m.get(ref)
	if err != nil {
		return State{}, err
	}
	return m.state(e)
}

func (m *Manager) state(e *entry) (State, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.deleted {
		return State{}, e.gone()
	}
	s := State{Status: e.status, Problem: e.problem, Held: e.held}
	if e.session == nil {
		doc, err := readMeta(e.dir)
		if err != nil {
			return State{}, sandbox.Errorf(sandbox.Internal, "session_unreadable", "read session %s: %w", e.ref.Session, err)
		}
		s.Session, s.Start, s.Exit, s.Loss = doc.Session, doc.Start, doc.Exit, doc.Loss
	} else {
		s.Session, s.Start, s.Exit, s.Loss = *e.session, e.start, e.exit, e.loss
	}
	s.First, s.End, s.LogBytes = e.first, e.end, e.logBytes
	if e.status.Ended() {
		at := e.endedAt
		s.EndedAt = &at
	}
	if e.log != nil {
		s.First, s.LogBytes = e.log.First(), e.log.Bytes()
		if !e.status.Ended() {
			s.End = e.log.Written()
		}
	}
	return s, nil
}

// List tells the states of a sandbox's sessions, oldest first.
func (m *Manager) List(sandboxID string) ([]State, error) {
	var list []State
	for _, e := range m.entries(sandboxID) {
		s, err := m.state(e)
		if sandbox.IsClass(err, sandbox.NotFound) {
			continue // deleted meanwhile
		}
		if err != nil {
			return nil, err
		}
		list = append(list, s)
	}
	slices.SortFunc(list, func(a, b State) int {
		return cmp.Or(a.Session.CreatedAt.Compare(b.Session.CreatedAt), cmp.Compare(a.Session.ID, b.Session.ID))
	})
	return list, nil
}

// Close stops following, writes and syncs what is there and closes the logs.
// Commands go on; their guests keep what is not acknowledged.
func (m *Manager) Close() error {
	m.mu.Lock()
	m.closed = true
	var all []*entry
	for _, b := range m.boxes {
		for _, e := range b.sessions {
			all = append(all, e)
		}
	}
	m.mu.Unlock()
	m.stop()
	m.wg.Wait()
	err := m.syncDirty()
	for _, e := range all {
		e.mu.Lock()
		l := e.log
		e.log, e.deleted, e.shut = nil, true, true
		e.wake()
		e.mu.Unlock()
		m.closeLog(e, l)
	}
	return err
}

func closedError() error {
	return sandbox.Errorf(sandbox.Unavailable, "node_stopping", "the node is going down").WithHint("try again when it is back")
}
