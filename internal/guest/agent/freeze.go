package agent

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	// freezeTime bounds the wait for processes to stand still. One that is in the
	// middle of a disk's work stops when that is done.
	freezeTime = 5 * time.Second
	// freezeLimit is the number of seconds after which a freeze ends whose host is
	// gone. They are counted, since a machine that was paused finds its clock far ahead.
	// The count goes on in whatever is made of the image, from the freeze on. So it is
	// far above the minute that a host waits for a restored machine (HelloWait in
	// internal/server), and the seconds before the snapshot: who comes late finds
	// that nothing has run yet, or that the host has given the machine up.
	freezeLimit = 180
	// usersGroup holds every process but the guest's own, once they were frozen.
	usersGroup = "cloche"
)

// freezer holds the processes of a guest's users still by its control groups:
// they neither see it nor can they tell it from having had no processor. No
// user sees the mount either: it has no place in the tree.
type freezer struct {
	ctx  context.Context // of the agent
	root *os.File        // of the control groups

	mu     sync.Mutex
	held   []string      // the groups that were frozen; nil: nothing is
	thawed chan struct{} // closed when nothing is held
	left   int           // seconds
}

// openFreezer returns nil where there is none. What an agent that ended held is
// held on.
func (a *Agent) openFreezer(ctx context.Context) *freezer {
	if !strings.HasPrefix(a.cfg.Dial, "vsock:") { // else the kernel is the host's, or gVisor's
		return nil
	}
	root, err := mountCgroups()
	if err != nil {
		a.cfg.Log.Warn("processes can't be frozen", "error", err)
		return nil
	}
	f := &freezer{ctx: ctx, root: root, thawed: make(chan struct{})}
	if f.read(usersGroup+"/cgroup.freeze") != "1\n" {
		close(f.thawed)
		return f
	}
	for _, g := range f.groups() {
		if f.read(g+"/cgroup.freeze") == "1\n" {
			f.held = append(f.held, g)
		}
	}
	f.left = freezeLimit
	go f.count(f.thawed)
	return f
}

func mountCgroups() (*os.File, error) {
	fs, err := unix.Fsopen("cgroup2", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsopen", err)
	}
	defer func() { _ = unix.Close(fs) }()
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, os.NewSyscallError("fsconfig", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("fsmount", err)
	}
	return os.NewFile(uintptr(fd), "cgroups"), nil
}

// Freeze implements the service. What it can't hold it says, and nothing else
// goes wrong for that.
func (a *Agent) Freeze(ctx context.Context, r *connect.Request[guestv1.FreezeRequest]) (*connect.Response[guestv1.FreezeResponse], error) {
	if fault.Is(fault.NoFreeze) {
		return connect.NewResponse(&guestv1.FreezeResponse{Frozen: true}), nil
	}
	if r.Msg.GetThaw() {
		a.freezer.thaw()
	}
	if a.freezer == nil || r.Msg.GetThaw() {
		return connect.NewResponse(new(guestv1.FreezeResponse)), nil
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTime)
	defer cancel()
	err := a.freezer.freeze(ctx)
	if err != nil {
		a.cfg.Log.Warn("not all processes stand still", "error", err)
	}
	return connect.NewResponse(&guestv1.FreezeResponse{Frozen: err == nil}), nil
}

// freeze holds everything still, and what it can of it if there is an error.
func (f *freezer) freeze(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left = freezeLimit
	if f.held != nil {
		return nil
	}
	if err := unix.Mkdirat(int(f.root.Fd()), usersGroup, 0o755); err != nil && err != unix.EEXIST {
		return os.NewSyscallError("mkdirat", err)
	}
	f.thawed, f.held = make(chan struct{}), []string{}
	go f.count(f.thawed)
	err := f.gather(ctx)
	for _, g := range f.groups() {
		if f.read(g+"/cgroup.freeze") != "0\n" {
			continue // it is a user's own doing
		}
		if werr := f.write(g+"/cgroup.freeze", "1"); werr != nil {
			err = errors.Join(err, werr)
			continue
		}
		f.held = append(f.held, g)
	}
	for _, g := range f.held {
		err = errors.Join(err, f.still(ctx, g))
	}
	return err
}

// count ends a freeze when its time is up.
func (f *freezer) count(thawed <-chan struct{}) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for left := freezeLimit; left > 0; {
		select {
		case <-tick.C:
		case <-thawed:
			return
		case <-f.ctx.Done():
			return
		}
		f.mu.Lock()
		f.left--
		left = f.left
		f.mu.Unlock()
	}
	f.thaw()
}

// gather moves every process of the users out of the root group, which can't be
// frozen. What one of them forks meanwhile is in the same group as it was.
func (f *freezer) gather(ctx context.Context) error {
	for ctx.Err() == nil {
		moved := 0
		for word := range strings.FieldsSeq(f.read("cgroup.procs")) {
			pid, err := strconv.Atoi(word)
			if err != nil || pid <= 1 || pid == os.Getpid() {
				continue
			}
			stat, err := os.ReadFile("/proc/" + word + "/stat")
			if err != nil || !livesInUserSpace(stat) {
				continue
			}
			if err := f.write(usersGroup+"/cgroup.procs", word); err == nil {
				moved++
			} else if !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
		if moved == 0 {
			return nil
		}
	}
	return ctx.Err()
}

// still waits until every process of a group stands still.
func (f *freezer) still(ctx context.Context, group string) error {
	events, err := f.open(group+"/cgroup.events", unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer events.Close()
	for {
		text, err := io.ReadAll(io.NewSectionReader(events, 0, 1<<10))
		if err != nil || bytes.Contains(text, []byte("frozen 1\n")) {
			return err
		}
		deadline, _ := ctx.Deadline()
		left := time.Until(deadline)
		if ctx.Err() != nil || left <= 0 {
			return context.DeadlineExceeded
		}
		fds := []unix.PollFd{{Fd: int32(events.Fd()), Events: unix.POLLPRI}}
		if _, err := unix.Poll(fds, int(left.Milliseconds())+1); err != nil && err != unix.EINTR {
			return os.NewSyscallError("poll", err)
		}
	}
}

// thaw lets everything go on.
func (f *freezer) thaw() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.held == nil {
		return
	}
	for _, g := range f.held {
		_ = f.write(g+"/cgroup.freeze", "0") // one that can't be written to is gone
	}
	f.held = nil
	close(f.thawed)
}

// wait waits while everything is held.
func (f *freezer) wait(ctx context.Context) error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	thawed := f.thawed
	f.mu.Unlock()
	select {
	case <-thawed:
		return nil
	case <-ctx.Done():
		return sandbox.Errorf(sandbox.Unavailable, "frozen", "a snapshot of the sandbox is being taken: %w", ctx.Err())
	}
}

// groups are those right below the root.
func (f *freezer) groups() []string {
	dir, err := f.open(".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil
	}
	defer dir.Close()
	entries, _ := dir.ReadDir(-1) // what could be read
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}

func (f *freezer) open(name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(int(f.root.Fd()), name, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// read returns what a control file says, "" where there is none.
func (f *freezer) read(name string) string {
	file, err := f.open(name, unix.O_RDONLY)
	if err != nil {
		return ""
	}
	defer file.Close()
	text, _ := io.ReadAll(file)
	return string(text)
}

func (f *freezer) write(name, text string) error {
	file, err := f.open(name, unix.O_WRONLY)
	if err != nil {
		return err
	}
	_, err = file.WriteString(text)
	return errors.Join(err, file.Close())
}
