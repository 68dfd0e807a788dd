//go:build clochefaults

package fault

import "os"

var name = os.Getenv(Env)

// Is tells whether the named fault is on.
func Is(n string) bool { return n == name }
