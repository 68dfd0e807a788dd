package drivertest

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// openFiles lists what the descriptors of a process point to.
func openFiles(pid int) []string {
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return nil // the pattern is well-formed
	}
	var targets []string
	for _, l := range links {
		if target, err := os.Readlink(l); err == nil {
			targets = append(targets, target)
		}
	}
	return targets
}

var hostileClauses = []Clause{
	{"reboot-refused", "Nobody inside, root included, can restart, halt or power off the machine by asking its kernel to.", func(b *bench) {
		x := b.box()
		want := strings.Repeat("refused\n", 4)
		b.want("what root got", x.root("reboot"), want)
		b.want("what a user got", x.user("reboot"), want)
		b.want("a file after that", x.user("cat", "/etc/mark"), "from the image")
		b.alive(x.m)
	}},
	{"impostor", "A process inside that says the agent's hello gets no answer, and the agent stays.", func(b *bench) {
		x := b.box()
		generation, _ := x.link.Generation()
		b.want("what it got", x.root("impostor"), "answer 0 true\nanswer 0 true\n")
		b.want("a file, after that", x.user("cat", "/etc/mark"), "from the image")
		if now, _ := x.link.Generation(); now != generation {
			b.Errorf("the agent was displaced %d times", now-generation)
		}
	}},
	{"flood", "A process inside that floods the host with connections and nonsense harms neither its own machine's sessions nor others.", func(b *bench) {
		x, other := b.box(), b.box()
		session, r := x.background(as("root", "flood", "4"), "ready")
		slowest, rounds := time.Duration(0), 0
		for r.exit == nil && rounds < 12 {
			for _, y := range []*box{x, other} {
				started := time.Now()
				b.want("a file meanwhile", y.user("cat", "/etc/mark"), "from the image")
				slowest = max(slowest, time.Since(started))
			}
			rounds++
		}
		if slowest > b.h.slowly(5*time.Second) {
			b.Errorf("a command took %v", slowest)
		}
		x.follow(session, r, nil)
		if !strings.Contains(r.out.String(), "flooded true") {
			b.Errorf("it did not flood: %q", r.out.String())
		}
		x.reconnect()
		b.want("a file after that", x.user("cat", "/etc/mark"), "from the image")
		b.Logf("%d rounds, the slowest command took %v", rounds, slowest)
	}},
}
