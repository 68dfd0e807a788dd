package sys

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
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

// CPUFeatures returns the features of the host's processors by the names that
// /proc/cpuinfo gives them, sorted: those that every processor has. It reads
// them once, and its answer must not be changed.
var CPUFeatures = sync.OnceValues(cpuFeatures)

func cpuFeatures() ([]string, error) {
	data, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return nil, fmt.Errorf("read the processors' features: %w", err)
	}
	var all []string
	for line := range strings.Lines(string(data)) {
		name, list, _ := strings.Cut(line, ":")
		if n := strings.TrimSpace(name); n != "flags" && n != "Features" {
			continue
		}
		features := strings.Fields(list)
		slices.Sort(features)
		if all == nil {
			all = features
			continue
		}
		all = slices.DeleteFunc(all, func(f string) bool {
			_, has := slices.BinarySearch(features, f)
			return !has
		})
	}
	if len(all) == 0 {
		return nil, errors.New("/proc/cpuinfo lists no features")
	}
	return slices.Compact(all), nil
}
