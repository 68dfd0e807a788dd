package dataplane

import (
	"context"
	"sync"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// rows is a fake of control: sandboxes and sessions in maps.
type rows struct {
	mu       sync.Mutex
	touches  int
	holds    int               // that are open
	held     int               // that were ever
	asked    int               // calls of Access
	access   func(*rows) error // what Access does; nil: nothing
	boxes    map[string]sandbox.Sandbox
	sessions map[string]sandbox.Session
	keys     map[string]string // idempotency key to session
}

func (f *rows) Touch(string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.touches++
}

func (f *rows) Hold(string) func() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holds++
	f.held++
	return sync.OnceFunc(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.holds--
	})
}

func (f *rows) Access(_ context.Context, _, _ string) error {
	f.mu.Lock()
	f.asked++
	access := f.access
	f.mu.Unlock()
	if access == nil {
		return nil
	}
	return access(f)
}

// move sets the state of every sandbox.
func (f *rows) move(to sandbox.State) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for id, sb := range f.boxes {
		sb.State = to
		f.boxes[id] = sb
	}
}

func (f *rows) Get(_ context.Context, c sandbox.Caller, id string) (sandbox.Sandbox, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sb, ok := f.boxes[id]
	if !ok || c.Scope() != "" && c.Scope() != sb.Project {
		return sandbox.Sandbox{}, sandbox.Errorf(sandbox.NotFound, "sandbox_not_found", "no sandbox %s", id)
	}
	return sb, nil
}

func (f *rows) CreateSession(ctx context.Context, c sandbox.Caller, box string, p sandbox.Process, idem sandbox.Idempotency) (sandbox.Session, bool, error) {
	sb, err := f.Get(ctx, c, box)
	if err != nil {
		return sandbox.Session{}, false, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if id := f.keys[idem.Key]; id != "" && idem.Key != "" {
		return f.sessions[id], true, nil
	}
	s := sandbox.Session{
		ID: sandbox.NewID(sandbox.KindSession), Project: sb.Project, Sandbox: box, Process: p,
		Generation: 1, Key: c.KeyID, CreatedAt: time.Now(),
	}
	f.sessions[s.ID], f.keys[idem.Key] = s, s.ID
	return s, false, nil
}

func (f *rows) Session(ctx context.Context, c sandbox.Caller, box, id string) (sandbox.Session, error) {
	if _, err := f.Get(ctx, c, box); err != nil {
		return sandbox.Session{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s, ok := f.sessions[id]
	if !ok || s.Sandbox != box {
		return sandbox.Session{}, sandbox.Errorf(sandbox.NotFound, "session_not_found", "no session %s", id)
	}
	return s, nil
}

func (f *rows) Sessions(ctx context.Context, c sandbox.Caller, box string, _ sandbox.Page) ([]sandbox.Session, string, error) {
	if _, err := f.Get(ctx, c, box); err != nil {
		return nil, "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []sandbox.Session
	for _, s := range f.sessions {
		if s.Sandbox == box {
			list = append(list, s)
		}
	}
	return list, "", nil
}
