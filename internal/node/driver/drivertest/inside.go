package drivertest

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/driver"
)

var diskClauses = []Clause{
	{"root-is-image", "The root filesystem is the image's: names, content, modes, owners, times, links.", func(b *bench) {
		host, err := b.h.Files.onHost("tree", b.h.Files.tree+"/data")
		if err != nil {
			b.Fatalf("%v", err)
		}
		b.want("the tree", b.box().root("tree", "/data"), string(host))
	}},
	{"root-writable", "Root can write anywhere in the root filesystem, a user where the modes say so.", func(b *bench) {
		x := b.box()
		x.root("write", "/etc/mark", "changed")
		b.want("the file", x.user("cat", "/etc/mark"), "changed")
		x.root("write", "/new", "new")
		x.user("write", "/tmp/mine", "mine")
		if r := x.do(as("user", "write", "/etc/mark", "x")); r.exit.GetCode() == 0 {
			b.Errorf("a user could write what is root's")
		}
		x.root("rm", "/data/zeroes")
		if r := x.do(as("root", "cat", "/data/zeroes")); r.exit.GetCode() == 0 {
			b.Errorf("a removed file can be read")
		}
	}},
	{"image-unchanged", "Nothing that is written or removed inside changes the image or the guest binary.", func(b *bench) {
		image, guest := b.hash(b.h.Files.Image), b.hash(b.h.Files.Guest)
		x := b.box()
		x.root("write", "/etc/mark", "changed")
		x.root("rm", "/data/zeroes")
		_ = x.do(as("root", "write", strings.Fields(x.root("init"))[0], "overwritten")) // it may well be refused
		b.kill(x.m)
		if b.hash(b.h.Files.Image) != image {
			b.Errorf("the image has changed")
		}
		if b.hash(b.h.Files.Guest) != guest {
			b.Errorf("the guest binary has changed")
		}
	}},
	{"disks-apart", "Two machines over one image don't see each other's writes.", func(b *bench) {
		one, two := b.box(), b.box()
		one.root("write", "/etc/mark", "one")
		two.root("write", "/tmp/two", "two")
		b.want("the other's file", two.root("cat", "/etc/mark"), "from the image")
		if r := one.do(as("root", "cat", "/tmp/two")); r.exit.GetCode() == 0 {
			b.Errorf("it reads the other's file")
		}
	}},
	{"disk-quota", "Writing more than the disk's size is ENOSPC, for root too; what is removed is free again.", func(b *bench) {
		x := b.box()
		for range 2 {
			for _, who := range []string{"user", "root"} {
				filled(b, x.must(as(who, "fill", "/tmp/big", "200")), 40, 64)
				x.must(as(who, "rm", "/tmp/big"))
			}
		}
		b.want("a write after that", x.user("fill", "/tmp/big", "32"), "wrote 32")
		b.alive(x.m)
	}},
}

// filled asserts that a disk got full between two sizes.
func filled(b *bench, said string, least, most int) {
	b.Helper()
	rest, full := strings.CutPrefix(said, "full ")
	n, err := strconv.Atoi(rest)
	if !full || err != nil || n < least || n > most {
		b.Errorf("it should be full after %d to %d MiB: %q", least, most, said)
	}
}

func (b *bench) hash(path string) string {
	b.Helper()
	f, err := os.Open(path)
	if err != nil {
		b.Fatalf("%v", err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		b.Fatalf("%v", err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func smallMemory(s *driver.Spec) { s.Resources.MemoryMiB = 192 }

var boundClauses = []Clause{
	{"memory-seen", "The guest sees its memory limit as its RAM.", func(b *bench) {
		for _, mib := range []int{192, 512} {
			said := b.box(func(s *driver.Spec) { s.Resources.MemoryMiB = mib }).root("memory")
			if n, err := strconv.Atoi(said); err != nil || n>>20 < mib*3/4 || n>>20 > mib {
				b.Errorf("with %d MiB it sees %q bytes", mib, said)
			}
		}
	}},
	{"memory-excess", "A user that takes more memory than there is loses that process, and nobody else anything.", func(b *bench) {
		x, other := b.box(smallMemory), b.box(smallMemory)
		sleeper, log := x.background(as("user", "ticks", "10000", "20"), "tick 1\n")
		for range 2 {
			if r := x.do(as("user", "anon", "1000")); r.exit.GetSignal() != 9 {
				b.Errorf("it ended with %v: %q", r.exit, r.out.String())
			}
		}
		x.signal(sleeper, 15)
		if x.follow(sleeper, log, nil); log.exit.GetSignal() != 15 {
			b.Errorf("the user's other process ended with %v", log.exit)
		}
		b.alive(x.m)
		b.want("another machine's file", other.user("cat", "/etc/mark"), "from the image")
	}},
	{"shm-bounded", "/dev/shm takes no more than the machine's memory bears.", func(b *bench) {
		x := b.box(smallMemory)
		for range 2 {
			filled(b, x.user("fill", "/dev/shm/big", "1000"), 16, 192)
			x.user("rm", "/dev/shm/big")
		}
		b.alive(x.m)
	}},
	{"cpu-limit", "A machine uses about as much CPU as it was given, however much it wants.", func(b *bench) {
		x := b.box(func(s *driver.Spec) { s.Resources.MilliCPU = 100 })
		before, started := b.stats(x.m).CPU, time.Now()
		x.user("spin", "2500")
		used, wall := b.stats(x.m).CPU-before, time.Since(started)
		if share := used.Seconds() / wall.Seconds(); share > 0.16 {
			b.Errorf("it used %v in %v, %.2f of a core", used, wall, share)
		}
	}},
	{"max-procs", "A user's processes beyond Spec.MaxProcs are refused with EAGAIN, and the machine, which has 4 MiB for each, goes on.", func(b *bench) {
		x := b.box(func(s *driver.Spec) { s.MaxProcs, s.Resources.MemoryMiB = 128, 512 })
		for range 2 {
			refusedForks(b, x.user("forks", "150"), 128)
		}
		b.want("root's file", x.root("cat", "/etc/mark"), "from the image")
		b.alive(x.m)
	}},
	{"setup-max-procs", "The lower bound that the guest's setup brings holds for users, each by itself.", func(b *bench) {
		m := b.bare(func(s *driver.Spec) { s.MaxProcs, s.Resources.MemoryMiB = 200, 1024 })
		x, err := b.boxOf(m, &guestv1.SetupRequest{MaxProcsPerUser: 32})
		if err != nil {
			b.Fatalf("the guest did not come: %v", err)
		}
		x.background(as("1001", "sleep", "60"), "ready")
		refusedForks(b, x.user("forks", "150"), 32)
	}},
}

func refusedForks(b *bench, said string, most int) {
	b.Helper()
	rest, refused := strings.CutPrefix(said, "refused ")
	n, err := strconv.Atoi(rest)
	if !refused || err != nil || n < 1 || n > most {
		b.Errorf("it should be refused after at most %d: %q", most, said)
	}
}
