package drivertest

import (
	"errors"
	"slices"
	"strings"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

var endClauses = []Clause{
	{"kill", "Kill returns when no process of the machine is left; Exited is closed and End says that it was killed.", func(b *bench) {
		x := b.box()
		x.background(as("user", "sleep", "60"), "ready")
		pids := b.pids(x.m.ID())
		if len(pids) == 0 {
			b.Fatalf("no process of it runs")
		}
		b.kill(x.m)
		if anyAlive(pids) || len(b.pids(x.m.ID())) != 0 {
			b.Errorf("processes are left: %v of %v", b.pids(x.m.ID()), pids)
		}
		select {
		case <-x.m.Exited():
		default:
			b.Errorf("Kill returned before Exited was closed")
		}
		if end := b.ended(x.m); end.Reason != sandbox.EndKilled || time.Since(end.At) > time.Minute {
			b.Errorf("End() = %+v", end)
		}
	}},
	{"kill-twice", "Killing a machine that has ended succeeds and changes nothing.", func(b *bench) {
		m := b.bare()
		b.kill(m)
		end := b.ended(m)
		b.kill(m)
		if again := m.End(); again != end {
			b.Errorf("End() was %+v and is %+v", end, again)
		}
	}},
	{"kill-keeps", "Kill keeps what Discard removes: the machine is still listed.", func(b *bench) {
		m := b.bare()
		b.kill(m)
		if !slices.Contains(b.list(), m.ID()) {
			b.Errorf("List has forgotten it")
		}
	}},
	{"kill-alone", "The end of one machine is nothing to another.", func(b *bench) {
		m, x := b.bare(), b.box()
		b.kill(m)
		b.discard(m.ID())
		b.alive(x.m)
		b.want("its file", x.user("cat", "/etc/mark"), "from the image")
	}},
	{"exit-of-pid-1", "When the guest's PID 1 ends, so does the machine, with the reason exited.", func(b *bench) {
		mortal := b.h.Mortal
		if mortal == nil {
			mortal = func(s *driver.Spec) { s.Guest = b.h.Files.inside }
		}
		m := b.bare(mortal)
		if end := b.ended(m); end.Reason != sandbox.EndExited {
			b.Errorf("End() = %+v", end)
		}
		if !b.eventually(5*time.Second, func() bool { return len(b.pids(m.ID())) == 0 }) {
			b.Errorf("processes are left: %v", b.pids(m.ID()))
		}
	}},
	{"killed-outside", "A machine whose host process is killed by somebody else ends, and End says so.", func(b *bench) {
		x := b.box()
		pids := b.pids(x.m.ID())
		if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
			b.Fatalf("kill %d: %v", pids[0], err)
		}
		if end := b.ended(x.m); end.Reason != sandbox.EndKilled && end.Reason != sandbox.EndCrashed {
			b.Errorf("End() = %+v", end)
		}
		if !b.eventually(5*time.Second, func() bool { return !anyAlive(pids) && len(b.pids(x.m.ID())) == 0 }) {
			b.Errorf("processes are left: %v", b.pids(x.m.ID()))
		}
	}},
}

var adoptClauses = []Clause{
	{"adopt", "A machine outlives its driver's process: another adopts it, the guest comes back, its sessions and files are as they were.", func(b *bench) {
		x := b.box()
		x.root("write", "/tmp/mine", "still here")
		session, r := x.background(as("user", "ticks", "60", "25"), "tick 3\n")
		b.adopt(x)
		x.follow(session, r, nil)
		allTicks(b, r, 60)
		b.want("its file", x.root("cat", "/tmp/mine"), "still here")
		if b.stats(x.m).CPU <= 0 {
			b.Errorf("Stats = %+v", b.stats(x.m))
		}
	}},
	{"adopt-twice", "A machine can be adopted as often as there is a new process.", func(b *bench) {
		x := b.box()
		for range 3 {
			b.adopt(x)
		}
		b.want("its file", x.root("cat", "/etc/mark"), "from the image")
	}},
	{"adopt-ends", "An adopted machine can be killed, and ends as one that was made here.", func(b *bench) {
		x := b.box()
		b.adopt(x)
		pids := b.pids(x.m.ID())
		b.kill(x.m)
		if end := b.ended(x.m); end.Reason != sandbox.EndKilled || anyAlive(pids) {
			b.Errorf("End() = %+v, processes alive: %v", end, anyAlive(pids))
		}
		b.discard(x.m.ID())
		b.nothingLeft(x.m.ID())
	}},
	{"adopt-watches", "The death of an adopted machine is noticed.", func(b *bench) {
		x := b.box()
		b.adopt(x)
		if err := syscall.Kill(b.pids(x.m.ID())[0], syscall.SIGKILL); err != nil {
			b.Fatalf("%v", err)
		}
		if end := b.ended(x.m); end.Reason == "" {
			b.Errorf("End() = %+v", end)
		}
	}},
	{"adopt-dead", "A machine that has ended is not found; where it is known how it ended, the error says so.", func(b *bench) {
		m := b.bare()
		b.kill(m)
		b.restart()
		_, err := b.d.Adopt(b.ctx, m.ID())
		var ended *driver.Ended
		if !sandbox.IsClass(err, sandbox.NotFound) || !errors.As(err, &ended) || ended.End.Reason != sandbox.EndKilled {
			b.Errorf("Adopt = %v", err)
		}
	}},
	{"adopt-died-unseen", "A machine that died while no driver ran is not found, whatever a state file says.", func(b *bench) {
		m := b.bare()
		pids := b.pids(m.ID())
		b.closeAll()
		if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
			b.Fatalf("%v", err)
		}
		if !b.eventually(5*time.Second, func() bool { return !anyAlive(pids[:1]) }) {
			b.Fatalf("it would not die")
		}
		b.restart()
		if _, err := b.d.Adopt(b.ctx, m.ID()); !sandbox.IsClass(err, sandbox.NotFound) {
			b.Errorf("Adopt = %v", err)
		}
		if !slices.Contains(b.list(), m.ID()) {
			b.Errorf("List has forgotten it")
		}
	}},
	{"adopt-unknown", "An id that never was is not found, and leaves no trace by being asked for.", func(b *bench) {
		s := b.spec()
		if _, err := b.d.Adopt(b.ctx, s.ID); !sandbox.IsClass(err, sandbox.NotFound) {
			b.Errorf("Adopt = %v", err)
		}
		b.nothingLeft(s.ID)
	}},
	{"adopt-discarded", "A machine that was discarded is not found.", func(b *bench) {
		m := b.bare()
		b.discard(m.ID())
		b.restart()
		if _, err := b.d.Adopt(b.ctx, m.ID()); !sandbox.IsClass(err, sandbox.NotFound) {
			b.Errorf("Adopt = %v", err)
		}
	}},
}

// adopt ends the driver and has another adopt the machine.
func (b *bench) adopt(x *box) {
	b.Helper()
	b.restart()
	m, err := b.d.Adopt(b.ctx, x.m.ID())
	if err != nil {
		b.Fatalf("Adopt = %v", err)
	}
	x.m = m
	b.alive(m)
	x.reconnect()
}

var discardClauses = []Clause{
	{"list", "List names what is alive and what has ended, in this process and the next, and nothing that was discarded.", func(b *bench) {
		live, dead, gone := b.bare(), b.bare(), b.bare()
		b.kill(dead)
		b.discard(gone.ID())
		for _, when := range []string{"now", "after a restart"} {
			got := b.list()
			if !slices.Contains(got, live.ID()) || !slices.Contains(got, dead.ID()) || slices.Contains(got, gone.ID()) || len(got) != 2 {
				b.Errorf("%s: List() = %v; live %s, dead %s, discarded %s", when, got, live.ID(), dead.ID(), gone.ID())
			}
			b.restart()
		}
	}},
	{"discard-live", "Discard of a running machine ends it and leaves nothing: no process, mount, control group or file.", func(b *bench) {
		x := b.box()
		x.background(as("user", "sleep", "60"), "ready")
		if left, err := b.h.Leftovers(x.m.ID()); err != nil || len(left) == 0 {
			b.Fatalf("a running machine has no trace: %v, %v", left, err)
		}
		pids := b.pids(x.m.ID())
		b.discard(x.m.ID())
		b.nothingLeft(x.m.ID())
		if anyAlive(pids) {
			b.Errorf("a process of it lives")
		}
		b.ended(x.m)
	}},
	{"discard-ended", "Discard of a machine that has ended leaves nothing.", func(b *bench) {
		m := b.bare()
		b.kill(m)
		b.discard(m.ID())
		b.nothingLeft(m.ID())
	}},
	{"discard-twice", "Discard is idempotent.", func(b *bench) {
		m := b.bare()
		for range 3 {
			b.discard(m.ID())
		}
		b.nothingLeft(m.ID())
	}},
	{"discard-is-final", "The Guest of a discarded machine is not found, and asking for it leaves no trace.", func(b *bench) {
		m := b.bare()
		b.discard(m.ID())
		if l, err := m.Guest(); !sandbox.IsClass(err, sandbox.NotFound) {
			b.Errorf("Guest = %v, %v", l, err)
		}
		b.nothingLeft(m.ID())
	}},
	{"discard-unknown", "Discard of an id that never was succeeds.", func(b *bench) {
		b.discard(sandbox.NewID(sandbox.KindSandbox))
	}},
	{"discard-unadopted", "Discard needs no more than the id: a fresh driver discards what it has not adopted.", func(b *bench) {
		live, dead := b.bare(), b.bare()
		b.kill(dead)
		b.restart()
		for _, m := range []driver.Machine{live, dead} {
			b.discard(m.ID())
			b.nothingLeft(m.ID())
		}
	}},
	{"discard-died-unseen", "Discard removes a machine that died while no driver ran.", func(b *bench) {
		m := b.bare()
		pids := b.pids(m.ID())
		b.closeAll()
		if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
			b.Fatalf("%v", err)
		}
		b.restart()
		b.discard(m.ID())
		b.nothingLeft(m.ID())
	}},
}

var tidyClauses = []Clause{
	{"stats", "Stats are plausible, and grow with what the machine uses.", func(b *bench) {
		x := b.box()
		idle := b.stats(x.m)
		if idle.MemoryBytes < 1<<20 || idle.MemoryBytes > 256<<20 || idle.CPU <= 0 || idle.Processes < 1 || idle.DiskBytes < -1 {
			b.Errorf("idle: %+v", idle)
		}
		x.background(as("user", "hold", "80"), "ready")
		x.user("fill", "/tmp/big", "24")
		x.user("spin", "300")
		busy := b.stats(x.m)
		if busy.MemoryBytes < idle.MemoryBytes+60<<20 {
			b.Errorf("80 MiB more of memory: %+v, then %+v", idle, busy)
		}
		if busy.CPU < idle.CPU+50*time.Millisecond {
			b.Errorf("300 ms of spinning: %+v, then %+v", idle, busy)
		}
		if idle.DiskBytes >= 0 && busy.DiskBytes < idle.DiskBytes+20<<20 {
			b.Errorf("24 MiB more of disk: %+v, then %+v", idle, busy)
		}
	}},
	{"stats-ended", "Stats of a machine that was discarded are not found, rather than zero.", func(b *bench) {
		m := b.bare()
		b.discard(m.ID())
		if st, err := m.Stats(b.ctx); !sandbox.IsClass(err, sandbox.NotFound) {
			b.Errorf("Stats = %+v, %v", st, err)
		}
	}},
	{"descriptors-not-inherited", "The processes of a machine hold no descriptor of whoever made it.", descriptorsNotInherited},
	{"descriptors-return", "Creating and discarding machines leaves no descriptor open here.", func(b *bench) {
		round := func() {
			x := b.box()
			b.stats(x.m)
			b.kill(x.m)
			x.link.Close()
			b.discard(x.m.ID())
		}
		round() // whatever is opened once is open now
		before := b.fileCount()
		for range 3 {
			round()
		}
		if !b.eventually(3*time.Second, func() bool { return b.fileCount() <= before }) {
			b.Errorf("%d descriptors were open, %d are", before, b.fileCount())
		}
	}},
}

func descriptorsNotInherited(b *bench) {
	marker := b.junk()
	// Without O_CLOEXEC: a careless library in the same process does that.
	fd, err := syscall.Open(marker, syscall.O_RDONLY, 0)
	if err != nil {
		b.Fatalf("%v", err)
	}
	defer syscall.Close(fd)
	defer syscall.Unlink(marker)
	x := b.box()
	pids := b.pids(x.m.ID())
	if len(pids) == 0 {
		b.Fatalf("no process of it runs")
	}
	for _, pid := range pids {
		for _, target := range openFiles(pid) {
			if strings.Contains(target, marker) {
				b.Errorf("process %d has %s open", pid, target)
			}
		}
	}
}
