package gvisor

import (
	"testing"

	"cloche.dev/cloche/internal/node/driver/drivertest"
)

// TestBrokenDrivers proves that the contract notices drivers and guests that
// break it.
func TestBrokenDrivers(t *testing.T) { drivertest.RunFaults(t, newHarness(t)) }
