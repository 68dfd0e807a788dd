// Package supervisor is PID 1 of a sandbox. It starts processes, reaps every
// child, reads the pipes and terminals of its sessions into bounded memory,
// and keeps the agent running: the agent is what talks to the host, holds no
// state, and can die or be replaced at any time without a byte lost or a
// process harmed.
//
// Invariants. It talks to nobody but its agent, over a socket pair. What it
// holds is bounded: sessions, output (1 MiB each, 16 MiB in all; then pipes
// are not read), requests of the agent. Output is freed only when the agent
// acknowledges it. Nothing a process does ends it; only root inside the
// sandbox can.
//
// cmd/cloche-guest calls it.
package supervisor

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guest/wire"
)

// How long to wait before an agent that ended is started again: short at
// first, longer for one that dies young.
const (
	agentBackoffMin = 10 * time.Millisecond
	agentBackoffMax = time.Second
	agentHealthy    = 10 * time.Second
)

// Config says how the agent is run.
type Config struct {
	Agent []string // its program and arguments; descriptor 3 is its socket
	Env   []string
	Log   *slog.Logger
}

// Supervisor is the state of PID 1.
type Supervisor struct {
	cfg   Config
	arena *arena

	mu       sync.Mutex // held while forking, so that the reaper finds every child known
	sessions map[string]*session
	children map[int]func(syscall.WaitStatus)
	state    wire.State
}

// Run is PID 1's main function. It returns when ctx ends (never, as PID 1),
// or at once when it cannot work at all.
func Run(ctx context.Context, cfg Config) error {
	a, err := newArena()
	if err != nil {
		return err
	}
	s := &Supervisor{cfg: cfg, arena: a, sessions: map[string]*session{}, children: map[int]func(syscall.WaitStatus){}}
	catchSignals()
	go s.reap()
	if fault.Is(fault.SupervisorEnds) {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, 500*time.Millisecond)
		defer cancel()
	}
	s.keepAgent(ctx)
	return ctx.Err()
}

// catchSignals makes the signals that would end a Go program do nothing. They
// are caught rather than ignored, because ignoring is inherited by children.
func catchSignals() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2, unix.SIGALRM,
		unix.SIGVTALRM, unix.SIGPROF, unix.SIGPIPE, unix.SIGABRT, unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL,
		unix.SIGTRAP, unix.SIGSYS, unix.SIGXCPU, unix.SIGXFSZ, unix.SIGIO, unix.SIGPWR, unix.SIGSTKFLT, unix.SIGWINCH)
	go func() {
		for range c { // PID 1 has no use for them
		}
	}()
}

// reap waits for every child, known or orphaned.
func (s *Supervisor) reap() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, unix.SIGCHLD)
	for range c {
		for s.reapOne() {
		}
	}
}

func (s *Supervisor) reapOne() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var pid int
	var err error
	var ws syscall.WaitStatus
	if fault.Is(fault.NoReap) {
		pid, ws = s.reapKnown()
	} else if pid, err = syscall.Wait4(-1, &ws, syscall.WNOHANG, nil); err == syscall.EINTR {
		return true
	}
	if pid <= 0 {
		return false
	}
	if ended := s.children[pid]; ended != nil {
		delete(s.children, pid)
		ended(ws)
	}
	return true
}

func (s *Supervisor) reapKnown() (int, syscall.WaitStatus) {
	var ws syscall.WaitStatus
	for pid := range s.children {
		if got, _ := syscall.Wait4(pid, &ws, syscall.WNOHANG, nil); got == pid {
			return pid, ws
		}
	}
	return 0, ws
}

// keepAgent runs one agent after another until ctx ends.
func (s *Supervisor) keepAgent(ctx context.Context) {
	backoff := agentBackoffMin
	for ctx.Err() == nil {
		began := time.Now()
		if err := s.runAgent(ctx); err != nil {
			s.cfg.Log.Error("the agent can't be started", "error", err)
		}
		if time.Since(began) > agentHealthy {
			backoff = agentBackoffMin
		}
		if fault.Is(fault.AgentOnce) {
			<-ctx.Done()
		}
		select {
		case <-ctx.Done():
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, agentBackoffMax)
	}
}

// runAgent starts an agent, serves it, and returns when it has ended.
func (s *Supervisor) runAgent(ctx context.Context) error {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	for _, fd := range fds {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 4*wire.MaxFetch) // only faster
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return err
	}
	conn, theirs := os.NewFile(uintptr(fds[0]), "agent"), os.NewFile(uintptr(fds[1]), "agent")
	defer conn.Close()
	pid, ended, err := s.forkAgent(theirs)
	_ = theirs.Close()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = unix.Kill(pid, unix.SIGKILL) })
	defer stop()
	s.serve(conn)
	// It hung up: if it is still there it is of no more use.
	select {
	case <-ended:
		return nil
	case <-time.After(100 * time.Millisecond):
	}
	s.mu.Lock()
	if s.children[pid] != nil { // not reaped, so the pid is still its own
		_ = unix.Kill(pid, unix.SIGKILL)
	}
	s.mu.Unlock()
	<-ended
	return nil
}

func (s *Supervisor) forkAgent(sock *os.File) (int, <-chan struct{}, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return 0, nil, err
	}
	defer null.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	pid, err := syscall.ForkExec(s.cfg.Agent[0], s.cfg.Agent, &syscall.ProcAttr{
		Dir: "/", Env: s.cfg.Env, Sys: &syscall.SysProcAttr{Setsid: true},
		Files: []uintptr{null.Fd(), 1, 2, sock.Fd()},
	})
	if err != nil {
		return 0, nil, err
	}
	ended := make(chan struct{})
	s.children[pid] = func(ws syscall.WaitStatus) {
		s.cfg.Log.Warn("the agent ended", "status", ws.ExitStatus(), "signal", ws.Signal().String())
		close(ended)
	}
	return pid, ended, nil
}
