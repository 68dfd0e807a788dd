package agent_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/gvisor"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
)

// startMachine makes the guest PID 1 of a gVisor machine. CLOCHE_TEST_ENGINE,
// CLOCHE_TEST_GUEST_BIN and CLOCHE_TEST_IMAGE name the engine, the guest and a
// Debian template's image, since building them takes minutes.
func (g *guest) startMachine() {
	t := g.t
	t.Helper()
	engine, bin, image := os.Getenv("CLOCHE_TEST_ENGINE"), os.Getenv("CLOCHE_TEST_GUEST_BIN"), os.Getenv("CLOCHE_TEST_IMAGE")
	if engine == "" || bin == "" || image == "" {
		t.Skip("SKIP: a machine needs CLOCHE_TEST_ENGINE, CLOCHE_TEST_GUEST_BIN and CLOCHE_TEST_IMAGE")
	}
	dir, err := os.MkdirTemp("", "cg") // short: a socket's path is
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	nets := netns.New(netns.Options{Dir: filepath.Join(dir, "run", "netns")})
	d, err := gvisor.New(gvisor.Options{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Engine: engine, Guest: bin,
		Networks: nets, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	id := sandbox.NewID(sandbox.KindSandbox)
	ns, err := nets.Create(g.ctx(time.Minute), id)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	m, err := d.Create(g.ctx(time.Minute), driver.Spec{
		ID: id, Image: image, Guest: bin, NetNS: ns, Hostname: "box",
		Resources: sandbox.Resources{MilliCPU: 2000, MemoryMiB: 1024, DiskMiB: 1024},
	})
	t.Cleanup(func() {
		if err := d.Discard(g.ctx(time.Minute), id); err != nil {
			t.Error(err)
		}
		if err := nets.Delete(g.ctx(time.Minute), id); err != nil {
			t.Error(err)
		}
		if err := d.Close(g.ctx(time.Minute)); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("created in %v", time.Since(began))
	g.listen = m.Guest
}
