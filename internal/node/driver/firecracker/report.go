package firecracker

import (
	"context"
	"io"
	"net"
	"time"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/sandbox"
)

// report waits for the guest's boot report: nil when its supervisor is about to
// start. Nothing but /init runs in a guest until then, so what dials first is
// it; a connection that dies without a byte is none.
func (m *machine) report(ctx context.Context, l *net.UnixListener) error {
	bounded, cancel := ctx, func() {}
	if _, ok := ctx.Deadline(); !ok {
		bounded, cancel = context.WithTimeout(ctx, bootTimeout)
	}
	defer cancel()
	stop := context.AfterFunc(bounded, func() { _ = l.Close() })
	defer stop()
	said := make(chan error, 1)
	go func() { said <- hear(bounded, l) }() // ends with the listener, which the caller closes
	select {
	case err := <-said:
		if bounded.Err() == nil {
			return err
		}
	case <-m.exited:
		// Its last word may be in the queue; more does not come.
		_ = l.SetDeadline(time.Now().Add(lastWord))
		if err := <-said; sandbox.IsClass(err, sandbox.FailedPrecondition) {
			return err
		}
		return errEnded
	case <-bounded.Done():
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return sandbox.Errorf(sandbox.Unavailable, "boot_timeout", "the guest's kernel did not reach user space within %s", bootTimeout)
}

// hear accepts connections until one brings a report.
func hear(ctx context.Context, l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
		_ = conn.SetDeadline(time.Now().Add(reportTime))
		c := &counted{Reader: conn}
		err = guestapi.ReadBootReport(c)
		stop()
		_ = conn.Close()
		if c.n > 0 {
			return err
		}
	}
}

const (
	// reportTime bounds the reading of one report.
	reportTime = 10 * time.Second
	// lastWord is how long accepting what is queued already may take.
	lastWord = 100 * time.Millisecond
)

// counted counts what is read.
type counted struct {
	io.Reader
	n int
}

// Read implements io.Reader.
func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += n
	return n, err
}
