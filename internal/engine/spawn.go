package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
)

// spawn runs a create child and returns what it says. When ctx ends first the
// child is killed; what it had made is the caller's to remove.
func (c *control) spawn(ctx context.Context, req enginerpc.CreateRequest) (created, error) {
	var out created
	if err := makeConsole(req.Dir); err != nil {
		return out, fmt.Errorf("make the console: %w", err)
	}
	console, err := openConsole(req.Dir, 0)
	if err != nil {
		return out, fmt.Errorf("open the console: %w", err)
	}
	defer console.Close()
	stdin, err := requestFile(req)
	if err != nil {
		return out, err
	}
	defer stdin.Close()
	stderrPath := filepath.Join(req.Dir, "create.log")
	stderr, err := os.OpenFile(stderrPath, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return out, err
	}
	defer stderr.Close()
	result, w, err := os.Pipe()
	if err != nil {
		return out, err
	}
	defer result.Close()
	_, exit, err := c.startChild(ctx, []*os.File{stdin, stderr, stderr, w, console})
	_ = w.Close()
	if err != nil {
		return out, err
	}
	// The child's end of the pipe closes with the child: it is closed in all
	// that the child starts.
	data, err := io.ReadAll(io.LimitReader(result, enginerpc.MaxRequest))
	ws := <-exit
	if ctx.Err() != nil {
		return out, ctx.Err()
	}
	if err != nil {
		return out, fmt.Errorf("read from the create child: %w", err)
	}
	if err := json.Unmarshal(data, &out); err != nil {
		return out, fmt.Errorf("the create child ended with status %#x and without an answer: %s", int(ws), cut(readTail(stderrPath, 4*maxDetail)))
	}
	if out.Error != "" {
		return out, errors.New(out.Error)
	}
	return out, nil
}

// startChild starts a create child, which is killed when ctx ends before the
// child's exit arrives on the returned channel.
func (c *control) startChild(ctx context.Context, files []*os.File) (int, <-chan unix.WaitStatus, error) {
	var proc *os.Process
	pid, exit, err := c.reaper.start(func() (int, error) {
		var err error
		proc, err = os.StartProcess("/proc/self/exe", []string{"cloche-gvisor", "create", c.root()}, &os.ProcAttr{
			Dir: "/", Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, Files: files,
			// Nobody would read its answer: a machine must not appear when its
			// creation has long been undone. (Threads of Go don't end before the process.)
			Sys: &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL},
		})
		if err != nil {
			return 0, fmt.Errorf("start the create child: %w", err)
		}
		return proc.Pid, nil
	})
	if err != nil {
		return 0, nil, err
	}
	out := make(chan unix.WaitStatus, 1)
	c.wg.Add(1)
	go func() {
		defer c.wg.Done()
		defer proc.Release() //nolint:errcheck // it never fails for a child that the reaper has waited for
		select {
		case ws := <-exit:
			out <- ws
		case <-ctx.Done():
			_ = proc.Kill() // fails only when it has just ended
			out <- <-exit
		}
	}()
	return pid, out, nil
}

// requestFile returns a file in memory that holds a request, to be read.
func requestFile(req enginerpc.CreateRequest) (*os.File, error) {
	data, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("request", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "request")
	if _, err := io.Copy(f, bytes.NewReader(data)); err != nil {
		_ = f.Close()
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}
