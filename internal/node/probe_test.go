package node

import (
	"bytes"
	"context"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// probed is a driver that is only ever probed.
type probed struct {
	mu     sync.Mutex
	key    ProbeKey
	lacks  error // what Key answers instead
	answer driver.Capability
	hang   bool          // until ctx ends
	deaf   time.Duration // for so long after that
	probes atomic.Int64
}

func (*probed) Name() string { return "vm" }

func (d *probed) Probe(ctx context.Context) driver.Capability {
	d.probes.Add(1)
	d.mu.Lock()
	hang, deaf, answer := d.hang, d.deaf, d.answer
	d.mu.Unlock()
	if hang {
		<-ctx.Done()
		time.Sleep(deaf)
		answer = driver.Capability{Reason: "the kernel said nothing"}
	}
	return answer
}

func (d *probed) set(f func(*probed)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f(d)
}

func newProbed() *probed {
	return &probed{key: ProbeKey{"boot": "1", "kernel": "a"}, answer: driver.Capability{OK: true, Reason: "it boots", Checks: []string{"one"}}}
}

// prober starts a prober over d in a directory that outlives it.
func (d *probed) prober(t *testing.T, file string, change func(*ProbeOptions)) (p *Prober, log *bytes.Buffer, stop func()) {
	t.Helper()
	log = &bytes.Buffer{}
	o := ProbeOptions{Driver: d, File: file, Log: slog.New(slog.NewTextHandler(log, nil)), Key: func() (ProbeKey, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		return maps.Clone(d.key), d.lacks
	}}
	if change != nil {
		change(&o)
	}
	p = NewProber(o)
	ctx, cancel := context.WithCancel(context.Background())
	begin := make(chan struct{})
	close(begin)
	done := make(chan struct{})
	go func() { defer close(done); p.run(ctx, begin) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	return p, log, stop
}

func wantsStatus(t *testing.T, p *Prober, state sandbox.DriverState, says string) {
	t.Helper()
	synctest.Wait()
	if st := p.Status(); st.State != state || !strings.Contains(st.Reason, says) || st.Name != "vm" {
		t.Errorf("%+v, want %s with %q", st, state, says)
	}
}

func probeFile(t *testing.T) string { return filepath.Join(t.TempDir(), "firecracker", "probe.json") }

func TestAProbeIsMadeOnceForEachKey(t *testing.T) {
	file := probeFile(t)
	synctest.Test(t, func(t *testing.T) {
		d := newProbed()
		times := func(n int64) {
			t.Helper()
			if got := d.probes.Load(); got != n {
				t.Errorf("%d probes, want %d", got, n)
			}
		}
		p, log, stop := d.prober(t, file, nil)
		wantsStatus(t, p, sandbox.DriverReady, "it boots")
		time.Sleep(time.Minute)
		stop()
		times(1)
		if n := strings.Count(log.String(), "default now"); n != 1 {
			t.Errorf("told %d times:\n%s", n, log)
		}

		// The next life of the daemon knows at once.
		p = NewProber(ProbeOptions{Driver: d, File: file, Key: func() (ProbeKey, error) { return d.key, nil }})
		if st := p.Status(); st.State != sandbox.DriverReady || st.Reason != "it boots" {
			t.Errorf("after a restart: %+v", st)
		}
		select {
		case <-p.Settled():
		default:
			t.Error("it is not settled")
		}
		p, _, stop = d.prober(t, file, nil)
		wantsStatus(t, p, sandbox.DriverReady, "it boots")
		times(1)

		// Another program is installed while it runs, which proves to be worse.
		d.set(func(d *probed) {
			d.key["kernel"], d.answer = "b", driver.Capability{Reason: "it hangs", Hint: "take another"}
		})
		time.Sleep(11 * time.Second)
		wantsStatus(t, p, sandbox.DriverUnavailable, "it hangs")
		times(2)
		stop()

		// A failure is believed, too, unless that is not wanted.
		p, _, stop = d.prober(t, file, nil)
		wantsStatus(t, p, sandbox.DriverUnavailable, "it hangs")
		times(2)
		stop()
		d.set(func(d *probed) { d.answer = driver.Capability{OK: true, Reason: "mended"} })
		p, _, stop = d.prober(t, file, func(o *ProbeOptions) { o.Again = true })
		wantsStatus(t, p, sandbox.DriverReady, "mended")
		times(3)
		stop()

		d.set(func(d *probed) { d.key["boot"] = "2" })
		p, _, stop = d.prober(t, file, nil)
		wantsStatus(t, p, sandbox.DriverReady, "mended")
		times(4)
		stop()
		if c, at, ok := KeptProbe(file, d.key); !ok || !c.OK || at.IsZero() {
			t.Errorf("kept: %+v %v %v", c, at, ok)
		}
		if _, _, ok := KeptProbe(file, ProbeKey{"boot": "1", "kernel": "b"}); ok {
			t.Error("what was found out of another boot counts")
		}
		if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		p, _, stop = d.prober(t, file, nil)
		wantsStatus(t, p, sandbox.DriverReady, "mended")
		times(5)
		stop()
	})
}

func TestAProbeEndsAtItsDeadline(t *testing.T) {
	for name, deaf := range map[string]time.Duration{"it says how far it came": 0, "it does not end": time.Minute} {
		t.Run(name, func(t *testing.T) {
			file := probeFile(t)
			synctest.Test(t, func(t *testing.T) {
				d := newProbed()
				d.hang, d.deaf = true, deaf
				p, _, stop := d.prober(t, file, nil)
				start := time.Now()
				wantsStatus(t, p, sandbox.DriverProbing, "")
				<-p.Settled()
				if took := time.Since(start); took > 60*time.Second {
					t.Errorf("it took %v", took)
				}
				says := "the kernel said nothing"
				if deaf > 0 {
					says = "did not end within 1m0s"
				}
				wantsStatus(t, p, sandbox.DriverUnavailable, says)
				stop()
				p, _, stop = d.prober(t, file, nil)
				wantsStatus(t, p, sandbox.DriverUnavailable, says)
				stop()
				if n := d.probes.Load(); n != 1 {
					t.Errorf("%d probes", n)
				}
			})
		})
	}
}

func TestADaemonThatEndsInTheMiddleOfAProbeKeepsNothing(t *testing.T) {
	file := probeFile(t)
	synctest.Test(t, func(t *testing.T) {
		d := newProbed()
		d.hang = true
		p, _, stop := d.prober(t, file, nil)
		wantsStatus(t, p, sandbox.DriverProbing, "")
		stop()
		wantsStatus(t, p, sandbox.DriverProbing, "")
		if _, err := os.Stat(file); !os.IsNotExist(err) {
			t.Errorf("something was kept: %v", err)
		}
		d.hang = false
		p, _, stop = d.prober(t, file, nil)
		wantsStatus(t, p, sandbox.DriverReady, "it boots")
		stop()
	})
}

func TestWhatIsNotInstalledIsNotProbed(t *testing.T) {
	file := probeFile(t)
	synctest.Test(t, func(t *testing.T) {
		d := newProbed()
		d.lacks = sandbox.Errorf(sandbox.FailedPrecondition, "kernel_missing", "there is no guest kernel").WithHint("install one")
		p, log, stop := d.prober(t, file, nil)
		time.Sleep(time.Minute)
		wantsStatus(t, p, sandbox.DriverUnavailable, "no guest kernel")
		if st := p.Status(); st.Hint != "install one" || strings.Count(log.String(), "no guest kernel") != 1 {
			t.Errorf("%+v\n%s", st, log)
		}
		d.set(func(d *probed) { d.lacks = nil })
		time.Sleep(11 * time.Second)
		wantsStatus(t, p, sandbox.DriverReady, "it boots")
		d.set(func(d *probed) {
			d.lacks = sandbox.Errorf(sandbox.FailedPrecondition, "kernel_missing", "it was removed")
		})
		time.Sleep(11 * time.Second)
		wantsStatus(t, p, sandbox.DriverUnavailable, "it was removed")
		stop()

		p, _, stop = d.prober(t, file, func(o *ProbeOptions) { o.Off, o.OffHint = "nobody wants it", "want it" })
		d.set(func(d *probed) { d.lacks = nil })
		time.Sleep(time.Minute)
		wantsStatus(t, p, sandbox.DriverUnavailable, "nobody wants it")
		stop()
		if n := d.probes.Load(); n != 1 {
			t.Errorf("%d probes", n)
		}
	})
}

func TestTheWordsOfAProbeAreBounded(t *testing.T) {
	file := probeFile(t)
	synctest.Test(t, func(t *testing.T) {
		d := newProbed()
		long := strings.Repeat("kernel\x1b[2J panic\n\xff", 1<<16)
		d.answer = driver.Capability{Reason: long, Hint: long, Checks: make([]string, 1<<12)}
		p, _, stop := d.prober(t, file, nil)
		wantsStatus(t, p, sandbox.DriverUnavailable, "kernel [2J panic kernel")
		stop()
		if st := p.Status(); len(st.Reason) > maxWords || len(st.Hint) > maxWords {
			t.Errorf("%d and %d bytes", len(st.Reason), len(st.Hint))
		}
		if c, _, ok := KeptProbe(file, d.key); !ok || len(c.Checks) != maxChecks || c.Reason != p.Status().Reason {
			t.Errorf("kept %v, %d checks", ok, len(c.Checks))
		}
	})
}

// vmDriver makes machines as the fake does, where its probe succeeds.
type vmDriver struct {
	*fakeDriver
	*probed
}

func (vmDriver) Name() string { return "vm" }
func (d vmDriver) Probe(ctx context.Context) driver.Capability {
	return d.probed.Probe(ctx)
}

// withVM is a rig whose node has a driver that must be probed beside the fake.
func withVM(t *testing.T, p *probed) (*rig, vmDriver) {
	r := newRig(t)
	d := vmDriver{newFakeDriver(t), p}
	r.more = func(o *Options) {
		o.Drivers = append(o.Drivers, d)
		o.Prober = NewProber(ProbeOptions{
			Driver: d, File: filepath.Join(r.state, "firecracker", "probe.json"), Every: 5 * time.Millisecond,
			Key: func() (ProbeKey, error) {
				p.mu.Lock()
				defer p.mu.Unlock()
				return maps.Clone(p.key), p.lacks
			},
		})
	}
	r.restart()
	return r, d
}

func (r *rig) driverOf(name string) sandbox.DriverStatus {
	r.t.Helper()
	c, err := r.n.Capacity(background)
	r.must(err)
	for _, d := range c.Drivers {
		if d.Name == name {
			return d
		}
	}
	r.t.Fatalf("no driver %s in %+v", name, c.Drivers)
	return sandbox.DriverStatus{}
}

func TestTheDefaultDriverIsTheOneThatWorks(t *testing.T) {
	p := newProbed()
	p.hang = true
	r, d := withVM(t, p)
	probing := request(1)
	if st := r.create(probing); st.Driver != "fake" || r.n.DefaultDriver() != "fake" || !r.driverOf("fake").Default {
		t.Errorf("while it is probed: %+v, default %s", st, r.n.DefaultDriver())
	}
	named := request(1)
	named.Driver = "vm"
	if _, err := r.n.CreateMachine(background, named); code(err) != "driver_probing" {
		t.Errorf("asked for by name: %v", err)
	}
	r.nothingOf(named.Sandbox)

	p.set(func(p *probed) { p.hang = false })
	r.restart() // which ends the probe, and nothing was found out
	<-r.n.o.Prober.Settled()
	if st := r.create(request(1)); st.Driver != "vm" || r.n.DefaultDriver() != "vm" || !r.driverOf("vm").Default || r.driverOf("fake").Default {
		t.Errorf("once it works: %+v, default %s", st, r.n.DefaultDriver())
	}
	st := r.create(named)
	if st.Driver != "vm" || !d.has(named.Sandbox) {
		t.Errorf("asked for by name: %+v", st)
	}
	if st := r.create(probing); st.Driver != "fake" {
		t.Errorf("what was made before has the driver %s", st.Driver)
	}

	// It is taken away: what runs goes on, nothing new is made, snapshots wait.
	snapshot := r.snapshot(snap(named.Sandbox, 2, sandbox.SnapshotDisk))
	p.set(func(p *probed) {
		p.lacks = sandbox.Errorf(sandbox.FailedPrecondition, "kernel_missing", "no kernel").WithHint("install")
	})
	for r.driverOf("vm").State != sandbox.DriverUnavailable {
		time.Sleep(time.Millisecond)
	}
	again := request(1)
	again.Driver = "vm"
	if _, err := r.n.CreateMachine(background, again); code(err) != "driver_unavailable" || !strings.Contains(err.Error(), "no kernel") {
		t.Errorf("a new one: %v", err)
	}
	again.Source = &sandbox.Source{Snapshot: snapshot.Snapshot, Kind: sandbox.SnapshotDisk}
	if _, err := r.n.CreateMachine(background, again); code(err) != "needs_driver" || !strings.Contains(err.Error(), "no kernel") {
		t.Errorf("from a snapshot: %v", err)
	}
	if !d.has(named.Sandbox) {
		t.Error("the machine that ran is gone")
	}
	r.restart()
	if st := r.create(request(1)); st.Driver != "fake" || !d.has(named.Sandbox) {
		t.Errorf("after a restart: %+v, adopted %v", st, d.has(named.Sandbox))
	}
}
