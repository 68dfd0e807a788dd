package egress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/egress/gatewayrpc"
	"cloche.dev/cloche/internal/egress/weak"
	"cloche.dev/cloche/internal/sys"
)

// gateway is one gateway's process.
type gateway struct {
	name    string
	build   string
	process sys.Process
	client  *gatewayrpc.Client
	// has are the sandboxes of one of before whose listeners it still has. Guarded
	// by the Manager's lock.
	has map[string]bool
}

// The files of a gateway, by its name; the log is shared.
const (
	socketSuffix = ".sock"
	recordSuffix = ".json" // its sys.Process
	logName      = "gateway.log"
	maxLog       = 4 << 20
)

func (m *Manager) path(name, suffix string) string { return filepath.Join(m.dir(), name+suffix) }

// Run keeps a gateway until ctx ends; the gateway lives on then for the sandboxes
// that it serves. It also closes the audit.
func (m *Manager) Run(ctx context.Context) error {
	defer m.audit.Close() //nolint:errcheck // what could be written was
	defer m.retire()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer m.stop()
	m.adoptOld(ctx, &wg)
	wg.Go(func() { m.every(ctx, healEvery, m.heal) })
	wg.Go(func() { m.every(ctx, countEvery, m.countAll) })
	const least, most = 50 * time.Millisecond, 5 * time.Second
	for pause := least; ctx.Err() == nil; {
		began := m.now()
		g, err := m.obtain(ctx)
		if err == nil {
			err = m.enter(ctx, g)
		}
		if err == nil {
			wg.Go(func() { m.heal(ctx) })
			m.serve(ctx, g, &wg)
			m.leave(ctx, g)
			if m.now().Sub(began) > most {
				pause = least
			}
		} else if ctx.Err() == nil {
			m.fail(err)
			m.o.Log.Error("the egress gateway can't be had; nothing leaves the sandboxes", "err", err)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		pause = min(2*pause, most)
	}
	return nil
}

func (m *Manager) every(ctx context.Context, d time.Duration, do func(context.Context)) {
	t := time.NewTicker(d)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			do(ctx)
		case <-ctx.Done():
			return
		}
	}
}

// obtain returns the gateway of this build and config: the one that lives, or
// a new one.
func (m *Manager) obtain(ctx context.Context) (*gateway, error) {
	bounded, cancel := context.WithTimeout(ctx, meetTimeout)
	defer cancel()
	g, err := m.meet(bounded, m.name, &m.config)
	if err == nil {
		m.o.Log.Info("adopted the egress gateway", "pid", g.process.PID)
		return g, nil
	}
	if !gatewayrpc.Absent(err) {
		m.o.Log.Warn("an egress gateway doesn't answer, and is ended", "err", err)
	}
	ctx, cancel = context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := m.kill(ctx, m.name); err != nil {
		return nil, err
	}
	return m.start(ctx)
}

// meet greets the gateway of a name.
func (m *Manager) meet(ctx context.Context, name string, config *gatewayrpc.Config) (*gateway, error) {
	c, err := gatewayrpc.Dial(ctx, m.path(name, socketSuffix))
	if err != nil {
		return nil, err
	}
	a, err := c.Call(ctx, gatewayrpc.Request{Op: gatewayrpc.OpHello, Config: config})
	if err == nil && (a.Welcome == nil || a.Welcome.Protocol < 1) {
		err = errors.New("what answers is no egress gateway")
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	g := &gateway{name: name, build: a.Welcome.Build, client: c}
	// Its own word is only taken where this daemon's predecessor had no time to
	// write the record: root ends the process that it names.
	if g.process, err = m.record(name); err != nil {
		g.process = a.Welcome.Process
	}
	return g, nil
}

// record reads which process a gateway is.
func (m *Manager) record(name string) (p sys.Process, err error) {
	data, err := os.ReadFile(m.path(name, recordSuffix))
	if err != nil {
		return p, err
	}
	return p, json.Unmarshal(data, &p)
}

// kill ends the process of a gateway, if it runs, and removes its files.
func (m *Manager) kill(ctx context.Context, name string) error {
	p, err := m.record(name)
	if err == nil {
		if err := p.Kill(); err != nil {
			return err
		}
		if err := p.Wait(ctx); err != nil {
			return err
		}
	}
	for _, suffix := range []string{socketSuffix, recordSuffix} {
		if err := os.Remove(m.path(name, suffix)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// start starts a gateway, which nothing of this process ends.
func (m *Manager) start(ctx context.Context) (*gateway, error) {
	path := m.path(m.name, socketSuffix)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }()
	l.SetUnlinkOnClose(false)
	socket, err := l.File()
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	log, err := m.openLog()
	if err != nil {
		return nil, err
	}
	defer log.Close()
	args := append(slices.Clone(m.o.Program[1:]), "--root="+m.root(), "--build="+m.o.Build)
	cmd := exec.Command(m.o.Program[0], args...)
	cmd.Dir, cmd.Env = "/", append([]string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, weak.Env()...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{socket}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := errors.Join(os.Chmod(path, 0o600), cmd.Start()); err != nil {
		return nil, fmt.Errorf("start the egress gateway: %w", err)
	}
	process, err := sys.FindProcess(cmd.Process.Pid)
	go func() { _ = cmd.Wait() }() // ends with the process; how it ended is in its log
	if err == nil {
		var data []byte
		if data, err = json.Marshal(process); err == nil {
			err = sys.WriteFileAtomic(m.path(m.name, recordSuffix), data, 0o600)
		}
	}
	_, _ = l.Close(), socket.Close() // so that nobody listens once the process has ended
	var g *gateway
	if err == nil {
		g, err = m.meet(ctx, m.name, &m.config)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		return nil, fmt.Errorf("start the egress gateway: %w: %s", err, tail(log.Name()))
	}
	m.o.Log.Info("started the egress gateway", "pid", process.PID)
	return g, nil
}

func (m *Manager) openLog() (*os.File, error) {
	log, err := os.OpenFile(filepath.Join(m.dir(), logName), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	if st, err := log.Stat(); err == nil && st.Size() > maxLog {
		_ = log.Truncate(0)
	}
	return log, nil
}

// tail is the end of the log.
func tail(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data[max(0, len(data)-512):]))
}

// enter makes g the gateway that every sandbox is attached to.
func (m *Manager) enter(ctx context.Context, g *gateway) error {
	a, err := m.call(ctx, g, gatewayrpc.Request{Op: gatewayrpc.OpList})
	if err != nil {
		g.client.Close()
		return errors.Join(err, m.kill(ctx, g.name))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, s := range a.Sandboxes {
		b := m.known(s)
		b.on, b.told = g, nil
	}
	m.current, m.settled, m.failure = g, true, nil
	m.wake()
	return nil
}

// known is the box of a sandbox that a gateway says it has. The lock is held.
func (m *Manager) known(s gatewayrpc.Sandbox) *box {
	b := m.boxes[s.Sandbox]
	if b == nil {
		b = &box{id: s.Sandbox, turn: make(chan struct{}, 1)}
		m.boxes[s.Sandbox] = b
	}
	b.listed = s
	return b
}

func (m *Manager) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.settled, m.failure = true, err
	m.wake()
}

// stop lets go of the gateway, and of what tells of dropped packets.
func (m *Manager) stop() {
	var stops []func()
	defer func() { all(stops) }()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, b := range m.boxes {
		stops = append(stops, b.unwatched())
	}
	m.settled, m.stopped, m.current, m.failure = true, true, nil, errStopped
	m.wake()
}

// serve takes what the gateway records until it is gone or ctx ends.
func (m *Manager) serve(ctx context.Context, g *gateway, wg *sync.WaitGroup) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, g.client.Close)()
	wg.Go(func() {
		if err := g.process.Wait(ctx); err != nil && ctx.Err() == nil {
			m.o.Log.Error("watch the egress gateway", "err", err)
		}
		g.client.Close()
	})
	wg.Go(func() { m.pump(ctx, g) })
	<-g.client.Done()
}

// leave notes that a gateway is gone, and sees to it that it is.
func (m *Manager) leave(ctx context.Context, g *gateway) {
	if ctx.Err() != nil {
		return // this daemon goes, not the gateway
	}
	m.o.Log.Warn("the egress gateway is gone", "pid", g.process.PID, "log", tail(filepath.Join(m.dir(), logName)))
	m.finish(ctx, g)
	var stops []func()
	defer func() { all(stops) }()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.restarts++
	m.current = nil
	for id, b := range m.boxes {
		if b.on == g {
			b.on, b.told = nil, nil
		}
		if b.on == nil && !b.wanted {
			stops = append(stops, b.unwatched())
		}
		if b.assignment == nil && !b.wanted && b.on == nil && len(b.turn) == 0 {
			delete(m.boxes, id)
		}
	}
	m.wake()
}

// finish ends what is left of a gateway. It goes on until it has: what that
// still has must not be taken for nothing.
func (m *Manager) finish(ctx context.Context, g *gateway) {
	for ctx.Err() == nil {
		bounded, cancel := context.WithTimeout(ctx, startTimeout)
		err := errors.Join(g.process.Kill(), m.kill(bounded, g.name))
		cancel()
		if err == nil {
			return
		}
		m.o.Log.Error("end the egress gateway", "pid", g.process.PID, "err", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// adoptOld takes up the gateways of other builds and configs: they have their
// sandboxes until these go over to the present one.
func (m *Manager) adoptOld(ctx context.Context, wg *sync.WaitGroup) {
	paths, err := filepath.Glob(m.path("*", socketSuffix))
	if err != nil {
		return // the pattern is malformed, so there can't be any
	}
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), socketSuffix)
		if name == m.name {
			continue
		}
		bounded, cancel := context.WithTimeout(ctx, meetTimeout)
		g, err := m.adoptOne(bounded, name)
		if err != nil && !gatewayrpc.Absent(err) {
			m.o.Log.Warn("an egress gateway of before doesn't answer, and is ended", "err", err)
		}
		cancel()
		if err != nil {
			bounded, cancel := context.WithTimeout(ctx, meetTimeout)
			if err := m.kill(bounded, name); err != nil {
				m.o.Log.Error("end an egress gateway of before", "err", err)
			}
			cancel()
			continue
		}
		m.o.Log.Info("an egress gateway of before is drained", "pid", g.process.PID, "build", g.build)
		wg.Go(func() {
			m.serve(ctx, g, wg)
			if ctx.Err() != nil {
				return
			}
			m.finish(ctx, g)
			m.mu.Lock()
			defer m.mu.Unlock()
			m.old = slices.DeleteFunc(m.old, func(o *gateway) bool { return o == g })
			m.wake()
		})
	}
}

func (m *Manager) adoptOne(ctx context.Context, name string) (*gateway, error) {
	g, err := m.meet(ctx, name, nil)
	if err != nil {
		return nil, err
	}
	a, err := g.client.Call(ctx, gatewayrpc.Request{Op: gatewayrpc.OpList})
	if err == nil {
		_, err = g.client.Call(ctx, gatewayrpc.Request{Op: gatewayrpc.OpDrain})
	}
	if err != nil {
		g.client.Close()
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	g.has = map[string]bool{}
	for _, s := range a.Sandboxes {
		m.known(s)
		if !s.Yielded {
			g.has[s.Sandbox] = true
		}
	}
	m.old = append(m.old, g)
	return g, nil
}
