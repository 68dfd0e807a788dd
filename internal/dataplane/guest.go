package dataplane

import (
	"context"
	"io"
	"strings"
	"sync"
	"time"
	"unicode"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1/guestv1connect"
	"cloche.dev/cloche/internal/sandbox"
)

// The bounds of what a guest is asked.
const (
	callTimeout   = 30 * time.Second // of a small call
	stallTimeout  = 60 * time.Second // of a bulk transfer in which the guest does nothing
	bulkPerBox    = 32               // transfers and tunnels of one sandbox at once
	chunkSize     = 128 << 10        // of a bulk transfer
	maxGuestText  = 500              // bytes of a guest's message that reach a client
	maxListed     = 10_000           // entries of a directory that reach a client
	maxListedText = 4 << 20          // bytes of their names, in all
)

// Guests hands out clients of sandboxes' agents (the node).
type Guests interface {
	// Client is for small calls; it waits for the agent while ctx lasts.
	Client(ctx context.Context, sandboxID string) (guestv1connect.GuestClient, error)
	// Extra is on a connection of its own, for one bulk transfer or tunnel.
	Extra(ctx context.Context, sandboxID string) (guestv1connect.GuestClient, io.Closer, error)
}

// guestFault is what a guest did that an honest agent doesn't do.
func guestFault(what string) error {
	e := sandbox.Errorf(sandbox.Unavailable, "guest_fault", "the sandbox's agent answered nonsense: %s", what)
	e.Retryable = false
	return e
}

// guestText bounds a text that a guest chose and takes control characters out.
func guestText(s string) string {
	if len(s) > maxGuestText {
		s = s[:maxGuestText]
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == unicode.ReplacementChar {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, " "))
}

// bulk takes a place among the sandbox's transfers and a connection for one.
// The context it returns ends with the transfer, or when done is called; until
// then the sandbox counts as used.
func (p *Plane) bulk(ctx context.Context, sandboxID string) (context.Context, *transfer, error) {
	if !p.places.take(sandboxID) {
		return nil, nil, sandbox.Errorf(sandbox.Quota, "too_many_transfers", "the sandbox has %d transfers and tunnels already", bulkPerBox).
			WithHint("wait until one ends").WithRetry(time.Second)
	}
	ctx, cancel := context.WithCancel(ctx)
	opening := time.AfterFunc(callTimeout, cancel)
	client, closer, err := p.o.Guests.Extra(ctx, sandboxID)
	opening.Stop()
	if err != nil {
		cancel()
		p.places.free(sandboxID)
		return nil, nil, guestapi.FromRPC(err)
	}
	t := &transfer{client: client, cancel: cancel}
	release := p.o.Identities.Hold(sandboxID)
	t.done = func() {
		release()
		cancel()
		p.close(closer)
		p.places.free(sandboxID)
	}
	return ctx, t, nil
}

// transfer is one bulk call. Its context is cancelled when the guest does
// nothing for too long while it is watched.
type transfer struct {
	client guestv1connect.GuestClient
	cancel context.CancelFunc
	done   func()
}

// watch runs f, which waits for the guest, and ends the transfer when that
// takes too long.
func (t *transfer) watch(f func()) {
	timer := time.AfterFunc(stallTimeout, t.cancel)
	f()
	timer.Stop()
}

// places counts the transfers of each sandbox.
type places struct {
	mu    sync.Mutex
	taken map[string]int
}

func (p *places) take(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken[id] >= bulkPerBox {
		return false
	}
	p.taken[id]++
	return true
}

func (p *places) free(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken[id]--; p.taken[id] <= 0 {
		delete(p.taken, id)
	}
}
