package node

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

// Probed is what a Prober asks of a driver.
type Probed interface {
	Name() string
	Probe(ctx context.Context) driver.Capability
}

// ProbeKey is all that a probe's answer depends on, by name: the host's boot,
// the hashes of the programs. While none of it has changed, the answer has not.
type ProbeKey map[string]string

// ProbeOptions make a Prober.
type ProbeOptions struct {
	Driver Probed
	// Key tells what would be probed now. Its error says why nothing can be:
	// something is not installed. It is asked often, and must be cheap.
	Key func() (ProbeKey, error)
	// File keeps the last answer beyond this process. Its directory may be missing.
	File string
	// Off, where it is not "", is why the driver is never probed, and so is not
	// to be used: one sentence. OffHint says what to do about it.
	Off, OffHint string
	// Again: a failure that an earlier process noted is not believed.
	Again bool
	// Deadline bounds one probe; 60 s. Every is how often Key is asked; 10 s.
	Deadline, Every time.Duration
	Log             *slog.Logger
}

// Prober finds out whether a driver that not every host can run works on this
// one, by its own probe, once for each key. The node owns one and runs it beside
// everything else, which never waits for it.
type Prober struct {
	o       ProbeOptions
	settled chan struct{} // closed with the first verdict
	wg      sync.WaitGroup

	mu     sync.Mutex
	key    ProbeKey // what the verdict is about; nil: that nothing can be probed
	status sandbox.DriverStatus
}

// verdict is what File holds.
type verdict struct {
	Key    ProbeKey  `json:"key"`
	OK     bool      `json:"ok"`
	Reason string    `json:"reason"`
	Hint   string    `json:"hint,omitempty"`
	Checks []string  `json:"checks,omitempty"`
	At     time.Time `json:"at"`
}

// maxVerdict bounds File.
const maxVerdict = 256 << 10

// lastWord is how long before its deadline a probe is told to end, so that it
// can still say how far it came.
const lastWord = 5 * time.Second

// NewProber makes a prober. It knows at once what an earlier process found out
// about the same key; otherwise the driver is being probed until Run has done so.
func NewProber(o ProbeOptions) *Prober {
	if o.Deadline <= 0 {
		o.Deadline = 60 * time.Second
	}
	if o.Every <= 0 {
		o.Every = 10 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	p := &Prober{o: o, settled: make(chan struct{})}
	p.status = sandbox.DriverStatus{Name: o.Driver.Name(), State: sandbox.DriverProbing}
	if o.Off != "" {
		p.settle(nil, driver.Capability{Reason: o.Off, Hint: o.OffHint})
	} else {
		p.look()
	}
	return p
}

// Status tells what is known of the driver now.
func (p *Prober) Status() sandbox.DriverStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.status
}

// Settled is closed when there has been a first verdict.
func (p *Prober) Settled() <-chan struct{} { return p.settled }

// run probes whenever there is another key, until ctx ends; at first when begin
// is closed. It returns when no probe is under way any more.
func (p *Prober) run(ctx context.Context, begin <-chan struct{}) {
	defer p.wg.Wait()
	if p.o.Off != "" {
		return
	}
	select {
	case <-begin:
	case <-ctx.Done():
		return
	}
	t := time.NewTicker(p.o.Every)
	defer t.Stop()
	for {
		if key := p.look(); key != nil {
			if c, ok := p.probe(ctx); ok {
				p.keep(key, c)
				p.settle(key, c)
			}
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// look compares the verdict with what would be probed now. It returns the key
// of what has to be probed, nil where the verdict holds or one was kept.
func (p *Prober) look() ProbeKey {
	key, err := p.o.Key()
	if err != nil {
		e := sandbox.AsError(err)
		p.settle(nil, driver.Capability{Reason: e.Message, Hint: e.Hint})
		return nil
	}
	p.mu.Lock()
	holds := p.status.State != sandbox.DriverProbing && maps.Equal(p.key, key)
	if !holds { // what was proven of something else proves nothing of this
		p.status = sandbox.DriverStatus{Name: p.status.Name, State: sandbox.DriverProbing}
	}
	p.mu.Unlock()
	if holds {
		return nil
	}
	v, ok := readVerdict(p.o.File)
	if !ok || !maps.Equal(v.Key, key) || !v.OK && p.o.Again {
		return key
	}
	p.settle(key, driver.Capability{OK: v.OK, Reason: v.Reason, Hint: v.Hint})
	return nil
}

// probe runs one probe within the deadline. Its answer counts for nothing where
// ctx ended, which ends a probe under way: false.
func (p *Prober) probe(ctx context.Context) (driver.Capability, bool) {
	told, cancel := context.WithTimeout(ctx, max(p.o.Deadline-lastWord, p.o.Deadline/2))
	late := time.NewTimer(p.o.Deadline)
	defer late.Stop()
	said := make(chan driver.Capability, 1)
	p.wg.Go(func() {
		defer cancel()
		said <- p.o.Driver.Probe(told)
	})
	p.o.Log.Info("a driver is being probed", "driver", p.o.Driver.Name(), "deadline", p.o.Deadline.String())
	c := driver.Capability{Reason: fmt.Sprintf("its probe did not end within %s", p.o.Deadline)}
	select {
	case c = <-said:
	case <-late.C:
	case <-ctx.Done():
	}
	return c, ctx.Err() == nil
}

// settle notes a verdict, and logs it where it is another than before.
func (p *Prober) settle(key ProbeKey, c driver.Capability) {
	c = bounded(c)
	now := sandbox.DriverStatus{Name: p.o.Driver.Name(), State: sandbox.DriverUnavailable, Reason: c.Reason, Hint: c.Hint}
	if c.OK {
		now.State = sandbox.DriverReady
	}
	p.mu.Lock()
	same := p.status == now
	p.key, p.status = key, now
	select {
	case <-p.settled:
	default:
		close(p.settled)
	}
	p.mu.Unlock()
	switch {
	case same:
	case c.OK:
		p.o.Log.Info("a driver works, and is the default now", "driver", now.Name, "reason", now.Reason)
	default:
		level := slog.LevelWarn
		if key == nil { // nothing was tried: most hosts are so on purpose
			level = slog.LevelInfo
		}
		p.o.Log.Log(context.Background(), level, "a driver can't be used here", "driver", now.Name, "reason", now.Reason, "hint", now.Hint)
	}
}

// keep notes a verdict for later processes. Without it the next one probes again.
func (p *Prober) keep(key ProbeKey, c driver.Capability) {
	c = bounded(c)
	data, err := json.MarshalIndent(verdict{Key: key, OK: c.OK, Reason: c.Reason, Hint: c.Hint, Checks: c.Checks, At: time.Now().UTC()}, "", "  ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(p.o.File), 0o700)
	}
	if err == nil {
		err = sys.WriteFileAtomic(p.o.File, append(data, '\n'), 0o600)
	}
	if err != nil {
		p.o.Log.Error("keep a probe's answer", "driver", p.o.Driver.Name(), "err", err)
	}
}

// The bounds of a verdict's words: a machine monitor's or a guest's may be in them.
const (
	maxWords  = 2 << 10 // bytes
	maxChecks = 32
)

// bounded is c in words that fit into a line of a log.
func bounded(c driver.Capability) driver.Capability {
	line := func(s string) string {
		s = s[:min(len(s), maxWords)]
		return strings.Join(strings.FieldsFunc(strings.ToValidUTF8(s, ""), unicode.IsControl), " ")
	}
	checks := c.Checks[:min(len(c.Checks), maxChecks)]
	c.Reason, c.Hint, c.Checks = line(c.Reason), line(c.Hint), nil
	for _, s := range checks {
		c.Checks = append(c.Checks, line(s))
	}
	return c
}

// readVerdict returns what a file holds; one that can't be read is none.
func readVerdict(file string) (v verdict, ok bool) {
	st, err := os.Stat(file)
	if err != nil || st.Size() > maxVerdict {
		return v, false
	}
	data, err := os.ReadFile(file)
	return v, err == nil && json.Unmarshal(data, &v) == nil && len(v.Key) > 0
}

// KeptProbe returns what a daemon has found out about this key and when; false
// where none has.
func KeptProbe(file string, key ProbeKey) (c driver.Capability, at time.Time, ok bool) {
	v, ok := readVerdict(file)
	if !ok || !maps.Equal(v.Key, key) {
		return c, at, false
	}
	return driver.Capability{OK: v.OK, Reason: v.Reason, Hint: v.Hint, Checks: v.Checks}, v.At, true
}

// DefaultDriver is the driver of requests that name none, now.
func (n *Node) DefaultDriver() string {
	if p := n.o.Prober; p != nil {
		if st := p.Status(); st.State == sandbox.DriverReady {
			return st.Name
		}
	}
	return n.o.Default
}

// driverStatus tells what is known of every driver, by name.
func (n *Node) driverStatus() []sandbox.DriverStatus {
	var all []sandbox.DriverStatus
	byDefault := n.o.Default
	for name, d := range n.drivers {
		st := sandbox.DriverStatus{Name: name, State: sandbox.DriverReady}
		if p := n.o.Prober; p != nil && p.o.Driver.Name() == name {
			if st = p.Status(); st.State == sandbox.DriverReady {
				byDefault = name
			}
		}
		st.Durability = d.Traits().Durability
		all = append(all, st)
	}
	for i := range all {
		all[i].Default = all[i].Name == byDefault
	}
	slices.SortFunc(all, func(a, b sandbox.DriverStatus) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// pick finds the driver of a request. A snapshot is restored by the driver that
// took it and by no other.
func (n *Node) pick(req sandbox.MachineRequest) (driver.Driver, error) {
	st, err := sandbox.FindDriver(n.driverStatus(), req.Driver)
	if err != nil && req.Source != nil {
		err = sandbox.NeedsDriver(err)
	}
	if err != nil {
		return nil, err
	}
	return n.drivers[st.Name], nil
}
