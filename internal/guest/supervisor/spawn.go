package supervisor

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guest/wire"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	maxSessions = 1024
	pipeSize    = 256 << 10
	ttyGroup    = 5 // Debian's and everyone's group of terminals
)

// start starts a session's process, or finds the session started already.
// That the process could not be started is the session's exit, not an error.
func (s *Supervisor) start(m *wire.Start) (*wire.Started, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ses, ok := s.sessions[m.Session]; ok {
		return started(ses), nil
	}
	if m.Session == "" || len(m.Session) > 64 || m.FailCode == 0 && (m.Path == "" || len(m.Args) == 0) {
		return nil, sandbox.Errorf(sandbox.Invalid, "start_malformed", "a start needs a session and a command")
	}
	if len(s.sessions) >= maxSessions {
		return nil, sandbox.Errorf(sandbox.Quota, "too_many_sessions", "%d sessions are the most at once", maxSessions)
	}
	ses := newSession(m.Session, s.arena)
	ses.started = time.Now()
	if m.FailCode == 0 {
		m.FailCode, m.FailText = s.spawn(ses, m)
	}
	if m.FailCode != 0 {
		ses.mu.Lock()
		ses.exit = wire.Exit{Code: m.FailCode, Reason: "start_failed", Text: m.FailText, UnixNano: ses.started.UnixNano()}
		ses.exited = true
		ses.mu.Unlock()
	}
	s.sessions[m.Session] = ses
	return started(ses), nil
}

func started(ses *session) *wire.Started {
	return &wire.Started{PID: int64(ses.pid), UnixNano: ses.started.UnixNano()}
}

// plumbing is the files of a session that is being started.
type plumbing struct {
	child []*os.File // stdin, stdout, stderr of the process; ours to close
	own   []*os.File // our ends, closed on failure only
}

func (p *plumbing) close(all bool) {
	for _, f := range p.child {
		_ = f.Close()
	}
	if all {
		for _, f := range p.own {
			_ = f.Close()
		}
	}
}

// spawn starts ses's process. The supervisor's lock is held, so that the
// reaper can't see the process before it is known.
func (s *Supervisor) spawn(ses *session, m *wire.Start) (code int64, text string) {
	p := new(plumbing)
	var err error
	if m.TTY {
		err = p.openTTY(ses, m)
	} else {
		err = p.openPipes(ses, m.Stdin)
	}
	if err != nil {
		p.close(true)
		return 126, "opening its pipes: " + err.Error()
	}
	pid, err := fork(m, p.child)
	p.close(err != nil)
	if err != nil {
		return execFailure(m, err)
	}
	for _, other := range s.sessions {
		if other.pid == pid {
			other.mu.Lock()
			other.reused = true
			other.mu.Unlock()
		}
	}
	ses.pid = pid
	s.children[pid] = ses.end
	for _, src := range ses.sources {
		go ses.pump(src)
	}
	if m.TimeoutMS > 0 && !fault.Is(fault.TimeoutIgnored) {
		ses.timers = append(ses.timers, time.AfterFunc(time.Duration(m.TimeoutMS)*time.Millisecond, ses.timeout))
	}
	return 0, ""
}

func execFailure(m *wire.Start, err error) (int64, string) {
	code := int64(126)
	if errors.Is(err, unix.ENOENT) {
		code = 127
	}
	return code, fmt.Sprintf("cannot run %q in %q: %v", m.Path, m.Dir, err)
}

func fork(m *wire.Start, files []*os.File) (int, error) {
	attr := &syscall.ProcAttr{Dir: m.Dir, Env: m.Env, Sys: &syscall.SysProcAttr{Setsid: true, Setctty: m.TTY}}
	if fault.Is(fault.WrongUser) {
		m.UID, m.GID, m.Groups = 0, 0, nil
	}
	if os.Geteuid() == 0 {
		cred := &syscall.Credential{Uid: m.UID, Gid: m.GID}
		for _, g := range m.Groups {
			n, err := strconv.ParseUint(g, 10, 32)
			if err != nil {
				return 0, unix.EINVAL
			}
			cred.Groups = append(cred.Groups, uint32(n))
		}
		attr.Sys.Credential = cred
	}
	for _, f := range files {
		attr.Files = append(attr.Files, f.Fd())
	}
	pid, err := syscall.ForkExec(m.Path, m.Args, attr)
	if errors.Is(err, unix.ENOEXEC) { // a script without #!: as execvp and every shell do
		args := append([]string{"sh", m.Path}, m.Args[1:]...)
		pid, err = syscall.ForkExec("/bin/sh", args, attr)
	}
	return pid, err
}

func (p *plumbing) openPipes(ses *session, withStdin bool) error {
	if withStdin {
		r, w, err := pipe(false)
		if err != nil {
			return err
		}
		p.child, p.own = append(p.child, r), append(p.own, w)
		ses.stdin = newStdin(w, false)
	} else {
		null, err := os.Open(os.DevNull)
		if err != nil {
			return err
		}
		p.child = append(p.child, null)
	}
	for _, stderr := range []bool{false, true} {
		r, w, err := pipe(true)
		if err != nil {
			return err
		}
		p.child, p.own = append(p.child, w), append(p.own, r)
		ses.sources = append(ses.sources, &source{file: r, stderr: stderr})
	}
	return nil
}

// pipe makes a pipe of which our end does not block and the child's does.
func pipe(ourRead bool) (r, w *os.File, err error) {
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	ours := fd[1]
	if ourRead {
		ours = fd[0]
		_, _ = unix.FcntlInt(uintptr(ours), unix.F_SETPIPE_SZ, pipeSize) // only faster
	}
	if err := unix.SetNonblock(ours, true); err != nil {
		_, _ = unix.Close(fd[0]), unix.Close(fd[1])
		return nil, nil, err
	}
	return os.NewFile(uintptr(fd[0]), "pipe"), os.NewFile(uintptr(fd[1]), "pipe"), nil
}

// openTTY makes a terminal in the guest itself.
func (p *plumbing) openTTY(ses *session, m *wire.Start) error {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("open /dev/ptmx", err)
	}
	master := os.NewFile(uintptr(fd), "/dev/ptmx")
	p.own = append(p.own, master)
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return os.NewSyscallError("TIOCGPTN", err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return os.NewSyscallError("TIOCSPTLCK", err)
	}
	name := "/dev/pts/" + strconv.Itoa(n)
	slave, err := os.OpenFile(name, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	p.child = append(p.child, slave, slave, slave)
	_ = os.Chown(name, int(m.UID), ttyGroup) // where devpts allows it: programs reopen their terminal
	_ = os.Chmod(name, 0o620)
	ses.tty = master
	ses.stdin = newStdin(master, true)
	ses.sources = []*source{{file: master}}
	return ses.resize(m.Rows, m.Cols)
}

func (s *session) resize(rows, cols uint16) error {
	if s.tty == nil {
		return sandbox.Errorf(sandbox.FailedPrecondition, "no_tty", "session %s has no terminal", s.id)
	}
	raw, err := s.tty.SyscallConn()
	if err == nil {
		var ierr error
		err = raw.Control(func(fd uintptr) {
			ierr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
		})
		err = errors.Join(err, ierr)
	}
	if err != nil {
		return sandbox.Errorf(sandbox.FailedPrecondition, "tty_closed", "the terminal of session %s is gone: %w", s.id, err)
	}
	return nil
}
