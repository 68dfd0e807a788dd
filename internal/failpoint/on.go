//go:build clochefaults

package failpoint

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

var (
	mu    sync.Mutex
	hits  = map[string]int{}
	at, n = parse(os.Getenv(EnvKill))
	skips = strings.Split(os.Getenv(EnvSkip), ",")
	file  = os.Getenv(EnvHits)
	clock = os.Getenv(EnvClock)
)

func parse(s string) (string, int) {
	name, times, ok := strings.Cut(s, "@")
	if !ok {
		return name, 1
	}
	n, err := strconv.Atoi(times)
	if err != nil {
		panic(EnvKill + " is NAME or NAME@N, not " + s)
	}
	return name, n
}

// Hit tells that the process stands at the named instant, and does not return
// if it is to be killed there.
func Hit(name string) {
	mu.Lock()
	defer mu.Unlock()
	hits[name]++
	if file != "" {
		if f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600); err == nil {
			_, _ = f.WriteString(name + "\n") // the suite misses the name and says so
			_ = f.Close()
		}
	}
	if name == at && hits[name] == n {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

// Skip tells whether the named precaution is to be left out.
func Skip(name string) bool { return slices.Contains(skips, name) }

// Now is the time of a host whose clock has jumped by what the file of EnvClock
// says. It has no monotonic reading, since that would hide the jump.
func Now() time.Time {
	now := time.Now()
	if clock == "" {
		return now
	}
	text, err := os.ReadFile(clock)
	if err != nil {
		return now // the file is there from the first jump on
	}
	offset, err := time.ParseDuration(strings.TrimSpace(string(text)))
	if err != nil {
		panic(EnvClock + " holds a duration, not " + string(text))
	}
	return now.Round(0).Add(offset)
}
