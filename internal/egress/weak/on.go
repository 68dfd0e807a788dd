//go:build clocheweak

package weak

import "os"

// Is tells whether the process has the named weakness.
func Is(weakness string) bool { return os.Getenv(EnvWeak) == weakness }

// Env is what a process hands on, so that another has the same weakness.
func Env() []string { return []string{EnvWeak + "=" + os.Getenv(EnvWeak)} }
