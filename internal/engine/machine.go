package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/boot"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"

	"cloche.dev/cloche/internal/node/cgroup"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sys"
)

// machine is one machine that the control process watches.
type machine struct {
	dir  string
	done chan struct{} // closed when it has ended and its record says so

	verbs sync.Mutex // one pause, resume or snapshot at a time

	mu    sync.Mutex
	rec   enginerpc.Machine
	asked bool      // we were asked to end it
	ooms  int64     // the kernel's kills in its cgroup that we have seen
	oomAt time.Time // when we saw the last
}

func (m *machine) record() enginerpc.Machine {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rec
}

// watch takes a machine into the books and follows it to its end. exit is
// where its sentry's status arrives, nil for one that is not our child.
func (c *control) watch(rec enginerpc.Machine, dir string, exit <-chan unix.WaitStatus) *machine {
	m := &machine{dir: dir, rec: rec, done: make(chan struct{})}
	c.sample(m)
	c.machines[rec.ID] = m
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		c.follow(m, exit)
	}()
	return m
}

// follow copies the console and waits for the end.
func (c *control) follow(m *machine, exit <-chan unix.WaitStatus) {
	rec := m.record()
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		if err := copyConsole(ctx, m.dir); err != nil {
			c.log.Warn("copy the console", "machine", rec.ID, "err", err)
		}
	}()
	e := ending{watched: exit != nil}
	if !c.await(rec.Sentry, exit, &e) {
		cancel()
		<-copied
		return // we are quitting, it lives on
	}
	// The sentry was the init of its pid namespace, so its stubs are gone by
	// now; the gofer follows by itself, or is made to.
	if err := rec.Gofer.Kill(); err != nil {
		c.log.Warn("end the gofer", "machine", rec.ID, "err", err)
	}
	cancel()
	<-copied
	c.conclude(m, e)
}

// await waits for the sentry's end; false means that the control process ends
// first.
func (c *control) await(sentry sys.Process, exit <-chan unix.WaitStatus, e *ending) bool {
	if exit != nil {
		select {
		case e.status = <-exit:
			return true
		case <-c.ctx.Done():
			return false
		}
	}
	if err := sentry.Wait(c.ctx); err != nil && c.ctx.Err() == nil {
		c.log.Error("wait for a sentry", "pid", sentry.PID, "err", err)
	}
	return c.ctx.Err() == nil
}

// conclude writes down how a machine ended.
func (c *control) conclude(m *machine, e ending) {
	c.sample(m)
	m.mu.Lock()
	e.asked = m.asked
	e.oom = time.Since(m.oomAt) < sampleEvery
	e.lastWords(m.dir)
	end := e.end()
	m.rec.Live, m.rec.End = false, &end
	rec := m.rec
	m.mu.Unlock()
	if err := saveRecord(m.dir, rec); err != nil && !errors.Is(err, os.ErrNotExist) {
		c.log.Error("record a machine's end", "machine", rec.ID, "err", err)
	}
	c.log.Info("machine ended", "machine", rec.ID, "reason", end.Reason)
	close(m.done)
}

// sample notes how often the kernel has killed in a machine's cgroup, so that
// an end can be told from an earlier kill of one of the guest's processes.
func (c *control) sample(m *machine) {
	n, err := c.tree.Group(m.rec.Cgroup).OOMKills()
	if err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > m.ooms {
		m.ooms, m.oomAt = n, time.Now()
	}
}

// box is the way to a machine's sentry. Not container.Load: that makes a lock
// file anew that a discard of the machine has just removed.
func (c *control) box(id string) *gsandbox.Sandbox {
	return &gsandbox.Sandbox{ID: id, ControlSocketPath: filepath.Join(c.root(), "runsc-"+id+".sock")}
}

// answers asks a machine's sentry whether its container runs. A sentry that is
// stuck keeps one goroutine until it ends.
func (c *control) answers(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	got := make(chan error, 1)
	go func() {
		state, err := c.box(id).ContainerRuntimeState(id)
		if err == nil && state != boot.RuntimeStateRunning {
			err = fmt.Errorf("its container is in state %d", state)
		}
		got <- err
	}()
	select {
	case err := <-got:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// kill ends whatever runs of a machine and returns when it is gone.
func (c *control) kill(ctx context.Context, m *machine) error {
	m.mu.Lock()
	rec := m.rec
	m.asked = m.asked || rec.End == nil
	m.mu.Unlock()
	if err := killAll(ctx, c.tree, rec); err != nil {
		return err
	}
	select {
	case <-m.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func killAll(ctx context.Context, tree *cgroup.Tree, rec enginerpc.Machine) error {
	if err := errors.Join(rec.Sentry.Kill(), rec.Gofer.Kill()); err != nil {
		return err
	}
	return tree.Group(rec.Cgroup).Kill(ctx)
}

// The links directory has one symbolic link for each machine, to its
// directory: it is how a new control process finds the machines of the last.
func (c *control) link(id string) string { return filepath.Join(c.dir, "machines", id) }

// resume takes up the machines of an earlier control process.
func (c *control) resume() error {
	entries, err := os.ReadDir(filepath.Join(c.dir, "machines"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		dir, err := os.Readlink(c.link(e.Name()))
		if err != nil {
			return err
		}
		rec, err := loadRecord(dir)
		if err != nil {
			// Its directory is gone, or it was never more than begun.
			c.log.Warn("forget a machine without a record", "machine", e.Name(), "err", err)
			if err := os.Remove(c.link(e.Name())); err != nil {
				return err
			}
			continue
		}
		if rec.End != nil {
			m := &machine{dir: dir, rec: rec, done: make(chan struct{})}
			close(m.done)
			c.machines[rec.ID] = m
			continue
		}
		c.watch(rec, dir, nil)
	}
	return nil
}
