package firecracker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker/jail"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	// askTimeout bounds a request that a VMM answers at once, unless it is
	// writing a snapshot whose asker is gone.
	askTimeout = 30 * time.Second
	// saveTimeout bounds one that reads or writes the guest's memory.
	saveTimeout = 10 * time.Minute

	// vsockName is the VMM's socket for its vsock device; what the guest dials
	// at a port comes to that name with "_PORT" behind it.
	vsockName  = "v.sock"
	agentName  = vsockName + "_1024"
	reportName = vsockName + "_1023"
	agentDial  = "vsock:2:1024"
	reportPort = 1023
	guestCID   = 3
)

// machine is one microVM.
type machine struct {
	d      *Driver
	id     string
	jail   *jail.Jail
	client *vmm.Client
	exited chan struct{} // closed by the watcher
	met    chan struct{} // closed when the VMM can be asked; nil: it can
	tap    string        // of one that is being made: the link that its VMM is to attach to
	mac    string        // and the hardware address that it shall have

	mu      sync.Mutex
	rec     record
	log     *jail.Log // nil until it is open
	end     sandbox.End
	guest   driver.Guests
	watched bool
	killed  bool        // by us
	gone    bool        // it was discarded: nothing of it may come back
	lent    *time.Timer // nil: its share of the processors holds
	dialled bool        // since it was lent more
}

func newMachine(d *Driver, rec record) *machine {
	j := d.jail(rec.ID)
	return &machine{d: d, id: rec.ID, jail: j, client: vmm.New(j.Socket()), exited: make(chan struct{}), rec: rec}
}

// note changes the record and writes it.
func (m *machine) note(change func(*record)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.rec)
	if m.gone {
		return notFound(m.id)
	}
	return m.rec.save(m.d.machineDir(m.id))
}

func (m *machine) record() record {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rec
}

// openLog begins to read the VMM's log.
func (m *machine) openLog() error {
	l, err := m.jail.Log()
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.log = l
	return nil
}

// find takes up a machine that another process made.
func (m *machine) find(ctx context.Context) error {
	rec := m.record()
	held, err := m.jail.Holds(rec.Process)
	if err != nil {
		return err
	}
	if !held {
		end := m.unseen()
		if err := m.note(func(r *record) { r.End = &end }); err != nil {
			return err
		}
		return &driver.Ended{End: end}
	}
	if !rec.Ready {
		return sandbox.Errorf(sandbox.NotFound, "machine_unfinished", "the machine %s was never finished", m.id)
	}
	m.met = make(chan struct{})
	if !rec.writing() {
		if err := m.meet(ctx, cmp.Or(m.d.test.ask, askTimeout)); err != nil {
			return err
		}
	}
	// Whoever restored it may not have come to that.
	if err := m.jail.Group().SetCPU(rec.Resources.MilliCPU); err != nil {
		return err
	}
	return m.openLog()
}

// meet asks the VMM of a machine that was found who it is, and cleans up after an
// earlier asker.
func (m *machine) meet(ctx context.Context, patience time.Duration) error {
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	info, err := m.client.Info(bounded)
	if ctx.Err() != nil {
		return ctx.Err() // it was not waited for
	}
	if err == nil && (info.ID != jail.NameOf(m.id) || info.Version != m.record().Version) {
		err = fmt.Errorf("it says that it is %+v", info)
	}
	if err != nil {
		return sandbox.Errorf(sandbox.NotFound, "machine_silent", "the machine %s does not answer as it should: %w", m.id, err)
	}
	return m.jail.DropRoom(roomName)
}

// catchUp does what is left to do for a machine that was found while its VMM may
// have been writing an image, however long that takes. That it lives its process
// tells until then.
func (m *machine) catchUp() {
	defer close(m.met)
	err := m.meet(m.d.ctx, saveTimeout)
	for errors.Is(err, context.DeadlineExceeded) && m.End().Reason == "" {
		m.d.o.Log.Warn("a machine still does not answer that an image was being written of", "machine", m.id)
		err = m.meet(m.d.ctx, saveTimeout)
	}
	switch {
	case err == nil && m.record().Held:
		err = m.goOn(m.d.ctx)
	case err == nil:
		err = m.stay(m.d.ctx)
	}
	if err == nil {
		return
	}
	select {
	case <-m.exited: // that is told elsewhere
	case <-m.d.ctx.Done():
	case <-time.After(time.Second):
		m.d.o.Log.Error("take up a machine that an image was being written of", "machine", m.id, "err", err)
	}
}

// unseen is the end of a machine that nobody watched.
func (m *machine) unseen() sandbox.End {
	if n, err := m.jail.Group().OOMKills(); err == nil && n > 0 {
		return sandbox.End{Reason: sandbox.EndOOM, Detail: "the VMM was killed for want of memory", At: time.Now().UTC()}
	}
	return sandbox.End{Reason: sandbox.EndUnknown, Detail: "it ended while nobody watched", At: time.Now().UTC()}
}

// watch follows a machine whose process runs to its end, or the driver's.
func (d *Driver) watch(m *machine) {
	m.mu.Lock()
	m.watched = true
	p := m.rec.Process
	m.mu.Unlock()
	d.mu.Lock()
	d.machines[m.id] = m
	d.mu.Unlock()
	d.wg.Go(func() {
		if err := p.Wait(d.ctx); err != nil {
			if d.ctx.Err() == nil {
				d.o.Log.Error("watch a machine", "machine", m.id, "err", err)
			}
			return
		}
		end := m.verdict()
		// Not after it was discarded; and without the record it is unknown later.
		if err := m.note(func(r *record) { r.End = &end }); err != nil && !sandbox.IsClass(err, sandbox.NotFound) {
			d.o.Log.Warn("note a machine's end", "machine", m.id, "err", err)
		}
		m.client.Close()
		m.mu.Lock()
		m.end = end
		m.mu.Unlock()
		close(m.exited)
	})
}

// verdict tells why a machine ended under our eyes. The VMM is not our child,
// so how it exited can't be asked for; it says itself when it goes by its own
// will, and what says nothing was killed.
func (m *machine) verdict() sandbox.End {
	m.mu.Lock()
	log, killed, gone := m.log, m.killed, m.gone
	m.mu.Unlock()
	end := sandbox.End{Reason: sandbox.EndKilled, At: time.Now().UTC()}
	said, line := jail.Silent, ""
	if log != nil {
		log.Finish()
		said, line = log.Verdict()
	}
	oom, err := m.jail.Group().OOMKills()
	switch {
	case err == nil && oom > 0:
		end.Reason, end.Detail = sandbox.EndOOM, "the VMM was killed for want of memory"
	case gone:
		end.Detail = "discarded"
	case killed:
		end.Detail = "by its driver"
	case said == jail.Left:
		end.Reason, end.Detail = sandbox.EndExited, "its kernel ended, as it does with PID 1"
	case said == jail.Crashed:
		end.Reason, end.Detail = sandbox.EndCrashed, line
	default:
		end.Detail = "the VMM's process was killed by somebody on the host"
	}
	return end
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
	m.mu.Lock()
	if m.end.Reason == "" {
		m.killed = true
	}
	p := m.rec.Process
	m.mu.Unlock()
	if err := m.jail.Kill(ctx, p); err != nil {
		return err
	}
	return m.over(ctx)
}

// over waits until the end is known of a machine that has no process any more.
func (m *machine) over(ctx context.Context) error {
	m.mu.Lock()
	watched := m.watched
	m.mu.Unlock()
	if !watched {
		return nil
	}
	select {
	case <-m.exited:
		return nil
	case <-m.d.ctx.Done():
		return nil // nobody watches any more
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Stats implements driver.Machine.
func (m *machine) Stats(context.Context) (driver.Stats, error) {
	u, err := m.jail.Group().Usage()
	if errors.Is(err, fs.ErrNotExist) {
		return driver.Stats{}, notFound(m.id)
	}
	if err != nil {
		return driver.Stats{}, err
	}
	st := driver.Stats{MemoryBytes: u.Memory, CPU: u.CPU, Processes: u.Tasks, DiskBytes: -1}
	if info, err := os.Stat(filepath.Join(m.d.machineDir(m.id), diskName)); err == nil {
		if raw, ok := info.Sys().(*syscall.Stat_t); ok {
			st.DiskBytes = raw.Blocks * 512
		}
	}
	return st, nil
}

// Guest implements driver.Machine. The socket is in the jail, for its VMM
// alone; of what dials there only the guest's vsock is known.
func (m *machine) Guest() (net.Listener, error) {
	return m.guest.Listen(m.id, func() (net.Listener, error) {
		l, err := m.jail.Listen(agentName, m.record().UID)
		if err != nil {
			return nil, err
		}
		return &agentListener{l, m}, nil
	})
}

// agentListener is the socket that a machine's agent dials.
type agentListener struct {
	*net.UnixListener
	m *machine
}

// Accept implements net.Listener.
func (l *agentListener) Accept() (net.Conn, error) {
	conn, err := l.UnixListener.Accept()
	if err == nil {
		l.m.shareSoon()
	}
	return conn, err
}

const (
	// lendFor bounds how long a restored machine has whole processors when its
	// agent does not dial, and lendMore when it has: for its hello and its setup.
	lendFor  = 5 * time.Second
	lendMore = 500 * time.Millisecond
)

// shareWhenDialled lets a restored machine have whole processors until its agent
// is there: it is waited for, and a small share would make that seconds.
func (m *machine) shareWhenDialled() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lent = time.AfterFunc(lendFor, m.share)
}

func (m *machine) shareSoon() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lent != nil && !m.dialled {
		m.dialled = true
		m.lent.Reset(lendMore)
	}
}

// share has the machine's share of the processors hold from now on.
func (m *machine) share() {
	m.mu.Lock()
	lent, milli := m.lent, m.rec.Resources.MilliCPU
	m.lent = nil
	m.mu.Unlock()
	if lent == nil {
		return
	}
	lent.Stop()
	if err := m.jail.Group().SetCPU(milli); err != nil && !errors.Is(err, fs.ErrNotExist) {
		m.d.o.Log.Warn("a machine's share of the processors can't be set", "machine", m.id, "err", err)
	}
}

// retire closes what is open for good: the machine is being discarded.
func (m *machine) retire() {
	m.mu.Lock()
	m.gone = true
	watched := m.watched
	if m.lent != nil {
		m.lent.Stop()
		m.lent = nil
	}
	m.mu.Unlock()
	m.guest.Retire()
	if !watched { // else the watcher does, when it has read the log
		m.letGo()
	}
}

// letGo closes what is open. The machine lives on.
func (m *machine) letGo() {
	m.share()
	m.guest.Close()
	m.client.Close()
	m.mu.Lock()
	log := m.log
	m.mu.Unlock()
	if log != nil {
		log.Close()
	}
}
