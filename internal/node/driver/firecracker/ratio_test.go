package firecracker

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/node/guestlink"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

const (
	ratioRounds = 10
	// worstRatio is how much longer than the VMM alone a machine may take until its
	// agent's hello.
	worstRatio = 1.5
)

// TestRatios makes and restores machines, each in turn with a bare VMM that
// does the same: one without a jail, control groups, a record or a setup of the
// guest. All are timed from the start to the agent's hello; ours are also timed until
// the guest has taken its setup, which a bare one has no likeness of.
func TestRatios(t *testing.T) {
	if !boots() {
		t.Skip("SKIP: nothing boots here")
	}
	f := newFixture(t)
	r := &ratio{fixture: f, key: guestapi.NewKey()}
	var bares, hellos, readies [2][]time.Duration
	bareTook := func(kind int, do func() *bareVMM) {
		began := time.Now()
		v := do()
		bares[kind] = append(bares[kind], time.Since(began))
		v.end()
	}
	oursTook := func(kind int, do func() *machine) {
		began := time.Now()
		m := do()
		l := r.ready(m, kind == 1)
		readies[kind] = append(readies[kind], time.Since(began))
		hellos[kind] = append(hellos[kind], r.hello.Sub(began))
		l.Close()
		r.gone(m)
	}
	m := r.created(r.size()) // with what is made once and kept
	r.ready(m, false).Close()
	r.gone(m)
	ours, bare := r.sources()
	for range ratioRounds {
		first, second := r.size(), r.size()
		bareTook(0, func() *bareVMM { return r.bareBoot(first) })
		oursTook(0, func() *machine { return r.created(first) })
		bareTook(1, func() *bareVMM { return r.bareLoad(bare) })
		oursTook(1, func() *machine { return r.restored(second, ours) })
	}
	for i, what := range []string{"create", "restore"} {
		b, h, o := median(bares[i]), median(hellos[i]), median(readies[i])
		factor := h.Seconds() / b.Seconds()
		t.Logf("%s: %v until its guest's hello, a bare VMM %v: %.2f times; %v until ready: %.2f times (medians of %d; hello %v, ready %v, bare %v)", what,
			h.Round(time.Millisecond), b.Round(time.Millisecond), factor, o.Round(time.Millisecond), o.Seconds()/b.Seconds(), ratioRounds,
			span(hellos[i]), span(readies[i]), span(bares[i]))
		if factor > worstRatio {
			t.Errorf("%s takes %.2f times as long as a bare VMM, more than %.1f", what, factor, worstRatio)
		}
	}
}

func median(d []time.Duration) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return (d[(len(d)-1)/2] + d[len(d)/2]) / 2
}

func span(d []time.Duration) string {
	return fmt.Sprintf("%v to %v", slices.Min(d).Round(time.Millisecond), slices.Max(d).Round(time.Millisecond))
}

// ratio makes machines of both kinds, of the same size.
type ratio struct {
	*fixture
	key   []byte
	hello time.Time // when the last guest that came had said its own
}

// heard notes when a guest has said its hello.
type heard struct {
	net.Listener
	r *ratio
}

// Accept implements net.Listener.
func (l heard) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	return &heardConn{Conn: conn, r: l.r}, err
}

type heardConn struct {
	net.Conn
	r     *ratio
	reads int
}

// Read implements net.Conn. A hello is read in two pieces: its length and itself.
func (c *heardConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.reads++; c.reads == 2 {
		c.r.hello = time.Now()
	}
	return n, err
}

func (r *ratio) size() driver.Spec {
	s := r.spec()
	s.Resources.MilliCPU = 1000
	return s
}

func (r *ratio) created(s driver.Spec) *machine {
	r.t.Helper()
	m, err := r.d.Create(r.ctx(), s)
	if err != nil {
		r.t.Fatalf("create: %v", err)
	}
	return m.(*machine)
}

func (r *ratio) restored(s driver.Spec, image driver.Image) *machine {
	r.t.Helper()
	m, err := r.d.Restore(r.ctx(), s, image)
	if err != nil {
		r.t.Fatalf("restore: %v", err)
	}
	return m.(*machine)
}

// ready waits until a machine's guest has taken its setup.
func (r *ratio) ready(m *machine, welcomed bool) *guestlink.Link {
	r.t.Helper()
	listen := func() (net.Listener, error) {
		l, err := m.Guest()
		if err != nil {
			return nil, err
		}
		return heard{l, r}, nil
	}
	l := guestlink.Start(guestlink.Config{
		Listen: listen, Key: r.key, Welcomed: welcomed, Epoch: 1,
		Setup: &guestv1.SetupRequest{Hostname: "box", Generation: 1, Restored: welcomed},
	})
	r.t.Cleanup(l.Close)
	if err := l.Ready(r.ctx()); err != nil {
		r.t.Fatalf("the guest did not come: %v", err)
	}
	return l
}

func (r *ratio) gone(m *machine) {
	r.t.Helper()
	if err := r.d.Discard(r.ctx(), m.ID()); err != nil {
		r.t.Fatalf("discard: %v", err)
	}
}

// sources makes an image of ours, and what a bare VMM saved.
func (r *ratio) sources() (driver.Image, string) {
	r.t.Helper()
	m := r.created(r.size())
	r.ready(m, false).Close()
	image := r.snapshot(m, sandbox.SnapshotMemory)
	r.gone(m)

	v := r.bareStart()
	v.boot(r.size())
	l := guestlink.Start(guestlink.Config{Listen: v.listen, Key: r.key, Epoch: 1})
	if err := l.Ready(r.ctx()); err != nil {
		r.t.Fatalf("the bare VMM's guest did not come: %v", err)
	}
	l.Close()
	ctx := r.ctx()
	if err := errors.Join(v.client.Pause(ctx), v.client.Save(ctx, stateName, memName)); err != nil {
		r.t.Fatal(err)
	}
	v.end()
	return image, v.dir
}

// bareVMM is a VMM in a directory of its own, and nothing around it.
type bareVMM struct {
	r      *ratio
	dir    string
	cmd    *exec.Cmd
	client *vmm.Client
	guest  net.Listener
}

// bareStart starts one and waits until it answers.
func (r *ratio) bareStart() *bareVMM {
	r.t.Helper()
	dir, err := os.MkdirTemp("", "bare-") // a short path: it is a socket's
	if err != nil {
		r.t.Fatal(err)
	}
	v := &bareVMM{r: r, dir: dir}
	r.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if v.guest, err = net.Listen("unix", filepath.Join(dir, agentName)); err != nil {
		r.t.Fatal(err)
	}
	pair, _, err := r.o.Pair()
	if err != nil {
		r.t.Fatal(err)
	}
	v.cmd = exec.Command(pair.Firecracker, "--api-sock", "api")
	v.cmd.Dir = dir
	if err := v.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	v.client = vmm.New(filepath.Join(dir, "api"))
	for {
		_, err := v.client.Info(r.ctx())
		if err == nil {
			return v
		}
		if !errors.Is(err, vmm.ErrGone) {
			r.t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // it makes its socket in its own time
	}
}

// boot boots what ours boots.
func (v *bareVMM) boot(s driver.Spec) {
	v.r.t.Helper()
	p := plan{spec: s}
	if err := v.r.d.current(&p); err != nil {
		v.r.t.Fatal(err)
	}
	initrd, err1 := v.r.d.initrd(p)
	empty, err2 := v.r.d.emptyDisk(v.r.ctx(), p.spec.Resources.DiskMiB)
	args, err3 := arguments(p, false)
	reports, err4 := net.Listen("unix", filepath.Join(v.dir, reportName))
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		v.r.t.Fatal(err)
	}
	defer reports.Close()
	v.copyDisk(empty)
	err := v.client.Configure(v.r.ctx(), vmm.Config{
		VCPUs: p.vcpus(), MemoryMiB: p.spec.Resources.MemoryMiB, Kernel: p.kernel.Image, Initrd: initrd, Args: args,
		VsockCID: guestCID, VsockPath: vsockName, Entropy: true, Tap: "bare0", MAC: "06:00:00:00:00:02", // root's VMM makes what is missing
		Drives: []vmm.Drive{{ID: "template", Path: p.spec.Image, ReadOnly: true}, {ID: "disk", Path: diskName, Writeback: true}},
	})
	if err == nil {
		err = v.client.Start(v.r.ctx())
	}
	if err != nil {
		v.r.t.Fatal(err)
	}
	_ = reports.(*net.UnixListener).SetDeadline(time.Now().Add(patience()))
	conn, err := reports.Accept()
	if err != nil {
		v.r.t.Fatal(err)
	}
	defer conn.Close()
	if err := guestapi.ReadBootReport(conn); err != nil {
		v.r.t.Fatal(err)
	}
}

func (v *bareVMM) copyDisk(from string) {
	v.r.t.Helper()
	in, err := os.Open(from)
	if err != nil {
		v.r.t.Fatal(err)
	}
	defer in.Close()
	out, err := os.Create(filepath.Join(v.dir, diskName))
	if err != nil {
		v.r.t.Fatal(err)
	}
	if err := errors.Join(sys.CopySparse(v.r.ctx(), out, in), out.Close()); err != nil {
		v.r.t.Fatal(err)
	}
}

// hello waits for the agent's.
func (v *bareVMM) hello() {
	v.r.t.Helper()
	_ = v.guest.(*net.UnixListener).SetDeadline(time.Now().Add(patience()))
	for {
		conn, err := v.guest.Accept()
		if err != nil {
			v.r.t.Fatal(err)
		}
		_, err = guestapi.Challenge(conn)
		if err == nil {
			_, err = guestapi.ReadHello(conn)
		}
		_ = conn.Close()
		if err == nil {
			return
		}
	}
}

// listen is the listener of a link.
func (v *bareVMM) listen() (net.Listener, error) { return v.guest, nil }

func (r *ratio) bareBoot(s driver.Spec) *bareVMM {
	v := r.bareStart()
	v.boot(s)
	v.hello()
	return v
}

// bareLoad loads what one saved in another directory, whose disk it uses.
func (r *ratio) bareLoad(from string) *bareVMM {
	r.t.Helper()
	v := r.bareStart()
	ctx := r.ctx()
	if err := os.Link(filepath.Join(from, diskName), filepath.Join(v.dir, diskName)); err != nil {
		r.t.Fatal(err)
	}
	if err := errors.Join(v.client.Load(ctx, filepath.Join(from, stateName), filepath.Join(from, memName)), v.client.Resume(ctx)); err != nil {
		r.t.Fatal(err)
	}
	v.hello()
	return v
}

func (v *bareVMM) end() {
	v.client.Close()
	_ = v.guest.Close()
	_ = v.cmd.Process.Kill()
	_ = v.cmd.Wait() // it was killed
}
