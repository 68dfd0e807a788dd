package drivertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/guestlink"
	"cloche.dev/cloche/internal/sandbox"
)

// patience bounds every wait for something that ought to happen soon.
const patience = 10 * time.Second

// slowly is d at the pace of this harness.
func (h Harness) slowly(d time.Duration) time.Duration { return d * time.Duration(max(1, h.Pace)) }

// patience is the constant at the pace of the harness.
func (b *bench) patience() time.Duration { return b.h.slowly(patience) }

// bench is one clause at work.
type bench struct {
	TB
	h   Harness
	ctx context.Context
	d   driver.Driver // the driver under test; open replaces it

	mu    sync.Mutex
	raw   driver.Driver // the same, unbroken
	shut  func(context.Context) error
	ids   []string
	links []*guestlink.Link
	dirs  []string // of images
}

// open makes a driver, after ending the one before as if its process had died.
func (b *bench) open() driver.Driver {
	b.Helper()
	b.closeAll()
	d, shut, err := b.h.Open()
	if err != nil {
		b.Fatalf("open the driver: %v", err)
	}
	b.raw, b.shut = d, shut
	if b.h.wrap != nil {
		d = b.h.wrap(d)
	}
	return d
}

// drop removes an image that is needed no more.
func (b *bench) drop(dir string) {
	b.Helper()
	if err := os.RemoveAll(dir); err != nil {
		b.Errorf("%v", err)
	}
}

// restart ends the driver and makes another over what it left.
func (b *bench) restart() {
	b.Helper()
	b.d = b.open()
}

func (b *bench) closeAll() {
	for _, l := range b.links {
		l.Close()
	}
	b.links = nil
	if b.shut != nil {
		if err := b.shut(b.ctx); err != nil {
			b.Errorf("end the driver: %v", err)
		}
		b.shut = nil
	}
}

// clean removes the clause's machines with the unbroken driver.
func (b *bench) clean() error {
	ctx, cancel := context.WithTimeout(context.Background(), b.h.slowly(clauseTimeout))
	defer cancel()
	b.ctx = ctx
	var errs []error
	var wg sync.WaitGroup
	for _, l := range b.links {
		wg.Go(l.Close)
	}
	wg.Wait()
	b.links = nil
	for _, id := range b.ids {
		if b.raw != nil {
			errs = append(errs, b.raw.Discard(ctx, id))
		}
		left, err := b.leftovers(id)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left of %s: %s", id, strings.Join(left, ", "))
		}
		errs = append(errs, err, b.h.Networks.Delete(ctx, id))
	}
	for _, dir := range b.dirs {
		errs = append(errs, os.RemoveAll(dir))
	}
	if b.shut != nil {
		errs = append(errs, b.shut(ctx))
	}
	return errors.Join(errs...)
}

// leftovers gives what is dying a moment to be gone.
func (b *bench) leftovers(id string) ([]string, error) {
	var left []string
	var err error
	b.eventually(2*time.Second, func() bool {
		left, err = b.h.Leftovers(id)
		return err != nil || len(left) == 0
	})
	return left, err
}

// eventually tries until ok, and tells whether it came to that in time.
func (b *bench) eventually(within time.Duration, ok func() bool) bool {
	for deadline := time.Now().Add(b.h.slowly(within)); ; time.Sleep(5 * time.Millisecond) {
		if ok() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

func (b *bench) within(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(b.ctx, d)
}

// spec returns the spec of a new machine, changed as asked.
func (b *bench) spec(change ...func(*driver.Spec)) driver.Spec {
	b.Helper()
	s, err := b.newSpec(sandbox.NewID(sandbox.KindSandbox), change...)
	if err != nil {
		b.Fatalf("make a network namespace: %v", err)
	}
	return s
}

func (b *bench) newSpec(id string, change ...func(*driver.Spec)) (driver.Spec, error) {
	ns, err := b.h.Networks.Create(b.ctx, id)
	if err != nil {
		return driver.Spec{}, err
	}
	b.mu.Lock()
	b.ids = append(b.ids, id)
	b.mu.Unlock()
	s := driver.Spec{
		ID: id, Image: b.h.Files.Image, Guest: b.h.Files.Guest, NetNS: ns, Hostname: "box",
		Resources:  sandbox.Resources{MilliCPU: 2000, MemoryMiB: 256, DiskMiB: 64},
		Supervisor: map[string]string{"GREETING": "hello"},
	}
	for k, v := range b.h.supervisor {
		s.Supervisor[k] = v
	}
	for _, c := range change {
		c(&s)
	}
	return s, nil
}

// bare creates a machine without speaking to its guest.
func (b *bench) bare(change ...func(*driver.Spec)) driver.Machine {
	b.Helper()
	m, err := b.d.Create(b.ctx, b.spec(change...))
	if err != nil {
		b.Fatalf("create: %v", err)
	}
	return m
}

// box is a machine and the link to its guest.
type box struct {
	b    *bench
	m    driver.Machine
	key  []byte
	link *guestlink.Link
}

// box creates a machine and waits for its guest.
func (b *bench) box(change ...func(*driver.Spec)) *box {
	b.Helper()
	x, err := b.boxOf(b.bare(change...), nil)
	if err != nil {
		b.Fatalf("the guest did not come: %v", err)
	}
	return x
}

func (b *bench) boxOf(m driver.Machine, setup *guestv1.SetupRequest) (*box, error) {
	x := &box{b: b, m: m, key: guestapi.NewKey()}
	return x, x.connect(false, setup)
}

// connect makes the link and waits for the guest.
func (x *box) connect(welcomed bool, setup *guestv1.SetupRequest) error {
	x.makeLink(welcomed, setup)
	ctx, cancel := x.b.within(x.b.patience())
	defer cancel()
	return x.link.Ready(ctx)
}

// listen makes the link for a guest that has its key already.
func (x *box) listen() { x.makeLink(true, nil) }

func (x *box) makeLink(welcomed bool, setup *guestv1.SetupRequest) {
	x.link = guestlink.Start(guestlink.Config{Listen: x.m.Guest, Key: x.key, Welcomed: welcomed, Epoch: 1, Setup: setup})
	x.b.mu.Lock()
	x.b.links = append(x.b.links, x.link)
	x.b.mu.Unlock()
}

// reconnect makes the link anew; the guest must prove itself.
func (x *box) reconnect() {
	x.b.Helper()
	x.link.Close()
	if err := x.connect(true, nil); err != nil {
		x.b.Fatalf("the guest did not come back: %v", err)
	}
}

// pids lists the machine's host processes.
func (b *bench) pids(id string) []int {
	b.Helper()
	pids, err := b.h.HostPIDs(id)
	if err != nil {
		b.Fatalf("the processes of %s: %v", id, err)
	}
	return pids
}

// anyAlive tells whether one of pids runs. One that has ended and waits to be
// reaped does not: that is its parent's business, which may be the host's init.
func anyAlive(pids []int) bool {
	return slices.ContainsFunc(pids, func(pid int) bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err == nil && !bytes.Contains(stat, []byte(") Z "))
	})
}

// ended waits for a machine's end.
func (b *bench) ended(m driver.Machine) sandbox.End {
	b.Helper()
	select {
	case <-m.Exited():
	case <-time.After(b.patience()):
		b.Fatalf("Exited is not closed")
	}
	return m.End()
}

func (b *bench) alive(m driver.Machine) {
	b.Helper()
	select {
	case <-m.Exited():
		b.Errorf("the machine ended: %+v", m.End())
	default:
		if end := m.End(); end != (sandbox.End{}) {
			b.Errorf("End() of a live machine = %+v", end)
		}
	}
}

func (b *bench) kill(m driver.Machine) {
	b.Helper()
	ctx, cancel := b.within(b.patience())
	defer cancel()
	if err := m.Kill(ctx); err != nil {
		b.Fatalf("kill: %v", err)
	}
}

func (b *bench) discard(id string) {
	b.Helper()
	ctx, cancel := b.within(b.patience())
	defer cancel()
	if err := b.d.Discard(ctx, id); err != nil {
		b.Fatalf("discard: %v", err)
	}
}

func (b *bench) list() []string {
	b.Helper()
	ids, err := b.d.List(b.ctx)
	if err != nil {
		b.Fatalf("list: %v", err)
	}
	return ids
}

// nothingLeft asserts that a machine left no trace.
func (b *bench) nothingLeft(id string) {
	b.Helper()
	left, err := b.leftovers(id)
	if err != nil || len(left) > 0 {
		b.Errorf("left of the machine: %q, %v", left, err)
	}
	if slices.Contains(b.list(), id) {
		b.Errorf("List still names it")
	}
}

func (b *bench) stats(m driver.Machine) driver.Stats {
	b.Helper()
	st, err := m.Stats(b.ctx)
	if err != nil {
		b.Fatalf("stats: %v", err)
	}
	return st
}

// fileCount counts the descriptors of this process.
func (b *bench) fileCount() int {
	b.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		b.Fatalf("%v", err)
	}
	return len(fds)
}
