package client

import (
	"context"
	"errors"
	"time"
)

// outage is what a stream knows of the time in which nothing comes from its
// daemon: it bounds it, and tells the caller of it once.
type outage struct {
	window      time.Duration
	interrupted func(error) // may be nil
	resumed     func()      // may be nil

	attempt  int       // connections that failed since something came
	since    time.Time // zero while there is none
	notified bool
}

// over notes that something came.
func (o *outage) over() {
	if o.since.IsZero() {
		return
	}
	o.since, o.attempt = time.Time{}, 0
	if o.notified && o.resumed != nil {
		o.resumed()
	}
	o.notified = false
}

// wait waits before the next connection, or returns the error that ends the
// stream.
func (o *outage) wait(ctx context.Context, err error) error {
	var e *Error
	if ctx.Err() != nil || !errors.As(err, &e) || !e.Retryable {
		return err
	}
	now := time.Now()
	if o.since.IsZero() {
		o.since = now
	}
	wait := max(backoff(o.attempt), e.RetryAfter)
	if now.Add(wait).Sub(o.since) > o.window {
		return err
	}
	if !o.notified && o.attempt > 0 {
		o.notified = true
		if o.interrupted != nil {
			o.interrupted(err)
		}
	}
	o.attempt++
	if sleep(ctx, wait) != nil {
		return context.Cause(ctx)
	}
	return nil
}
