package e2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

// holder is a process that holds argv[1] bytes in its memory and, each time that
// it is asked, answers their hash, that of every file below argv[2], and its pid.
const holder = `
import hashlib, os, random, sys, time
data = bytearray(random.Random(1).randbytes(int(sys.argv[1])))
def tree(top):
    h = hashlib.sha256()
    for d, ds, fs in os.walk(top):
        ds.sort()
        for f in sorted(fs):
            h.update(f.encode())
            with open(os.path.join(d, f), 'rb') as o:
                h.update(o.read())
    return h.hexdigest()[:16]
open('/run/holder', 'w').write(str(os.getpid()))
while True:
    if not os.path.exists('/run/ask'):
        time.sleep(0.05)
        continue
    files = tree(sys.argv[2]) if open('/run/ask').read() == '' else '-'
    os.unlink('/run/ask')
    with open('/run/answer.tmp', 'w') as o:
        o.write('%s %s %d' % (hashlib.sha256(data).hexdigest()[:16], files, os.getpid()))
    os.rename('/run/answer.tmp', '/run/answer')
`

// askMemory is the question, in shell, of its memory and pid alone.
const askMemory = `printf memory > /run/ask.tmp; mv /run/ask.tmp /run/ask; ` + hear

// askHolder is the whole question.
const askHolder = `: > /run/ask; ` + hear

// hear waits for the answer.
const hear = `while [ ! -e /run/answer ]; do sleep 0.05; done; cat /run/answer; rm /run/answer`

// doze is a shell's sleep of a tenth of a second without a process of its own:
// many machines that fork all the time would take the cores from what is tested.
const doze = `read -t 0.1 -u 9 || true`

// counter is a loop that counts, in a file and on its standard output.
const counter = `mkfifo /run/doze.$$ && exec 9<>/run/doze.$$; echo $$ > /run/counter; i=0
while :; do i=$((i+1)); echo $i; printf '%08d\n' $i 1<>/run/count; ` + doze + `; done`

// start runs a command in a session that nobody is attached to.
func (b box) start(args ...string) (session string) {
	b.t.Helper()
	return b.d.For(b.t).Must(append([]string{"exec", "-d", "-u", "root", b.id, "--"}, args...)...)
}

// hold starts a holder and waits until it holds.
func (b box) hold(bytes int, dir string) {
	b.t.Helper()
	b.start("python3", "-c", holder, strconv.Itoa(bytes), dir)
	b.script(`while [ ! -s /run/holder ]; do sleep 0.05; done`)
}

// count reads the counter.
func (b box) count() int {
	b.t.Helper()
	n, err := strconv.Atoi(b.script("cat /run/count"))
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// TestSuspendCycles suspends and restores a sandbox 20 times (6 in CI) that holds
// 200 MB in a process, 10 000 files and a loop that counts: nothing of it may
// change, and the loop's output must be whole.
func TestSuspendCycles(t *testing.T) {
	cycles := atFull(20, 6)
	d := harness.Start(t)
	b := newBox(t, d, map[string]any{"resources": map[string]int{"memory_mib": 1024, "disk_mib": 1024}})
	b.script(`mkdir /srv/many && cd /srv/many && python3 -c '
import os, random
r = random.Random(2)
for i in range(10000):
    if i % 100 == 0:
        os.mkdir(str(i // 100))
    open("%d/%d" % (i // 100, i), "wb").write(r.randbytes(r.randrange(2000)))
'`)
	b.hold(200<<20, "/srv/many")
	ses := b.start("bash", "-c", counter)
	b.script(`while [ ! -s /run/count ]; do sleep 0.05; done`)
	before, memory, loop := b.script(askHolder), b.script(askMemory), b.script("cat /run/counter")
	last := b.count()
	var down, up, checks []time.Duration
	for i := range cycles {
		begin := time.Now()
		b.verb("suspend")
		down = append(down, time.Since(begin))
		if s := b.get(); s.State != api.SandboxSuspended || s.RecoveryPoint == nil || b.sentry() != 0 {
			t.Fatalf("cycle %d: suspended as %+v, process %d", i, s, b.sentry())
		}
		begin = time.Now()
		b.verb("restore")
		up = append(up, time.Since(begin))
		begin = time.Now()
		if now := b.script(askMemory); now != memory {
			t.Fatalf("cycle %d: the holder says %s, and said %s", i, now, memory)
		}
		if i%5 == 0 || i == cycles-1 { // reading 10 000 files takes longer than all else
			if now := b.script(askHolder); now != before {
				t.Fatalf("cycle %d: the holder says %s, and said %s", i, now, before)
			}
		}
		now := b.count()
		if pid := b.script("cat /run/counter"); now < last || pid != loop {
			t.Fatalf("cycle %d: the loop is at %d after %d, its pid is %s after %s", i, now, last, pid, loop)
		}
		last = now
		checks = append(checks, time.Since(begin))
	}
	eventually(t, "the loop goes on", 10*time.Second, func() bool { return b.count() > last })
	s := newClient(t, d, d.Key).Session(b.id, ses)
	if err := s.Signal(t.Context(), "SIGKILL"); err != nil {
		t.Fatal(err)
	}
	logText(t, s) // to its end
	lines := readLines(t, s, 0)
	for i, l := range lines {
		if l != i+1 {
			t.Fatalf("line %d of the loop's output is %d", i+1, l)
		}
	}
	t.Logf("%d cycles with 200 MB: suspend %v to %v, restore %v to %v, hashing inside %v to %v; %d lines of the loop (load %s)", cycles,
		slices.Min(down).Round(time.Millisecond), slices.Max(down).Round(time.Millisecond),
		slices.Min(up).Round(time.Millisecond), slices.Max(up).Round(time.Millisecond),
		slices.Min(checks).Round(time.Millisecond), slices.Max(checks).Round(time.Millisecond), len(lines), load())
}

// readLines reads a session's log of numbers from an offset as far as it is now.
// Half a line at its end is left out.
func readLines(t *testing.T, s *client.Session, from int64) (list []int) {
	t.Helper()
	info, err := s.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	st := s.Follow(client.StreamOptions{Offset: from})
	defer st.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var text strings.Builder
	for st.Offset() < info.OffsetNext {
		e, err := st.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case api.EventStdout:
			text.Write(e.Data)
		case api.EventGap:
			t.Errorf("a gap: %+v", e)
		}
	}
	whole := text.String()
	whole = whole[:strings.LastIndexByte(whole, '\n')+1]
	for l := range strings.Lines(whole) {
		n, err := strconv.Atoi(strings.TrimSpace(l))
		if err != nil {
			t.Fatalf("%q is no line of the loop", l)
		}
		list = append(list, n)
	}
	return list
}

// TestPauseStandsStill pauses a loop: it stands still, nothing is lost of it, and
// it goes on.
func TestPauseStandsStill(t *testing.T) {
	d := harness.Start(t)
	b := newBox(t, d, nil)
	ses := b.start("bash", "-c", counter)
	s := newClient(t, d, d.Key).Session(b.id, ses)
	at := func() int64 {
		i, err := s.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return i.OffsetNext
	}
	eventually(t, "the loop counts", 20*time.Second, func() bool { return at() > 10 })
	b.verb("pause")
	time.Sleep(300 * time.Millisecond) // what was produced before is on its way
	first := at()
	time.Sleep(time.Second) // a loop that ran would print 10 lines
	if now := at(); now != first {
		t.Errorf("a paused loop printed %d bytes", now-first)
	}
	if i, err := s.Get(t.Context()); err != nil || !i.Held || i.State != api.SessionRunning {
		t.Errorf("a session of a paused sandbox: %+v, %v", i, err)
	}
	b.refused(409, api.ClassFailedPrecondition, "POST", b.path("/exec"), api.ExecRequest{Args: []string{"true"}})
	b.verb("resume")
	eventually(t, "the loop goes on", 10*time.Second, func() bool { return at() > first })
}

// identity is what tells one machine from another, from inside.
const identity = `cat /etc/machine-id /proc/sys/kernel/random/boot_id /proc/sys/kernel/hostname /run/cloche/generation; head -c 16 /dev/urandom | od -An -tx1 | tr -d ' '`

// TestForkMany forks a sandbox into 20 (8 in CI): each is another machine that
// begins with all that the parent had.
func TestForkMany(t *testing.T) {
	count := atFull(20, 8)
	d := harness.Start(t)
	b := newBox(t, d, nil)
	b.script(`mkdir -p /etc/cloche/on_restore.d /srv/data && head -c 1000000 /dev/urandom > /srv/data/random &&
printf '#!/bin/sh\necho "$CLOCHE_GENERATION $(cat /run/cloche/generation)" >> /run/hook\n' > /etc/cloche/on_restore.d/50-test && chmod 755 /etc/cloche/on_restore.d/50-test`)
	b.hold(20<<20, "/srv/data")
	loop := b.start("bash", "-c", counter)
	b.script(`while [ ! -s /run/count ]; do sleep 0.05; done`)
	parent, hash := strings.Fields(b.script(identity)), b.script(askHolder)
	begin := time.Now()
	var f api.Forked
	b.want(202, &f, "POST", b.path("/fork"), map[string]any{"count": count, "labels": map[string]string{"kind": "child"}})
	if len(f.Children) != count {
		t.Fatalf("%d children", len(f.Children))
	}
	b.done(f.Operation.Id)
	source := time.Since(begin)
	for _, c := range f.Children {
		b.other(c.Sandbox.Id).done(c.Operation.Id)
	}
	all := time.Since(begin)
	seen := map[string]string{}
	differ := func(id, what, v string) {
		if other, again := seen[what+v]; again || v == "" {
			t.Errorf("%s has the %s %q of %s", id, what, v, other)
		}
		seen[what+v] = id
	}
	names := []string{"machine-id", "boot_id", "hostname", "generation", "randomness"}
	for i, n := range names {
		if n != "generation" {
			differ(b.id, n, parent[i])
		}
	}
	c := newClient(t, d, d.Key)
	for _, child := range f.Children {
		k := b.other(child.Sandbox.Id)
		s := k.get()
		if s.Parent != b.id || s.Labels["kind"] != "child" || s.State != api.SandboxRunning {
			t.Errorf("a child: %+v", s)
		}
		is := strings.Fields(k.script(identity))
		for i, n := range names {
			// The generation counts each sandbox's own machines.
			if n == "generation" {
				if is[i] == parent[i] && s.Epoch == b.get().Epoch {
					continue
				}
				if is[i] != strconv.FormatInt(s.Epoch, 10) {
					t.Errorf("%s has the generation %s, its epoch is %d", k.id, is[i], s.Epoch)
				}
				continue
			}
			differ(k.id, n, is[i])
		}
		if got := k.script(askHolder); got != hash {
			t.Errorf("%s holds %s, its parent %s", k.id, got, hash)
		}
		if hook := k.script("cat /run/hook"); hook != is[3]+" "+is[3] {
			t.Errorf("%s: the hook was run as %q, the generation is %s", k.id, hook, is[3])
		}
		goesOn(t, c, k, loop)
	}
	if out := b.script("cat /run/hook 2>/dev/null || echo none"); out != "none" {
		t.Errorf("the hook ran in the parent, which goes on: %q", out)
	}
	n := b.count()
	eventually(t, "the parent goes on", 10*time.Second, func() bool { return b.count() > n })
	t.Logf("the fork took %v for the source, %v until all %d children were up (load %s)", source.Round(time.Millisecond), all.Round(time.Millisecond), count, load())
	b.deleteAll(f.Children)
}

// deleteAll deletes sandboxes at once and waits.
func (b box) deleteAll(list []api.AcceptedSandbox) {
	b.t.Helper()
	var ops []string
	for _, c := range list {
		ops = append(ops, b.other(c.Sandbox.Id).ask("delete", "", false).answer(b.t).Operation.Id)
	}
	for _, op := range ops {
		b.done(op)
	}
}

// goesOn demands that a session goes on in a child as a new one, whose numbers
// follow on those of its parent.
func goesOn(t *testing.T, c *client.Client, k box, parent string) {
	t.Helper()
	list, err := c.Sessions(t.Context(), k.id)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		if s.Parent != parent {
			continue
		}
		if s.Id == parent || s.State != api.SessionRunning || s.ParentOffset <= 0 || s.OffsetFirst != s.ParentOffset {
			t.Errorf("%s goes on as %+v", parent, s)
		}
		eventually(t, "the inherited loop prints", 10*time.Second, func() bool {
			i, err := c.Session(k.id, s.Id).Get(t.Context())
			return err == nil && i.OffsetNext > s.ParentOffset+8
		})
		return
	}
	t.Errorf("%s has no session that goes on from %s: %+v", k.id, parent, list)
}

// TestRollback rolls a sandbox back under three running sessions: each is told
// so, their logs stay, and what lives in the snapshot goes on as new ones.
func TestRollback(t *testing.T) {
	d := harness.Start(t)
	c := newClient(t, d, d.Key)
	b := newBox(t, d, nil)
	boot := b.script("cat /proc/sys/kernel/random/boot_id /etc/machine-id")
	b.script("echo one > /srv/file")
	var old []string
	for range 3 {
		old = append(old, b.start("bash", "-c", strings.ReplaceAll(counter, "/run/count", "/run/own.$$")))
	}
	time.Sleep(500 * time.Millisecond) // so that they have printed something
	snap := b.snapshot("before", "memory")
	b.script("echo two > /srv/file; echo three > /srv/other")
	late := b.start("sleep", "1000")

	told := make([]api.StreamEvent, len(old))
	var followers sync.WaitGroup
	for i, id := range old {
		followers.Go(func() {
			st := c.Session(b.id, id).Follow(client.StreamOptions{})
			defer st.Close()
			for {
				e, err := st.Next(t.Context())
				if err != nil {
					return
				}
				told[i] = e
				told[i].Data = nil
			}
		})
	}
	time.Sleep(time.Second) // the abandoned timeline goes on for a while
	b.rollback(snap)
	followers.Wait()
	for i, e := range told {
		if e.Type != api.EventLost || e.Reason != "rolled_back" {
			t.Errorf("session %d was told %+v", i, e)
		}
	}
	if out := b.script("cat /srv/file; ls /srv/other 2>/dev/null; cat /proc/sys/kernel/random/boot_id /etc/machine-id"); out != "one\n"+boot {
		t.Errorf("after the rollback: %q, before: %q", out, boot)
	}
	if i, err := c.Session(b.id, late).Get(t.Context()); err != nil || i.State != api.SessionLost {
		t.Errorf("a session that began after the snapshot: %+v, %v", i, err)
	}
	list, err := c.Sessions(t.Context(), b.id)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range old {
		before := readLines(t, c.Session(b.id, id), 0)
		for i, n := range before {
			if n != i+1 {
				t.Fatalf("the old log of %s has %d as line %d", id, n, i+1)
			}
		}
		goesOn(t, c, b, id)
		for _, s := range list {
			if s.Parent != id {
				continue
			}
			// The old log up to the offset and the new one are one sequence.
			known := 0
			text := fmt.Sprint(strings.Join(words(before), "\n"), "\n")
			if int(s.ParentOffset) > len(text) {
				t.Fatalf("the parent's offset is %d, its log has %d", s.ParentOffset, len(text))
			}
			if head := text[:s.ParentOffset]; strings.HasSuffix(head, "\n") {
				known = strings.Count(head, "\n")
				first := readLines(t, c.Session(b.id, s.Id), s.ParentOffset)[0]
				if first != known+1 {
					t.Errorf("the new session begins with %d, the old one had %d lines until then", first, known)
				}
			}
			if len(before) <= known {
				t.Errorf("the old log of %s ends at the snapshot: %d of %d lines", id, len(before), known)
			}
		}
	}
}

func words(list []int) (all []string) {
	for _, n := range list {
		all = append(all, strconv.Itoa(n))
	}
	return all
}
