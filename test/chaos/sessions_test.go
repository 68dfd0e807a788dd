package chaos

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
)

// counting prints numbered lines of one length for ever, so that what stands at
// an offset is known; asked to end, it writes how many it printed to a file.
const counting = `
import os, sys, time, signal
name, delay = sys.argv[1], float(sys.argv[2])
stop = []
signal.signal(signal.SIGTERM, lambda *a: stop.append(1))
i = 0
while not stop:
    os.write(1, b'%015d\n' % i)
    i += 1
    time.sleep(delay)
while True:
    try:
        with open('/var/tmp/' + name, 'w') as f:
            f.write(str(i))
        break
    except OSError: # the host's disk is full
        time.sleep(0.1)
os._exit(7) # at once: a second signal on the way out would tell another end
`

// startCounter starts a counting session in a running box.
func (k *worker) startCounter(b *box) error {
	k.names++
	name := fmt.Sprintf("count-%d-%d", k.n, k.names)
	delay := []string{"0.02", "0.02", "0.003"}[k.rnd.IntN(3)]
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	m := k.mark()
	s, err := k.c.CreateSession(ctx, b.id, api.ProcessSpec{Args: []string{"python3", "-c", counting, name, delay}, User: "root"})
	if err != nil {
		return fmt.Errorf("create a session: %w", err)
	}
	_, err = k.c.Session(b.id, s.ID).Start(ctx)
	if e := (*client.Error)(nil); errors.As(err, &e) && e.Code == "session_expired" && strings.Contains(k.since(m), "clock") {
		k.rep.count("operations", "session: expired, since the clock jumped")
		return nil
	}
	if err != nil {
		return fmt.Errorf("start the session %s (%s): %w", s.ID, k.since(m), err)
	}
	c := &counter{id: s.ID, name: name, total: -1}
	b.counters = append(b.counters, c)
	k.rep.count("operations", "session: started")
	// Before its first line it may not know yet what to do with a signal.
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		info, err := k.session(b, c)
		if err != nil || info.OffsetNext > 0 {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("the session %s was started and prints nothing; it is %s, %+v", c.id, info.State, info.Exit)
		}
	}
}

// session reads what a session is.
func (k *worker) session(b *box, c *counter) (api.Session, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return k.c.Session(b.id, c.id).Get(ctx)
}

// checkLive holds the counters of a running box to going on, and their logs to
// what they print.
func (k *worker) checkLive(b *box) error {
	for _, c := range slices.Clone(b.counters) {
		info, err := k.session(b, c)
		if err != nil {
			return err
		}
		if info.State == api.SessionExited && c.mayExit { // by a stop that failed after its grace
			b.counters = slices.DeleteFunc(b.counters, func(o *counter) bool { return o == c })
			b.ended = append(b.ended, c)
			continue
		}
		if info.State != api.SessionRunning || info.Held {
			return fmt.Errorf("the session %s of a running sandbox is %s, held %v, exit %+v", c.id, info.State, info.Held, info.Exit)
		}
		first := info.OffsetNext
		for end := time.Now().Add(30 * time.Second); info.OffsetNext <= first; time.Sleep(50 * time.Millisecond) {
			if c.mayExit && info.State == api.SessionExited {
				break // the next look sorts it
			}
			if time.Now().After(end) {
				return fmt.Errorf("the session %s stands still at offset %d for 30 s", c.id, first)
			}
			if info, err = k.session(b, c); err != nil {
				return err
			}
		}
		if err := k.readLog(b, c, info); err != nil {
			return err
		}
		k.rep.count("checks", "a session goes on, and its log is what it printed")
	}
	return nil
}

// readLog reads a session's log from where it was last read to what info says,
// or to its end, and compares every byte.
func (k *worker) readLog(b *box, c *counter, info api.Session) error {
	if info.OffsetNext < c.checked {
		return fmt.Errorf("the log of %s has shrunk from %d to %d bytes", c.id, c.checked, info.OffsetNext)
	}
	st := k.c.Session(b.id, c.id).Follow(client.StreamOptions{Offset: c.checked})
	defer st.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	live := info.State == api.SessionRunning || info.State == api.SessionCreated
	for !live || c.checked < info.OffsetNext {
		e, err := st.Next(ctx)
		if err != nil {
			return fmt.Errorf("the log of %s (%s, %d to %d) at offset %d: %w", c.id, info.State, info.OffsetFirst, info.OffsetNext, c.checked, err)
		}
		switch e.Type {
		case api.EventStdout:
			if e.Offset != c.checked {
				return fmt.Errorf("the log of %s goes on at %d where %d comes next", c.id, e.Offset, c.checked)
			}
			if d := differs(e.Data, e.Offset); d != "" {
				return fmt.Errorf("the log of %s is not what was printed: %s", c.id, d)
			}
			c.checked += int64(len(e.Data))
		case api.EventGap:
			if c.checked >= c.from || e.To != c.from || e.Reason == "" {
				return fmt.Errorf("the log of %s, which begins at %d, has a gap: %+v", c.id, c.from, e)
			}
			c.checked = e.To
		case api.EventExit, api.EventLost:
			return k.checkEnd(c, info, e)
		case api.EventStarted:
		default:
			return fmt.Errorf("the log of %s tells %s: %q", c.id, e.Type, e.Data)
		}
	}
	return nil
}

// checkEnd holds the last event of a log to what the session says and to what
// can have ended it.
func (k *worker) checkEnd(c *counter, info api.Session, e api.StreamEvent) error {
	c.terminal = string(e.Type)
	switch {
	case c.checked != info.OffsetNext && info.State != api.SessionRunning:
		return fmt.Errorf("the log of %s ends at %d, the session says %d", c.id, c.checked, info.OffsetNext)
	case e.Type == api.EventLost && e.Reason == "":
		return fmt.Errorf("the session %s is lost without a reason", c.id)
	case e.Type == api.EventLost:
		k.rep.count("checks", "a lost session's log is a prefix, and says that it is lost")
	case !c.mayExit:
		return fmt.Errorf("the session %s ended by itself: %+v", c.id, e.Exit)
	case e.Exit == nil || e.Exit.Code != 7:
		return fmt.Errorf("the session %s was asked to end and did so as %+v", c.id, e.Exit)
	case c.total >= 0 && c.total != c.checked:
		return fmt.Errorf("the log of %s has %d bytes, %d were printed", c.id, c.checked, c.total)
	default:
		k.rep.count("checks", "an ended session's log is all that it printed")
	}
	return nil
}

// finish asks a counter to end and compares the length of its log with what
// the program says it printed.
func (k *worker) finish(b *box, c *counter) error {
	c.mayExit = true
	var info api.Session
	var err error
	for end := time.Now().Add(90 * time.Second); info.State != api.SessionExited; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("the session %s was asked to end and is %s after 90 s", c.id, info.State)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		_ = k.c.Session(b.id, c.id).Signal(ctx, "SIGTERM") // what came of it is seen next
		cancel()
		if info, err = k.session(b, c); err != nil {
			return err
		}
		if info.State == api.SessionLost {
			return errors.Join(fmt.Errorf("the session %s was asked to end and is lost", c.id), k.settled(b))
		}
	}
	out, err := k.exec(b.id, "cat", "/var/tmp/"+c.name)
	if err != nil {
		return fmt.Errorf("read what %s printed: %w", c.id, err)
	}
	lines, err := strconv.ParseInt(strings.TrimSpace(out), 10, 64)
	if err != nil {
		return err
	}
	c.total = lines * line
	if err := k.readLog(b, c, info); err != nil {
		return err
	}
	for i, x := range b.counters {
		if x == c {
			b.counters = append(b.counters[:i:i], b.counters[i+1:]...)
			break
		}
	}
	k.rep.count("operations", "session: ended")
	return nil
}

// inherit finds the sessions that must go on from those that lived in an image.
func (k *worker) inherit(b *box, living []*counter) error {
	known := map[string]bool{}
	for _, c := range append(append([]*counter(nil), b.counters...), b.ended...) {
		known[c.id] = true
	}
	want := map[string]*counter{}
	for _, c := range living {
		want[c.id] = c
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	list, err := k.c.Sessions(ctx, b.id)
	if err != nil {
		return err
	}
	for _, s := range list {
		parent, ok := want[s.Parent]
		if known[s.Id] || s.State != api.SessionRunning || !ok {
			continue
		}
		delete(want, s.Parent)
		if s.ParentOffset < parent.from || s.OffsetFirst != s.ParentOffset && s.OffsetNext > s.ParentOffset {
			return fmt.Errorf("the session %s begins at %d of its parent %s, its log at %d", s.Id, s.ParentOffset, s.Parent, s.OffsetFirst)
		}
		b.counters = append(b.counters, &counter{id: s.Id, name: parent.name, parent: parent, from: s.ParentOffset, total: -1})
		k.rep.count("checks", "a session goes on from its parent on a new timeline")
	}
	if len(want) > 0 {
		var ids, have []string
		for id := range want {
			ids = append(ids, id)
		}
		for _, s := range list {
			have = append(have, fmt.Sprintf("%s %s parent=%s", s.Id, s.State, s.Parent))
		}
		return fmt.Errorf("%d sessions lived in the snapshot; %v do not go on. There are: %s", len(living), ids, strings.Join(have, "; "))
	}
	return nil
}

// checkEnded reads the logs of sessions that ended, once more where a worker
// cares to, and demands that they say how.
func (k *worker) checkEnded(b *box) error {
	for _, c := range b.ended {
		if c.terminal != "" {
			continue
		}
		info, err := k.session(b, c)
		var e *client.Error
		if errors.As(err, &e) && e.Class == api.ClassNotFound {
			return fmt.Errorf("the ended session %s is gone, and its log with it", c.id)
		}
		// The row may tell of the machine's end a moment before the session does.
		for end := time.Now().Add(10 * time.Second); err == nil && info.State == api.SessionRunning && time.Now().Before(end); {
			time.Sleep(50 * time.Millisecond)
			info, err = k.session(b, c)
		}
		if err != nil {
			return err
		}
		if info.State == api.SessionRunning || info.State == api.SessionCreated {
			return fmt.Errorf("the session %s is %s, and its machine is gone (the sandbox is %s)", c.id, info.State, b.state)
		}
		if err := k.readLog(b, c, info); err != nil {
			return err
		}
	}
	return nil
}
