package firecracker

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/guestlink"
	"cloche.dev/cloche/internal/sandbox"
)

// TestSteps says where the time of a restore goes, and the processor's, our own
// and that of the jailer. It fails nothing.
func TestSteps(t *testing.T) {
	f := newFixture(t)
	if !boots() {
		t.Skip("SKIP: no guest gets anywhere here")
	}
	m := f.create()
	key := guestapi.NewKey()
	ready := func(m *machine, welcomed bool) {
		l := guestlink.Start(guestlink.Config{Listen: m.Guest, Key: key, Welcomed: welcomed, Epoch: 1, Setup: &guestv1.SetupRequest{Hostname: "box", Generation: 1}})
		defer l.Close()
		ctx, cancel := context.WithTimeout(context.Background(), patience())
		defer cancel()
		if err := l.Ready(ctx); err != nil {
			t.Fatal(err)
		}
	}
	ready(m, false)
	image := f.snapshot(m, sandbox.SnapshotMemory)
	f.rest(m)
	walls, selfs := map[string][]time.Duration{}, map[string][]time.Duration{}
	var order []string
	var whole, kids []time.Duration
	for range 10 {
		s := f.spec()
		last, cpu := time.Now(), spent(syscall.RUSAGE_SELF)
		note := func(step string) {
			now, used := time.Now(), spent(syscall.RUSAGE_SELF)
			if !slices.Contains(order, step) {
				order = append(order, step)
			}
			walls[step], selfs[step] = append(walls[step], now.Sub(last)), append(selfs[step], used-cpu)
			last, cpu = now, used
		}
		f.d.test.at = note
		began, children := last, spent(syscall.RUSAGE_CHILDREN)
		y, err := f.d.Restore(f.ctx(), s, image)
		if err != nil {
			t.Fatal(err)
		}
		note("returned")
		ready(y.(*machine), true)
		note("hello")
		whole, kids = append(whole, time.Since(began)), append(kids, spent(syscall.RUSAGE_CHILDREN)-children)
		f.d.test.at = nil
		if err := f.d.Discard(f.ctx(), y.ID()); err != nil {
			t.Fatal(err)
		}
	}
	for _, step := range order {
		t.Logf("%-18s %6d ms, %6d ms of CPU here", step, median(walls[step]).Milliseconds(), median(selfs[step]).Milliseconds())
	}
	t.Logf("whole %d ms %v, jailer's CPU %d ms", median(whole).Milliseconds(), whole, median(kids).Milliseconds())
	for _, name := range []string{"mem", "disk", "state"} {
		if st, err := os.Stat(filepath.Join(image.Dir, name)); err == nil {
			t.Logf("%s %d bytes, %d in blocks", name, st.Size(), st.Sys().(*syscall.Stat_t).Blocks*512)
		}
	}
}

func spent(who int) time.Duration {
	var r syscall.Rusage
	_ = syscall.Getrusage(who, &r)
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}
