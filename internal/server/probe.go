package server

import (
	"context"
	"io"
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
func Probe(ctx context.Context) driver.Capability {
	c, err := probe(ctx)
	if err != nil {
		e := sandbox.AsError(err)
		return driver.Capability{Reason: e.Message, Hint: e.Hint}
	}
	return c
}

func probe(ctx context.Context) (c driver.Capability, err error) {
	dir, err := os.MkdirTemp("", "cloche-") // short: sockets lie below it
	if err != nil {
		return c, err
	}
	defer func() {
		if rm := os.RemoveAll(dir); err == nil {
			err = rm
		}
	}()
	artifacts, err := artifact.Open(filepath.Join(dir, "artifacts"))
	if err != nil {
		return c, err
	}
	engine, err := artifacts.Embedded(artifact.EngineName)
	if err != nil {
		return c, err
	}
	guests, err := artifacts.Builds(artifact.GuestName)
	if err != nil {
		return c, err
	}
	guest, err := guests.Path(guests.Current())
	if err != nil {
		return c, err
	}
	d, err := gvisor.New(gvisor.Options{
		StateDir: dir, RunDir: filepath.Join(dir, "r"), Engine: engine.Path, Guest: guest,
		Networks: netns.New(filepath.Join(dir, "r", "netns")), Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return c, err
	}
	c = d.Probe(ctx)
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWait)
	defer cancel()
	return c, d.Close(closing)
}
