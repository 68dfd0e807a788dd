package supervisor

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guest/wire"
	"cloche.dev/cloche/internal/sandbox"
)

// How long the output of a session whose main process has ended is still
// read: until every pipe is closed, or nothing came for drainQuiet, or
// drainMax has passed. What the main process itself had written is always
// read, however long the host takes to make room for it.
const (
	drainQuiet = 100 * time.Millisecond
	drainMax   = time.Second
	killAfter  = 5 * time.Second
)

// A command that writes little at a time, but all the time, would cost several
// wake-ups of every process on the way for each write. So what comes within
// gatherTime of what came before may wait that long, unless it is much.
const (
	gatherTime = time.Millisecond
	gatherRead = 16 << 10
	gatherSend = 64 << 10
)

// source is one pipe or terminal that a session's output comes from.
type source struct {
	file   *os.File
	stderr bool
	done   bool
	must   int // bytes that were in it when the main process ended
}

// session is one command: its processes' ends of the pipes, and its output.
type session struct {
	id      string
	pid     int
	started time.Time
	tty     *os.File
	stdin   *stdin

	mu       sync.Mutex
	log      outlog
	sources  []*source
	ended    bool // the main process was reaped
	exited   bool // the exit is told; output from now on is thrown away
	freed    bool
	timedOut bool
	reused   bool // another session's process has our pid, so our group is gone
	exit     wire.Exit
	lastRead time.Time
	lastSent time.Time
	changed  chan struct{} // closed and replaced at each change
	timers   []*time.Timer
}

func newSession(id string, a *arena) *session {
	return &session{id: id, log: outlog{arena: a}, changed: make(chan struct{})}
}

// notify wakes all who wait for a change. The lock is held.
func (s *session) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// pump reads one source until it is closed. It reads only when there is room.
func (s *session) pump(src *source) {
	defer src.file.Close()
	raw, err := src.file.SyscallConn()
	var last time.Time
	for err == nil && s.waitRoom() {
		n, rerr := 0, error(nil)
		err = raw.Read(func(fd uintptr) bool {
			n, rerr = s.readOnce(int(fd), src)
			return !errors.Is(rerr, unix.EAGAIN)
		})
		if err == nil && !errors.Is(rerr, unix.ENOBUFS) && (rerr != nil || n == 0) {
			break
		}
		if n > 0 && n < gatherRead && time.Since(last) < 2*gatherTime {
			time.Sleep(gatherTime)
		}
		last = time.Now()
	}
	s.mu.Lock()
	src.done = true
	s.notify()
	s.mu.Unlock()
}

// waitRoom waits until the log has room or output is thrown away.
func (s *session) waitRoom() bool {
	for {
		s.mu.Lock()
		ok, wait := true, (<-chan struct{})(nil)
		if !s.exited {
			ok, wait = s.log.room()
		}
		changed := s.changed
		s.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-wait:
		case <-changed:
		}
	}
}

func (s *session) readOnce(fd int, src *source) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.exited {
		var scratch [4096]byte
		return readv(fd, [][]byte{scratch[:]})
	}
	if ok, _ := s.log.room(); !ok {
		return 0, unix.ENOBUFS
	}
	n, err := s.log.readInto(fd, src.stderr)
	if n > 0 {
		src.must -= n
		s.lastRead = time.Now()
		s.notify()
	}
	return n, err
}

// end takes the status of the main process and tells the exit once the output
// is drained.
func (s *session) end(ws syscall.WaitStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.exit = exitOf(ws, s.timedOut)
	for _, src := range s.sources {
		if raw, err := src.file.SyscallConn(); err == nil && !src.done {
			_ = raw.Control(func(fd uintptr) {
				src.must, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ)
			})
		}
	}
	s.lastRead = time.Now()
	s.notify()
	go s.drain()
}

func exitOf(ws syscall.WaitStatus, timedOut bool) wire.Exit {
	x := wire.Exit{Reason: "exited", Code: int64(ws.ExitStatus()), UnixNano: time.Now().UnixNano()}
	if ws.Signaled() {
		x.Reason, x.Signal, x.Code = "signaled", int64(ws.Signal()), 128+int64(ws.Signal())
	}
	if timedOut {
		x.Reason = "timeout"
	}
	if fault.Is(fault.ExitLost) {
		x.Code, x.Signal = 0, 0
	}
	return x
}

func (s *session) drain() {
	limit := time.Now().Add(drainMax)
	for {
		s.mu.Lock()
		wait, blocked := s.drained(limit)
		if wait <= 0 && !blocked {
			s.finish()
			s.mu.Unlock()
			return
		}
		changed := s.changed
		s.mu.Unlock()
		if blocked { // the time that the host makes us wait is not the drain's
			<-changed
			limit = time.Now().Add(drainMax)
			continue
		}
		t := time.NewTimer(wait)
		select {
		case <-changed:
		case <-t.C:
		}
		t.Stop()
	}
}

// drained tells how long the drain may still take, and whether it waits for
// the host to make room. The lock is held.
func (s *session) drained(limit time.Time) (wait time.Duration, blocked bool) {
	open, must := false, false
	for _, src := range s.sources {
		open = open || !src.done
		must = must || !src.done && src.must > 0
	}
	if !open {
		return 0, false
	}
	now := time.Now()
	room, _ := s.log.room()
	if must || fault.Is(fault.OrphanWait) {
		last := limit
		if l := s.lastRead.Add(drainMax); l.After(last) {
			last = l
		}
		if fault.Is(fault.OrphanWait) {
			return drainMax, !room
		}
		return last.Sub(now), !room
	}
	if !room {
		// Perhaps a descendant has more to say, but its reader stands still.
		return limit.Sub(now), false
	}
	return min(limit.Sub(now), s.lastRead.Add(drainQuiet).Sub(now)), false
}

// finish tells the exit. The lock is held.
func (s *session) finish() {
	s.exited = true
	if s.stdin != nil {
		s.stdin.close()
	}
	if !s.timedOut {
		for _, t := range s.timers {
			t.Stop()
		}
	}
	s.notify()
}

// fetch waits for output at offset or the exit.
func (s *session) fetch(ctx context.Context, offset uint64) (*wire.Fetched, error) {
	var gathered <-chan time.Time
	for {
		s.mu.Lock()
		switch {
		case s.freed:
			s.mu.Unlock()
			return nil, errUnknownSession(s.id)
		case offset < s.log.base || offset > s.log.end:
			base, end := s.log.base, s.log.end
			s.mu.Unlock()
			return nil, sandbox.Errorf(sandbox.Invalid, "offset_out_of_range", "output from %d to %d is held, not %d", base, end, offset)
		case s.gathers(offset) && gathered == nil:
			s.mu.Unlock()
			t := time.NewTimer(gatherTime)
			defer t.Stop()
			gathered = t.C
			select {
			case <-gathered:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
			continue
		case offset < s.log.end || s.exited:
			s.lastSent = time.Now()
			f := new(wire.Fetched)
			s.log.fetch(offset, f)
			if s.exited && offset+uint64(len(f.Data)) == s.log.end {
				f.Exited, f.Exit = true, s.exit
			}
			s.mu.Unlock()
			return f, nil
		}
		changed := s.changed
		s.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// gathers tells whether output should wait for more. The lock is held.
func (s *session) gathers(offset uint64) bool {
	n := s.log.end - offset
	return n > 0 && n < gatherSend && !s.exited && time.Since(s.lastSent) < 2*gatherTime
}

func (s *session) ack(offset uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if offset > s.log.end {
		return sandbox.Errorf(sandbox.Invalid, "offset_out_of_range", "only %d bytes were produced, not %d", s.log.end, offset)
	}
	s.log.ack(offset)
	s.notify()
	return nil
}

// free ends the session's record; what its orphans write is thrown away.
func (s *session) free() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.exited {
		return false
	}
	s.freed = true
	s.log.free()
	s.notify()
	return true
}

func (s *session) info() wire.Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return wire.Session{ID: s.id, PID: int64(s.pid), Exited: s.exited, Acked: s.log.base, Produced: s.log.end}
}

func errUnknownSession(id string) error {
	return sandbox.Errorf(sandbox.NotFound, "session_unknown", "the guest knows no session %q", id)
}
