package control

import (
	"context"
	"sync"
)

// bell wakes those who wait for a key to change: an operation's id, or ""
// for any event.
type bell struct {
	mu      sync.Mutex
	waiting map[string]*ring
}

type ring struct {
	ch    chan struct{}
	users int
}

func newBell() *bell { return &bell{waiting: map[string]*ring{}} }

// listen returns a channel that closes at the next ring of key, and a function
// to call when one no longer listens. Listen first, then look, then wait.
func (b *bell) listen(key string) (<-chan struct{}, func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	r := b.waiting[key]
	if r == nil {
		r = &ring{ch: make(chan struct{})}
		b.waiting[key] = r
	}
	r.users++
	return r.ch, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if r.users--; r.users == 0 && b.waiting[key] == r {
			delete(b.waiting, key)
		}
	}
}

// ring wakes who listens to key, and who listens to everything.
func (b *bell) ring(key string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range []string{key, ""} {
		if r := b.waiting[k]; r != nil {
			close(r.ch)
			delete(b.waiting, k)
		}
	}
}

// slots bounds how many do something at once, first come first served by the
// channel's own queue.
type slots struct{ ch chan struct{} }

func newSlots(n int) *slots { return &slots{make(chan struct{}, n)} }

// take waits for a slot; busy is called once where there is none at once.
func (s *slots) take(ctx context.Context, busy func()) error {
	select {
	case s.ch <- struct{}{}:
		return nil
	default:
	}
	busy()
	select {
	case s.ch <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s *slots) free() { <-s.ch }
