package chaos

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// killer kills the daemon and its helpers, and disturbs the host, until the run
// is over. It is the only one that starts and ends the daemon.
type killer struct {
	*world
	rnd    *rand.Rand
	armed  string         // the failpoint that the daemon will die at
	points map[string]int // how often the daemon was killed at each failpoint
	offset time.Duration  // by how much the clock has jumped
}

// failpoints finds the names of all failpoints in the sources.
func failpoints(t *testing.T) map[string]int {
	t.Helper()
	names := map[string]int{}
	call := regexp.MustCompile(`failpoint\.Hit\("([^"]+)"\)`)
	err := filepath.WalkDir("../../internal", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		b, err := os.ReadFile(path)
		for _, m := range call.FindAllSubmatch(b, -1) {
			names[string(m[1])] = 0
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// maxWrongs is after how many findings a run ends: what follows is mostly their
// consequence.
const maxWrongs = 12

// run disturbs until there were enough kills, and leaves a daemon that runs.
func (k *killer) run() {
	end := time.Now().Add(k.set.time)
	for int(k.kills.Load()) < k.set.kills && k.rep.bad() < maxWrongs && time.Now().Before(end) {
		if err := k.disturb(); err != nil {
			k.rep.wrong("the daemon does not come back: %v", err)
			break
		}
	}
	if k.armed != "" || !k.d.Running() { // what follows needs one that lives
		k.end()
		if err := k.start(""); err != nil {
			k.rep.wrong("the daemon does not come back: %v", err)
		}
	}
}

// disturb does one thing at random.
func (k *killer) disturb() error {
	switch n := k.rnd.IntN(100); {
	case n < 5:
		return k.killControl()
	case n < 9:
		return k.fillDisk()
	case n < 14:
		return k.jump()
	case n < 60:
		return k.killAtPoint()
	}
	k.sleep(1500 * time.Millisecond)
	return k.killDaemon()
}

func (k *killer) sleep(most time.Duration) { time.Sleep(time.Duration(k.rnd.Int64N(int64(most)))) }

// killDaemon kills the daemon now and starts it again.
func (k *killer) killDaemon() error {
	k.end()
	return k.start("")
}

// end ends the daemon, unless it has met its failpoint.
func (k *killer) end() {
	k.troubles.daemon.Add(1)
	how := k.d.How()
	switch {
	case how == "":
		k.d.Kill9()
		k.counted("daemon, at a random time")
	case how == "signal: killed" && k.armed != "":
		k.hit(k.armed)
	default:
		k.rep.wrong("the daemon has ended by itself: %s\n%s", how, k.d.Log())
	}
}

func (k *killer) counted(kind string) {
	k.rep.count("kills", kind)
	k.kills.Add(1)
}

// start starts the daemon, armed with a failpoint; it may meet that while it
// starts, and is started again then.
func (k *killer) start(point string) error {
	if k.rnd.IntN(4) == 0 {
		k.sleep(600 * time.Millisecond) // it is gone for a while
	}
	k.arm(point)
	k.armed = point
	for range 3 {
		err := k.d.TryServe()
		if err == nil {
			return nil
		}
		if k.d.Running() || k.d.How() != "signal: killed" || point == "" {
			return err
		}
		k.hit(point)
		point, k.armed = "", ""
		k.arm("")
	}
	return errors.New("it ends again and again")
}

func (k *killer) hit(point string) {
	name, _, _ := strings.Cut(point, "@")
	k.points[name]++
	k.counted("daemon, at a failpoint")
}

// killAtPoint arms the daemon with one of the failpoints at which it was
// killed the least, and waits until it dies there.
func (k *killer) killAtPoint() error {
	names := slices.Sorted(maps.Keys(k.points))
	k.rnd.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	slices.SortStableFunc(names, func(a, b string) int { return k.points[a] - k.points[b] })
	point := names[k.rnd.IntN(min(len(names), 6))]
	if n := k.points[point]; n > 0 {
		point = fmt.Sprintf("%s@%d", point, 1+k.rnd.IntN(n+1))
	}
	k.end()
	if err := k.start(point); err != nil {
		return err
	}
	for range 60 {
		if !k.d.Running() {
			k.end()
			return k.start("")
		}
		time.Sleep(100 * time.Millisecond)
	}
	return nil // it was not passed; the daemon goes on armed
}

// killControl kills the engine's control process.
func (k *killer) killControl() error {
	k.troubles.control.Add(1)
	for _, p := range k.d.ControlProcesses() {
		if pid, err := strconv.Atoi(p); err == nil && syscall.Kill(pid, syscall.SIGKILL) == nil {
			k.counted("the engine's control process")
		}
	}
	k.sleep(time.Second)
	k.troubles.control.Add(1)
	return nil
}

// fillDisk leaves no room for a while.
func (k *killer) fillDisk() error {
	if k.disk == nil {
		return nil
	}
	k.troubles.disk.Add(1)
	release, err := k.disk.fill()
	if err != nil {
		return fmt.Errorf("fill the disk: %w", err)
	}
	k.rep.count("disturbances", "the disk was full for a while")
	k.sleep(3 * time.Second)
	release()
	k.troubles.disk.Add(1)
	return nil
}

// maxJump keeps the clock within bounds in which no policy of a sandbox that is
// touched all the time comes due.
const maxJump = 2 * time.Hour

// jump lets the clock jump.
func (k *killer) jump() error {
	k.offset = time.Duration(k.rnd.Int64N(int64(2*maxJump))) - maxJump
	tmp := k.clock + ".tmp"
	if err := os.WriteFile(tmp, []byte(k.offset.String()), 0o600); err != nil {
		return err
	}
	k.rep.count("disturbances", "the clock jumped")
	k.troubles.clock.Add(1)
	return os.Rename(tmp, k.clock)
}

// manyKills is from how many kills on every failpoint must be among them.
const manyKills = 400

// tell reports on the failpoints.
func (k *killer) tell() {
	var missing []string
	passed := map[string]bool{}
	b, _ := os.ReadFile(k.hits)
	for name := range strings.Lines(string(b)) {
		passed[strings.TrimSpace(name)] = true
	}
	for _, name := range slices.Sorted(maps.Keys(k.points)) {
		switch {
		case k.points[name] > 0:
			for range k.points[name] {
				k.rep.count("failpoints killed at", name)
			}
		case passed[name]:
			k.rep.count("failpoints passed and not killed at", name)
			missing = append(missing, name)
		default:
			k.rep.count("failpoints never passed", name)
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 && k.set.kills >= manyKills && k.rep.bad() == 0 {
		k.t.Errorf("in %d kills the daemon was not killed once at %s", k.kills.Load(), strings.Join(missing, ", "))
	}
}
