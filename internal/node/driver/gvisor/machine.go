package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
)

// endTimeout bounds asking the control process how a machine ended.
const endTimeout = 15 * time.Second

// machine is one gVisor sandbox.
type machine struct {
	d      *Driver
	e      *engine
	id     string
	exited chan struct{}

	mu    sync.Mutex
	rec   enginerpc.Machine
	end   sandbox.End
	guest driver.Guests
	disk  string // the descriptor of the overlay's file, below /proc
}

func newMachine(d *Driver, e *engine, id string) *machine {
	return &machine{d: d, e: e, id: id, exited: make(chan struct{})}
}

// hold returns the machine of a record, watching it from now on.
func (d *Driver) hold(rec enginerpc.Machine, e *engine) *machine {
	d.mu.Lock()
	m := d.machines[rec.ID]
	d.mu.Unlock()
	if m != nil {
		return m
	}
	m = newMachine(d, e, rec.ID)
	d.watch(m, rec)
	return m
}

// watch follows a machine to its end, or the driver's.
func (d *Driver) watch(m *machine, rec enginerpc.Machine) {
	m.rec = rec
	d.mu.Lock()
	d.machines[m.id] = m
	d.mu.Unlock()
	d.wg.Add(1)
	go func() {
		defer d.wg.Done()
		if err := rec.Sentry.Wait(d.ctx); err != nil {
			if d.ctx.Err() == nil {
				d.o.Log.Error("watch a machine", "machine", m.id, "err", err)
			}
			return
		}
		end := m.ask()
		m.mu.Lock()
		m.end = end
		m.mu.Unlock()
		close(m.exited)
	}()
}

// ask asks the control process how the machine ended, which learns it at about
// the same time as we do.
func (m *machine) ask() sandbox.End {
	ctx, cancel := context.WithTimeout(m.d.ctx, endTimeout)
	defer cancel()
	for {
		rec, err := m.e.get(ctx, m.id)
		if err == nil && rec.End != nil {
			return *rec.End
		}
		if sandbox.IsClass(err, sandbox.NotFound) {
			// It was discarded under our eyes.
			return sandbox.End{Reason: sandbox.EndKilled, Detail: "discarded", At: time.Now().UTC()}
		}
		if perr := pause(ctx, 2*time.Millisecond); perr != nil {
			return sandbox.End{
				Reason: sandbox.EndUnknown, Detail: fmt.Sprintf("the engine could not tell how it ended: %v", err), At: time.Now().UTC(),
			}
		}
	}
}

// ID implements driver.Machine.
func (m *machine) ID() string { return m.id }

// Exited implements driver.Machine.
func (m *machine) Exited() <-chan struct{} { return m.exited }

// End implements driver.Machine.
func (m *machine) End() sandbox.End {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.end
}

// Kill implements driver.Machine.
func (m *machine) Kill(ctx context.Context) error {
	err := m.e.kill(ctx, m.id)
	if sandbox.IsClass(err, sandbox.NotFound) {
		err = nil // it was discarded
	}
	if err != nil {
		m.d.o.Log.Warn("kill a machine without its engine", "machine", m.id, "err", err)
	}
	if err := m.d.group(m.id).Kill(ctx); err != nil {
		return err
	}
	select {
	case <-m.exited:
		return nil
	case <-m.d.ctx.Done():
		return nil // nobody watches any more, and no process is left
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Stats implements driver.Machine.
func (m *machine) Stats(context.Context) (driver.Stats, error) {
	u, err := m.d.group(m.id).Usage()
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return driver.Stats{}, notFound(m.id)
		}
		return driver.Stats{}, err
	}
	return driver.Stats{MemoryBytes: u.Memory, CPU: u.CPU, Processes: u.Tasks, DiskBytes: m.diskBytes()}, nil
}

// diskBytes tells how much of the host's disk the overlay's file holds. It has
// no name, so it is found through the sentry, which keeps it open.
func (m *machine) diskBytes() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.disk == "" {
		dir := fmt.Sprintf("/proc/%d/fd", m.rec.Sentry.PID)
		entries, err := os.ReadDir(dir)
		if err != nil {
			return -1
		}
		for _, e := range entries {
			target, err := os.Readlink(filepath.Join(dir, e.Name()))
			if err == nil && strings.Contains(target, "/runsc-filestore-") {
				m.disk = filepath.Join(dir, e.Name())
				break
			}
		}
	}
	st, err := os.Stat(m.disk)
	if err != nil || !m.rec.Sentry.Exists() {
		return -1
	}
	raw, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return -1
	}
	return raw.Blocks * 512
}

// Guest implements driver.Machine. The socket is root's alone, in a directory
// of its own that the guest sees read-only.
func (m *machine) Guest() (net.Listener, error) { return m.guest.Listen(m.id, m.listen) }

func (m *machine) listen() (net.Listener, error) {
	dir := filepath.Join(m.d.socketDir(m.id), "host")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, socketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = l.Close()
		return nil, err
	}
	return l, nil
}
