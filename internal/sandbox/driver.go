package sandbox

import (
	"strings"
	"time"
)

// DriverState tells whether a driver makes machines on a host now.
type DriverState string

// The driver states.
const (
	DriverReady       DriverState = "ready"
	DriverProbing     DriverState = "probing" // whether it can is being found out
	DriverUnavailable DriverState = "unavailable"
)

// DriverStatus is what a node says of one of its drivers.
type DriverStatus struct {
	Name    string      `json:"name"`
	State   DriverState `json:"state"`
	Default bool        `json:"default,omitempty"` // for requests that name none
	Reason  string      `json:"reason,omitempty"`  // why it is not ready, or what was proven; one sentence
	Hint    string      `json:"hint,omitempty"`    // how to mend it

	Durability Durability `json:"durability,omitempty"` // of its machines' disks
}

// probeRetry is when somebody who asked for a driver that is being probed may
// ask again: a probe boots a kernel, and is told to end within a minute.
const probeRetry = 5 * time.Second

// CodeDriverProbing is the code of the refusal that passes by itself.
const CodeDriverProbing = "driver_probing"

// FindDriver returns the driver of this name among a host's, or for "" the
// default. The error is Invalid ("unknown_driver") where there is none,
// FailedPrecondition ("driver_unavailable") where it can't make machines, or
// Unavailable ("driver_probing") while nobody knows yet.
func FindDriver(drivers []DriverStatus, name string) (DriverStatus, error) {
	var names []string
	for _, d := range drivers {
		if d.Name == name || name == "" && d.Default {
			return d, d.refusal()
		}
		names = append(names, d.Name)
	}
	return DriverStatus{}, Errorf(Invalid, "unknown_driver", "there is no driver %.64q here", name).
		WithHint("name one of %s, or none for the host's default", strings.Join(names, ", "))
}

func (d DriverStatus) refusal() error {
	switch d.State {
	case DriverReady:
		return nil
	case DriverProbing:
		return Errorf(Unavailable, CodeDriverProbing, "whether the driver %s works on this host is being found out", d.Name).
			WithHint("try again soon, or name no driver to get the one that works already").WithRetry(probeRetry)
	}
	hint := d.Hint
	if hint == "" {
		hint = "`cloche doctor` tells which drivers work here and why"
	}
	return Errorf(FailedPrecondition, "driver_unavailable", "the driver %s can't make machines on this host: %s", d.Name, d.Reason).WithHint("%s", hint)
}

// NeedsDriver is a refusal of FindDriver for what another driver can't stand
// in for, a snapshot's machine: FailedPrecondition ("needs_driver"), unless it
// passes by itself.
func NeedsDriver(err error) error {
	e := AsError(err)
	if e == nil || e.Code == CodeDriverProbing {
		return err
	}
	return Errorf(FailedPrecondition, "needs_driver", "a snapshot is restored by the driver that took it: %s", e.Message).WithHint("%s", e.Hint)
}
