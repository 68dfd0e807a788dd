package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// close deletes all that a worker has, after a last look at it.
func (k *worker) close() {
	for len(k.boxes) > 0 {
		b := k.boxes[0]
		var err error
		if b.state == "running" {
			err = k.checkRunning(b)
		} else {
			err = k.checkKept(b)
		}
		if err != nil {
			k.blame(b, err)
			continue
		}
		k.delete(b)
	}
	for _, i := range k.pool {
		if r, _, err := k.ask(k.rnd, "DELETE", "/v1/snapshots/"+i.id, nil, nil); err != nil || r != nil && r.Class != api.ClassNotFound {
			k.rep.wrong("worker %d: delete the snapshot %s: %v %v", k.n, i.id, r, err)
		}
	}
	k.pool = nil
}

// moreGoroutines is the room for connections that clients keep for the next call.
const moreGoroutines = 24

// checkEnd demands that nothing is left: no rows, no files, no processes.
func (w *world) checkEnd(before level) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	list, err := w.c.Sandboxes(ctx, client.SandboxFilter{})
	if err != nil {
		w.rep.wrong("list the sandboxes: %v", err)
	}
	for _, s := range list {
		if s.State != api.SandboxDeleted {
			w.rep.wrong("the sandbox %s is left, %s", s.Id, s.State)
		}
	}
	b, r, err := w.once("GET", "/v1/snapshots", "", nil)
	var snaps api.SnapshotList
	if err != nil || r != nil || json.Unmarshal(b, &snaps) != nil || len(snaps.Items) > 0 {
		w.rep.wrong("snapshots are left: %v %v %.300s", err, r, b)
	}
	if left := w.d.WaitCensus(30 * time.Second); len(left) > 0 {
		w.rep.wrong("left on the host: %s", strings.Join(left, "\n"))
	}
	var names []string
	for end := time.Now().Add(60 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		names = nil
		entries, _ := os.ReadDir(filepath.Join(w.d.State, "snapshots"))
		for _, e := range entries {
			names = append(names, e.Name())
		}
		if len(names) == 0 {
			break
		}
	}
	if len(names) > 0 {
		w.rep.wrong("files of snapshots are left: %s", strings.Join(names, " "))
	}
	w.rep.count("checks", "the host's census is empty")
	w.d.DemandLevel(before.fds, before.control)
	now := w.goroutines()
	for end := time.Now().Add(30 * time.Second); now > before.goroutines+moreGoroutines && time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		now = w.goroutines()
	}
	if before.goroutines == 0 || now == 0 || now > before.goroutines+moreGoroutines {
		w.rep.wrong("the daemon has %d goroutines; before the first sandbox it had %d", now, before.goroutines)
	}
	w.checkEvents()
}

// checkEvents holds every sandbox's way through its states, as the events tell
// it, to the lifecycle.
func (w *world) checkEvents() {
	at := map[string]string{}
	after, last := int64(0), int64(0)
	for {
		b, r, err := w.once("GET", fmt.Sprintf("/v1/events?after=%d&limit=1000", after), "", nil)
		var l api.EventList
		if err != nil || r != nil || json.Unmarshal(b, &l) != nil {
			w.rep.wrong("read the events after %d: %v %v %.300s", after, err, r, b)
			return
		}
		if l.Gap != nil {
			w.rep.wrong("events are missing: %+v", *l.Gap)
		}
		if len(l.Items) == 0 {
			break
		}
		for _, e := range l.Items {
			if e.Seq <= last {
				w.rep.wrong("the event %d comes after %d", e.Seq, last)
			}
			last = e.Seq
			if e.Type != "sandbox.state" {
				continue
			}
			var move struct{ From, To string }
			if err := json.Unmarshal(e.Data, &move); err != nil {
				w.rep.wrong("the event %d holds %s", e.Seq, e.Data)
			}
			if at[e.Sandbox] != move.From || !legal(move.From, move.To) {
				w.rep.wrong("the event %d tells that %s, which was %q, went from %q to %q", e.Seq, e.Sandbox, at[e.Sandbox], move.From, move.To)
			}
			at[e.Sandbox] = move.To
			w.rep.count("checks", "an event's step is one of the lifecycle, and follows the last")
		}
		after = l.NextAfter
	}
	for id, state := range at {
		if state != "deleted" {
			w.rep.wrong("the events leave %s %s", id, state)
		}
	}
}
