package netns

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	vishnetns "github.com/vishvananda/netns"
	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/sandbox"
)

// census gives namespaces numbers here by which the kernel tells which of them
// there still are, whoever keeps them.
type census struct {
	t   *testing.T
	ids []int
}

func (c *census) add(paths ...string) {
	c.t.Helper()
	for _, path := range paths {
		ns, err := vishnetns.GetFromPath(path)
		if err != nil {
			c.t.Fatal(err)
		}
		id := 1<<20 + os.Getpid()<<10&0xfffffff + len(c.ids)
		if err := netlink.SetNetNsIdByFd(int(ns), id); err != nil {
			c.t.Fatal(err)
		}
		ns.Close()
		c.ids = append(c.ids, id)
	}
}

// alive lists those that the kernel has.
func (c *census) alive() []int {
	c.t.Helper()
	req := nl.NewNetlinkRequest(90 /* RTM_GETNSID */, syscall.NLM_F_DUMP)
	req.AddData(&nl.RtGenMsg{})
	messages, err := req.Execute(syscall.NETLINK_ROUTE, 88 /* RTM_NEWNSID */)
	if err != nil {
		c.t.Fatal(err)
	}
	var alive []int
	for _, m := range messages {
		attrs, err := nl.ParseRouteAttr(m[4:] /* struct rtgenmsg */)
		if err != nil {
			c.t.Fatal(err)
		}
		for _, a := range attrs {
			if a.Attr.Type != 1 /* NETNSA_NSID */ {
				continue
			}
			if id := int(int32(nl.NativeEndian().Uint32(a.Value))); slices.Contains(c.ids, id) {
				alive = append(alive, id)
			}
		}
	}
	return alive
}

// gone waits until the kernel has cleaned up what nobody keeps.
func (c *census) gone() {
	c.t.Helper()
	for deadline := time.Now().Add(6 * patience); ; time.Sleep(5 * time.Millisecond) {
		left := c.alive()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%d of %d namespaces are left", len(left), len(c.ids))
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// links counts the links of this namespace that are ours by name.
func links(t *testing.T) (n int) {
	t.Helper()
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		if l.Name == gatewayLink || strings.HasPrefix(l.Name, "veth") {
			n++
		}
	}
	return n
}

// Two hundred pairs, each with sockets and a connection, half of them from a
// pool, leave no namespace, link, mount, file, socket or goroutine.
func TestNoTraces(t *testing.T) {
	needRoot(t)
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithCancel(context.Background())
	dir := filepath.Join(t.TempDir(), "netns")
	pooled, plain := New(Options{Dir: dir, Pool: 4}), New(Options{Dir: dir})
	ran := make(chan error)
	census := &census{t: t}
	// The first warms up what is kept for good: the poller, for one.
	once(t, plain, census)
	census.gone()
	before, linksBefore := descriptors(t), links(t)
	go func() { ran <- pooled.Run(ctx) }()
	for i := range 200 {
		once(t, []*Manager{pooled, plain}[i%2], census)
	}
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	census.gone()
	if n := mounts(t, dir); n != 0 {
		t.Errorf("%d mounts are left", n)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 0 {
		t.Errorf("files are left: %v, %v", names, err)
	}
	if n := descriptors(t); n > before {
		t.Errorf("%d descriptors are open, %d were before", n, before)
	}
	if n := links(t); n != linksBefore {
		t.Errorf("%d links are in the host's namespace, %d were before", n, linksBefore)
	}
	if len(pooled.ready) != 0 {
		t.Error("the pool still has pairs")
	}
}

// once makes a pair, uses it and removes it.
func once(t *testing.T, m *Manager, c *census) {
	t.Helper()
	ctx, id := context.Background(), sandbox.NewID(sandbox.KindSandbox)
	path, err := m.Create(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	c.add(path, m.gateway(id))
	if n := len(c.alive()); n < 2 {
		t.Fatalf("the kernel knows %d of the two namespaces", n)
	}
	w := &wire{t: t, m: m, id: id, ns: path}
	proxy, dnsTCP, dnsUDP, err := m.Sockets(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := w.dial("tcp4", "198.51.100.7:443", 0)
	if err != nil {
		t.Fatal(err)
	}
	fd, _, err := syscall.Accept4(int(proxy.Fd()), syscall.SOCK_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Delete(ctx, id); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Close(fd); err != nil {
		t.Error(err)
	}
	for _, f := range []interface{ Close() error }{conn, proxy, dnsTCP, dnsUDP} {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// The pool's pairs are used, each once, and one that somebody took lives on
// when the pool ends.
func TestPool(t *testing.T) {
	needRoot(t)
	defer goleak.VerifyNone(t)
	ctx, cancel := context.WithCancel(context.Background())
	dir := filepath.Join(t.TempDir(), "netns")
	m := New(Options{Dir: dir, Pool: 3})
	ran := make(chan error)
	go func() { ran <- m.Run(ctx) }()
	full := func() {
		for deadline := time.Now().Add(patience); len(m.ready) < cap(m.ready); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("the pool does not fill")
			}
		}
	}
	full()
	if n := mounts(t, dir); n != 0 {
		t.Errorf("pairs that nobody took have %d names", n)
	}
	seen := map[string]bool{}
	var ids []string
	for range 8 {
		id := sandbox.NewID(sandbox.KindSandbox)
		path, err := m.Create(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
		for _, p := range []string{path, m.gateway(id)} {
			err := in(p, func() error {
				ns, err := os.Readlink("/proc/thread-self/ns/net")
				if seen[ns] {
					t.Errorf("%s was given twice", ns)
				}
				seen[ns] = true
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	full()
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
	for _, id := range ids {
		w := &wire{t: t, m: m, id: id, ns: m.path(id)}
		proxy, dns, udp := w.sockets()
		c, err := w.dial("tcp4", "198.51.100.7:443", 0)
		if err != nil {
			t.Fatal(err)
		}
		s, _ := accept(t, proxy)
		exchange(t, c, s)
		for _, f := range []interface{ Close() error }{c, s, proxy, dns, udp} {
			f.Close()
		}
		if err := m.Delete(ctx, id); err != nil {
			t.Error(err)
		}
	}
	if _, err := m.Create(context.Background(), ids[0]); err != nil {
		t.Errorf("Create after the pool's end: %v", err)
	}
	if err := m.Delete(context.Background(), ids[0]); err != nil {
		t.Error(err)
	}
}

// BenchmarkCreate compares a pair of the pool's with one that is made when it
// is asked for; the ratio is in the log.
func BenchmarkCreate(b *testing.B) {
	needRoot(b)
	took := map[string]time.Duration{}
	for _, pool := range []int{0, 64} {
		name := map[int]string{0: "made-now", 64: "from-pool"}[pool]
		b.Run(name, func(b *testing.B) {
			m := New(Options{Dir: filepath.Join(b.TempDir(), "netns"), Pool: pool})
			var all []time.Duration
			for b.Loop() {
				b.StopTimer()
				if pool > 0 { // one that is ready, and nobody who makes more meanwhile
					p, err := makePair()
					if err != nil {
						b.Fatal(err)
					}
					m.ready <- p
				}
				id := sandbox.NewID(sandbox.KindSandbox)
				b.StartTimer()
				started := time.Now()
				if _, err := m.Create(context.Background(), id); err != nil {
					b.Fatal(err)
				}
				all = append(all, time.Since(started))
				b.StopTimer()
				if err := m.Delete(context.Background(), id); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			slices.Sort(all)
			took[name] = all[len(all)/2]
			b.ReportMetric(float64(took[name].Microseconds()), "p50-µs")
		})
	}
	if took["from-pool"] > 0 {
		b.Logf("made now / from the pool, medians: %.1f", float64(took["made-now"])/float64(took["from-pool"]))
	}
}
