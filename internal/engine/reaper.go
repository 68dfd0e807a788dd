package engine

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"sync"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/sys"
)

// maxStray bounds how many exits are remembered that nobody has asked for.
const maxStray = 4096

// reaper collects every child of the control process: the create children,
// and the sentries and gofers that they leave to it. Nothing else in the
// process may wait for a child.
type reaper struct {
	mu      sync.Mutex
	waiting map[int]chan unix.WaitStatus
	stray   map[int]unix.WaitStatus // exits that came before the question
	order   []int                   // of stray, oldest first
}

func newReaper() *reaper {
	return &reaper{waiting: map[int]chan unix.WaitStatus{}, stray: map[int]unix.WaitStatus{}}
}

// run reaps until ctx ends.
func (r *reaper) run(ctx context.Context) {
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, unix.SIGCHLD)
	defer signal.Stop(sigs)
	for {
		r.reap()
		select {
		case <-ctx.Done():
			return
		case <-sigs:
		}
	}
}

func (r *reaper) reap() {
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
		r.mu.Lock()
		if c, ok := r.waiting[pid]; ok {
			delete(r.waiting, pid)
			c <- ws
		} else {
			r.keep(pid, ws)
		}
		r.mu.Unlock()
	}
}

func (r *reaper) keep(pid int, ws unix.WaitStatus) {
	if _, ok := r.stray[pid]; !ok {
		r.order = append(r.order, pid)
	}
	r.stray[pid] = ws
	if len(r.order) > maxStray {
		delete(r.stray, r.order[0])
		r.order = r.order[1:]
	}
}

// start runs start, which makes a child and returns its number, with no chance
// that the child's exit is taken for that of an earlier process of the same
// number. The exit arrives on the channel.
func (r *reaper) start(start func() (int, error)) (int, <-chan unix.WaitStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := start()
	if err != nil {
		return 0, nil, err
	}
	return pid, r.register(pid), nil
}

// adopt returns the channel on which the exit of a process arrives that was
// left to us; at once, when it came before.
func (r *reaper) adopt(p sys.Process) <-chan unix.WaitStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	ws, have := r.stray[p.PID]
	delete(r.stray, p.PID)
	if now, err := sys.FindProcess(p.PID); err == nil && now == p {
		have = false // what was kept is of an earlier process
	}
	c := r.register(p.PID)
	if have {
		delete(r.waiting, p.PID)
		c <- ws
	}
	return c
}

func (r *reaper) register(pid int) chan unix.WaitStatus {
	c := make(chan unix.WaitStatus, 1)
	r.waiting[pid] = c
	return c
}
