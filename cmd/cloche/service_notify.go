package main

import (
	"net"
	"os"
)

// serviceManager returns what tells systemd how far the daemon is (sd_notify),
// or does nothing where it was not started by systemd. What the daemon starts
// must not speak for it, so the variable goes.
func serviceManager() func(state string) {
	path := os.Getenv("NOTIFY_SOCKET")
	_ = os.Unsetenv("NOTIFY_SOCKET")
	if path == "" {
		return func(string) {}
	}
	return func(state string) {
		// Who doesn't listen learns nothing: systemd then says that by itself.
		c, err := net.Dial("unixgram", path) // "@" begins an abstract one, here as there
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = c.Write([]byte(state))
	}
}
