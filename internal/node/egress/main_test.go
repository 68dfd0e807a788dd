package egress

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	vishnetns "github.com/vishvananda/netns"
	"go.uber.org/goleak"

	"cloche.dev/cloche/internal/egress"
	"cloche.dev/cloche/internal/egress/ca"
	"cloche.dev/cloche/internal/node/netns"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/test/internet"
)

// TestMain also makes the test's binary be a gateway, and a daemon.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "egress-gateway":
			be(gatewayMain)
		case "egress-daemon":
			be(daemonMain)
		}
	}
	goleak.VerifyTestMain(m)
}

func be(what func() error) {
	if err := what(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func gatewayMain() error {
	o := egress.Options{Listener: os.NewFile(egress.ListenerFD, "socket"), Log: os.Stderr}
	f := flag.NewFlagSet("", flag.ContinueOnError)
	f.StringVar(&o.Root, "root", "", "")
	f.StringVar(&o.Build, "build", "", "")
	if err := f.Parse(os.Args[2:]); err != nil {
		return err
	}
	return egress.Run(context.Background(), o)
}

// site is where the tests live: a stand-in internet, and a host.
type site struct {
	t     *testing.T
	world *internet.World
	echo  netip.AddrPort // of a server that says what it hears
	nets  *netns.Manager
	dir   string
	spec  spec
	ca    sandbox.Authority
}

// spec is what a daemon is told, in another process too.
type spec struct {
	RunDir, StateDir, NetDir string
	Open                     []netip.Prefix
	Resolvers                []netip.AddrPort
	Build, RootsFile         string
	Assign                   []sandbox.EgressAssignment
}

func newSite(t *testing.T) *site {
	t.Helper()
	world := internet.New(t)
	dir, err := os.MkdirTemp("", "ceg") // short: there are sockets in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	s := &site{t: t, world: world, dir: dir}
	s.spec = spec{
		RunDir: filepath.Join(dir, "r"), StateDir: filepath.Join(dir, "s"), NetDir: filepath.Join(dir, "n"),
		Open: []netip.Prefix{netip.MustParsePrefix(world.Open())}, Resolvers: []netip.AddrPort{netip.MustParseAddrPort(world.Resolver())}, Build: "1",
	}
	s.nets = netns.New(netns.Options{Dir: s.spec.NetDir})
	l := world.Listen(world.Addr(9), 7)
	s.echo = netip.AddrPortFrom(world.Addr(9), 7)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
		}
	}()
	t.Cleanup(func() { // the gateways outlive their managers
		gateways, _ := filepath.Glob(filepath.Join(s.spec.RunDir, "egress", "*"+recordSuffix))
		for _, g := range gateways {
			s.process(g).end()
		}
	})
	if s.ca, err = ca.Generate("test"); err != nil {
		t.Fatal(err)
	}
	return s
}

// box makes a sandbox's network.
func (s *site) box() string {
	s.t.Helper()
	id := sandbox.NewID(sandbox.KindSandbox)
	if _, err := s.nets.Create(context.Background(), id); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = s.nets.Delete(context.Background(), id) })
	return id
}

// reaches is an assignment of a profile that lets everything go to the world,
// and resolves allowed.test only.
func (s *site) reaches(id string, revision int64) sandbox.EgressAssignment {
	return sandbox.EgressAssignment{
		Sandbox: id, Project: "prj_test", Revision: revision, CA: s.ca,
		Profile: sandbox.EgressProfile{Name: "world", Version: revision, Default: sandbox.EgressDeny, Rules: []sandbox.EgressRule{
			{Name: "world", Action: sandbox.EgressAllow, CIDRs: []string{s.world.Open()}},
			{Name: "names", Action: sandbox.EgressAllow, Hosts: []string{"allowed.test"}},
		}},
	}
}

// nothing is an assignment that denies everything.
func (s *site) nothing(id string, revision int64) sandbox.EgressAssignment {
	a := *none(id)
	a.Project, a.Revision, a.CA = "prj_test", revision, s.ca
	return a
}

// networks count what is asked of them.
type networks struct {
	*netns.Manager
	mu    sync.Mutex
	asked int
}

func (n *networks) Sockets(ctx context.Context, id string) (proxy, dnsTCP, dnsUDP *os.File, err error) {
	n.mu.Lock()
	n.asked++
	n.mu.Unlock()
	return n.Manager.Sockets(ctx, id)
}

// start runs a Manager until the function that it returns is called.
func (sp spec) start(log *slog.Logger) (*Manager, *networks, func(), error) {
	self, err := os.Executable()
	if err != nil {
		return nil, nil, nil, err
	}
	n := &networks{Manager: netns.New(netns.Options{Dir: sp.NetDir})}
	m, err := New(Options{
		RunDir: sp.RunDir, StateDir: sp.StateDir, Program: []string{self, "egress-gateway"}, Networks: n, Open: sp.Open,
		Resolvers: sp.Resolvers, RootsFile: sp.RootsFile, Build: sp.Build, Log: log,
	})
	if err != nil {
		return nil, nil, nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = m.Run(ctx)
	}()
	return m, n, sync.OnceFunc(func() { cancel(); <-done }), nil
}

type testLog struct{ t *testing.T }

func (l testLog) Write(p []byte) (int, error) { l.t.Logf("%s", p); return len(p), nil }

func (s *site) manager() (*Manager, *networks, func()) {
	s.t.Helper()
	m, n, stop, err := s.spec.start(slog.New(slog.NewTextHandler(testLog{s.t}, nil)))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(stop)
	return m, n, stop
}

// daemonMain is a daemon that attaches sandboxes, says so, and goes on.
func daemonMain() error {
	var sp spec
	if err := json.Unmarshal([]byte(os.Args[2]), &sp); err != nil {
		return err
	}
	m, _, _, err := sp.start(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		return err
	}
	for _, a := range sp.Assign {
		if err := m.Set(context.Background(), a); err != nil {
			return err
		}
		if err := m.Attach(context.Background(), a.Sandbox); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	select {}
}

// inside runs do on a thread that is in a machine's namespace.
func (s *site) inside(id string, do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends
		ns, err := vishnetns.GetFromPath(filepath.Join(s.spec.NetDir, id))
		if err == nil {
			err = vishnetns.Set(ns)
			_ = ns.Close()
		}
		if err == nil {
			err = do()
		}
		done <- err
	}()
	return <-done
}

// dial connects from a machine to an address.
func (s *site) dial(id string, to netip.AddrPort) (c net.Conn, err error) {
	err = s.inside(id, func() error {
		c, err = (&net.Dialer{Timeout: 10 * time.Second}).Dial("tcp4", to.String())
		return err
	})
	return c, err
}

// hears tells whether what a machine says to the echo comes back on c.
func hears(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	buf := make([]byte, 5)
	_, err := io.ReadFull(c, buf)
	if err == nil && string(buf) != "hello" {
		err = fmt.Errorf("heard %q", buf)
	}
	return err
}

// reach dials the echo and hears it.
func (s *site) reach(id string) (net.Conn, error) {
	c, err := s.dial(id, s.echo)
	if err != nil {
		return nil, err
	}
	if err := hears(c); err != nil {
		_ = c.Close()
		return nil, err
	}
	s.t.Cleanup(func() { _ = c.Close() })
	return c, nil
}
