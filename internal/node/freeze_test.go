package node

import (
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// TestWhatRunsIsFrozenForItsImage looks at what a machine's processes did when
// each kind of image was taken, and that they go on after it.
func TestWhatRunsIsFrozenForItsImage(t *testing.T) {
	r := newRig(t)
	r.d.kernel = true
	req := request(1)
	r.create(req)
	m := r.d.machine(req.Sandbox)
	seen := func(want ...bool) {
		t.Helper()
		m.mu.Lock()
		saw := slices.Clone(m.saw)
		m.mu.Unlock()
		if !slices.Equal(saw, want) {
			t.Errorf("its snapshots saw it frozen: %v, not %v", saw, want)
		}
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
			m.mu.Lock()
			frozen := m.frozen
			m.mu.Unlock()
			if !frozen {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("what was frozen does not go on")
			}
		}
	}
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotMemory))
	seen(true)
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotDisk))
	seen(true, false)
	r.d.fails["snapshot"] = sandbox.Errorf(sandbox.Internal, "failed", "it fails")
	if _, err := r.n.SnapshotMachine(background, snap(req.Sandbox, 1, sandbox.SnapshotMemory)); code(err) != "failed" {
		t.Errorf("error %v", err)
	}
	seen(true, false)
	r.must(r.n.PauseMachine(background, req.Sandbox, 1))
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotMemory))
	r.must(r.n.ResumeMachine(background, req.Sandbox, 1))
	seen(true, false, true)
	r.must(r.n.PauseMachine(background, req.Sandbox, 1))
	r.must(r.n.ResumeMachine(background, req.Sandbox, 1))
	seen(true, false, true)
	// Where the kernel is an engine's there is no need.
	r.d.kernel = false
	r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotMemory))
	seen(true, false, true, false)
}

// TestAGuestThatDoesNotFreezeIsSnapshottedAsItRuns has agents that can't freeze
// what runs, and that were never told of it. The log says so, once.
func TestAGuestThatDoesNotFreezeIsSnapshottedAsItRuns(t *testing.T) {
	for name, c := range map[string]struct {
		kernel, old, restless bool
		logged                int
	}{
		"it freezes":             {kernel: true},
		"it can't":               {kernel: true, restless: true, logged: 1},
		"it is an old one":       {kernel: true, old: true, logged: 1},
		"it has no own kernel":   {restless: true},
		"old without own kernel": {old: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.stop()
			var log lockedBuffer
			r.more = func(o *Options) { o.Log = slog.New(slog.NewTextHandler(&log, nil)) }
			r.start("boot-1")
			r.d.kernel, r.d.old, r.d.restless = c.kernel, c.old, c.restless
			req := request(1)
			r.create(req)
			r.snapshot(snap(req.Sandbox, 1, sandbox.SnapshotMemory))
			if saw := r.d.machine(req.Sandbox).saw; !slices.Equal(saw, []bool{c.kernel && c.logged == 0}) {
				t.Errorf("frozen: %v", saw)
			}
			if got := strings.Count(log.String(), "is not frozen"); got != c.logged {
				t.Errorf("that it is not frozen is logged %d times: %s", got, log.String())
			}
		})
	}
}

// lockedBuffer is a log that is written by many.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
