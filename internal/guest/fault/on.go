//go:build clochefaults

package fault

import "os"

var name = os.Getenv(Env)

// Is tells whether the named fault is on.
func Is(n string) bool { return n == name }

// In tells whether an environment that is to be PID 1's names the fault.
func In(env map[string]string, n string) bool { return env[Env] == n }
