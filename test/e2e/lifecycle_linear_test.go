package e2e

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"cloche.dev/cloche/test/harness"
	"cloche.dev/cloche/test/linear"
)

// livelyVerbs are what the histories on real machines are drawn from: deletes
// have histories of their own, since a new sandbox costs more than a verb.
var livelyVerbs = strings.Fields(strings.Repeat("pause resume suspend restore stop start wake snapshot rollback look look ", 2) + "fork crash pause resume wake wake")

// TestHistories runs histories of clients that ask for verbs at once, of real
// sandboxes over HTTP, and checks that each is linearizable: 200 of them, fewer
// in CI.
func TestHistories(t *testing.T) {
	n := atFull(200, 48)
	base := uint64(time.Now().UnixNano())
	if s := os.Getenv("LINEAR_SEED"); s != "" {
		var err error
		if base, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	d := harness.Start(t)
	first := newBox(t, d, nil)
	snap := first.snapshot("s", "memory")
	first.verb("delete")
	begin := time.Now()
	var next, steps, accepted, refused, failed atomic.Int64
	var lanes sync.WaitGroup
	for lane := range 4 {
		lanes.Go(func() {
			rng := rand.New(rand.NewPCG(base, uint64(lane)))
			var o *overHTTP
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				var h *linear.History
				if i%8 == 0 { // from the create to the delete
					h = wholeLife(t, d, rng)
				} else {
					if o == nil {
						o = historyOf(newBox(t, d, map[string]any{"snapshot": snap}))
					}
					var ok bool
					if h, ok = chapter(t, o, snap, rng); !ok {
						o = nil
					}
				}
				a, r, f := h.Count()
				steps.Add(int64(h.Steps()))
				accepted.Add(int64(a))
				refused.Add(int64(r))
				failed.Add(int64(f))
			}
			if o != nil {
				o.do("DELETE", o.path(""), nil)
			}
		})
	}
	lanes.Wait()
	t.Logf("LINEAR_SEED=%d: %d histories of %d steps: %d verbs accepted, %d refused, %d operations failed, in %.1f s (load %s)",
		base, n, steps.Load(), accepted.Load(), refused.Load(), failed.Load(), time.Since(begin).Seconds(), load())
}

// wholeLife is a history from a create to a delete, with deletes in between.
func wholeLife(t *testing.T, d *harness.Daemon, rng *rand.Rand) *linear.History {
	o := historyOf(box{caller: caller{t: t, url: d.URL, key: d.Key}, d: d})
	plan := linear.Plan{Clients: 2, Calls: 4, Verbs: append([]string{"delete"}, livelyVerbs...), Pause: 200 * time.Millisecond}
	h, err := linear.Run(context.Background(), o, plan, rng)
	judge(t, h, err)
	o.orphans()
	return h
}

// chapter is a history of a sandbox that lives on; false where it doesn't.
func chapter(t *testing.T, o *overHTTP, snap string, rng *rand.Rand) (*linear.History, bool) {
	ctx := context.Background()
	h := linear.Begun(snap)
	plan := linear.Plan{Clients: 2 + rng.IntN(2), Calls: 3 + rng.IntN(2), Verbs: livelyVerbs, Pause: 100 * time.Millisecond}
	err := h.Play(ctx, o, plan, rng)
	o.orphans()
	home := o.home(h, snap) && !h.Crashed()
	h.Settle(ctx, o)
	judge(t, h, err)
	return h, home
}

func judge(t *testing.T, h *linear.History, err error) {
	t.Helper()
	if err == nil {
		err = h.Check(time.Minute)
	}
	if err != nil {
		t.Errorf("%v", err)
	}
}
