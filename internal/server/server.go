// Package server assembles the roles of `cloche serve` on one host: the store,
// the node with its drivers, the session recorder, control and the two halves
// of the API behind one listener. It holds no logic of its own beyond the
// order in which things start and stop.
//
// Stopping ends none of the machines: they outlive the daemon, and the next
// start adopts them.
package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"cloche.dev/cloche/internal/auth"
	"cloche.dev/cloche/internal/control"
	"cloche.dev/cloche/internal/dataplane"
	"cloche.dev/cloche/internal/failpoint"
	"cloche.dev/cloche/internal/httpapi"
	"cloche.dev/cloche/internal/httpapi/rest"
	"cloche.dev/cloche/internal/metrics"
	"cloche.dev/cloche/internal/node"
	"cloche.dev/cloche/internal/node/artifact"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/gvisor"
	"cloche.dev/cloche/internal/node/egress"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/node/session"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/store/sqlite"
	"cloche.dev/cloche/internal/sys"
	"cloche.dev/cloche/internal/template"
)

// Options are what `cloche serve` takes.
type Options struct {
	Listen   string // host:port
	StateDir string // absolute
	RunDir   string // absolute and short: sockets lie below it
	Insecure bool   // plain HTTP on a listener that is not loopback
	TLSCert  string // files; both or none
	TLSKey   string
	Metrics  string // host:port of Prometheus' listener; "" is none

	// What the host lends to sandboxes: see node.Options. 0 is no bound.
	MemoryOvercommit float64
	CPUOvercommit    float64
	DiskFloorMiB     int64

	// Driver is DriverAuto ("" is the same), or the name of the one that new
	// sandboxes get where they name none.
	Driver string
	// AllowFirecracker is the one release of Firecracker that is let pass although
	// its jailer is known to have a hole; for tests.
	AllowFirecracker string

	Egress EgressOptions

	Ready   func() // called when requests are answered; may be nil
	Version string
	Log     *slog.Logger
}

// maxRunDir keeps the paths of sockets below the kernel's 107 bytes.
const maxRunDir = 48

// shutdownWait is how long requests under way may take to end.
const shutdownWait = 3 * time.Second

// Run serves until ctx ends. Everything that it starts has ended when it
// returns, but for the machines and the engine's control process.
func Run(ctx context.Context, o Options) error {
	if err := o.check(); err != nil {
		return err
	}
	for _, dir := range []string{o.StateDir, o.RunDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return fmt.Errorf("make %s: %w", dir, err)
		}
	}
	lock, err := sys.TryLock(filepath.Join(o.StateDir, "lock"))
	if errors.Is(err, sys.ErrLocked) {
		return sandbox.Errorf(sandbox.Conflict, "state_in_use", "another daemon uses the state directory %s", o.StateDir).
			WithHint("stop it, or give this one another --state-dir, --run-dir and --listen")
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	listener, err := o.open(ctx)
	if err != nil {
		return err
	}
	defer listener.Close()
	var scrapes net.Listener
	if o.Metrics != "" {
		if scrapes, err = metrics.Listen(ctx, o.Metrics, o.Insecure); err != nil {
			return err
		}
		defer scrapes.Close()
	}
	h, err := assemble(ctx, o)
	if err != nil {
		return err
	}
	defer h.close(o.Log)
	return h.run(ctx, listener, scrapes, o)
}

// check refuses what can't be served safely.
func (o Options) check() error {
	if len(o.RunDir) > maxRunDir {
		return sandbox.Errorf(sandbox.Invalid, "run_dir_too_long", "the run directory's path may have %d bytes at most, since sockets lie below it", maxRunDir).
			WithHint("give a shorter --run-dir")
	}
	if (o.TLSCert == "") != (o.TLSKey == "") {
		return sandbox.Errorf(sandbox.Invalid, "tls_half", "TLS needs both a certificate and a key")
	}
	if err := CheckDriver(o.Driver); err != nil {
		return err
	}
	if err := o.Egress.check(); err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return sandbox.Errorf(sandbox.Invalid, "bad_listen", "the address to listen on is not host:port: %w", err)
	}
	ip := net.ParseIP(host)
	loopback := host == "localhost" || ip != nil && ip.IsLoopback()
	if !loopback && o.TLSCert == "" && !o.Insecure {
		return sandbox.Errorf(sandbox.Invalid, "plain_listener", "%s is not loopback, and keys would cross the network in clear", o.Listen).
			WithHint("give --tls-cert and --tls-key, or --insecure behind a proxy that terminates TLS")
	}
	return nil
}

func (o Options) open(ctx context.Context) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", o.Listen)
	if err != nil {
		return nil, sandbox.Errorf(sandbox.Unavailable, "cannot_listen", "%w", err).WithHint("is another daemon running there? --listen takes another address")
	}
	if o.TLSCert == "" {
		return l, nil
	}
	cert, err := tls.LoadX509KeyPair(o.TLSCert, o.TLSKey)
	if err != nil {
		_ = l.Close()
		return nil, sandbox.Errorf(sandbox.Invalid, "bad_certificate", "read the TLS certificate: %w", err)
	}
	return tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}), nil
}

// host is the assembled roles of one host.
type host struct {
	store    *sqlite.Store
	sessions *session.Manager
	drivers  []driver.Driver // the first works on every host
	prober   *node.Prober    // of the driver that not every host can run
	networks *netns.Manager
	egress   *egress.Manager
	rules    *control.Egress // what control needs for it
	node     *node.Node
	metrics  *metrics.Metrics // nil without a listener for them
	control  *control.Control
	handler  http.Handler
}

func assemble(ctx context.Context, o Options) (_ *host, err error) {
	h := &host{}
	defer func() {
		if err != nil {
			h.close(o.Log)
		}
	}()
	if h.store, err = sqlite.Open(ctx, filepath.Join(o.StateDir, "cloche.db"), failpoint.Now); err != nil {
		return nil, err
	}
	first, err := auth.Bootstrap(ctx, h.store, o.StateDir, time.Now)
	if err != nil {
		return nil, err
	}
	if first.Lost {
		o.Log.Warn("the admin key's file is missing", "what_to_do", first.Instruct)
	}
	templates, err := template.Open(o.StateDir, template.Limits{})
	if err != nil {
		return nil, err
	}
	guests := &late{}
	h.sessions, err = session.New(session.Options{
		Dir: filepath.Join(o.StateDir, "sessions"), Guests: guests, Log: o.Log, Clock: failpoint.Now,
		Retire: func(ctx context.Context, ref session.Ref) error { return h.store.DeleteSession(ctx, ref.Session) },
	})
	if err != nil {
		return nil, err
	}
	if err = h.newNode(o, templates); err != nil {
		return nil, err
	}
	guests.Node = h.node
	h.control = control.New(control.Options{
		Store: h.store, Node: h.node, Builder: templates, MintKey: auth.Mint, Egress: h.rules, Log: o.Log, Now: failpoint.Now,
	})
	h.handler, err = h.face(o)
	return h, err
}

// late is the recorder's way to the guests: the node needs the recorder to
// exist, so the node comes second.
type late struct{ *node.Node }

func (h *host) newNode(o Options, images node.Images) error {
	artifacts, err := artifact.Open(filepath.Join(o.StateDir, "artifacts"))
	if err != nil {
		return err
	}
	engines, err := artifacts.Builds(artifact.EngineName)
	if err != nil {
		return err
	}
	guests, err := artifacts.Builds(artifact.GuestName)
	if err != nil {
		return err
	}
	networks := netns.New(netns.Options{Dir: filepath.Join(o.RunDir, "netns"), Pool: networkPool, Log: o.Log})
	h.networks = networks
	if err := h.newEgress(o, networks); err != nil {
		return err
	}
	everywhere, err := gvisor.New(gvisor.Options{
		StateDir: o.StateDir, RunDir: o.RunDir, Engine: engines.CurrentPath(), EngineByHash: engines.Path,
		Guest: guests.CurrentPath(), Networks: networks, Log: o.Log,
	})
	if err != nil {
		return err
	}
	h.drivers = append(h.drivers, everywhere)
	if err := h.addFirecracker(o, artifacts, guests, networks); err != nil {
		return err
	}
	h.node, err = node.New(node.Options{
		StateDir: o.StateDir, Drivers: h.drivers, Default: gvisor.Name, Prober: h.prober,
		Images: images, Networks: networks, Egress: h.egress, RootsFile: o.Egress.RootsFile, Guests: guests, Recorder: h.sessions,
		Concurrency: 2 * runtime.NumCPU(), HelloWait: time.Minute, MaxProcs: maxProcs, BootID: sys.HostBootID(),
		MemoryShare: o.MemoryOvercommit, CPUOvercommit: o.CPUOvercommit, DiskFloor: o.DiskFloorMiB << 20, Log: o.Log,
	})
	return err
}

// networkPool is how many networks wait for their sandboxes: as many as are made
// at once where somebody forks.
const networkPool = 8

// maxProcs is how many processes one user that is not root may have at most in
// a sandbox, however much memory that has: enough for a build, and far below
// what the host's own bound on the machine allows, so that a fork bomb meets
// EAGAIN and not the end of its sandbox.
const maxProcs = 1024

func (h *host) face(o Options) (http.Handler, error) {
	key, err := auth.LoadTokenKey(o.StateDir)
	if err != nil {
		return nil, err
	}
	router, err := rest.NewRouter(o.Log)
	if err != nil {
		return nil, err
	}
	if o.Metrics != "" {
		h.metrics = h.measure(o)
		router.Observe(h.metrics.Request)
	}
	keys, tokens := auth.NewVerifier(h.store), auth.NewTokens(key)
	httpapi.New(httpapi.Options{
		Control: h.control, Keys: keys, Tokens: tokens, Version: o.Version, Driver: h.node.DefaultDriver,
		Durability: durabilities(h.drivers),
	}).Register(router)
	dataplane.New(dataplane.Options{
		Identities: h.control, Recorder: dataplane.Recorded(h.sessions), Guests: h.node, Keys: keys, Tokens: tokens, Log: o.Log,
	}).Register(router)
	return router, nil
}

// run starts the roles from the bottom up and stops them from the top down.
func (h *host) run(ctx context.Context, listener, scrapes net.Listener, o Options) error {
	below, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	g, below := errgroup.WithContext(below)
	g.Go(func() error { return quiet(h.sessions.Run(below)) })
	g.Go(func() error { return quiet(h.networks.Run(below)) })
	g.Go(func() error { return quiet(h.egress.Run(below)) })
	g.Go(func() error { return quiet(h.node.Run(below)) })
	g.Go(func() error { return quiet(h.control.Run(below)) })
	if h.metrics != nil {
		g.Go(func() error { return quiet(h.metrics.Run(below, scrapes)) })
	}
	if err := h.proven(ctx, below, o); err != nil {
		stop()
		return errors.Join(err, g.Wait())
	}

	streams, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	srv := httpapi.NewServer(streams, h.handler, o.Log)
	g.Go(func() error {
		if err := srv.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("serve: %w", err)
		}
		return nil
	})
	o.Log.Info("ready", "listen", listener.Addr().String())
	if o.Ready != nil {
		o.Ready()
	}
	select {
	case <-ctx.Done():
	case <-below.Done(): // one of the roles failed
	}
	cut()
	wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWait)
	defer cancel()
	if err := srv.Shutdown(wait); err != nil {
		_ = srv.Close()
	}
	stop()
	return g.Wait()
}

func (h *host) measure(o Options) *metrics.Metrics {
	return metrics.New(metrics.Options{
		Store: h.store, Host: h.node, Sessions: h.sessions.Counts, Output: h.sessions.Recorded, Egress: h.gatewayState,
		Version: o.Version, Driver: h.node.DefaultDriver, Log: o.Log,
	})
}

func quiet(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// close ends what run left open, from the top down.
func (h *host) close(log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownWait)
	defer cancel()
	note := func(what string, err error) {
		if err != nil {
			log.Error("close "+what, "err", err)
		}
	}
	if h.sessions != nil {
		note("the sessions' logs", h.sessions.Close())
	}
	for _, d := range slices.Backward(h.drivers) {
		if c, ok := d.(interface {
			Close(ctx context.Context) error
		}); ok {
			note("the driver "+d.Name(), c.Close(ctx))
		}
	}
	if h.store != nil {
		note("the store", h.store.Close())
	}
}
