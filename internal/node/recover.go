package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/sandbox"
)

// recover takes up what an earlier process left: machines whose bring-up was
// done are adopted, the others are undone, and what no journal roots is
// collected.
func (n *Node) recover(ctx context.Context) {
	entries, err := os.ReadDir(filepath.Join(n.o.StateDir, "machines"))
	if err != nil {
		n.o.Log.Error("list the machines' journals", "err", err)
		return
	}
	var wg sync.WaitGroup
	limit := make(chan struct{}, 8)
	rooted := map[string]bool{}
	for _, e := range entries {
		id := e.Name()
		if !sandbox.ValidID(sandbox.KindSandbox, id) {
			continue
		}
		rooted[id] = true
		wg.Add(1)
		limit <- struct{}{}
		go func() {
			defer wg.Done()
			defer func() { <-limit }()
			n.recoverOne(ctx, id)
		}()
	}
	wg.Wait()
	n.collect(ctx, rooted)
}

func (n *Node) recoverOne(ctx context.Context, id string) {
	log := n.o.Log.With("sandbox", id)
	j, err := loadJournal(n.dir(id))
	if err != nil {
		log.Error("a machine's journal is unreadable; the machine is left alone", "err", err)
		return
	}
	if j == nil || !j.Done {
		if err := n.sweep(ctx, id); err != nil {
			log.Error("undo an unfinished bring-up", "err", err)
		}
		return
	}
	m := n.newMachine(id, j)
	m.ready = true
	if j.End == nil {
		if end := n.adopt(ctx, m); end != nil {
			j.End = end
			if err := j.save(n.dir(id)); err != nil {
				log.Error("save a machine's end", "err", err)
			}
			log.Info("machine ended while nobody watched", "reason", end.Reason)
		}
	}
	if j.End != nil {
		n.tellEnd(ctx, id, *j.End)
	}
	n.mu.Lock()
	n.machines[id] = m
	n.fences[id] = j.Request.Generation
	n.touch(m)
	n.mu.Unlock()
}

// adopt takes up one machine, or tells how it ended. A machine that can't be
// taken up for another reason is ended: nobody could reach it.
func (n *Node) adopt(ctx context.Context, m *machine) *sandbox.End {
	end := func(r sandbox.EndReason, detail string) *sandbox.End {
		return &sandbox.End{Reason: r, Detail: detail, At: time.Now().UTC()}
	}
	d, ok := n.drivers[m.journal.Driver]
	if !ok {
		return end(sandbox.EndUnknown, "this daemon has no driver "+m.journal.Driver)
	}
	var err error
	m.driver, err = d.Adopt(ctx, m.id)
	var ended *driver.Ended
	switch {
	case err == nil:
		n.startLink(m)
		n.watch(m)
		return nil
	case errors.As(err, &ended) && ended.End.Reason != sandbox.EndUnknown:
		return &ended.End
	case m.journal.BootID != n.o.BootID:
		return end(sandbox.EndHostRestart, "the host was restarted")
	case sandbox.IsClass(err, sandbox.NotFound):
		return end(sandbox.EndUnknown, "it ended while the daemon was down")
	default:
		if derr := d.Discard(ctx, m.id); derr != nil {
			n.o.Log.Error("end a machine that can't be adopted", "sandbox", m.id, "err", derr)
		}
		return end(sandbox.EndUnknown, "it could not be adopted: "+err.Error())
	}
}

// collect removes what bears a sandbox's id and has no journal.
func (n *Node) collect(ctx context.Context, rooted map[string]bool) {
	found := map[string]bool{}
	note := func(ids []string, err error) {
		if err != nil {
			n.o.Log.Error("take the census", "err", err)
		}
		for _, id := range ids {
			if sandbox.ValidID(sandbox.KindSandbox, id) && !rooted[id] {
				found[id] = true
			}
		}
	}
	for _, d := range n.drivers {
		note(d.List(ctx))
	}
	note(n.o.Networks.List(ctx))
	for id := range found {
		n.o.Log.Info("collecting what nothing roots", "sandbox", id)
		if err := n.sweep(ctx, id); err != nil {
			n.o.Log.Error("collect", "sandbox", id, "err", err)
		}
	}
}
