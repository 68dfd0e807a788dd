package firecracker

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/sandbox"
)

// TestProbeOfWhatBootsNothing has a guest that is no program: whatever this
// host's KVM can do, nobody dials, and Probe says so within its deadline. Where
// the kernel gets as far as to /init, it says that the machine ended.
func TestProbeOfWhatBootsNothing(t *testing.T) {
	f := newFixture(t)
	f.d.test.noReport = false
	nets := &timedNetworks{Networks: f.d.o.Networks}
	f.d.o.Guest, f.d.o.Networks = filepath.Join(f.dir, "no-program"), nets
	if err := os.WriteFile(f.d.o.Guest, []byte("no program"), 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	began := time.Now()
	c := f.d.Probe(ctx)
	if took := time.Since(began); took > 6*time.Second {
		t.Errorf("it took %v", took)
	}
	slow := strings.Contains(c.Reason, "the kernel did not reach user space within ") && strings.Contains(c.Reason, "KVM here can't boot Linux")
	if c.OK || !slow && !strings.Contains(c.Reason, "ended before it was up") || c.Hint == "" || len(c.Checks) < 4 {
		t.Errorf("Probe = %+v", c)
	}
	t.Logf("%+v", c)
	if ids, err := f.d.List(f.ctx()); err != nil || len(ids) > 0 {
		t.Errorf("Probe left %v, %v", ids, err)
	}
	if !nets.undone.After(nets.made) {
		t.Errorf("the time to clean up began at %v, and the network was made at %v", nets.undone, nets.made)
	}
}

// timedNetworks notes when a network was made, and when the time began in which
// it is removed.
type timedNetworks struct {
	Networks
	made, undone time.Time
}

func (n *timedNetworks) Create(ctx context.Context, id string) (string, error) {
	path, err := n.Networks.Create(ctx, id)
	n.made = time.Now()
	return path, err
}

func (n *timedNetworks) Delete(ctx context.Context, id string) error {
	if until, ok := ctx.Deadline(); ok {
		n.undone = until.Add(-undoTimeout)
	}
	return n.Networks.Delete(ctx, id)
}

// TestProbeSaysWhatIsMissing takes away one thing after the other.
func TestProbeSaysWhatIsMissing(t *testing.T) {
	f := newFixture(t)
	sound := f.o.Pair
	pair, kernel, err := sound()
	if err != nil {
		t.Fatal(err)
	}
	junk := filepath.Join(f.dir, "firecracker")
	if err := os.WriteFile(junk, []byte("no program"), 0o755); err != nil {
		t.Fatal(err)
	}
	missing := func(code string) error {
		return sandbox.Errorf(sandbox.FailedPrecondition, code, "%s", code).WithHint("install it")
	}
	for name, c := range map[string]struct {
		change func(*Options)
		reason string
	}{
		"not installed": {func(o *Options) {
			o.Pair = func() (installed.Pair, installed.Kernel, error) { return pair, kernel, missing("firecracker_missing") }
		}, "firecracker_missing"},
		"a vulnerable jailer": {func(o *Options) {
			o.AllowVersion = nil
			p := pair
			p.Version = "1.12.1"
			o.Pair = func() (installed.Pair, installed.Kernel, error) { return p, kernel, nil }
		}, "CVE-2026-1386"},
		"a release that hangs": {func(o *Options) {
			o.AllowVersion = nil
			p := pair
			p.Version = "1.16.1"
			o.Pair = func() (installed.Pair, installed.Kernel, error) { return p, kernel, nil }
		}, "hangs"},
		"another release than recorded": {func(o *Options) {
			o.AllowVersion = func(string) error { return nil }
			p := pair
			p.Version = "1.15.1"
			o.Pair = func() (installed.Pair, installed.Kernel, error) { return p, kernel, nil }
		}, "and the pair is 1.15.1"},
		"a broken binary": {func(o *Options) {
			p := pair
			p.Firecracker, p.Jailer = junk, junk
			o.Pair = func() (installed.Pair, installed.Kernel, error) { return p, kernel, nil }
		}, "can't be run"},
		"no kernel file": {func(o *Options) {
			k := kernel
			k.Image = "/none"
			o.Pair = func() (installed.Pair, installed.Kernel, error) { return pair, k, nil }
		}, "/none"},
		"no guest": {func(o *Options) { o.Guest = "/no-guest" }, "/no-guest"},
	} {
		o := f.o
		c.change(&o)
		d, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		got := d.Probe(ctx)
		cancel()
		if got.OK || !strings.Contains(got.Reason, c.reason) || got.Hint == "" {
			t.Errorf("%s: %+v", name, got)
		}
		d.stop()
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	if c := f.d.Probe(ctx); c.OK || c.Reason == "" {
		t.Errorf("in a millisecond: %+v", c)
	}
	if err := unbooted(errors.New("other"), 0); sandbox.AsError(err).Code == "kvm_cannot_boot" {
		t.Error("any error is blamed on KVM")
	}
}
