package driver

import (
	"net"
	"sync"

	"cloche.dev/cloche/internal/sandbox"
)

// Guests keeps the one listener of a machine, as Living.Guest wants it. The
// zero value has none yet.
type Guests struct {
	mu      sync.Mutex
	current *GuestListener
	retired bool
}

// GuestListener is a machine's listener; closing it makes room for the next.
type GuestListener struct {
	net.Listener
	of *Guests
}

// Close implements net.Listener.
func (l *GuestListener) Close() error {
	l.of.mu.Lock()
	defer l.of.mu.Unlock()
	if l.of.current == l {
		l.of.current = nil
	}
	return l.Listener.Close()
}

// Listen returns the listener that there is, or the one that open makes. Once
// the machine called id was retired it is not found, and open isn't called.
func (g *Guests) Listen(id string, open func() (net.Listener, error)) (net.Listener, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.retired {
		return nil, sandbox.Errorf(sandbox.NotFound, "machine_not_found", "there is no machine %s", id)
	}
	if g.current != nil {
		return g.current, nil
	}
	l, err := open()
	if err != nil {
		return nil, err
	}
	g.current = &GuestListener{Listener: l, of: g}
	return g.current, nil
}

// Close closes the listener that there is; the next Listen opens another.
func (g *Guests) Close() {
	g.mu.Lock()
	l := g.current
	g.mu.Unlock()
	if l != nil {
		_ = l.Close() // only ever says that it is closed
	}
}

// Retire closes it for good: the machine is being discarded.
func (g *Guests) Retire() {
	g.mu.Lock()
	g.retired = true
	g.mu.Unlock()
	g.Close()
}
