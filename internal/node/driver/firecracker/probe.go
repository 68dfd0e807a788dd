package firecracker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/sandbox"
)

// probeMemory is what Probe's machine gets, in MiB.
const probeMemory = 128

// Probe implements driver.Driver: it boots a machine without drives, waits for
// its guest to report and its agent to dial, and discards it. An API that
// answers proves nothing: there are hosts whose KVM passes every check and on
// which every call succeeds while the guest's kernel never gets anywhere.
func (d *Driver) Probe(ctx context.Context) driver.Capability {
	c := driver.Capability{}
	began := time.Now()
	err := d.probe(ctx, &c)
	took := time.Since(began)
	if err == nil {
		c.OK = true
		c.Reason = fmt.Sprintf("a Firecracker machine booted, its agent dialled, and it was removed, in %d ms", took.Milliseconds())
		return c
	}
	c.Reason = fmt.Sprintf("a Firecracker machine can't be run here: %v", err)
	var e *sandbox.Error
	if errors.As(err, &e) {
		c.Reason, c.Hint = "a Firecracker machine can't be run here: "+e.Message, e.Hint
	}
	if c.Hint == "" {
		c.Hint = "`cloche doctor` looks at what a machine needs; gVisor needs no KVM"
	}
	return c
}

func (d *Driver) probe(ctx context.Context, c *driver.Capability) (err error) {
	p, err := d.ready(ctx, c)
	if err != nil {
		return err
	}
	id := sandbox.NewID(sandbox.KindSandbox)
	// What was made is removed even if ctx ends while it runs, in a time of its own.
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		err = errors.Join(err, d.Discard(undo, id), d.o.Networks.Delete(undo, id))
	}()
	netns, err := d.o.Networks.Create(ctx, id)
	if err != nil {
		return fmt.Errorf("make a network namespace: %w", err)
	}
	c.Checks = append(c.Checks, "a network namespace was made")
	p.spec = driver.Spec{
		ID: id, Image: noRoot, Guest: d.o.Guest, NetNS: netns, Hostname: "probe",
		Resources: sandbox.Resources{MilliCPU: 1000, MemoryMiB: probeMemory, DiskMiB: sandbox.MinDiskMiB},
	}
	began := time.Now()
	m, err := d.bring(ctx, p)
	if err != nil {
		return unbooted(err, time.Since(began))
	}
	c.Checks = append(c.Checks, fmt.Sprintf("the kernel %s reached user space in %d ms", p.kernel.Name, time.Since(began).Milliseconds()))
	if err := dialled(ctx, m); err != nil {
		return unbooted(err, time.Since(began))
	}
	c.Checks = append(c.Checks, fmt.Sprintf("the guest's agent dialled after %d ms", time.Since(began).Milliseconds()))
	if err := m.Kill(ctx); err != nil {
		return fmt.Errorf("end the machine: %w", err)
	}
	c.Checks = append(c.Checks, "it was ended: "+string(m.End().Reason))
	return nil
}

// ready looks at all that can be known without booting.
func (d *Driver) ready(ctx context.Context, c *driver.Capability) (plan, error) {
	var p plan
	if os.Geteuid() != 0 {
		return p, sandbox.Errorf(sandbox.FailedPrecondition, "not_root", "it needs root").WithHint("run as root")
	}
	if err := d.current(&p); err != nil {
		return p, err
	}
	c.Checks = append(c.Checks, "Firecracker "+p.pair.Version+", the kernel "+p.kernel.Name)
	if err := sameVersion(ctx, p); err != nil {
		return p, err
	}
	c.Checks = append(c.Checks, "firecracker and jailer are of one release")
	if _, err := findTool("mkfs.ext4"); err != nil {
		return p, err
	}
	if _, err := os.Stat(d.o.Guest); err != nil {
		return p, sandbox.Errorf(sandbox.FailedPrecondition, "file_missing", "the guest binary is missing: %w", err)
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return p, sandbox.Errorf(sandbox.FailedPrecondition, "no_kvm", "/dev/kvm can't be used: %w", err).
			WithHint("load the module kvm_intel or kvm_amd; in a virtual machine, its host must allow nested virtualization")
	}
	c.Checks = append(c.Checks, "/dev/kvm opens", fmt.Sprintf("cgroup v%d", d.tree.Version()))
	return p, f.Close()
}

// sameVersion asks both programs what they are: a record can be wrong.
func sameVersion(ctx context.Context, p plan) error {
	for program, path := range map[string]string{vmm.Firecracker: p.pair.Firecracker, vmm.Jailer: p.pair.Jailer} {
		out, err := installed.AskVersion(ctx, path)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_broken", "%s can't be run: %w", program, err).
				WithHint("install it again with `cloche firecracker install`")
		}
		version, err := vmm.ParseVersion(program, out)
		if err != nil {
			return err
		}
		if version != p.pair.Version {
			return sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_mismatch", "%s is release %s, and the pair is %s", program, version, p.pair.Version).
				WithHint("take both from one upstream release")
		}
	}
	return nil
}

// dialled waits for the guest's agent. What it says is the node's to judge.
func dialled(ctx context.Context, m driver.Machine) error {
	l, err := m.Guest()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	conn, err := l.Accept()
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	return conn.Close()
}

// unbooted says what it means that time ran out.
func unbooted(err error, after time.Duration) error {
	if !errors.Is(err, context.DeadlineExceeded) && !strings.Contains(sandbox.AsError(err).Code, "timeout") {
		return err
	}
	return sandbox.Errorf(sandbox.FailedPrecondition, "kvm_cannot_boot",
		"the kernel did not reach user space within %.1f s: KVM here can't boot Linux, or is too slow for it: %w", after.Seconds(), err).
		WithHint("use gVisor here; in a virtual machine, ask its host for nested virtualization that can boot a kernel")
}
