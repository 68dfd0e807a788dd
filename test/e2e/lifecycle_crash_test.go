package e2e

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/test/harness"
)

// writer appends numbered lines, each with the time at which it was written and
// synced before the next, and goes on after the last whole line of a file that is
// there.
const writer = `
import os, time
path = '/srv/lines'
n = 0
if os.path.exists(path):
    text = open(path, 'rb').read()
    text = text[:text.rfind(b'\n') + 1]
    n = text.count(b'\n')
    os.truncate(path, len(text))
f = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    n += 1
    os.write(f, b'%d %d\n' % (n, time.time_ns() // 1000000))
    os.fsync(f)
    time.sleep(0.01)
`

// prefix checks that a file of the writer's is one, and returns how many lines it
// has and when the last was written.
func prefix(t *testing.T, text string) (lines int, last time.Time) {
	t.Helper()
	whole, _ := strings.CutSuffix(text, "end") // mustScript's trim must not hide half a line
	for l := range strings.Lines(whole) {
		f := strings.Fields(l)
		if !strings.HasSuffix(l, "\n") || len(f) != 2 || f[0] != strconv.Itoa(lines+1) {
			t.Fatalf("line %d of the file is %q", lines+1, l)
		}
		ms, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			t.Fatalf("line %d of the file is %q", lines+1, l)
		}
		lines++
		last = time.UnixMilli(ms)
	}
	return lines, last
}

// TestCheckpoints kills the machine at random times while a program appends
// synced lines: after a start the file is a prefix of what was written, it ends
// where the API said that the recovery point lies, and that is no older than the
// policy allows.
func TestCheckpoints(t *testing.T) {
	const every = time.Second // the policy's
	// What a checkpoint may come late by: it takes its time, and one that made the
	// machine stand still for long is followed by as much rest as the share of its
	// time allows that a machine may stand still (a fiftieth). How long that is
	// here and now a neighbour's snapshots tell.
	const share, least = 50, 15 * time.Second
	kills := atFull(100, 10)
	begin := time.Now()
	d := harness.Start(t)
	b := newBox(t, d, map[string]any{"policy": map[string]any{"checkpoint_seconds": int(every.Seconds())}})
	if s := b.get(); s.Durability != api.DurabilitySnapshot {
		t.Errorf("its durability is %q", s.Durability)
	}
	eventually(t, "the first checkpoint", 30*time.Second, func() bool { return b.get().RecoveryPoint != nil })
	neighbour := newBox(t, d, nil)
	var worst time.Duration
	var lost []time.Duration
	for i := range kills {
		asked := time.Now()
		neighbour.snapshot(fmt.Sprint("pace-", i), "disk")
		worst = max(worst, time.Since(asked))
		slack := max(least, 5*time.Second+share*worst)
		b.start("python3", "-c", writer)
		time.Sleep(1500*time.Millisecond + time.Duration(rand.Int64N(int64(2*time.Second))))
		if !b.kill() {
			t.Fatal("there is no machine to kill")
		}
		killed := time.Now()
		b.is(api.SandboxFailed)
		s := b.get()
		if s.End == nil || s.End.Reason != "killed" || s.RecoveryPoint == nil {
			t.Fatalf("kill %d: %+v, recovery point %+v", i, s.End, s.RecoveryPoint)
		}
		if !strings.Contains(s.End.Detail, s.RecoveryPoint.At.UTC().Format(time.RFC3339)) {
			t.Errorf("kill %d: the end does not say what is lost: %q, recovery point %v", i, s.End.Detail, s.RecoveryPoint.At)
		}
		b.verb("start")
		_, last := prefix(t, b.script("cat /srv/lines 2>/dev/null; echo end"))
		at := s.RecoveryPoint.At
		if age := killed.Sub(at); age > every+slack {
			t.Errorf("kill %d: the recovery point was %v old, where %v were allowed", i, age, every+slack)
		} else {
			lost = append(lost, age)
		}
		// A recovery point of before this round's first line tells nothing of it.
		if !last.IsZero() && last.After(at.Add(500*time.Millisecond)) {
			t.Errorf("kill %d: the file has a line of %v, and the recovery point is said to be of %v", i, last, at)
		}
		if after := s.RecoveryPoint; last.Before(at.Add(-2*time.Second)) && killed.Sub(at) < time.Second {
			t.Errorf("kill %d: the file ends at %v, and the recovery point is said to be of %v", i, last, after.At)
		}
	}
	slices.Sort(lost)
	if len(lost) > 0 {
		t.Logf("%d kills: lost %v at best, %v in the middle, %v at worst, where the policy says %v; %.1f s (load %s)", kills,
			lost[0].Round(time.Millisecond), lost[len(lost)/2].Round(time.Millisecond), lost[len(lost)-1].Round(time.Millisecond), every,
			time.Since(begin).Seconds(), load())
	}
}

// TestCrashPolicy kills machines whose policy starts them again: they come back
// from their recovery point, by themselves, and say what was lost. One without
// a recovery point stays failed.
func TestCrashPolicy(t *testing.T) {
	d := harness.Start(t)
	policy := map[string]any{"on_crash": "start", "checkpoint_seconds": 0}
	b := newBox(t, d, map[string]any{"policy": policy})
	b.script("echo kept > /srv/file")
	b.snapshot("s", "disk")
	b.script("echo lost > /srv/file")
	never := newBox(t, d, map[string]any{"policy": policy})
	begin := time.Now()
	b.kill()
	never.kill()
	eventually(t, "the sandbox comes back", 60*time.Second, func() bool {
		s := b.get()
		return s.State == api.SandboxRunning && s.Epoch > 1
	})
	t.Logf("it was back after %.1f s", time.Since(begin).Seconds())
	if out := b.script("cat /srv/file"); out != "kept" {
		t.Errorf("it came back with %q", out)
	}
	if op := b.lastOp(); op.Verb != "start" || op.Key != "system-crash" {
		t.Errorf("who started it: %+v", op)
	}
	var page api.EventList
	b.want(200, &page, "GET", "/v1/events?after=0&limit=1000", nil, "Accept", "application/json")
	told := false
	for _, e := range page.Items {
		told = told || e.Sandbox == b.id && strings.Contains(string(e.Data), `"to":"failed"`) && strings.Contains(string(e.Data), "is lost")
	}
	if !told {
		t.Error("no event tells what was lost")
	}
	if s := never.get(); s.State != api.SandboxFailed || s.End == nil || !strings.Contains(s.End.Detail, "lost") {
		t.Errorf("one without a recovery point: %s, %+v", s.State, s.End)
	}
}
