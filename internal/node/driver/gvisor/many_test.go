package gvisor

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// engineProcess is the control process of the fixture's engine.
func (f *fixture) engineProcess() sys.Process {
	f.t.Helper()
	e, err := f.d.from(f.d.o.Engine)
	if err != nil {
		f.t.Fatal(err)
	}
	var about enginerpc.About
	if err := e.once(context.Background(), "GET", "/v1/about", nil, &about); err != nil {
		f.t.Fatal(err)
	}
	p, err := sys.FindProcess(about.PID)
	if err != nil {
		f.t.Fatal(err)
	}
	return p
}

func (f *fixture) descriptors(p sys.Process) int {
	f.t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID))
	if err != nil {
		f.t.Fatal(err)
	}
	return len(fds)
}

// createAll makes n machines at once and returns them when each has dialled.
func (f *fixture) createAll(n int) ([]driver.Machine, []time.Duration) {
	f.t.Helper()
	ms, took := make([]driver.Machine, n), make([]time.Duration, n)
	specs := make([]driver.Spec, n)
	for i := range specs {
		specs[i] = f.spec(256)
	}
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			started := time.Now()
			m, err := f.d.Create(f.ctx(2*time.Minute), specs[i])
			if err != nil {
				f.t.Errorf("create %d: %v", i, err)
				return
			}
			if r := f.link(m).run(1000, "cat", "/etc/mark"); r.Out != "from the image" {
				f.t.Errorf("machine %d: %+v", i, r)
			}
			ms[i], took[i] = m, time.Since(started)
		})
	}
	wg.Wait()
	if f.t.Failed() {
		f.t.FailNow()
	}
	slices.Sort(took)
	return ms, took
}

func (f *fixture) discardAll(ms []driver.Machine) {
	var wg sync.WaitGroup
	for _, m := range ms {
		wg.Go(func() { f.discard(m.ID()) })
	}
	wg.Wait()
}

// TestFiftyAtOnce makes fifty machines at once, some rounds in a row, and
// looks for what is left of them.
func TestFiftyAtOnce(t *testing.T) {
	f := newFixture(t)
	f.discard(f.create(f.spec(128)).ID()) // starts the control process
	p := f.engineProcess()
	fds := f.descriptors(p)
	rounds := 4
	if testing.Short() {
		rounds = 1
	}
	for range rounds {
		started := time.Now()
		ms, took := f.createAll(50)
		wall := time.Since(started)
		var mem int64
		for _, m := range ms {
			st, err := m.Stats(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			mem += st.MemoryBytes
		}
		started = time.Now()
		f.discardAll(ms)
		t.Logf("50 created, connected and asked in %v (each %v to %v), %d MiB each; discarded in %v", wall.Round(time.Millisecond),
			took[0].Round(time.Millisecond), took[49].Round(time.Millisecond), mem/50>>20, time.Since(started).Round(time.Millisecond))
	}
	if ids, err := f.d.List(context.Background()); err != nil || len(ids) != 0 {
		t.Errorf("List() = %v, %v", ids, err)
	}
	if now := f.descriptors(p); now > fds+4 {
		t.Errorf("the control process had %d descriptors and has %d", fds, now)
	}
	if kids, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", p.PID, p.PID)); len(strings.TrimSpace(string(kids))) != 0 {
		t.Errorf("the control process has children: %s", kids)
	}
	if n := mountCount(t, f.o.StateDir) + mountCount(t, filepath.Join(f.o.RunDir, Name)); n != 0 {
		t.Errorf("%d mounts are left", n)
	}
	for _, dir := range []string{"machines", "root"} {
		left, err := filepath.Glob(filepath.Join(f.o.RunDir, Name, "*", dir, "*"))
		if err != nil || len(left) != 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
}

// mountCount counts the mounts below dir.
func mountCount(t *testing.T, dir string) int {
	t.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(data), " "+dir+"/")
}

// TestAdopt restarts the daemon, and then the control process, over a living
// machine, and has it end in several ways.
func TestAdopt(t *testing.T) {
	f := newFixture(t)
	m := f.create(f.spec(128))
	l := f.link(m)
	if r := l.run(0, "write", "/tmp/mine", "still here"); r.Code != 0 {
		t.Fatal(r)
	}
	f.d.stop() // as a daemon that is killed: nothing else is said to anybody
	m.(*machine).guest.Close()
	_ = l.conn.Close()

	restart := func(name string) driver.Machine {
		f.d = f.open()
		m, err := f.d.Adopt(f.ctx(time.Minute), m.ID())
		if err != nil {
			t.Fatalf("%s: Adopt = %v", name, err)
		}
		l := f.link(m)
		if r := l.run(0, "cat", "/tmp/mine"); r.Out != "still here" {
			t.Errorf("%s: %+v", name, r)
		}
		_ = l.conn.Close() // and the guest dials again
		return m
	}
	m = restart("another daemon")
	p := f.engineProcess()
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(context.Background()); err != nil {
		t.Fatal(err)
	}
	f.d.stop()
	m.(*machine).guest.Close()
	m = restart("another control process")
	if _, err := m.Stats(context.Background()); err != nil {
		t.Error(err)
	}
	if err := m.(*machine).rec.Sentry.Kill(); err != nil {
		t.Fatal(err)
	}
	<-m.Exited()
	if m.End().Reason != sandbox.EndUnknown {
		t.Errorf("End() = %+v", m.End())
	}
	f.discard(m.ID())
}

// TestDiscardWithoutEngine removes a machine whose control process is dead and
// stays so.
func TestDiscardWithoutEngine(t *testing.T) {
	f := newFixture(t)
	m := f.create(f.spec(128))
	p := f.engineProcess()
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(context.Background()); err != nil {
		t.Fatal(err)
	}
	f.d.stop()
	f.d = f.open()
	f.discard(m.ID())
	if ids, err := f.d.List(context.Background()); err != nil || len(ids) != 0 {
		t.Errorf("List() = %v, %v", ids, err)
	}
	if sentry := m.(*machine).rec.Sentry; sentry.Exists() {
		if err := sentry.Wait(f.ctx(5 * time.Second)); err != nil {
			t.Error("the sentry lives")
		}
	}
}

// TestCancel ends creations half way.
func TestCancel(t *testing.T) {
	f := newFixture(t)
	f.discard(f.create(f.spec(128)).ID())
	for _, after := range []time.Duration{0, 5, 20, 40, 60, 80} {
		ctx, cancel := context.WithTimeout(context.Background(), after*time.Millisecond)
		m, err := f.d.Create(ctx, f.spec(128))
		if err == nil {
			f.discard(m.ID())
		}
		cancel()
	}
	if ids, err := f.d.List(context.Background()); err != nil || len(ids) != 0 {
		t.Errorf("List() = %v, %v", ids, err)
	}
}

func TestProbe(t *testing.T) {
	f := newFixture(t)
	c := f.d.Probe(f.ctx(time.Minute))
	t.Logf("%+v", c)
	if !c.OK {
		t.Errorf("Probe = %+v", c)
	}
	if ids, err := f.nets.List(context.Background()); err != nil || len(ids) != 0 {
		t.Errorf("namespaces left: %v, %v", ids, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if c := f.d.Probe(ctx); c.OK {
		t.Errorf("Probe in a millisecond = %+v", c)
	}
}

// TestControlKilledInCreation kills the control process at some instant of a
// creation whose child is slow. The driver undoes it and may be asked again at
// once: what the child had begun must neither be in the way nor end the new machine.
func TestControlKilledInCreation(t *testing.T) {
	f := newFixture(t)
	f.discard(f.create(f.spec(128)).ID()) // the control process runs
	for i := range 10 {
		control := f.engineProcess()
		spec := f.spec(128)
		made := make(chan error, 1)
		go func() {
			_, err := f.d.Create(f.ctx(time.Minute), spec)
			made <- err
		}()
		child := f.createChild(control)
		time.Sleep(time.Duration(10*i) * time.Millisecond)
		_ = syscall.Kill(child.PID, syscall.SIGSTOP) // it may have ended
		if err := control.Kill(); err != nil {
			t.Fatal(err)
		}
		t.Logf("killed after %d ms: %v", 10*i, <-made)
		if err := child.Wait(f.ctx(50 * time.Millisecond)); err != nil {
			t.Error("the creation was undone, and its child lives still")
			_ = syscall.Kill(child.PID, syscall.SIGCONT)
		}
		m := f.create(spec)
		select {
		case <-m.Exited():
			t.Errorf("the machine that was made then ended: %+v", m.End())
		case <-time.After(300 * time.Millisecond):
		}
		f.discard(spec.ID)
	}
}

// createChild waits for the create child of a control process.
func (f *fixture) createChild(control sys.Process) sys.Process {
	f.t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", control.PID))
		for _, list := range lists {
			pids, _ := os.ReadFile(list)
			for _, s := range strings.Fields(string(pids)) {
				args, _ := os.ReadFile("/proc/" + s + "/cmdline")
				pid, err := strconv.Atoi(s)
				if err != nil || !strings.Contains(string(args), "\x00create\x00") {
					continue
				}
				if p, err := sys.FindProcess(pid); err == nil {
					return p
				}
			}
		}
	}
	f.t.Fatal("there is no create child")
	return sys.Process{}
}
