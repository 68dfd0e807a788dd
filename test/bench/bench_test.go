package bench

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/test/harness"
)

const (
	rounds = 5
	output = 200_000_000
	quota  = 256 << 20 // of a session's log
)

func TestBench(t *testing.T) {
	harness.Bin(t)
	f := newFixture(t)
	var u syscall.Utsname
	_ = syscall.Uname(&u) // only shown
	fmt.Printf("%d CPUs, Linux %s, %s, load at the start %s\n", runtime.NumCPU(), text(u.Release[:]), runtime.Version(), loadavg())
	for _, b := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"roundtrip", f.roundTrip},
		{"output", f.output},
		{"streams", f.streams},
		{"sleeper", f.sleeper},
		{"overflow", f.overflow},
		{"files", f.files},
		{"memory", f.memory},
		{"fifty", f.fifty},
		{"lifecycle", f.lifecycle},
		{"pausing", f.pausing},
	} {
		t.Run(b.name, b.run)
	}
	printRows()
}

func text(b []int8) string {
	var s strings.Builder
	for _, c := range b {
		if c == 0 {
			break
		}
		s.WriteByte(byte(c))
	}
	return s.String()
}

// fifty makes 50 sandboxes at once, each of which runs a command.
func (f *fixture) fifty(t *testing.T) {
	const n = 50
	ours := func() float64 {
		ids := make([]string, n)
		start := time.Now()
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				a, err := f.c.CreateSandbox(context.Background(), f.request())
				if err == nil {
					ids[i] = a.Sandbox.Id
					_, err = f.c.Wait(context.Background(), a.Operation.Id, nil)
				}
				if err != nil {
					t.Errorf("sandbox %d of %d: %v", i, n, err)
					return
				}
				r, err := f.c.Exec(context.Background(), ids[i], api.ExecRequest{Args: []string{"/bin/work"}})
				if err != nil || r.Exit == nil || r.Exit.Code != 0 {
					t.Errorf("command in sandbox %d of %d: %+v, %v", i, n, r, err)
				}
			})
		}
		wg.Wait()
		took := time.Since(start).Seconds()
		f.remove(t, ids)
		return took
	}
	floor := func() float64 {
		boxes := make([]*box, n)
		start := time.Now()
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() {
				x, err := f.b.create(context.Background())
				boxes[i] = x
				if err == nil {
					_, err = x.run(context.Background(), "/bin/work")
				}
				if err != nil {
					t.Errorf("bare machine %d of %d: %v", i, n, err)
				}
			})
		}
		wg.Wait()
		took := time.Since(start).Seconds()
		discardAll(boxes)
		return took
	}
	report(t, "50 created at once, each runs a command", "s", "s, bare engine", 1.3, measure(rounds, ours, floor))
}

// roundTrip runs a command that ends at once in a sandbox that lives.
func (f *fixture) roundTrip(t *testing.T) {
	id := f.sandboxes(t, 1)[0]
	x := f.bares(t, 1, func(ctx context.Context) (*box, error) { return f.b.create(ctx) })[0]
	ours := func() float64 {
		start := time.Now()
		f.exec(t, id, "/bin/work")
		return ms(start)
	}
	floor := func() float64 {
		start := time.Now()
		x.must(t, "/bin/work")
		return ms(start)
	}
	ours()
	floor()
	report(t, "round trip of a command on a live sandbox", "ms", "ms, guest's connection", 0, measure(51, ours, floor))
}

// output moves 200 MB out of a sandbox.
func (f *fixture) output(t *testing.T) {
	id := f.sandboxes(t, 1)[0]
	x := f.bares(t, 1, func(ctx context.Context) (*box, error) { return f.b.create(ctx) })[0]
	n := strconv.Itoa(output)
	rate := func(run func() int64) func() float64 {
		return func() float64 {
			start := time.Now()
			if got := run(); got != output {
				t.Errorf("%d bytes of %d arrived", got, output)
			}
			return time.Since(start).Seconds()
		}
	}
	octets := rate(func() int64 { return f.octets(t, id, "/bin/work", "spew", n).stdout })
	sse := rate(func() int64 { return f.sse(t, id, "/bin/work", "spew", n) })
	guest := rate(func() int64 { return x.must(t, "/bin/work", "spew", n).stdout })
	pipe := rate(func() int64 { return f.pipe(t, n) })
	octets()
	guest()
	report(t, "200 MB of output through the octet stream", "s", "s, guest's connection", 0, measure(rounds, octets, guest))
	report(t, "200 MB of output through server-sent events", "s", "s, guest's connection", 0, measure(rounds, sse, guest))
	report(t, "200 MB over the guest's connection", "s", "s, a pipe of the host", 0, measure(rounds, guest, pipe))
}

// pipe runs the command on the host and reads its output from a pipe.
func (f *fixture) pipe(t *testing.T, n string) int64 {
	cmd := exec.Command(f.work, "spew", n)
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, out, make([]byte, 64<<10))
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// streams moves output of five commands at once.
func (f *fixture) streams(t *testing.T) {
	const each, n = output / 4, 5
	ids := f.sandboxes(t, n)
	boxes := f.bares(t, n, func(ctx context.Context) (*box, error) { return f.b.create(ctx) })
	all := func(one func(i int) int64) func() float64 {
		return func() float64 {
			start := time.Now()
			var wg sync.WaitGroup
			for i := range n {
				wg.Go(func() {
					if got := one(i); got != each {
						t.Errorf("%d bytes of %d arrived", got, each)
					}
				})
			}
			wg.Wait()
			return time.Since(start).Seconds()
		}
	}
	size := strconv.Itoa(each)
	ours := func(sandbox func(i int) string) func() float64 {
		return all(func(i int) int64 { return f.octets(t, sandbox(i), "/bin/work", "spew", size).stdout })
	}
	floor := func(machine func(i int) *box) func() float64 {
		return all(func(i int) int64 { return machine(i).must(t, "/bin/work", "spew", size).stdout })
	}
	one := measure(rounds, ours(func(int) string { return ids[0] }), floor(func(int) *box { return boxes[0] }))
	report(t, "5 streams of 50 MB at once from one sandbox", "s", "s, guest's connection", 0, one)
	five := measure(rounds, ours(func(i int) string { return ids[i] }), floor(func(i int) *box { return boxes[i] }))
	report(t, "5 streams of 50 MB at once from five sandboxes", "s", "s, guests' connections", 0, five)
	for name, p := range map[string]pairs{"one sandbox": one, "five sandboxes": five} {
		rate := each / 1e6 / median(p.ours)
		// From the request to the exit; what is demanded while they stream is
		// measured by TestStreamsOutliveTheDaemon of test/e2e.
		fmt.Printf("5 streams at once, %s: %.1f MB/s each, %.0f MB/s in all\n", name, rate, n*rate)
	}
}

// sleeper writes 200 MB while the only reader sleeps, beside no reader.
func (f *fixture) sleeper(t *testing.T) {
	id := f.sandboxes(t, 1)[0]
	n := strconv.Itoa(output)
	alone := func() float64 {
		s := f.session(t, id, "/bin/work", "spew", n)
		if _, err := s.Start(context.Background()); err != nil {
			t.Fatal(err)
		}
		f.await(t, s)
		// The two pipes are read each for itself, so that the end of stdout may
		// come after what was written to stderr last.
		return inside(t, drain(t, s.Follow(client.StreamOptions{Offset: output - 4*mib}), false).stderr)
	}
	asleep := func() float64 {
		s := f.session(t, id, "/bin/work", "spew", n)
		st := s.Attach(client.StreamOptions{})
		if _, err := st.Next(context.Background()); err != nil { // it is there, and reads no more
			t.Fatal(err)
		}
		f.await(t, s)
		l := drain(t, st, true)
		if l.stdout != output || l.wrong >= 0 || len(l.gaps) != 0 {
			t.Errorf("the reader that slept got %d bytes of %d, gaps %v, wrong from %d on", l.stdout, output, l.gaps, l.wrong)
		}
		return inside(t, l.stderr)
	}
	alone()
	report(t, "200 MB of output while the reader sleeps (the command's own time)", "ms", "ms, no reader", 1.2, measure(rounds, asleep, alone))
}

// await waits until a session's command has ended, without reading its log.
func (f *fixture) await(t *testing.T, s *client.Session) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		info, err := s.Get(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if info.Exit != nil {
			return
		}
	}
	t.Fatal("the command does not end")
}

// overflow writes three times the log's quota: a late reader is told exactly
// what is gone and gets all the rest.
func (f *fixture) overflow(t *testing.T) {
	const total = 3 * quota
	id := f.sandboxes(t, 1)[0]
	s := f.session(t, id, "/bin/work", "spew", strconv.Itoa(total))
	if _, err := s.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	f.await(t, s)
	l := drain(t, s.Follow(client.StreamOptions{}), true)
	gone := int64(0)
	for _, g := range l.gaps {
		gone += g.To - g.Offset
	}
	if len(l.gaps) != 1 || l.gaps[0].Offset != 0 || gone+l.stdout != total || l.wrong >= 0 || l.stdout < quota/2 || l.stdout > quota {
		t.Errorf("of %d bytes a late reader is told %d gone (%v) and gets %d, wrong from %d on", total, gone, l.gaps, l.stdout, l.wrong)
	}
	fmt.Printf("at 3 x the quota a late reader is told that [0, %d) is gone and gets the other %d bytes, each right\n", gone, l.stdout)
}

// files reads 10 000 small files of the template, beside the same files in a
// directory of the host that the gofer serves. Everything is in the page cache,
// and each side has read its files once before.
func (f *fixture) files(t *testing.T) {
	id := f.sandboxes(t, 1)[0]
	x := f.bares(t, 1, func(ctx context.Context) (*box, error) {
		return f.b.create(ctx, enginerpc.Bind{Source: f.tree, Target: "/gofer"})
	})[0]
	ours := func() float64 {
		r := f.exec(t, id, "/bin/work", "read", "/tree")
		if got := strings.Fields(string(r.Stdout)); len(got) != 2 || got[0] != strconv.Itoa(treeDirs*treeFiles) {
			t.Fatalf("read %q", r.Stdout)
		}
		return inside(t, r.Stderr)
	}
	floor := func() float64 { return inside(t, x.must(t, "/bin/work", "read", "/gofer").stderr) }
	ours()
	floor()
	report(t, "10 000 small files of the template read inside (warm)", "ms", "ms, through a gofer directory", 0.6, measure(2*rounds+1, ours, floor))
}

// memory looks at 20 idle sandboxes, and at as many bare machines whose PID 1
// sleeps.
func (f *fixture) memory(t *testing.T) {
	const n = 20
	settle := 10 * time.Second // the guest's runtime gives back what start-up took
	parent := "/" + f.parent(t)
	var ours, floor []float64
	t.Run("ours", func(t *testing.T) {
		var groups []string
		for _, id := range f.sandboxes(t, n) {
			groups = append(groups, filepath.Join(parent, id))
		}
		time.Sleep(settle)
		ours = f.pssOf(t, groups)
	})
	t.Run("floor", func(t *testing.T) {
		var groups []string
		for _, x := range f.bares(t, n, f.b.createIdle) {
			groups = append(groups, f.b.group(x.id))
		}
		time.Sleep(settle)
		floor = f.pssOf(t, groups)
	})
	report(t, "memory of an idle sandbox, 20 at once (PSS)", "MiB", "MiB, bare engine, PID 1 sleeps", 0, pairs{ours, floor})
	fmt.Printf("the daemon itself: %.1f MiB\n", pss(t, []int{f.d.Pid()}))
}

// parent is the cgroup of the daemon's sandboxes.
func (f *fixture) parent(t *testing.T) string {
	t.Helper()
	id := f.sandboxes(t, 1)[0]
	found, err := filepath.Glob(filepath.Join("/sys/fs/cgroup", "*", "cloche-*", id))
	if v2, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", "cloche-*", id)); err == nil {
		found = append(found, v2...)
	}
	if len(found) == 0 {
		t.Fatalf("the cgroup of %s was not found: %v", id, err)
	}
	return filepath.Base(filepath.Dir(found[0]))
}

// pssOf is the memory of each cgroup's processes in MiB, sorted.
func (f *fixture) pssOf(t *testing.T, groups []string) []float64 {
	t.Helper()
	var all []float64
	for _, g := range groups {
		pids, err := f.b.tree.Group(g).Procs()
		if err != nil || len(pids) == 0 {
			t.Fatalf("processes of %s: %v, %v", g, pids, err)
		}
		all = append(all, pss(t, pids))
	}
	slices.Sort(all)
	return all
}

func pss(t *testing.T, pids []int) float64 {
	t.Helper()
	var kib float64
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
				n, err := strconv.ParseFloat(strings.Fields(rest)[0], 64)
				if err != nil {
					t.Fatal(err)
				}
				kib += n
			}
		}
	}
	return kib / 1024
}
