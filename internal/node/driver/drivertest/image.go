package drivertest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

var pauseClauses = []Clause{
	{"pause", "A paused machine's processes stand still, and go on where they stood when it is resumed; both are idempotent.", pauseStandsStill},
	{"pause-link", "Pausing cuts no connection of the agent.", func(b *bench) {
		x := b.box()
		before, _ := x.link.Generation()
		x.pause()
		time.Sleep(100 * time.Millisecond)
		x.resume()
		b.want("the host name", x.root("hostname"), "box")
		if after, _ := x.link.Generation(); after != before {
			b.Errorf("the agent dialled again: %d connections before, %d after", before, after)
		}
	}},
	{"pause-adopt", "A paused machine stays paused when the daemon ends, and is adopted as that.", func(b *bench) {
		x := b.box()
		session, r := x.background(as("root", "ticks", "100000", "1"), "tick 3")
		x.pause()
		x.readopt()
		if paused, err := x.m.Paused(b.ctx); err != nil || !paused {
			b.Fatalf("Paused = %v, %v", paused, err)
		}
		x.resume()
		x.advances(session, r)
	}},
	{"pause-kill", "A paused machine can be killed, and discarded.", func(b *bench) {
		for _, discard := range []bool{false, true} {
			x := b.box()
			x.pause()
			if discard {
				x.link.Close()
				b.discard(x.m.ID())
				b.nothingLeft(x.m.ID())
				continue
			}
			b.kill(x.m)
			b.ended(x.m)
		}
	}},
}

func pauseStandsStill(b *bench) {
	x := b.box()
	session, r := x.background(as("root", "ticks", "100000", "1"), "tick 3")
	for range 2 {
		x.pause()
	}
	if paused, err := x.m.Paused(b.ctx); err != nil || !paused {
		b.Errorf("Paused = %v, %v", paused, err)
	}
	used := b.stats(x.m).CPU
	time.Sleep(500 * time.Millisecond)
	if more := b.stats(x.m).CPU - used; more > 50*time.Millisecond {
		b.Errorf("it used %v of CPU in half a second while it was paused", more)
	}
	for range 2 {
		x.resume()
	}
	if paused, err := x.m.Paused(b.ctx); err != nil || paused {
		b.Errorf("Paused after Resume = %v, %v", paused, err)
	}
	x.advances(session, r)
}

// advances follows a session of "ticks" for some more and checks that no tick
// is missing or doubled.
func (x *box) advances(session string, r *result) {
	x.b.Helper()
	next := strings.Count(r.out.String(), "\n") + 20
	x.follow(session, r, func() bool { return strings.Contains(r.out.String(), fmt.Sprintf("tick %d\n", next)) })
	for i, line := range strings.Split(strings.TrimSpace(r.out.String()), "\n") {
		if want := "tick " + strconv.Itoa(i); line != want {
			x.b.Fatalf("line %d is %q, not %q", i, line, want)
		}
	}
}

func (x *box) pause() {
	x.b.Helper()
	if err := x.m.Pause(x.b.ctx); err != nil {
		x.b.Fatalf("pause: %v", err)
	}
}

func (x *box) resume() {
	x.b.Helper()
	if err := x.m.Resume(x.b.ctx); err != nil {
		x.b.Fatalf("resume: %v", err)
	}
}

// readopt ends the driver and takes the machine up with another.
func (x *box) readopt() {
	x.b.Helper()
	x.b.restart()
	m, err := x.b.d.Adopt(x.b.ctx, x.m.ID())
	if err != nil {
		x.b.Fatalf("adopt: %v", err)
	}
	x.m = m
	if paused, err := m.Paused(x.b.ctx); err != nil || paused {
		x.listen() // its agent can't come before it is resumed
		return
	}
	if err := x.connect(true, nil); err != nil {
		x.b.Fatalf("the agent did not come back: %v", err)
	}
}

// snapshot takes an image as a node does. Of a memory image what runs is frozen,
// the connections are closed first and a new hello is awaited; for a disk image
// the guest is asked to sync where it caches. A machine that is paused can't be
// asked for anything.
func (x *box) snapshot(kind sandbox.SnapshotKind) driver.Image {
	x.b.Helper()
	dir, err := os.MkdirTemp("", "cloche-image-")
	if err != nil {
		x.b.Fatalf("%v", err)
	}
	x.b.mu.Lock()
	x.b.dirs = append(x.b.dirs, dir)
	x.b.mu.Unlock()
	memory := kind == sandbox.SnapshotMemory
	paused, err := x.m.Paused(x.b.ctx)
	if err != nil {
		x.b.Fatalf("paused: %v", err)
	}
	if memory {
		if !paused {
			x.freeze()
		}
		x.link.Close()
	} else if !paused && x.b.d.Traits().CachesDisk {
		x.sync()
	}
	image, err := x.m.Snapshot(x.b.ctx, dir, kind)
	if err != nil {
		x.b.Fatalf("snapshot: %v", err)
	}
	if image.Dir != dir || image.Kind != kind || image.Needs.Driver != x.b.h.Name || image.Stood <= 0 {
		x.b.Errorf("the image is %+v", image)
	}
	if now, err := x.m.Paused(x.b.ctx); err != nil || now != paused {
		x.b.Errorf("Paused was %v before and is %v (%v) after", paused, now, err)
	}
	if memory && !paused {
		if err := x.connect(true, nil); err != nil {
			x.b.Fatalf("the agent did not come back after the snapshot: %v", err)
		}
	}
	return image
}

// sync has the guest write to its disk what it keeps in memory.
func (x *box) sync() {
	x.b.Helper()
	ctx, cancel := x.b.within(x.b.patience())
	defer cancel()
	if _, err := x.client().Sync(ctx, connect.NewRequest(&guestv1.SyncRequest{})); err != nil {
		x.b.Fatalf("sync: %v", err)
	}
}

// restore makes a machine from an image of x and waits for its guest.
func (x *box) restore(image driver.Image, setup *guestv1.SetupRequest, change ...func(*driver.Spec)) *box {
	x.b.Helper()
	y, err := x.tryRestore(image, setup, change...)
	if err != nil {
		x.b.Fatalf("restore: %v", err)
	}
	return y
}

func (x *box) tryRestore(image driver.Image, setup *guestv1.SetupRequest, change ...func(*driver.Spec)) (*box, error) {
	spec, err := x.b.newSpec(sandbox.NewID(sandbox.KindSandbox), change...)
	if err != nil {
		return nil, err
	}
	m, err := x.b.d.Restore(x.b.ctx, spec, image)
	if err != nil {
		return nil, err
	}
	if image.Kind == sandbox.SnapshotDisk {
		return x.b.boxOf(m, setup)
	}
	y := &box{b: x.b, m: m, key: x.key}
	return y, y.connect(true, setup)
}

var memoryClauses = []Clause{
	{"snapshot-goes-on", "A machine goes on after a memory snapshot: its processes as if nothing had been, its agent dials again.", func(b *bench) {
		x := b.box()
		session, r := x.background(as("root", "ticks", "100000", "1"), "tick 3")
		x.snapshot(sandbox.SnapshotMemory)
		x.advances(session, r)
		x.snapshot(sandbox.SnapshotMemory)
		x.advances(session, r)
	}},
	{"snapshot-cut", "However close to a snapshot the host closes its connections, the agent dials again, also when one fails in between.", func(b *bench) {
		x := b.box()
		for range 15 {
			b.drop(x.snapshot(sandbox.SnapshotMemory).Dir) // closes the link and takes the image at once; there is no room for 15
			x.link.Close()
			if _, err := x.m.Snapshot(b.ctx, "/nowhere", sandbox.SnapshotMemory); err == nil {
				b.Fatalf("an image was written to nowhere")
			}
			if err := x.connect(true, nil); err != nil {
				b.Fatalf("the agent did not come back: %v", err)
			}
		}
		b.want("the host name", x.root("hostname"), "box")
	}},
	{"restore", "A machine made from a memory image goes on where that stood: processes with their numbers, output, files, memory.", restoreGoesOn},
	{"restore-paused", "The image of a paused machine runs when it is restored; the machine itself stays paused.", func(b *bench) {
		x := b.box()
		session, r := x.background(as("root", "ticks", "100000", "1"), "tick 3")
		x.pause()
		image := x.snapshot(sandbox.SnapshotMemory)
		copied := result{offset: r.offset}
		copied.out.Write(r.out.Bytes())
		x.restore(image, nil).advances(session, &copied)
		x.listen()
		x.resume()
		x.advances(session, r)
	}},
	{"restore-again", "An image can be restored many times, at once, and a restored machine can be snapshotted again.", restoreMany},
	{"restore-bounds", "A restored machine has the disk quota and the memory of the one before.", func(b *bench) {
		x := b.box(func(s *driver.Spec) { s.Resources.DiskMiB = 32 })
		before := x.root("memory")
		y := x.restore(x.snapshot(sandbox.SnapshotMemory), nil, func(s *driver.Spec) { s.Resources.DiskMiB = 32 })
		b.want("the memory that the guest sees", y.root("memory"), before)
		if said := y.root("fill", "/big", "64"); !strings.HasPrefix(said, "full ") {
			b.Errorf("64 MiB went onto a disk of 32: %q", said)
		}
	}},
	{"restore-identity", "A restored machine has the name, the machine id, the boot id and the generation that its setup gives it.", restoreIdentity},
	{"restore-damaged", "A damaged image is refused or its machine ends, and nothing is left.", func(b *bench) {
		x := b.box()
		image := x.snapshot(sandbox.SnapshotMemory)
		damage := b.h.Damage
		if damage == nil {
			damage = halve
		}
		if err := damage(image.Dir); err != nil {
			b.Fatalf("damage the image: %v", err)
		}
		y, err := x.tryRestore(image, nil)
		if err == nil {
			b.Errorf("a machine came of half an image: %s", y.m.ID())
		}
		for _, id := range b.ids[1:] {
			if err != nil && y == nil {
				b.nothingLeft(id)
			}
		}
	}},
	{"restore-needs", "What an image needs and the host lacks is named: another driver, engine or processor.", func(b *bench) {
		x := b.box()
		needs := x.snapshot(sandbox.SnapshotMemory).Needs
		if err := b.d.Missing(needs); err != nil {
			b.Errorf("Missing on the host where it was taken = %v", err)
		}
		for code, change := range map[string]func(*sandbox.Needs){
			"needs_driver": func(n *sandbox.Needs) { n.Driver = "other" },
			"needs_engine": func(n *sandbox.Needs) { n.EngineHash = strings.Repeat("0", 64) },
			"needs_cpu":    func(n *sandbox.Needs) { n.CPU = append([]string{"abacus"}, n.CPU...) },
		} {
			n := needs
			change(&n)
			err := b.d.Missing(n)
			if e := sandbox.AsError(err); e == nil || e.Class != sandbox.FailedPrecondition || e.Code != code {
				b.Errorf("Missing with another %s = %v", code, err)
			}
		}
	}},
}

// halve damages an image.
func halve(dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, f := range files {
		if st, serr := os.Stat(f); serr == nil && st.Size() > 100_000 && st.Size() < 20<<20 {
			err = errors.Join(err, os.Truncate(f, st.Size()/2))
		}
	}
	return err
}

func restoreGoesOn(b *bench) {
	x := b.box()
	x.root("write", "/new", "kept")
	x.root("write", "/run/volatile", "in memory")
	session, r := x.background(as("root", "ticks", "100000", "1"), "tick 3")
	held, hr := x.background(as("user", "hold", "20"), "ready")
	pids := x.sessions()
	image := x.snapshot(sandbox.SnapshotMemory)
	x.link.Close()
	b.discard(x.m.ID())

	y := x.restore(image, nil)
	if now := y.sessions(); now[session] != pids[session] || now[held] != pids[held] || now[held] == 0 {
		b.Errorf("the sessions' processes are %v, and were %v", now, pids)
	}
	b.want("a file", y.root("cat", "/new"), "kept")
	b.want("a file in memory", y.root("cat", "/run/volatile"), "in memory")
	y.advances(session, r)
	y.signal(held, 15)
	y.follow(held, hr, nil)
}

func restoreMany(b *bench) {
	x := b.box()
	session, r := x.background(as("root", "ticks", "100000", "1"), "tick 3")
	image := x.snapshot(sandbox.SnapshotMemory)
	boxes := make([]*box, 3)
	var wg sync.WaitGroup
	for i := range boxes {
		wg.Go(func() {
			var err error
			if boxes[i], err = x.tryRestore(image, nil); err != nil {
				b.Errorf("restore %d: %v", i, err)
			}
		})
	}
	wg.Wait()
	for i, y := range boxes {
		if y == nil {
			return
		}
		y.root("write", "/mine", strconv.Itoa(i))
		copied := result{offset: r.offset}
		copied.out.Write(r.out.Bytes())
		y.advances(session, &copied)
	}
	y := boxes[1].restore(boxes[1].snapshot(sandbox.SnapshotMemory), nil)
	b.want("its own file", y.root("cat", "/mine"), "1")
}

const (
	bootIDFile     = "/proc/sys/kernel/random/boot_id"
	machineIDFile  = "/etc/machine-id"
	generationFile = "/run/cloche/generation"
)

func restoreIdentity(b *bench) {
	setup := func(name, digit string, generation uint64) *guestv1.SetupRequest {
		return &guestv1.SetupRequest{
			Hostname: name, Generation: generation, MachineId: strings.Repeat(digit, 32),
			BootId: strings.ReplaceAll("dddddddd-dddd-4ddd-8ddd-dddddddddddd", "d", digit),
		}
	}
	told := func(x *box, s *guestv1.SetupRequest) {
		b.Helper()
		b.want("the host name", x.root("hostname"), s.GetHostname())
		b.want("the machine id", x.root("cat", machineIDFile), s.GetMachineId()+"\n")
		b.want("the boot id", x.root("cat", bootIDFile), s.GetBootId()+"\n")
		b.want("the boot id as a user reads it", x.user("cat", bootIDFile), s.GetBootId()+"\n")
		b.want("the generation", x.root("cat", generationFile), strconv.FormatUint(s.GetGeneration(), 10)+"\n")
	}
	first := setup("first", "1", 1)
	x, err := b.boxOf(b.bare(), first)
	if err != nil {
		b.Fatalf("%v", err)
	}
	told(x, first)
	image := x.snapshot(sandbox.SnapshotMemory)
	for i, digit := range []string{"2", "3"} {
		s := setup("other", digit, uint64(i)+2)
		s.Restored = true
		told(x.restore(image, s, func(spec *driver.Spec) { spec.Hostname = "other" }), s)
	}
}

var diskImageClauses = []Clause{
	{"disk-snapshot", "A disk snapshot cuts no connection and disturbs no process.", func(b *bench) {
		x := b.box()
		session, r := x.background(as("root", "ticks", "100000", "1"), "tick 3")
		before, _ := x.link.Generation()
		x.snapshot(sandbox.SnapshotDisk)
		x.advances(session, r)
		if after, _ := x.link.Generation(); after != before {
			b.Errorf("the agent dialled again: %d connections before, %d after", before, after)
		}
	}},
	{"disk-unsynced", "A disk image holds what was written before it and synced by nobody, once a guest that caches was asked to sync.", func(b *bench) {
		x := b.box()
		big := strings.Repeat("unsynced ", 2000)
		for i := range 3 {
			x.user("scribble", "/tmp/"+strconv.Itoa(i), big+strconv.Itoa(i))
		}
		y := x.restore(x.snapshot(sandbox.SnapshotDisk), nil)
		for i := range 3 {
			if got := y.root("cat", "/tmp/"+strconv.Itoa(i)); got != big+strconv.Itoa(i) {
				b.Errorf("file %d holds %d bytes, and %d were written", i, len(got), len(big)+1)
			}
		}
	}},
	{"disk-restore", "A machine made from a disk image is a new boot with the old disk: changed, new and removed files, owners, modes, times to the second; nothing else.", diskRestore},
	{"disk-restore-again", "A machine of a disk image has its quota, and can be snapshotted again.", func(b *bench) {
		small := func(s *driver.Spec) { s.Resources.DiskMiB = 32 }
		x := b.box(small)
		x.root("write", "/new", "kept")
		y := x.restore(x.snapshot(sandbox.SnapshotDisk), nil, small)
		if said := y.root("fill", "/big", "64"); !strings.HasPrefix(said, "full ") {
			b.Errorf("64 MiB went onto a disk of 32: %q", said)
		}
		y.root("rm", "/big")
		y.root("write", "/newer", "too")
		z := y.restore(y.snapshot(sandbox.SnapshotDisk), nil, small)
		b.want("a file of the first", z.root("cat", "/new"), "kept")
		b.want("a file of the second", z.root("cat", "/newer"), "too")
	}},
	{"disk-of-paused", "The disk of a paused machine can be saved; it stays paused.", func(b *bench) {
		x := b.box()
		x.root("write", "/new", "kept")
		x.pause()
		image := x.snapshot(sandbox.SnapshotDisk)
		b.want("a file", x.restore(image, nil).root("cat", "/new"), "kept")
	}},
}

func diskRestore(b *bench) {
	x := b.box()
	x.root("write", "/etc/new", "kept")
	x.user("write", "/tmp/mine", "of a user")
	x.root("rm", "/data/link")
	x.background(as("root", "sleep", "1000"), "ready")
	before := x.root("tree", "/tmp") + x.root("tree", "/etc")
	y := x.restore(x.snapshot(sandbox.SnapshotDisk), nil)
	b.sameTree(before, y.root("tree", "/tmp")+y.root("tree", "/etc"))
	if r := y.do(as("root", "cat", "/data/link")); r.exit.GetCode() == 0 {
		b.Errorf("a removed file is back: %q", r.out.String())
	}
	if n := len(y.sessions()); n != 0 {
		b.Errorf("a new boot has %d sessions", n)
	}
}

// sameTree compares two outputs of "tree": times may be rounded to a second.
func (b *bench) sameTree(before, after string) {
	b.Helper()
	was, is := strings.Split(before, "\n"), strings.Split(after, "\n")
	for i := range was {
		if i >= len(is) {
			b.Fatalf("the tree ends before %q", was[i])
		}
		what, at := cutTime(was[i])
		now, then := cutTime(is[i])
		if what != now || then-at < -1 || then-at > 1 {
			b.Errorf("a file was %q and is %q", was[i], is[i])
		}
	}
	if len(is) > len(was) {
		b.Errorf("what is new in the tree: %q", is[len(was):])
	}
}

// cutTime takes the time off the end of a line of "tree", where it has one.
func cutTime(line string) (rest string, at int64) {
	if i := strings.LastIndexByte(line, ' '); i > 0 {
		if n, err := strconv.ParseInt(line[i+1:], 10, 64); err == nil {
			return line[:i], n
		}
	}
	return line, 0
}

// sessions are the guest's sessions and the numbers of their processes.
func (x *box) sessions() map[string]int64 {
	x.b.Helper()
	pids := map[string]int64{}
	resp, err := x.client().Sessions(x.b.ctx, connect.NewRequest(&guestv1.SessionsRequest{}))
	if err != nil {
		x.b.Fatalf("sessions: %v", err)
	}
	for _, s := range resp.Msg.GetSessions() {
		if !s.GetExited() {
			pids[s.GetSession()] = s.GetPid()
		}
	}
	return pids
}
