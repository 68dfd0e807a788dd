package e2e

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/test/harness"
)

// TestManySuspended keeps 40 suspended sandboxes (1000 at full length) on one
// host: the daemon starts within 2 s, grows little, lists a page quickly, and what
// is restored at random is what was suspended.
func TestManySuspended(t *testing.T) {
	n, back := atFull(1000, 40), atFull(20, 5)
	d := harness.Start(t)
	b := newBox(t, d, map[string]any{"resources": map[string]int{"memory_mib": 128, "disk_mib": 64}})
	b.hold(1<<20, "/etc/ssl")
	hash := b.script(askHolder)
	begin := time.Now()
	var ids []string
	for len(ids) < n {
		var f api.Forked
		b.want(202, &f, "POST", b.path("/fork"), map[string]any{"count": min(20, n-len(ids))})
		b.done(f.Operation.Id)
		var ops []string
		for _, c := range f.Children {
			k := b.other(c.Sandbox.Id)
			k.done(c.Operation.Id)
			k.script("echo " + k.id + " > /srv/id")
			ops = append(ops, k.ask("suspend", "", false).answer(t).Operation.Id)
			ids = append(ids, k.id)
		}
		for _, op := range ops {
			b.done(op)
		}
	}
	b.verb("delete")
	t.Logf("%d sandboxes forked and suspended in %.1f s (load %s)", n, time.Since(begin).Seconds(), load())
	d.Stop()
	begin = time.Now()
	d.Serve()
	start := time.Since(begin)
	if start > 2*time.Second {
		t.Errorf("the daemon took %v to start with %d suspended sandboxes", start, n)
	}
	var page api.SandboxList
	var took []time.Duration
	for range 10 {
		begin = time.Now()
		b.want(200, &page, "GET", "/v1/sandboxes?limit=100", nil)
		took = append(took, time.Since(begin))
	}
	if len(page.Items) != min(100, n) {
		t.Errorf("the page has %d rows", len(page.Items))
	}
	best := took[0]
	for _, v := range took {
		best = min(best, v)
	}
	if best > 50*time.Millisecond {
		t.Errorf("a page of 100 took %v", took)
	}
	full := d.Usage().RSS
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	for _, id := range ids[:back] {
		k := b.other(id)
		k.verb("restore")
		if got := k.script(askHolder + "; cat /srv/id"); strings.TrimSuffix(got, id) == got || !strings.HasPrefix(got, hash) {
			t.Errorf("%s was restored as %q, and was %s", id, got, hash)
		}
	}
	var all []api.AcceptedSandbox
	for _, id := range ids {
		all = append(all, api.AcceptedSandbox{Sandbox: api.Sandbox{Id: id}})
	}
	b.deleteAll(all)
	d.Stop()
	d.Serve()
	b.want(200, &page, "GET", "/v1/sandboxes?limit=100", nil)
	empty := d.Usage().RSS
	t.Logf("start %v; a page of 100 rows %v at best; RSS %s with them and %s without", start.Round(time.Millisecond), best.Round(100*time.Microsecond), mib(full), mib(empty))
	if grown := full - empty; grown > 50<<20 {
		t.Errorf("the daemon's RSS is %s larger with %d suspended sandboxes", mib(grown), n)
	}
}

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
