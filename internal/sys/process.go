package sys

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Process names a process beyond the reuse of its number.
type Process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // in clock ticks after boot
}

// FindProcess names the process that has number pid now. Its error is
// os.ErrNotExist when there is none.
func FindProcess(pid int) (Process, error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, unix.ESRCH) {
		err = os.ErrNotExist // it ended between open and read
	}
	if err != nil {
		return Process{}, fmt.Errorf("find process %d: %w", pid, err)
	}
	start, err := startTime(string(data))
	if err != nil {
		return Process{}, fmt.Errorf("find process %d: %w", pid, err)
	}
	return Process{PID: pid, Start: start}, nil
}

// startTime reads a process's start time from its stat file. The second field
// is the command in parentheses and may hold anything; the start time is the
// 20th field after it.
func startTime(stat string) (uint64, error) {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return 0, errors.New("its stat file is malformed")
	}
	return strconv.ParseUint(fields[19], 10, 64)
}

// open returns a descriptor that is readable once p has ended. Its error is
// os.ErrNotExist when p has ended and was reaped.
func (p Process) open() (*os.File, error) {
	if p.PID <= 0 {
		return nil, os.ErrNotExist
	}
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	// EINVAL is how kernels before 6.15 say that the number is a thread's by now.
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		err = os.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	now, err := FindProcess(p.PID)
	if err == nil && now != p {
		err = fmt.Errorf("process %d is another one by now: %w", p.PID, os.ErrNotExist)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// Exists tells whether p runs, or has ended and was not yet reaped. One that
// can't be looked at is not taken for dead.
func (p Process) Exists() bool {
	f, err := p.open()
	if err == nil {
		_ = f.Close()
	}
	return !errors.Is(err, os.ErrNotExist)
}

// scarce tells of an error that says nothing of a process, but that this one has
// no descriptor or memory to look at it now.
func scarce(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// scarceWait is how long Wait waits before it looks again.
const scarceWait = 200 * time.Millisecond

// Wait returns nil when p has ended, whoever its parent is, and ctx's error
// when that ends first. Where there is no descriptor to wait with, it waits for
// one: whoever gave up would miss the end.
func (p Process) Wait(ctx context.Context) error {
	f, err := p.open()
	for scarce(err) {
		select {
		case <-time.After(scarceWait):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		f, err = p.open()
	}
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	err = conn.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return err == nil && n == 1
	})
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// Kill sends p SIGKILL. One that has ended is no error.
func (p Process) Kill() error {
	f, err := p.open()
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.PidfdSendSignal(int(f.Fd()), unix.SIGKILL, nil, 0)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", p.PID, err)
	}
	return nil
}
