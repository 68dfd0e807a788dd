package drivertest

import (
	"context"
	"net"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// noMachine is what a broken driver gives out for a machine that is not there.
type noMachine struct {
	driver.Machine // nil: nobody gets as far as to pause it
	id             string
}

// ID implements driver.Machine.
func (m noMachine) ID() string { return m.id }

// Guest implements driver.Machine: nobody will ever dial.
func (noMachine) Guest() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") }

// Stats implements driver.Machine.
func (noMachine) Stats(context.Context) (driver.Stats, error) { return driver.Stats{}, nil }

// Kill implements driver.Machine.
func (noMachine) Kill(context.Context) error { return nil }

// Exited implements driver.Machine.
func (noMachine) Exited() <-chan struct{} { return nil }

// End implements driver.Machine.
func (noMachine) End() sandbox.End { return sandbox.End{} }
