package server

import (
	"context"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker"
	"cloche.dev/cloche/internal/node/driver/gvisor"
	"cloche.dev/cloche/internal/sandbox"
)

// DriverAuto lets the host decide: Firecracker where its probe proves that it
// works, gVisor elsewhere and until then.
const DriverAuto = "auto"

// CheckDriver tells whether Options.Driver may have this value.
func CheckDriver(name string) error {
	switch name {
	case "", DriverAuto, gvisor.Name, firecracker.Name:
		return nil
	}
	return sandbox.Errorf(sandbox.Invalid, "unknown_driver", "there is no driver %.64q", name).
		WithHint("it is one of %s, %s and %s", DriverAuto, firecracker.Name, gvisor.Name)
}

// durabilities tells what each driver's disks outlive.
func durabilities(drivers []driver.Driver) map[string]sandbox.Durability {
	all := map[string]sandbox.Durability{}
	for _, d := range drivers {
		all[d.Name()] = d.Traits().Durability
	}
	return all
}

// provenWait bounds the wait for a driver without which the daemon is not to
// serve: the adoption of what lives, and one probe.
const provenWait = 3 * time.Minute

// proven returns nil when new sandboxes can get the driver that the daemon was
// told to use. Only one that was named is waited for: until its probe has ended,
// ctx ends, or below, the roles, do.
func (h *host) proven(ctx, below context.Context, o Options) error {
	if o.Driver != firecracker.Name {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, provenWait)
	defer cancel()
	defer context.AfterFunc(below, cancel)()
	select {
	case <-h.prober.Settled():
		_, err := sandbox.FindDriver([]sandbox.DriverStatus{h.prober.Status()}, o.Driver)
		return err
	case <-ctx.Done():
		return sandbox.AsError(ctx.Err())
	}
}
