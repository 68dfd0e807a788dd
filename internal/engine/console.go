package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/node/driver/gvisor/enginerpc"
)

const (
	// maxConsole bounds each of the two files that PID 1's output goes to.
	maxConsole = 64 << 10
	// consolePause follows each full buffer, so that a guest that floods its
	// console costs the host next to nothing.
	consolePause = 50 * time.Millisecond
)

// A console is the stdout and stderr of a guest's PID 1: a FIFO in the
// machine's directory. PID 1 has it open for reading and writing, so that it
// sees neither an error nor an end when the control process dies, and blocks
// only after a pipe full of output that nobody reads.
func makeConsole(dir string) error {
	return unix.Mkfifo(filepath.Join(dir, enginerpc.FifoName), 0o600)
}

func openConsole(dir string, flags int) (*os.File, error) {
	return os.OpenFile(filepath.Join(dir, enginerpc.FifoName), os.O_RDWR|flags, 0)
}

// copyConsole copies a console to its log until ctx ends, and then what is
// left in it.
func copyConsole(ctx context.Context, dir string) error {
	fifo, err := openConsole(dir, unix.O_NONBLOCK)
	if err != nil {
		return fmt.Errorf("open the console: %w", err)
	}
	defer fifo.Close()
	out, err := openRotating(filepath.Join(dir, enginerpc.ConsoleName), maxConsole)
	if err != nil {
		return fmt.Errorf("open the console's log: %w", err)
	}
	defer out.Close() //nolint:errcheck // a write has failed before that does
	stop := context.AfterFunc(ctx, func() { _ = fifo.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	buf := make([]byte, maxConsole/2)
	for {
		n, err := fifo.Read(buf)
		if n > 0 {
			if _, err := out.Write(buf[:n]); err != nil {
				return fmt.Errorf("write the console's log: %w", err)
			}
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return drainConsole(fifo, out, buf)
		}
		if err != nil {
			return fmt.Errorf("read the console: %w", err)
		}
		if n == len(buf) {
			pause(ctx, consolePause)
		}
	}
}

// drainConsole copies what the FIFO holds, which is at most a pipe full.
func drainConsole(fifo *os.File, out *rotating, buf []byte) error {
	conn, err := fifo.SyscallConn()
	if err != nil {
		return err
	}
	var werr error
	if err := conn.Control(func(fd uintptr) {
		for range 4 {
			n, err := unix.Read(int(fd), buf)
			if err != nil || n <= 0 {
				return
			}
			if _, werr = out.Write(buf[:n]); werr != nil {
				return
			}
		}
	}); err != nil {
		return err
	}
	return werr
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
