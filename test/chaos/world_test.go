package chaos

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"cloche.dev/cloche/client"
	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/test/harness"
)

// settings are what the environment asks of a run.
type settings struct {
	seed    uint64
	kills   int
	workers int
	time    time.Duration // the run ends then at the latest
}

func settingsOf(t *testing.T) settings {
	t.Helper()
	number := func(name string, def int) int {
		v, err := strconv.Atoi(os.Getenv(name))
		if os.Getenv(name) == "" {
			return def
		}
		if err != nil || v < 1 {
			t.Fatalf("%s is a number, not %q", name, os.Getenv(name))
		}
		return v
	}
	s := settings{kills: number("CHAOS_KILLS", 500), workers: number("CHAOS_WORKERS", 6), time: 50 * time.Minute}
	if v := os.Getenv("CHAOS_TIME"); v != "" {
		var err error
		if s.time, err = time.ParseDuration(v); err != nil {
			t.Fatalf("CHAOS_TIME is a duration, not %q", v)
		}
	}
	s.seed = seedOf(t)
	return s
}

// world is what the actors share: one daemon that dies and comes back, and what
// they have to tell.
type world struct {
	t       *testing.T
	set     settings
	d       *harness.Daemon
	c       *client.Client
	plain   *http.Client
	rep     *report
	disk    *disk
	clock   string // the file of the clock's jumps
	metrics string // where the daemon serves them
	hits    string // the file of the failpoints that were passed
	stop    context.Context
	halt    context.CancelFunc

	troubles
}

// troubles count what the killers have done, so that an actor can tell what
// may explain a failure of its own call.
type troubles struct{ daemon, control, agent, disk, clock, kills atomic.Int64 }

// mark is the count of troubles at one instant.
type mark struct{ daemon, control, agent, disk, clock int64 }

func (w *world) mark() mark {
	return mark{w.troubles.daemon.Load(), w.troubles.control.Load(), w.troubles.agent.Load(), w.troubles.disk.Load(), w.troubles.clock.Load()}
}

// since says what has happened since a mark; "" is nothing.
func (w *world) since(m mark) string {
	var what []string
	now := w.mark()
	for _, k := range []struct {
		name     string
		was, now int64
	}{{"daemon", m.daemon, now.daemon}, {"control", m.control, now.control}, {"agent", m.agent, now.agent}, {"disk", m.disk, now.disk}, {"clock", m.clock, now.clock}} {
		if k.was != k.now {
			what = append(what, k.name)
		}
	}
	if w.disk != nil && w.disk.full.Load() && m.disk == now.disk {
		what = append(what, "disk")
	}
	return strings.Join(what, "+")
}

// binary is the build that can be killed at failpoints.
func binary(t *testing.T) string {
	t.Helper()
	harness.Bin(t) // skips where nothing can run
	if bin := os.Getenv("CLOCHE_CHAOS_BIN"); bin != "" {
		return bin
	}
	bin, err := filepath.Abs("../../dist/chaos/cloche")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(bin); err != nil {
		t.Skipf("SKIP: no build with failpoints (%v); `make chaos` makes it", err)
	}
	return bin
}

// newWorld starts a daemon with failpoints; its state lies on a disk of
// diskSize where that is not 0.
func newWorld(t *testing.T, set settings, diskSize int64) *world {
	t.Helper()
	bin := binary(t)
	dir, err := os.MkdirTemp("", "clo") // short: sockets lie below it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		keepLog(t, filepath.Join(dir, "daemon.log"))
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove the directories: %v", err)
		}
	})
	w := &world{t: t, set: set, rep: newReport(t), plain: &http.Client{Timeout: time.Minute}}
	if diskSize > 0 {
		w.disk = mountDisk(t, dir, diskSize)
	}
	w.d = harness.NewIn(t, bin, dir)
	w.clock, w.hits = filepath.Join(dir, "clock"), filepath.Join(dir, "hits")
	w.metrics = harness.FreePort(t)
	w.d.Flags = []string{"--metrics", w.metrics}
	w.d.Seed()
	w.arm("")
	w.d.Serve()
	w.c, err = client.New(client.Options{URL: w.d.URL, Key: w.d.Key, Retry: 2 * time.Minute, Reconnect: 2 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	w.stop, w.halt = context.WithCancel(context.Background())
	t.Cleanup(w.halt)
	return w
}

// arm sets what the next daemon is started with.
func (w *world) arm(kill string, more ...string) {
	w.d.Extra = append([]string{
		failpoint.EnvKill + "=" + kill, failpoint.EnvHits + "=" + w.hits, failpoint.EnvClock + "=" + w.clock,
	}, more...)
}

func (w *world) over() bool { return w.stop.Err() != nil }

// keepLog keeps the whole log of a daemon that a failed test ran.
func keepLog(t *testing.T, path string) {
	if !t.Failed() {
		return
	}
	to, err := filepath.Abs(filepath.Join("../../dist/test", "chaos-"+t.Name()+".log"))
	if err == nil {
		err = os.MkdirAll(filepath.Dir(to), 0o700)
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(path)
	}
	if err == nil {
		err = os.WriteFile(to, b, 0o600)
	}
	t.Logf("the daemon's whole log: %s (%v)", to, err)
}
