package supervisor

import (
	"bytes"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/sandbox"
)

// signal sends sig to the session's process group and to every other process
// that is still in its session (setsid leaves both; a shell's job control
// leaves only the group).
func (s *session) signal(sig unix.Signal) error {
	if sig < 1 || sig > 64 {
		return sandbox.Errorf(sandbox.Invalid, "bad_signal", "there is no signal %d", int(sig))
	}
	s.mu.Lock()
	ended := s.ended || s.exited
	if !ended { // pids are handed out in turn: ours can't be anyone else's so soon
		s.send(sig)
	}
	s.mu.Unlock()
	if ended {
		return sandbox.Errorf(sandbox.FailedPrecondition, "session_exited", "the command of session %s has ended", s.id)
	}
	return nil
}

// timeout asks the session's processes to end, and makes them later.
func (s *session) timeout() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.exited {
		return
	}
	s.timedOut = true
	s.send(unix.SIGTERM)
	s.timers = append(s.timers, time.AfterFunc(killAfter, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.reused {
			s.send(unix.SIGKILL)
		}
	}))
}

// send signals the group, then the rest of the session. A killed session may
// fork meanwhile, so SIGKILL looks again until nobody new is found.
func (s *session) send(sig unix.Signal) {
	if fault.Is(fault.SignalMainOnly) {
		_ = unix.Kill(s.pid, sig)
		return
	}
	_ = unix.Kill(-s.pid, sig) // ESRCH: the group is gone
	seen := map[int]bool{}
	for round := 0; round < 10; round++ {
		fresh := false
		for _, pid := range members(s.pid) {
			if !seen[pid] {
				seen[pid], fresh = true, true
				_ = unix.Kill(pid, sig)
			}
		}
		if !fresh || sig != unix.SIGKILL {
			return
		}
	}
}

// members lists the processes of session sid outside its first group.
func members(sid int) []int {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1) // what could be read
	var out []int
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || pid == os.Getpid() {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if err != nil {
			continue
		}
		group, session := groupAndSession(stat)
		if session == sid && group != sid {
			out = append(out, pid)
		}
	}
	return out
}

// groupAndSession reads the fifth and sixth field of a stat file. The second
// is the program's own name in brackets and may hold anything.
func groupAndSession(stat []byte) (group, session int) {
	rest := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(rest) < 4 {
		return -1, -1
	}
	group, err1 := strconv.Atoi(string(rest[2]))
	session, err2 := strconv.Atoi(string(rest[3]))
	if err1 != nil || err2 != nil {
		return -1, -1
	}
	return group, session
}
