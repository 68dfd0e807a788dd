// Package netns makes the network namespaces that machines live in, each with
// a gateway namespace beside it (docs/adr/0008).
//
// A pair is joined by a veth whose one end, eth0, is the machine's. At the
// other end nothing is forwarded: nftables there sends every TCP connection to
// the one listening socket of the proxy and port 53 to those of the resolver,
// and drops and counts the rest. The sockets are opened here and handed to the
// gateway process, which is never in that namespace itself.
//
// Invariants: every pair looks the same from inside (addresses, MACs, name,
// MTU), so that a restored or cloned machine fits any; a namespace is named
// after its sandbox by a bind mount, so that every call is idempotent and
// knows what to remove from the id alone; a pair is never used twice: what one
// machine left in it (connections, neighbours, counters) can't reach the next,
// and making one ahead costs less than proving that one is clean. Namespaces
// of the pool have no name: they live by this process's descriptors alone and
// a crash leaves none. The node, the drivers' probes and the egress manager
// call it.
package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// gatewaySuffix makes the name of the gateway's namespace of the machine's.
// No id of a sandbox has a dot in it.
const gatewaySuffix = ".gateway"

// Options configure a Manager.
type Options struct {
	Dir  string       // where the namespaces get their names
	Pool int          // how many pairs Run keeps ready; 0: none are made ahead
	Log  *slog.Logger // nil: nothing is logged
}

// Manager makes and removes pairs of namespaces below one directory.
type Manager struct {
	o     Options
	ready chan *pair
}

// New returns a manager of the namespaces in o.Dir.
func New(o Options) *Manager {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	// Run has one pair in its hand while it waits for room.
	return &Manager{o: o, ready: make(chan *pair, max(0, o.Pool-1))}
}

func (m *Manager) path(id string) string { return filepath.Join(m.o.Dir, id) }

// gateway is the path of the gateway's namespace of a sandbox.
func (m *Manager) gateway(id string) string { return m.path(id) + gatewaySuffix }

func valid(id string) error {
	if sandbox.ValidID(sandbox.KindSandbox, id) {
		return nil
	}
	return sandbox.Errorf(sandbox.Invalid, "malformed_id", "%q is not the id of a sandbox", id)
}

// Create gives a sandbox a new pair of namespaces, one of the pool's where
// there is one, and returns the path of the machine's. A pair that the sandbox
// has already goes, since what an earlier machine left in it must not reach
// the next.
func (m *Manager) Create(ctx context.Context, id string) (path string, err error) {
	if err := m.Delete(ctx, id); err != nil {
		return "", err
	}
	if err := os.MkdirAll(m.o.Dir, 0o700); err != nil {
		return "", err
	}
	p, err := m.take()
	if err != nil {
		return "", fmt.Errorf("make network namespaces for %s: %w", id, err)
	}
	defer p.close()
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Delete(context.WithoutCancel(ctx), id))
		}
	}()
	// The gateway's first: a machine's namespace without one is a leftover of
	// releases that had no gateway.
	if err := name(int(p.gateway), m.gateway(id)); err != nil {
		return "", err
	}
	if err := name(int(p.machine), m.path(id)); err != nil {
		return "", err
	}
	return m.path(id), nil
}

// take returns a pair that nobody has used.
func (m *Manager) take() (*pair, error) {
	select {
	case p := <-m.ready:
		return p, nil
	default:
		return makePair()
	}
}

// name gives a namespace a name in the file system, which keeps it alive.
func name(fd int, path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := sys.BindMount(fmt.Sprintf("/proc/self/fd/%d", fd), path); err != nil {
		return fmt.Errorf("name the network namespace %s: %w", path, err)
	}
	return nil
}

// Delete removes a sandbox's namespaces. It succeeds for one that never had
// any. Sockets in them keep the namespaces, unnamed, until they are closed.
func (m *Manager) Delete(_ context.Context, id string) error {
	if err := valid(id); err != nil {
		return err
	}
	for _, path := range []string{m.path(id), m.gateway(id)} {
		if err := sys.UnmountAll(path); err != nil {
			return fmt.Errorf("unmount the network namespace %s: %w", path, err)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// List names the sandboxes that have namespaces, or what is left of them.
func (m *Manager) List(context.Context) ([]string, error) {
	entries, err := os.ReadDir(m.o.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		if id := strings.TrimSuffix(e.Name(), gatewaySuffix); valid(id) == nil {
			ids = append(ids, id)
		}
	}
	return slices.Compact(ids), nil // sorted: by name, and a dot sorts before anything of an id
}
