package supervisor

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/sandbox"
)

// eot is what a terminal takes as the end of input at the start of a line.
const eot = 4

// stdin is the writing end of a session's stdin, addressed by absolute
// offsets so that a write can be repeated. The pipe itself is the buffer.
type stdin struct {
	turn     chan struct{} // holds one token; whoever has it may write
	file     *os.File
	tty      bool
	accepted uint64 // guarded by turn
	closed   bool   // guarded by turn
	over     chan struct{}
}

func newStdin(f *os.File, tty bool) *stdin {
	in := &stdin{turn: make(chan struct{}, 1), file: f, tty: tty, over: make(chan struct{})}
	in.turn <- struct{}{}
	return in
}

// write takes data whose first byte has the given offset, as far as there is
// room until ctx ends. A reader that has gone closes stdin.
func (in *stdin) write(ctx context.Context, offset uint64, data []byte, closeIt bool) (uint64, bool, error) {
	select {
	case <-in.turn:
	case <-in.over:
		return 0, true, nil
	case <-ctx.Done():
		return 0, false, ctx.Err()
	}
	defer func() { in.turn <- struct{}{} }()
	if offset > in.accepted {
		return 0, false, sandbox.Errorf(sandbox.Invalid, "offset_out_of_range", "%d bytes of stdin were taken; the next can't start at %d", in.accepted, offset)
	}
	if skip := in.accepted - offset; skip < uint64(len(data)) {
		data = data[skip:]
	} else {
		data = nil
	}
	if in.closed {
		return in.accepted, true, nil
	}
	if fault.Is(fault.StdinDropped) {
		in.accepted, data = in.accepted+uint64(len(data)), nil
	}
	if err := in.push(ctx, data); err != nil {
		return in.accepted, false, err
	}
	if closeIt && !in.closed {
		in.shut()
	}
	return in.accepted, in.closed, nil
}

// push writes data. The token is held.
func (in *stdin) push(ctx context.Context, data []byte) error {
	if len(data) == 0 {
		return nil
	}
	_ = in.file.SetWriteDeadline(time.Time{})
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = in.file.SetWriteDeadline(time.Unix(1, 0))
		close(cut)
	})
	defer func() {
		if !stop() {
			<-cut // or it would cut the next write short
		}
	}()
	n, err := in.file.Write(data)
	in.accepted += uint64(n)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded) && ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EIO) || errors.Is(err, os.ErrClosed):
		in.closed = true
		return nil
	}
	return err
}

func (in *stdin) shut() {
	in.closed = true
	if in.tty {
		_, _ = in.file.Write([]byte{eot}) // the terminal may have gone
		return
	}
	_ = in.file.Close()
}

// close ends stdin for good, whoever waits for room. It is called once.
func (in *stdin) close() {
	close(in.over)
	if !in.tty {
		_ = in.file.Close()
	}
}
