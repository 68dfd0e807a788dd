package control

import (
	"context"
	"slices"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// DrainReport tells what a drain did.
type DrainReport struct {
	Done []string          `json:"done"` // sandboxes that it suspended, or whose disk it saved where they can't be
	Left map[string]string `json:"left"` // the others, and why
}

// Drain suspends everything that has a machine, and saves the disk of what
// can't be suspended, within a time: the host goes down. What an operation has
// in hand is waited for first. Sandboxes that come up meanwhile are drained too.
func (c *Control) Drain(ctx context.Context, who sandbox.Caller, within time.Duration) (DrainReport, error) {
	if err := who.Can(sandbox.ActKeys); err != nil {
		return DrainReport{}, err
	}
	if within <= 0 || within > MaxDrain {
		return DrainReport{}, invalid("bad_within", "a drain may take up to %s, not %s", MaxDrain, within)
	}
	bounded, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	d := drain{c: c, own: map[string]string{}, tried: map[string]bool{}, done: map[string]bool{}, left: map[string]string{}}
	err := d.run(bounded)
	if bounded.Err() != nil && ctx.Err() == nil { // no time is left, which is an answer
		last, stop := context.WithTimeout(ctx, lastLook)
		defer stop()
		err = d.look(last)
	}
	report := DrainReport{Done: []string{}, Left: d.left}
	for id := range d.done {
		report.Done = append(report.Done, id)
	}
	slices.Sort(report.Done)
	return report, err
}

// The pace of a drain.
const (
	drainPoll = time.Second     // where nobody rings
	lastLook  = 5 * time.Second // at what has ended when the time was over
)

// drain is one drain under way.
type drain struct {
	c     *Control
	own   map[string]string // the suspends that it waits for, by sandbox
	tried map[string]bool   // what it has asked to suspend
	done  map[string]bool
	left  map[string]string // why a sandbox is not done, until it is
}

// run goes round until nothing is under way any more.
func (d *drain) run(ctx context.Context) error {
	for {
		rung, leave := d.c.bell.listen("")
		busy, err := d.round(ctx)
		if err != nil || !busy {
			leave()
			return err
		}
		poll, cancel := context.WithTimeout(ctx, drainPoll)
		select {
		case <-rung:
		case <-poll.Done():
		}
		cancel()
		leave()
		if ctx.Err() != nil {
			return sandbox.AsError(ctx.Err())
		}
	}
}

// round asks what has a machine to suspend, and judges what has ended since
// the last. It tells whether something is still under way.
func (d *drain) round(ctx context.Context) (busy bool, err error) {
	rows, err := d.rows(ctx)
	if err != nil {
		return false, err
	}
	for id, op := range d.own {
		if sb, ok := rows[id]; ok && sb.Operation == op {
			busy = true
			delete(rows, id)
		} else if err := d.judge(ctx, id); err != nil {
			return false, err
		}
	}
	for id, sb := range rows {
		switch {
		case sb.State.Transitional():
			d.left[id] = "it is still " + string(sb.State)
			busy = true
		case !d.tried[id]:
			d.tried[id] = true
			busy = d.suspend(ctx, sb) || busy
		}
	}
	return busy, nil
}

// rows are the sandboxes that have a machine or an operation under way, by id,
// but for those that go anyway. What settled without a machine is not left.
func (d *drain) rows(ctx context.Context) (map[string]sandbox.Sandbox, error) {
	var filter sandbox.SandboxFilter
	for _, s := range sandbox.States {
		if s != sandbox.StateDeleting && (s.HasMachine() || s.Transitional()) {
			filter.States = append(filter.States, s)
		}
	}
	rows := map[string]sandbox.Sandbox{}
	for page := (sandbox.Page{Limit: 500}); ; {
		list, next, err := d.c.store.Sandboxes(ctx, "", filter, page)
		if err != nil {
			return nil, err
		}
		for _, sb := range list {
			rows[sb.ID] = sb
		}
		if next == "" {
			break
		}
		page.Token = next
	}
	for id := range d.left {
		if _, here := rows[id]; !here && d.own[id] == "" {
			delete(d.left, id)
		}
	}
	return rows, nil
}

// suspend asks for it and tells whether it is under way; what refuses is saved
// instead.
func (d *drain) suspend(ctx context.Context, sb sandbox.Sandbox) bool {
	who := sandbox.Caller{KeyID: sandbox.DrainKey, Project: sb.Project, Role: sandbox.RoleProject}
	_, op, _, err := d.c.ask(ctx, who, sb.ID, sandbox.VerbSuspend, input{}, sandbox.Idempotency{})
	if err != nil {
		d.save(ctx, sb.ID, sandbox.AsError(err).Message)
		return false
	}
	d.own[sb.ID] = op.ID
	d.left[sb.ID] = "its suspend has not ended"
	return true
}

// judge notes how a suspend ended.
func (d *drain) judge(ctx context.Context, id string) error {
	op, err := d.c.store.Operation(ctx, "", d.own[id])
	if err != nil {
		return err
	}
	delete(d.own, id)
	if op.Error != nil {
		d.save(ctx, id, op.Error.Message)
		return nil
	}
	d.done[id] = true
	delete(d.left, id)
	return nil
}

// look judges what has ended, and asks for nothing more.
func (d *drain) look(ctx context.Context) error {
	for id, own := range d.own {
		op, err := d.c.store.Operation(ctx, "", own)
		if err != nil {
			return err
		}
		if op.State.Done() && op.Error == nil {
			d.done[id] = true
			delete(d.left, id)
		}
	}
	return nil
}

// save checkpoints what can't be suspended, so that its disk outlives the host.
func (d *drain) save(ctx context.Context, id, why string) {
	d.left[id] = "it can't be suspended: " + why
	sb, err := d.c.store.Sandbox(ctx, "", id)
	switch {
	case err != nil:
		return
	case sb.State != sandbox.StateRunning:
		d.left[id] += "; it is " + string(sb.State)
		return
	}
	if _, err := d.c.checkpoint(ctx, sb); err != nil {
		d.left[id] += "; nor can its disk be saved: " + sandbox.AsError(err).Message
		return
	}
	d.done[id] = true
	delete(d.left, id)
}
