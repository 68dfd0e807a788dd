// Package netns makes the network namespaces that machines live in: for now
// an empty one each, with only its loopback up, named by a bind mount so that
// it lives without a process in it.
//
// Invariants: a namespace is named after its sandbox, so that every call is
// idempotent and knows what to remove from the id alone; no namespace has a
// way to the host's network. The node calls it. Egress will put the other end
// of a veth into Create and a gateway's namespace beside it.
package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	vishnetns "github.com/vishvananda/netns"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Manager makes and removes namespaces below one directory.
type Manager struct{ dir string }

// New returns a manager of the namespaces in dir.
func New(dir string) *Manager { return &Manager{dir: dir} }

func (m *Manager) path(id string) string { return filepath.Join(m.dir, id) }

// Create makes the namespace of a sandbox and returns its path. Where it
// exists already it is made anew, since what an earlier machine left in it
// must not reach the next.
func (m *Manager) Create(ctx context.Context, id string) (string, error) {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return "", sandbox.Errorf(sandbox.Invalid, "malformed_id", "%q is not the id of a sandbox", id)
	}
	if err := m.Delete(ctx, id); err != nil {
		return "", err
	}
	if err := os.MkdirAll(m.dir, 0o700); err != nil {
		return "", err
	}
	f, err := os.OpenFile(m.path(id), os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o400)
	if err != nil {
		return "", err
	}
	if err := f.Close(); err != nil {
		return "", err
	}
	if err := makeOne(m.path(id)); err != nil {
		return "", errors.Join(fmt.Errorf("make network namespace %s: %w", id, err), m.Delete(ctx, id))
	}
	return m.path(id), nil
}

// makeOne makes a namespace on a thread of its own, which is used again only
// if it is back in its own namespace.
func makeOne(path string) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		own, err := vishnetns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer own.Close() //nolint:errcheck // nothing was written to it
		err = fillIn(path)
		if back := vishnetns.Set(own); back != nil {
			err = errors.Join(err, back) // the thread stays locked and ends with this goroutine
		} else {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// fillIn moves the thread to a new namespace, brings that one up and names it.
func fillIn(path string) error {
	ns, err := vishnetns.New()
	if err != nil {
		return err
	}
	defer ns.Close() //nolint:errcheck // nothing was written to it
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	return sys.BindMount(fmt.Sprintf("/proc/self/fd/%d", int(ns)), path)
}

// Delete removes a sandbox's namespace. It succeeds for one that never was.
func (m *Manager) Delete(_ context.Context, id string) error {
	if !sandbox.ValidID(sandbox.KindSandbox, id) {
		return sandbox.Errorf(sandbox.Invalid, "malformed_id", "%q is not the id of a sandbox", id)
	}
	if err := sys.UnmountAll(m.path(id)); err != nil {
		return fmt.Errorf("unmount network namespace %s: %w", id, err)
	}
	if err := os.Remove(m.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// List names the sandboxes that have a namespace, or what is left of one.
func (m *Manager) List(context.Context) ([]string, error) {
	entries, err := os.ReadDir(m.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		if sandbox.ValidID(sandbox.KindSandbox, e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}
