package chaos

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// seedOf is $CHAOS_SEED, or one made of the time. It is told when a test fails.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("CHAOS_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 0, 64); err != nil {
			t.Fatalf("CHAOS_SEED is a number, not %q", s)
		}
	}
	t.Logf("seed: CHAOS_SEED=%d", seed)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("to run it again: CHAOS_SEED=%d", seed)
		}
	})
	return seed
}

// again runs one test of this binary in a process with more environment.
func again(t *testing.T, test string, env ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^"+test+"$", "-test.v", "-test.timeout=9m")
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestChaos lets workers ask for everything while killers kill everything. Its
// size is set by CHAOS_KILLS, CHAOS_WORKERS and CHAOS_TIME.
func TestChaos(t *testing.T) {
	set := settingsOf(t)
	w := newWorld(t, set, 16<<30)
	defer w.rep.show()
	before := w.level()

	var workers []*worker
	var wg sync.WaitGroup
	for n := range set.workers {
		k := &worker{world: w, n: n, rnd: newRand(set.seed, uint64(n))}
		workers = append(workers, k)
		wg.Go(k.run)
	}
	k := &killer{world: w, rnd: newRand(set.seed, 1<<32), points: failpoints(t)}
	k.run()
	w.halt()
	wg.Wait()
	k.tell()
	for _, k := range workers {
		k.close()
	}
	if w.rep.bad() == 0 {
		w.checkEnd(before)
	}
	if n := int(w.kills.Load()); n < set.kills && w.rep.bad() == 0 {
		t.Errorf("there were %d kills of %d", n, set.kills)
	}
}

// level is what a daemon without sandboxes occupies.
type level struct{ fds, control, goroutines int }

// level makes one sandbox and deletes it, and tells what is occupied after that.
func (w *world) level() level {
	id := w.d.Must("create", "base")
	w.d.Must("rm", "--force", id)
	if left := w.d.WaitCensus(20 * time.Second); len(left) > 0 {
		w.t.Fatalf("left on the host: %v", left)
	}
	return level{w.d.Usage().FDs, w.d.ControlFDs(), w.goroutines()}
}

// goroutines reads from the daemon's metrics how many it has; 0 is unknown.
func (w *world) goroutines() (n int) {
	resp, err := w.plain.Get("http://" + w.metrics + "/metrics")
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	for line := range strings.Lines(string(b)) {
		if _, err := fmt.Sscanf(line, "go_goroutines %d", &n); err == nil {
			return n
		}
	}
	return 0
}

// newRand is one actor's choices: all of a run's follow from its seed.
func newRand(seed, actor uint64) *rand.Rand {
	return rand.New(rand.NewPCG(seed, actor))
}
