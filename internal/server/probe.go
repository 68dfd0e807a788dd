package server

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"

	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/gvisor"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
)

// Probe tells whether machines can run on this host, by running one in
// directories of its own that are gone when it returns: it needs no daemon and
// disturbs none. `cloche doctor` calls it.
func Probe(ctx context.Context) driver.Capability { return told(probe(ctx)) }

// told is what a probe found, or why there was none.
func told(c driver.Capability, err error) driver.Capability {
	if err != nil {
		e := sandbox.AsError(err)
		return driver.Capability{Reason: e.Message, Hint: e.Hint}
	}
	return c
}

func probe(ctx context.Context) (c driver.Capability, err error) {
	err = apart(func(dir string, artifacts *artifact.Store) error {
		engine, err := artifacts.Embedded(artifact.EngineName)
		if err != nil {
			return err
		}
		guests, err := artifacts.Builds(artifact.GuestName)
		if err != nil {
			return err
		}
		d, err := gvisor.New(gvisor.Options{
			StateDir: dir, RunDir: filepath.Join(dir, "r"), Engine: engine.Path, Guest: guests.CurrentPath(),
			Networks: netns.New(netns.Options{Dir: filepath.Join(dir, "r", "netns")}), Log: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			return err
		}
		c, err = once(ctx, d)
		return err
	})
	return c, err
}

// once probes with a driver that is used for nothing else.
func once(ctx context.Context, d interface {
	Probe(ctx context.Context) driver.Capability
	Close(ctx context.Context) error
},
) (driver.Capability, error) {
	c := d.Probe(ctx)
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWait)
	defer cancel()
	return c, d.Close(closing)
}

// apart runs f with a directory, and a store of artifacts in it, that are gone
// when it returns.
func apart(f func(dir string, artifacts *artifact.Store) error) (err error) {
	dir, err := os.MkdirTemp("", "cloche-") // short: sockets lie below it
	if err != nil {
		return err
	}
	defer func() {
		if rm := os.RemoveAll(dir); err == nil {
			err = rm
		}
	}()
	artifacts, err := artifact.Open(filepath.Join(dir, "artifacts"))
	if err != nil {
		return err
	}
	return f(dir, artifacts)
}
