package firecracker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
)

// childEnv makes the test's binary a daemon that is killed at a step; it holds
// an errand.
const childEnv = "CLOCHE_TEST_ERRAND"

// errand is what such a daemon does until then.
type errand struct {
	Dir   string // the fixture's
	Verb  string // "create", "restore", "snapshot" or "discard"
	Step  string
	Spec  driver.Spec
	Image driver.Image
	To    string // where a snapshot goes
}

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "--id" { // a jailer has started it
		inside()
	}
	if text := os.Getenv(childEnv); text != "" {
		var e errand
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			panic(err)
		}
		if err := e.run(); err != nil {
			panic(err)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// childTB is as much of a test as the fixture's options need.
type childTB struct{ testing.TB }

func (childTB) Helper()             {}
func (childTB) Logf(string, ...any) {}
func (childTB) Fatal(args ...any)   { panic(args) }

func (e errand) run() error {
	dir := os.Getenv(binariesEnv)
	if dir == "" {
		dir = os.Getenv(prebuiltEnv)
	}
	d, err := New(optionsFor(childTB{}, dir, e.Dir, netns.New(netns.Options{Dir: filepath.Join(e.Dir, "net")})))
	if err != nil {
		return err
	}
	d.test.noReport = !boots()
	d.test.at = func(step string) {
		if step == e.Step {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	ctx := context.Background()
	switch e.Verb {
	case "create":
		_, err = d.Create(ctx, e.Spec)
	case "restore":
		_, err = d.Restore(ctx, e.Spec, e.Image)
	case "discard":
		err = d.Discard(ctx, e.Spec.ID)
	case "snapshot":
		var m driver.Machine
		if m, err = d.Adopt(ctx, e.Spec.ID); err == nil {
			_, err = m.Snapshot(ctx, e.To, sandbox.SnapshotMemory)
		}
	}
	return err
}

// killedAt runs an errand in a process of its own, which must be killed at its
// step.
func (f *fixture) killedAt(e errand) {
	f.t.Helper()
	e.Dir = f.dir
	text, err := json.Marshal(e)
	if err != nil {
		f.t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	if st, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || st.Signal() != syscall.SIGKILL {
		f.t.Errorf("%s was not killed at %s: %v\n%s", e.Verb, e.Step, err, out.Bytes())
	}
}

// TestKilledDaemon kills the daemon with SIGKILL at each step of everything that
// it does to a machine. The next one finds what is there by its id, adopts what
// was finished, and removes all of it.
func TestKilledDaemon(t *testing.T) {
	f := newFixture(t)
	first := f.create()
	image := f.snapshot(first, sandbox.SnapshotMemory)
	f.rest(first)
	for _, verb := range []string{"create", "restore"} {
		for _, step := range makeSteps(verb == "restore") {
			s := f.spec()
			f.killedAt(errand{Verb: verb, Step: step, Spec: s, Image: image})
			f.restart()
			ids, err := f.d.List(f.ctx())
			if err != nil || !slices.Contains(ids, s.ID) {
				t.Errorf("%s, %s: List = %v, %v", verb, step, ids, err)
			}
			m, err := f.d.Adopt(f.ctx(), s.ID)
			switch {
			case step == "make.ready":
				if err != nil {
					t.Errorf("%s, %s: Adopt = %v", verb, step, err)
					break
				}
				f.alive(m.(*machine))
			case !sandbox.IsClass(err, sandbox.NotFound):
				t.Errorf("%s, %s: Adopt = %v", verb, step, err)
			}
			f.gone(s.ID)
		}
	}
	f.alive(f.adopt(first.ID()))
}

// gone discards a machine and asserts that nothing is left of it, for a moment
// longer than anything might need to come back.
func (f *fixture) gone(id string) {
	f.t.Helper()
	if err := f.d.Discard(f.ctx(), id); err != nil {
		f.t.Errorf("discard: %v", err)
	}
	time.Sleep(20 * time.Millisecond)
	f.nothingLeft(id)
}

// TestKilledDuringSnapshot does the same to one that takes a snapshot: the
// machine goes on, and another can be taken.
func TestKilledDuringSnapshot(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	for _, step := range snapshotSteps {
		f.killedAt(errand{Verb: "snapshot", Step: step, Spec: driver.Spec{ID: m.ID()}, To: t.TempDir()})
		f.restart()
		m = f.adopt(m.ID())
		f.alive(m)
		if paused, err := m.Paused(f.ctx()); err != nil || paused {
			t.Errorf("%s: Paused = %v, %v", step, paused, err)
		}
		if m.record().Held {
			t.Errorf("%s: it is noted as held", step)
		}
		if _, err := os.Stat(filepath.Join(f.jailRoot(m), roomName)); err == nil {
			t.Errorf("%s: what it wrote is left in the jail", step)
		}
	}
	f.restore(f.snapshot(m, sandbox.SnapshotMemory))
	// One that was paused stays so.
	if err := m.Pause(f.ctx()); err != nil {
		t.Fatal(err)
	}
	f.killedAt(errand{Verb: "snapshot", Step: "snapshot.saved", Spec: driver.Spec{ID: m.ID()}, To: t.TempDir()})
	f.restart()
	m = f.adopt(m.ID())
	if paused, err := m.Paused(f.ctx()); err != nil || !paused {
		t.Errorf("Paused = %v, %v", paused, err)
	}
}

// TestAdoptedWhileAnImageIsWritten kills the daemon in a snapshot and starts it
// again while the VMM answers nobody, as one does that is still writing. The
// machine is adopted at once; what is asked of it waits, and then it is as before.
func TestAdoptedWhileAnImageIsWritten(t *testing.T) {
	f := newFixture(t)
	for _, paused := range []bool{false, true} {
		m := f.create()
		if paused {
			f.rest(m)
		}
		f.killedAt(errand{Verb: "snapshot", Step: "snapshot.saved", Spec: driver.Spec{ID: m.ID()}, To: t.TempDir()})
		f.signal(m, syscall.SIGSTOP)
		for range 2 { // and a stop of the daemon does not wait for it either
			f.restart()
			f.d.test.ask = 50 * time.Millisecond
			m = f.adopt(m.ID())
			short, cancel := context.WithTimeout(context.Background(), 4*f.d.test.ask)
			if _, err := m.Paused(short); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("asked while it writes: %v", err)
			}
			cancel()
			if !m.record().writing() {
				t.Error("that it may be writing is forgotten")
			}
		}
		f.signal(m, syscall.SIGCONT)
		if is, err := m.Paused(f.ctx()); err != nil || is != paused {
			t.Errorf("Paused = %v, %v, not %v", is, err, paused)
		}
		if m.record().writing() {
			t.Errorf("the record still says that it writes: %+v", m.record())
		}
		if _, err := os.Stat(filepath.Join(f.jailRoot(m), roomName)); err == nil {
			t.Error("what it wrote is left in the jail")
		}
		f.alive(m)
		f.snapshot(m, sandbox.SnapshotMemory)

		// One that dies instead has ended as any other.
		f.killedAt(errand{Verb: "snapshot", Step: "snapshot.saved", Spec: driver.Spec{ID: m.ID()}, To: t.TempDir()})
		f.signal(m, syscall.SIGSTOP)
		f.restart()
		m = f.adopt(m.ID())
		if err := m.Kill(f.ctx()); err != nil {
			t.Fatal(err)
		}
		if end := f.ended(m); end.Reason != sandbox.EndKilled {
			t.Errorf("End() = %+v", end)
		}
		if err := m.Resume(f.ctx()); !sandbox.IsClass(err, sandbox.NotFound) {
			t.Errorf("Resume = %v", err)
		}
	}
}

// TestASilentMachineIsTakenForDeadOnlyWhenItWasWaitedFor has one that writes no
// image and answers nobody.
func TestASilentMachineIsTakenForDeadOnlyWhenItWasWaitedFor(t *testing.T) {
	f := newFixture(t)
	m := f.create()
	f.signal(m, syscall.SIGSTOP)
	f.restart()
	ctx, cancel := context.WithCancel(f.ctx())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := f.d.Adopt(ctx, m.ID()); !errors.Is(err, context.Canceled) || sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("Adopt = %v when it was given up", err)
	}
	f.d.test.ask = 50 * time.Millisecond
	if _, err := f.d.Adopt(f.ctx(), m.ID()); sandbox.AsError(err).Code != "machine_silent" {
		t.Errorf("Adopt = %v", err)
	}
	f.d.test.ask = 0
	f.signal(m, syscall.SIGCONT)
	f.alive(f.adopt(m.ID()))
}

// signal sends a machine's VMM a signal.
func (f *fixture) signal(m *machine, s syscall.Signal) {
	f.t.Helper()
	if err := syscall.Kill(m.record().Process.PID, s); err != nil {
		f.t.Fatal(err)
	}
}

// TestKilledDuringDiscard does the same to one that discards.
func TestKilledDuringDiscard(t *testing.T) {
	f := newFixture(t)
	for _, step := range []string{"discard.killed", "discard.jail", "discard.files"} {
		id := f.create().ID()
		f.restart() // a second daemon that watches it would note its end meanwhile
		f.killedAt(errand{Verb: "discard", Step: step, Spec: driver.Spec{ID: id}})
		f.restart()
		if ids, err := f.d.List(f.ctx()); err != nil || !slices.Contains(ids, id) {
			t.Errorf("%s: List = %v, %v", step, ids, err)
		}
		if _, err := f.d.Adopt(f.ctx(), id); !sandbox.IsClass(err, sandbox.NotFound) {
			t.Errorf("%s: Adopt = %v", step, err)
		}
		f.gone(id)
	}
}

// TestKilledAtAnyTime kills the daemon at instants that are no steps, in the
// midst of what the jailer and the VMM do.
func TestKilledAtAnyTime(t *testing.T) {
	f := newFixture(t)
	for after := 20 * time.Millisecond; after < 400*time.Millisecond; after += 19 * time.Millisecond {
		s := f.spec()
		text, err := json.Marshal(errand{Dir: f.dir, Verb: "create", Spec: s})
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), childEnv+"="+string(text))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(after)
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		f.restart()
		f.gone(s.ID)
		if left, _ := filepath.Glob(filepath.Join(f.o.StateDir, "machines", "*")); len(left) > 0 {
			t.Errorf("after %v: left are %v", after, left)
		}
	}
}
