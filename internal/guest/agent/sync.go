package agent

import (
	"context"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/sandbox"
)

// Sync implements the service. The kernel can't be told to give up a syncfs: one
// whose asker is gone goes on, and whoever asks next waits for it within its own
// deadline before it begins another, so that there is never more than one.
func (a *Agent) Sync(ctx context.Context, _ *connect.Request[guestv1.SyncRequest]) (*connect.Response[guestv1.SyncResponse], error) {
	late := sandbox.Errorf(sandbox.Unavailable, "sync_timeout", "the disk was not synced in time")
	select {
	case a.syncing <- struct{}{}:
	case <-ctx.Done():
		return nil, late
	}
	done := make(chan error, 1)
	go func() { // ends with the syncfs
		defer func() { <-a.syncing }()
		done <- syncRoot()
	}()
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
		return connect.NewResponse(&guestv1.SyncResponse{}), nil
	case <-ctx.Done():
		return nil, late
	}
}

// syncRoot writes what the kernel keeps of the root filesystem to its disk. An
// overlay passes that on to the filesystem that it writes to.
func syncRoot() error {
	if fault.Is(fault.SyncIgnored) {
		return nil
	}
	return withFile("/", unix.O_RDONLY|unix.O_DIRECTORY, unix.Syncfs)
}
