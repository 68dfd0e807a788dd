package engine

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
	"cloche.dev/cloche/internal/sandbox"
)

// pauseTimeout bounds how long a sentry may take to stop its tasks or to let
// them go on.
const pauseTimeout = 30 * time.Second

func (c *control) servePause(_ http.ResponseWriter, r *http.Request) (any, error) {
	return nil, c.verb(r, func(m *machine) error { return c.pause(m, enginerpc.Paused) })
}

func (c *control) serveResume(_ http.ResponseWriter, r *http.Request) (any, error) {
	return nil, c.verb(r, func(m *machine) error { return c.pause(m, "") })
}

// verb does something to a living machine, one thing at a time. What it does
// goes on when the asker has gone: it must not end half way.
func (c *control) verb(r *http.Request, do func(m *machine) error) error {
	m, err := c.find(r.PathValue("id"))
	if err != nil {
		return err
	}
	m.verbs.Lock()
	defer m.verbs.Unlock()
	if end := m.record().End; end != nil {
		return ended(end)
	}
	err = do(m)
	if end := m.record().End; err != nil && end != nil {
		return ended(end)
	}
	return err
}

func ended(end *sandbox.End) error {
	return sandbox.Errorf(sandbox.NotFound, "machine_ended", "the machine has ended: %s %s", end.Reason, end.Detail)
}

// pause brings a machine to where it is wanted, Paused or running (""). The
// sentry counts stops, and one resume too many ends it, so every step is
// noted before and after; where a note says that a step was begun and not that
// it was done, the sentry is looked into. Called with m.verbs held.
func (c *control) pause(m *machine, wanted string) error {
	now := m.record().Pause
	if now == enginerpc.Pausing || now == enginerpc.Resuming {
		paused, err := c.isPaused(m)
		if err != nil {
			return err
		}
		now = ""
		if paused {
			now = enginerpc.Paused
		}
		if err := c.note(m, now); err != nil {
			return err
		}
	}
	if now == wanted {
		return nil
	}
	box := c.box(m.record().ID)
	step, do := enginerpc.Pausing, func() error { return box.Pause(box.ID) }
	if wanted == "" {
		step, do = enginerpc.Resuming, func() error { return box.Resume(box.ID) }
	}
	if err := c.note(m, step); err != nil {
		return err
	}
	if err := c.ask(m, pauseTimeout, do); err != nil {
		return err
	}
	return c.note(m, wanted)
}

// note writes down where a machine stands.
func (c *control) note(m *machine, pause string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.rec.End != nil {
		return ended(m.rec.End)
	}
	rec := m.rec
	rec.Pause = pause
	if err := saveRecord(m.dir, rec); err != nil {
		return sandbox.Errorf(sandbox.Unavailable, "record_not_written", "the machine's record can't be written: %w", err)
	}
	m.rec.Pause = pause
	return nil
}

// ask runs a call of a machine's sentry until it answers or the machine ends. A
// sentry that does neither in time keeps one goroutine until it ends.
func (c *control) ask(m *machine, timeout time.Duration, call func() error) error {
	answer := make(chan error, 1)
	go func() { answer <- call() }()
	ctx, cancel := context.WithTimeout(c.ctx, timeout)
	defer cancel()
	select {
	case err := <-answer:
		if err != nil {
			return sandbox.Errorf(sandbox.Internal, "sentry_failed", "the machine's sentry failed: %w", err)
		}
		return nil
	case <-m.done:
		return ended(m.record().End)
	case <-ctx.Done():
		return sandbox.Errorf(sandbox.Unavailable, "sentry_silent", "the machine's sentry did not answer within %s", timeout)
	}
}

// isPaused looks whether a sentry's tasks stand still: each has a goroutine,
// and that of PID 1, which nothing but an external stop can halt, is in doStop.
// One look may catch a task on its way there, so two must agree.
func (c *control) isPaused(m *machine) (bool, error) {
	var last *bool
	for range 50 {
		var stacks string
		box := c.box(m.record().ID)
		err := c.ask(m, pauseTimeout, func() (err error) {
			stacks, err = box.Stacks()
			return err
		})
		if err != nil {
			return false, err
		}
		tasks, stopped := countTasks(stacks)
		paused := tasks > 0 && tasks == stopped
		if last != nil && *last == paused {
			return paused, nil
		}
		last = &paused
		time.Sleep(20 * time.Millisecond)
	}
	return false, errors.New("it can't be told whether the machine is paused")
}

// countTasks counts the goroutines of tasks in a dump of a sentry's stacks, and
// those of them that stand still.
func countTasks(stacks string) (tasks, stopped int) {
	for g := range strings.SplitSeq(stacks, "\n\n") {
		if !strings.Contains(g, "kernel.(*Task).run(") {
			continue
		}
		tasks++
		if strings.Contains(g, "kernel.(*Task).doStop(") {
			stopped++
		}
	}
	return tasks, stopped
}
