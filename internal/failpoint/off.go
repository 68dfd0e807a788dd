//go:build !clochefaults

package failpoint

import "time"

// Hit does nothing.
func Hit(string) {}

// Skip is false.
func Skip(string) bool { return false }

// Now is time.Now.
func Now() time.Time { return time.Now() }
