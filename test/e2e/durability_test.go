package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

// generator prints TOTAL bytes that SEED decides, at most RATE bytes a second
// (0: as fast as it can), and at its end writes their number and SHA-256 to a
// file in the guest.
const generator = `
import sys, hashlib, random, time, os
seed, total, rate, out = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
base = random.Random(seed).randbytes(1 << 18)
h, n, i, begin = hashlib.sha256(), 0, 0, time.monotonic()
while n < total:
    b = (i.to_bytes(8, 'little') + base)[:total - n]
    i += 1
    h.update(b)
    v = memoryview(b)
    while v:
        v = v[os.write(1, v):]
    n += len(b)
    if rate:
        ahead = n / rate - (time.monotonic() - begin)
        if ahead > 0.01:
            time.sleep(ahead)
with open(out, 'w') as f:
    f.write('%d %s' % (n, h.hexdigest()))
`

// follower is a CLI that was attached to a session before the daemon's death.
type follower struct {
	cmd *exec.Cmd
	got string
	err error
}

// follow runs the CLI and digests its standard output.
func follow(t *testing.T, d *harness.Daemon, wg *sync.WaitGroup, args ...string) *follower {
	t.Helper()
	f := &follower{cmd: d.Command(t.Context(), args...)}
	out, err := f.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var errs screen
	f.cmd.Stderr = &errs
	if err := f.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	wg.Go(func() {
		f.got, _ = digest(out)
		if f.err = f.cmd.Wait(); f.err != nil {
			f.err = fmt.Errorf("%w: %s", f.err, errs.String())
		}
	})
	return f
}

// TestStreamsOutliveTheDaemon lets 10 commands stream, 5 of them fast, kills
// the daemon, waits 30 s (5 in CI) and starts it again: every log, what the CLIs show
// that were attached before (to a fast and a slow one), and what those show
// that come late (to the others), must be what the guest printed, byte for
// byte. More CLIs from the start would take the cores that the streams need.
func TestStreamsOutliveTheDaemon(t *testing.T) {
	const (
		fast, slow         = 250_000_000, 20_000_000 // below the quota of 256 MiB
		fastRate, slowRate = 22e6, 1e6
	)
	d := harness.Start(t)
	c := newClient(t, d, d.Key)
	var boxes []string
	for range 5 {
		boxes = append(boxes, create(t, d))
	}
	var wg sync.WaitGroup
	followers := make([]*follower, 10)
	sessions := make([]string, 10)
	begin := time.Now()
	for i := range 10 {
		total, rate := fast, fastRate
		if i >= 5 {
			total, rate = slow, slowRate
		}
		args := []string{boxes[i%5], "--", "python3", "-c", generator, strconv.Itoa(i), strconv.Itoa(total), fmt.Sprint(rate), fmt.Sprintf("/tmp/sum-%d", i)}
		if i%5 == 0 {
			followers[i] = follow(t, d, &wg, append([]string{"exec"}, args...)...)
			continue
		}
		sessions[i] = d.Must(append([]string{"exec", "-d"}, args...)...)
	}
	offsets := func() map[string]int64 {
		at := map[string]int64{}
		for _, b := range boxes {
			list, err := c.Sessions(t.Context(), b)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range list {
				if s.State != api.SessionRunning {
					t.Fatalf("a session has ended before the kill: %+v", s)
				}
				at[s.Args[3]] = s.OffsetNext
			}
		}
		return at
	}
	eventually(t, "all of them stream", 60*time.Second, func() bool {
		at := offsets()
		n := 0
		for _, v := range at {
			if v > 0 {
				n++
			}
		}
		return n == 10
	})
	first, from := offsets(), time.Now()
	time.Sleep(3 * time.Second) // what is measured is a rate over this time
	last, took := offsets(), time.Since(from).Seconds()
	d.Kill9()
	quick, sum := 0, 0.0
	var rates []string
	for i := range 10 {
		rate := float64(last[strconv.Itoa(i)]-first[strconv.Itoa(i)]) / took / 1e6
		sum += rate
		if rate >= 20 {
			quick++
		}
		rates = append(rates, fmt.Sprintf("%.1f", rate))
	}
	t.Logf("killed after %.1f s; MB/s of each over the last %.1f s: %s; together %.0f (load %s)", time.Since(begin).Seconds(), took, strings.Join(rates, " "), sum, load())
	if quick < 5 {
		t.Logf("RATE NOT REACHED: %d of 5 sessions at 20 MB/s or more; this machine gave %.0f MB/s in all at load %s", quick, sum, load())
	}
	time.Sleep(atFull(30*time.Second, 5*time.Second)) // the daemon is down
	d.Serve()
	for i, ses := range sessions {
		if ses != "" {
			followers[i] = follow(t, d, &wg, "attach", boxes[i%5], ses)
		}
	}
	wg.Wait()
	t.Logf("all CLIs ended %.1f s after the first began", time.Since(begin).Seconds())
	for i, f := range followers {
		box := boxes[i%5]
		want := mustScript(t, d, box, "root", fmt.Sprintf("cat /tmp/sum-%d", i))
		if f.err != nil || f.got != want {
			t.Errorf("the CLI of command %d shows %s, the guest printed %s: %v", i, f.got, want, f.err)
		}
		list, err := c.Sessions(t.Context(), box)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			if len(s.Args) < 4 || s.Args[3] != strconv.Itoa(i) {
				continue
			}
			if got, exit := logDigest(t, c.Session(box, s.Id)); got != want || exit == nil || exit.Code != 0 {
				t.Errorf("the log of command %d is %s, the guest printed %s; exit %+v", i, got, want, exit)
			}
		}
	}
	for _, b := range boxes {
		d.Must("rm", b)
	}
	if left := d.WaitCensus(20 * time.Second); len(left) > 0 {
		t.Errorf("orphans after the deletes: %s", strings.Join(left, "\n"))
	}
}

// killAgent is a script for root in the guest that sends the agent a signal.
const killAgent = `
import os, sys
for p in os.listdir('/proc'):
    if p.isdigit():
        try:
            a = open('/proc/%s/cmdline' % p, 'rb').read().split(b'\0')
        except OSError:
            continue
        if len(a) > 1 and a[0].endswith(b'guest') and a[1] == b'agent':
            os.kill(int(p), int(sys.argv[1]))
            print('agent', p)
`

// TestOutputOutlivesTheAgent kills the agent inside, again and again, while
// commands stream.
func TestOutputOutlivesTheAgent(t *testing.T) {
	d := harness.Start(t)
	c := newClient(t, d, d.Key)
	box := create(t, d)
	var wg sync.WaitGroup
	f := follow(t, d, &wg, "exec", box, "--", "python3", "-c", generator, "1", "60000000", "10e6", "/tmp/sum")
	seen := map[string]bool{}
	for range 8 {
		time.Sleep(400 * time.Millisecond) // spread over the command's 6 s
		r := d.CLI("exec", "-u", "root", box, "--", "python3", "-c", killAgent, "9")
		if r.Code != 0 || !strings.HasPrefix(r.Stdout, "agent ") {
			t.Errorf("kill the agent: %+v", r)
		}
		seen[r.Stdout] = true
	}
	wg.Wait()
	want := mustScript(t, d, box, "root", "cat /tmp/sum")
	if f.err != nil || f.got != want {
		t.Errorf("the CLI shows %s, the guest printed %s: %v", f.got, want, f.err)
	}
	list, _ := c.Sessions(t.Context(), box)
	for _, s := range list {
		if strings.Contains(s.Args[2], "hashlib") {
			if got, exit := logDigest(t, c.Session(box, s.Id)); got != want || exit == nil || exit.Code != 0 {
				t.Errorf("the log is %s, the guest printed %s; exit %+v", got, want, exit)
			}
		}
	}
	t.Logf("%d agents were killed", len(seen))
}

// TestRestartAdopts restarts the daemon, by a crash and in order, over a live
// sandbox: the same machine goes on, and so does its command.
func TestRestartAdopts(t *testing.T) {
	d := harness.Start(t)
	box := create(t, d)
	mustScript(t, d, box, "user", "echo kept > ~/kept; echo $$ > /dev/null")
	boot := mustScript(t, d, box, "root", "cat /proc/1/stat | cut -d' ' -f22")
	ses := d.Must("exec", "-d", "-i", box, "--", "bash", "-c", "echo before; read x; echo after $x; exit 5")
	control := strings.Join(d.ControlProcesses(), " ")
	for _, how := range []string{"kill -9", "SIGTERM"} {
		if how == "kill -9" {
			d.Kill9()
		} else {
			d.Stop()
		}
		begin := time.Now()
		d.Serve()
		t.Logf("%s: ready again after %v", how, time.Since(begin))
		if now := strings.Join(d.ControlProcesses(), " "); now != control {
			t.Errorf("%s: the engine's control process was %s and is %s", how, control, now)
		}
		if got := mustScript(t, d, box, "root", "cat /home/user/kept; cat /proc/1/stat | cut -d' ' -f22"); got != "kept\n"+boot {
			t.Errorf("%s: another machine: %q", how, got)
		}
	}
	cmd := d.Command(t.Context(), "attach", "-i", box, ses)
	cmd.Stdin = strings.NewReader("words\n")
	out, _ := cmd.Output()
	if string(out) != "before\nafter words\n" || cmd.ProcessState.ExitCode() != 5 {
		t.Errorf("the session went on as %q, exit code %d", out, cmd.ProcessState.ExitCode())
	}
}

// TestSlowReader holds that a reader that sleeps does not hold the command up,
// and still gets all of its output.
func TestSlowReader(t *testing.T) {
	d := harness.Start(t)
	c := newClient(t, d, d.Key)
	box := create(t, d)
	run := func(sum string) (*client.Session, time.Duration) {
		s, err := c.CreateSession(t.Context(), box, api.ProcessSpec{Args: []string{"python3", "-c", generator, "3", "100000000", "0", sum}})
		if err != nil {
			t.Fatal(err)
		}
		st := s.Attach(client.StreamOptions{})
		defer st.Close()
		begin := time.Now()
		if _, err := st.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the command ends while its reader sleeps", 2*time.Minute, func() bool {
			i, err := s.Get(t.Context())
			return err == nil && i.State == api.SessionExited
		})
		took := time.Since(begin)
		h, n := sha256.New(), 0
		for {
			e, err := st.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if e.Type == api.EventExit {
				break
			}
			h.Write(e.Data)
			n += len(e.Data)
		}
		if got, want := fmt.Sprintf("%d %s", n, hex.EncodeToString(h.Sum(nil))), mustScript(t, d, box, "root", "cat "+sum); got != want {
			t.Errorf("the reader that slept got %s of %s", got, want)
		}
		return s, took
	}
	_, took := run("/tmp/sum")
	t.Logf("100 MB with a reader that sleeps: the command took %.1f s (load %s)", took.Seconds(), load())
}

// TestLogBeyondItsQuota prints three times a log's quota: a late reader is
// told exactly what is gone, and gets the rest.
func TestLogBeyondItsQuota(t *testing.T) {
	const total, quota = 805_306_368, 256 << 20
	d := harness.Start(t)
	c := newClient(t, d, d.Key)
	box := create(t, d)
	// Every line is 64 bytes and begins with its number, so that the content
	// at any offset is known.
	prog := fmt.Sprintf(`
import os
pad = b'.' * 50 + b'\n'
for i in range(0, %d, 8192):
    b = b''.join(b'%%013d' %% n + pad for n in range(i, i + 8192))
    while b:
        b = b[os.write(1, b):]
`, total/64)
	begin := time.Now()
	ses := d.Must("exec", "-d", box, "--", "python3", "-c", prog)
	s := c.Session(box, ses)
	eventually(t, "the command ends", 4*time.Minute, func() bool {
		i, err := s.Get(t.Context())
		return err == nil && i.State == api.SessionExited
	})
	t.Logf("%d MB printed in %.1f s (load %s)", total/1_000_000, time.Since(begin).Seconds(), load())
	info, err := s.Get(t.Context())
	if err != nil || info.OffsetNext != total || info.OffsetFirst <= 0 || total-info.OffsetFirst > quota {
		t.Fatalf("the session says %+v: %v", info, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	st := s.Follow(client.StreamOptions{})
	defer st.Close()
	at := int64(0)
	line := make([]byte, 0, 64)
	for {
		e, err := st.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case api.EventGap:
			if e.Offset != 0 || e.To != info.OffsetFirst || e.Reason == "" {
				t.Errorf("the gap is told as %+v, the log begins at %d", e, info.OffsetFirst)
			}
			at = e.To
			line = line[:0]
		case api.EventStdout:
			if e.Offset != at {
				t.Fatalf("an event at %d where %d comes next", e.Offset, at)
			}
			for _, b := range e.Data {
				if at%64 == 0 || len(line) > 0 {
					line = append(line, b)
				}
				at++
				if len(line) == 64 {
					if want := fmt.Sprintf("%013d", at/64-1); string(line[:13]) != want {
						t.Fatalf("line %q where %s was printed", line[:13], want)
					}
					line = line[:0]
				}
			}
		case api.EventExit:
			if at != total {
				t.Errorf("the log ends at %d instead of %d", at, total)
			}
			t.Logf("gone: bytes 0 to %d; kept: %d MiB", info.OffsetFirst, (total-info.OffsetFirst)>>20)
			return
		}
	}
}
