package linear

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/anishathalye/porcupine"
)

// System is one sandbox that a history is run against.
type System interface {
	// Ask asks for a verb.
	Ask(ctx context.Context, a Ask) Answer
	// Look reads the sandbox: State, Op and, where it is told, Generation.
	Look(ctx context.Context) Answer
	// Wait waits until an operation has ended: Failed.
	Wait(ctx context.Context, op string) Answer
	// Crash kills the machine, if there is one.
	Crash(ctx context.Context)
}

// Plan says what a history is made of.
type Plan struct {
	Clients, Calls int
	// Verbs are drawn from, as often as each stands here; "look" and "crash" are two of them.
	Verbs []string
	// Pause is the longest time that a client waits between two calls.
	Pause time.Duration
	// Before, where not nil, is called when every client and every operation is
	// done, before the last delete.
	Before func() error
}

// Verbs are the default of Plan.Verbs: a mixture in which the sandbox lives
// long enough to see most of its states.
var Verbs = strings.Fields(strings.Repeat("pause resume suspend restore stop start wake snapshot rollback look look look ", 4) + "fork fork delete crash crash")

// History is what happened to one sandbox. Its methods may be called at once.
type History struct {
	name    string // of its idempotency keys: a sandbox may see many histories
	clock   atomic.Int64
	mu      sync.Mutex
	steps   []porcupine.Operation
	snaps   []string
	crashes []int64
	ends    sync.WaitGroup
}

// New is an empty history, of a sandbox that is not there yet.
func New() *History { return &History{name: fmt.Sprintf("h%x", rand.Uint64())} }

// Begun is a history of a sandbox that runs, with no operation under way, that
// can go back to this snapshot of its memory.
func Begun(snapshot string) *History {
	h := New()
	before := func(a Ask, out Answer) {
		h.record(0, h.clock.Add(1), Input{Kind: KindAsk, Ask: a}, out)
		h.record(0, h.clock.Add(1), Input{Kind: KindEnd, Op: out.Op}, Answer{})
	}
	before(Ask{Verb: "create"}, Answer{Op: "op_create"})
	before(Ask{Verb: "snapshot"}, Answer{Op: "op_snapshot", Snapshot: snapshot})
	h.snaps = append(h.snaps, snapshot)
	return h
}

// record notes a step that was asked for at `call` and answered now.
func (h *History) record(client int, call int64, in Input, out Answer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.steps = append(h.steps, porcupine.Operation{ClientId: client, Input: in, Call: call, Output: out, Return: h.clock.Add(1)})
}

// Run draws a history and runs it against sys: a create, what the clients ask
// for at once, and at last a delete. It returns when every operation has ended.
func Run(ctx context.Context, sys System, plan Plan, rng *rand.Rand) (*History, error) {
	h := New()
	h.Ask(ctx, sys, 0, Ask{Verb: "create"})
	err := h.Play(ctx, sys, plan, rng)
	h.Ask(ctx, sys, 0, Ask{Verb: "delete"})
	h.Settle(ctx, sys)
	return h, err
}

// Play lets the clients ask for what they draw, and waits until every operation
// has ended.
func (h *History) Play(ctx context.Context, sys System, plan Plan, rng *rand.Rand) error {
	var clients sync.WaitGroup
	for c := range plan.Clients {
		own := rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))
		clients.Go(func() {
			for i := range plan.Calls {
				if plan.Pause > 0 {
					time.Sleep(time.Duration(own.Int64N(int64(plan.Pause) + 1)))
				}
				switch verb := plan.Verbs[own.IntN(len(plan.Verbs))]; verb {
				case "look":
					h.Look(ctx, sys, c+1)
				case "crash":
					h.Crash(ctx, sys)
				default:
					h.draw(ctx, sys, c+1, i, verb, own)
				}
			}
		})
	}
	clients.Wait()
	h.ends.Wait()
	var err error
	if plan.Before != nil {
		err = plan.Before()
	}
	h.Look(ctx, sys, 0)
	return err
}

// draw asks for a verb, sometimes with a key and then sometimes twice at once,
// and sometimes waits until it is done.
func (h *History) draw(ctx context.Context, sys System, client, i int, verb string, rng *rand.Rand) {
	a := Ask{Verb: verb, Disk: rng.IntN(2) == 0}
	if verb == "rollback" {
		a.To = h.anySnapshot(rng)
	}
	again := rng.IntN(8)
	if again < 2 {
		a.Key = fmt.Sprintf("%s-%d-%d", h.name, client, i)
	}
	var twice sync.WaitGroup
	if again == 0 {
		twice.Go(func() { h.Ask(ctx, sys, client+100, a) })
	}
	_, done := h.Ask(ctx, sys, client, a)
	twice.Wait()
	if rng.IntN(2) == 0 {
		<-done
	}
}

// Ask asks for a verb and records it, and in the background its operation's end,
// which closes the channel. Where it was refused that is closed already.
func (h *History) Ask(ctx context.Context, sys System, client int, a Ask) (Answer, <-chan struct{}) {
	done := make(chan struct{})
	call := h.clock.Add(1)
	in := a
	in.To = strings.TrimSuffix(a.To, diskMark)
	out := sys.Ask(ctx, in)
	if out.Snapshot != "" && a.Verb == "snapshot" {
		if a.Disk {
			out.Snapshot += diskMark
		}
		h.mu.Lock()
		if !slices.Contains(h.snaps, out.Snapshot) {
			h.snaps = append(h.snaps, out.Snapshot)
		}
		h.mu.Unlock()
	}
	h.record(client, call, Input{Kind: KindAsk, Ask: a}, out)
	if out.Refused != "" || out.Op == "" {
		close(done)
		return out, done
	}
	h.ends.Go(func() {
		defer close(done)
		h.end(call, out.Op, sys.Wait(ctx, out.Op))
	})
	return out, done
}

// end records an operation's end once, however many asked for it.
func (h *History) end(call int64, op string, out Answer) {
	now := h.clock.Add(1)
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, s := range h.steps {
		in, _ := s.Input.(Input)
		// One end lies within both intervals; two different answers stay two steps.
		if in.Kind == KindEnd && in.Op == op && s.Output == out {
			h.steps[i].Call, h.steps[i].Return = min(s.Call, call), min(s.Return, now)
			return
		}
	}
	h.steps = append(h.steps, porcupine.Operation{ClientId: 2000, Input: Input{Kind: KindEnd, Op: op}, Call: call, Output: out, Return: now})
}

// Look looks at the sandbox.
func (h *History) Look(ctx context.Context, sys System, client int) Answer {
	call := h.clock.Add(1)
	out := sys.Look(ctx)
	h.record(client, call, Input{Kind: KindLook}, out)
	return out
}

// Crash kills the machine. When the row hears of it, nobody can know: Settle
// ends its interval.
func (h *History) Crash(ctx context.Context, sys System) {
	h.mu.Lock()
	h.crashes = append(h.crashes, h.clock.Add(1))
	h.mu.Unlock()
	sys.Crash(ctx)
}

// Crashed tells whether a machine was killed since the history began or was
// last settled: its row may hear of it as late as in another history.
func (h *History) Crashed() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.crashes) > 0
}

// Settle waits until every operation has ended and takes a last look.
func (h *History) Settle(ctx context.Context, sys System) {
	h.ends.Wait()
	h.Look(ctx, sys, 0)
	for i, call := range h.crashes {
		h.record(1000+i, call, Input{Kind: KindCrash}, Answer{})
	}
	h.crashes = nil
}

// anySnapshot is one of the history's snapshots, or one that never was.
func (h *History) anySnapshot(rng *rand.Rand) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.snaps) == 0 || rng.IntN(10) == 0 {
		return "snp_aaaaaaaaaaaaaaaaaaaa"
	}
	return h.snaps[rng.IntN(len(h.snaps))]
}

// Steps is how many steps the history has.
func (h *History) Steps() int { return len(h.steps) }

// Count tells how many steps were accepted verbs, refused ones, and how many
// operations failed.
func (h *History) Count() (accepted, refused, failed int) {
	for _, s := range h.steps {
		in, out := s.Input.(Input), s.Output.(Answer)
		switch {
		case in.Kind == KindAsk && out.Refused == "":
			accepted++
		case in.Kind == KindAsk:
			refused++
		case in.Kind == KindEnd && out.Failed != "":
			failed++
		}
	}
	return accepted, refused, failed
}

// Check tells whether the history is linearizable; an error where it is not, or
// where that can't be found out in time.
func (h *History) Check(within time.Duration) error {
	switch porcupine.CheckOperationsTimeout(Model.ToModel(), h.steps, within) {
	case porcupine.Ok:
		return nil
	case porcupine.Unknown:
		return fmt.Errorf("not decided within %v:\n%s", within, h)
	}
	return fmt.Errorf("no order of these steps explains the answers:\n%s", h)
}

// String lists the steps in the order in which they were asked for.
func (h *History) String() string {
	steps := slices.Clone(h.steps)
	slices.SortFunc(steps, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var b strings.Builder
	for _, s := range steps {
		fmt.Fprintf(&b, "%4d %4d  client %-4d %s\n", s.Call, s.Return, s.ClientId, Describe(s.Input.(Input), s.Output.(Answer)))
	}
	return b.String()
}
