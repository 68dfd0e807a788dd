package sys

import (
	"os"
	"strings"
)

// HostBootID returns the kernel's id of this boot of the host; "" where it
// can't be read.
func HostBootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
