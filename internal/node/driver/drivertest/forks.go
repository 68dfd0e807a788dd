package drivertest

import (
	"crypto/sha256"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

var forkClauses = []Clause{
	{"frozen", "From Freeze to the next setup none of the users' processes runs, in a machine that has a kernel of its own; nothing else is cut.", func(b *bench) {
		x := b.box()
		session, r := x.background(as("user", "ticks", "100000", "1"), "tick 3")
		frozen := x.freeze()
		if frozen != b.d.Traits().OwnKernel {
			b.Fatalf("Freeze says %v", frozen)
		}
		before := x.produced(session)
		stands := func() bool { // what was in the pipe is told yet
			was := before
			before = x.produced(session)
			return before == was
		}
		if frozen && !b.eventually(time.Second, stands) {
			b.Errorf("a frozen process goes on")
		}
		time.Sleep(b.h.slowly(50 * time.Millisecond))
		if after := x.produced(session); frozen && after != before {
			b.Errorf("%d bytes were written by a frozen process", after-before)
		}
		x.reconnect()
		x.advances(session, r)
		b.want("the host name", x.root("hostname"), "box")
	}},
	{"fork-random", "No two machines of one image read the same from the kernel's generator, from the first instant on.", func(b *bench) {
		f := b.fork(3)
		if shared := f.shared(); shared != "" {
			b.Errorf("%s", shared)
		}
	}},
}

// freeze has the guest hold its processes still, and tells whether it did.
func (x *box) freeze() bool {
	x.b.Helper()
	resp, err := x.client().Freeze(x.b.ctx, connect.NewRequest(new(guestv1.FreezeRequest)))
	if err != nil {
		x.b.Fatalf("freeze: %v", err)
	}
	return resp.Msg.GetFrozen()
}

// produced is how much a session has written so far.
func (x *box) produced(session string) uint64 {
	x.b.Helper()
	resp, err := x.client().Sessions(x.b.ctx, connect.NewRequest(new(guestv1.SessionsRequest)))
	if err != nil {
		x.b.Fatalf("sessions: %v", err)
	}
	for _, s := range resp.Msg.GetSessions() {
		if s.GetSession() == session {
			return s.GetProduced()
		}
	}
	x.b.Fatalf("there is no session %s", session)
	return 0
}

// setupOf is the setup of a machine's generation.
func setupOf(generation uint64) *guestv1.SetupRequest {
	digit := fmt.Sprintf("%x", generation%16)
	return &guestv1.SetupRequest{
		Hostname: "box" + strconv.FormatUint(generation, 10), Generation: generation, MachineId: strings.Repeat(digit, 32),
		BootId: strings.ReplaceAll("dddddddd-dddd-4ddd-8ddd-dddddddddddd", "d", digit), Restored: generation > 1,
	}
}

// forked are machines of one image.
type forked struct {
	b       *bench
	boxes   []*box
	values  [][]string // what each of them read first
	session string     // a counter
	counted []*result
	tree    string // a hash
}

// reads is how many values of each child are compared.
const reads = 40

// fork makes an image of a machine with a process that reads the generator all
// the time, and n machines of it. Each stands still as soon as it has read.
func (b *bench) fork(n int) *forked {
	b.Helper()
	x, err := b.boxOf(b.bare(), setupOf(1))
	if err != nil {
		b.Fatalf("the guest did not come: %v", err)
	}
	f := &forked{b: b, tree: x.hashes()}
	ticks, counted := x.background(as("root", "ticks", "1000000", "20"), "tick 3")
	f.session = ticks
	random, r := x.background(as("user", "randoms", "2"), "g1 ")
	x.root("reseed")
	image := x.snapshot(sandbox.SnapshotMemory)
	x.pause()
	for i := range n {
		y := x.restore(image, setupOf(uint64(i)+2))
		copied, label := &result{offset: r.offset}, fmt.Sprintf("g%d ", i+2)
		y.follow(random, copied, func() bool { return strings.Count(copied.out.String(), label) >= reads })
		y.pause()
		f.boxes = append(f.boxes, y)
		f.values = append(f.values, labelled(copied.out.String(), label))
		c := &result{offset: counted.offset}
		c.out.Write(counted.out.Bytes())
		f.counted = append(f.counted, c)
	}
	return f
}

// labelled returns the whole lines with a label, without it.
func labelled(text, label string) (values []string) {
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, label); ok && strings.HasSuffix(v, "\n") {
			values = append(values, strings.TrimSpace(v))
		}
	}
	return values
}

// shared tells what two of the children have both read, "" where nothing is.
func (f *forked) shared() string {
	of, count, example := map[string]int{}, 0, ""
	for i, values := range f.values {
		for _, v := range values {
			if j, ok := of[v]; ok {
				count++
				example = fmt.Sprintf("children %d and %d read %s", j, i, v)
			}
			of[v] = i
		}
	}
	if count == 0 {
		return ""
	}
	return fmt.Sprintf("%d values were read twice: %s", count, example)
}

// hashes is a hash of all that the image has, and what it says of them.
func (x *box) hashes() string {
	x.b.Helper()
	return fmt.Sprintf("%x", sha256.Sum256([]byte(x.root("tree", "/data"))))
}

// whole lets all children go on, and looks whether each is whole and itself.
func (f *forked) whole() {
	f.b.Helper()
	for i, y := range f.boxes {
		y.resume()
		y.advances(f.session, f.counted[i])
		s := setupOf(uint64(i) + 2)
		f.b.want("the host name", y.root("hostname"), s.GetHostname())
		f.b.want("the machine id", y.root("cat", machineIDFile), s.GetMachineId()+"\n")
		f.b.want("the boot id", y.root("cat", bootIDFile), s.GetBootId()+"\n")
		f.b.want("the hash of the files", y.hashes(), f.tree)
		y.pause()
	}
}

// Forks makes n machines of one image: they are whole, differ in what is theirs,
// and share nothing of the generator.
func Forks(t *testing.T, h Harness, n int) {
	err := check(t, h, Clause{Name: "forks", test: func(b *bench) {
		f := b.fork(n)
		if shared := f.shared(); shared != "" {
			b.Errorf("%s", shared)
		}
		f.whole()
		b.Logf("%d machines of one image: %d values of the generator, none of them twice; hashes equal (%.12s), counters without a gap", n, n*reads, f.tree)
	}})
	if err != nil {
		t.Errorf("what it left: %v", err)
	}
}

// UnseededForks makes n machines of one image whose guests are not reseeded,
// some times: at least once two must share what they read.
func UnseededForks(t *testing.T, h Harness, n, tries int) {
	h = h.with(Fault{Name: "no_reseed", guest: true}, true)
	caught := 0
	for range tries {
		err := check(t, h, Clause{Name: "forks", test: func(b *bench) {
			if shared := b.fork(n).shared(); shared != "" {
				b.Logf("not reseeded: %s", shared)
				caught++
			}
		}})
		if err != nil {
			t.Errorf("what it left: %v", err)
		}
		if caught > 0 || t.Failed() {
			break
		}
	}
	if caught == 0 {
		t.Errorf("in %d tries no two of %d machines that were not reseeded read the same", tries, n)
	}
}

// Cycles suspends and restores a machine, n times.
func Cycles(t *testing.T, h Harness, n int) {
	err := check(t, h, Clause{Name: "cycles", test: func(b *bench) {
		x := b.box()
		tree := x.hashes()
		session, r := x.background(as("root", "ticks", "1000000", "5"), "tick 3")
		x.root("write", "/run/volatile", "in memory")
		began := time.Now()
		for i := range n {
			x = x.suspended()
			x.advances(session, r)
			b.want("the hash of the files", x.hashes(), tree)
			b.want("a file in memory", x.root("cat", "/run/volatile"), "in memory")
			if i == n-1 {
				b.Logf("%d cycles of suspend and restore in %v: hashes equal (%.12s), %d ticks without a gap", n,
					time.Since(began).Round(time.Millisecond), tree, strings.Count(r.out.String(), "\n"))
			}
		}
	}})
	if err != nil {
		t.Errorf("what it left: %v", err)
	}
}

// suspended suspends a machine as a node does, and restores it.
func (x *box) suspended() *box {
	x.b.Helper()
	x.freeze()
	x.link.Close()
	x.pause()
	image := x.snapshot(sandbox.SnapshotMemory)
	x.b.discard(x.m.ID())
	y := x.restore(image, nil)
	x.b.drop(image.Dir)
	return y
}
