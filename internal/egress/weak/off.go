//go:build !clocheweak

package weak

// Is is false.
func Is(string) bool { return false }

// Env is empty.
func Env() []string { return nil }
