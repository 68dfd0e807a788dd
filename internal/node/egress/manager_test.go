package egress

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/sys"
)

var background = context.Background()

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type process struct {
	t *testing.T
	sys.Process
}

func (s *site) process(record string) process {
	data, err := os.ReadFile(record)
	p := process{t: s.t}
	if err == nil {
		err = json.Unmarshal(data, &p.Process)
	}
	must(s.t, err)
	return p
}

// end kills a process and waits until it has ended.
func (p process) end() {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(background, 20*time.Second)
	defer cancel()
	must(p.t, p.Kill())
	must(p.t, p.Wait(ctx))
}

// gateway is the process of a Manager's present gateway.
func (s *site) gateway(m *Manager) process {
	s.t.Helper()
	return s.process(m.path(m.name, recordSuffix))
}

// another waits until the Manager has another gateway than p.
func another(t *testing.T, m *Manager, p process) {
	t.Helper()
	ctx, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	for {
		m.mu.Lock()
		g, changed := m.current, m.changed
		m.mu.Unlock()
		if g != nil && g.process != p.Process {
			return
		}
		must(t, m.await(ctx, changed))
	}
}

// ends waits for a connection's end, which is no earlier than the test's other
// side, and returns how it came.
func ends(c net.Conn) error {
	_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
	_, err := c.Read(make([]byte, 1))
	return err
}

func TestKillTheGateway(t *testing.T) {
	s := newSite(t)
	m, _, _ := s.manager()
	free, shut, bare := s.box(), s.box(), s.box()
	must(t, m.Set(background, s.reaches(free, 3)))
	must(t, m.Set(background, s.nothing(shut, 3)))
	for _, id := range []string{free, shut, bare} {
		must(t, m.Attach(background, id))
	}
	for round := range 2 {
		c, err := s.reach(free)
		must(t, err)
		for _, id := range []string{shut, bare} {
			if _, err := s.reach(id); err == nil {
				t.Errorf("round %d: a sandbox that may reach nothing reached the world", round)
			}
		}
		p := s.gateway(m)
		killed := time.Now()
		p.end()
		if err := ends(c); err == nil {
			t.Error("a connection outlived the gateway")
		}
		another(t, m, p)
		for _, id := range []string{free, shut, bare} {
			must(t, m.Attach(background, id)) // which waits until it is
		}
		t.Logf("everything was attached again %s after the kill", time.Since(killed).Round(time.Millisecond))
	}
	st, err := m.Stats(background)
	must(t, err)
	if st.Restarts != 2 || !st.Up || st.Sandboxes != 3 {
		t.Errorf("stats %+v", st)
	}
	must(t, m.Detach(background, free))
	if _, err := s.reach(free); err == nil {
		t.Error("a sandbox that was detached reached the world")
	}
	m.Forget(free)
	if m.CA(free) != nil {
		t.Error("a forgotten sandbox's authority is known")
	}
	must(t, m.Attach(background, free)) // with nothing assigned
	if _, err := s.reach(free); err == nil {
		t.Error("a forgotten sandbox reached the world")
	}
}

func TestKillTheDaemon(t *testing.T) {
	s := newSite(t)
	free, shut := s.box(), s.box()
	s.spec.Assign = []sandbox.EgressAssignment{s.reaches(free, 3), s.nothing(shut, 3)}
	told, err := json.Marshal(s.spec)
	must(t, err)
	self, err := os.Executable()
	must(t, err)
	cmd := exec.Command(self, "egress-daemon", string(told))
	cmd.Stderr = testLog{t}
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		t.Fatalf("the daemon says %q (%v)", line, err)
	}
	c, err := s.reach(free)
	must(t, err)

	must(t, cmd.Process.Signal(syscall.SIGKILL))
	_ = cmd.Wait()
	must(t, hears(c)) // the gateway goes on
	if _, err := s.reach(free); err != nil {
		t.Errorf("without a daemon: %v", err)
	}
	if _, err := s.reach(shut); err == nil {
		t.Error("without a daemon a sandbox reached what it may not")
	}

	records, err := filepath.Glob(filepath.Join(s.spec.RunDir, "egress", "*"+recordSuffix))
	must(t, err)
	if len(records) != 1 {
		t.Fatalf("%d gateways", len(records))
	}
	before := s.process(records[0])
	m, n, _ := s.manager()
	must(t, m.Attach(background, free))
	must(t, m.Attach(background, shut))
	if p := s.gateway(m); p.Process != before.Process || n.asked != 0 {
		t.Errorf("process %+v for %+v, sockets asked for %d times", p.Process, before.Process, n.asked)
	}
	if got := string(m.CA(free)); got != string(s.ca.Cert) {
		t.Errorf("the authority of an adopted sandbox is %q", got)
	}
	must(t, hears(c))
	if _, err := s.reach(shut); err == nil {
		t.Error("an adopted sandbox reached what it may not")
	}
	// What was recorded while there was no daemon.
	tell, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	enough := errors.New("enough")
	err = m.Audit().FollowEgress(tell, sandbox.EgressAuditFilter{Sandbox: shut, Project: "prj_test", Verdict: "denied"}, func(r sandbox.EgressRecord) error {
		if r.Dialled != s.echo || r.Profile != sandbox.PresetNone {
			t.Errorf("record %+v", r)
		}
		return enough
	})
	if !errors.Is(err, enough) {
		t.Errorf("the audit: %v", err)
	}
	must(t, m.Set(background, s.nothing(free, 4)))
	if err := ends(c); err == nil {
		t.Error("a connection outlived a profile that denies it")
	}
	must(t, m.Set(background, s.reaches(free, 2))) // an older one changes nothing
	if _, err := s.reach(free); err == nil {
		t.Error("an older assignment was put in force")
	}
}

func TestAnotherBuild(t *testing.T) {
	s := newSite(t)
	first, _, stop := s.manager()
	id, other := s.box(), s.box()
	for _, id := range []string{id, other} {
		must(t, first.Set(background, s.reaches(id, 1)))
		must(t, first.Attach(background, id))
	}
	c, err := s.reach(id)
	must(t, err)
	c2, err := s.reach(other)
	must(t, err)
	before := s.gateway(first)
	stop()
	var e *sandbox.Error
	for _, do := range []func(context.Context, string) error{first.Attach, first.Reset, first.Detach} {
		if err := do(background, id); !errors.As(err, &e) || e.Code != "egress_gateway_down" {
			t.Errorf("asked of a daemon that has ended: %v", err)
		}
	}
	s.spec.Build = "2"
	m, _, _ := s.manager()
	must(t, m.Attach(background, id)) // stays where it is until its assignment is known
	must(t, hears(c))
	if _, err := s.reach(id); err != nil {
		t.Errorf("before the handover: %v", err)
	}
	must(t, m.Set(background, s.reaches(id, 1)))
	m.mu.Lock()
	on := m.boxes[id].on
	m.mu.Unlock()
	if on == nil || on.process == before.Process || on.build != "2" {
		t.Errorf("after the handover it is on %+v", on)
	}
	must(t, hears(c)) // goes on in the gateway of before
	if _, err := s.reach(id); err != nil {
		t.Errorf("after the handover: %v", err)
	}
	must(t, m.Set(background, s.nothing(id, 2)))
	if err := ends(c); err == nil {
		t.Error("a connection in the gateway of before outlived a profile that denies it")
	}
	must(t, hears(c2))
	must(t, m.Detach(background, other)) // which only the one of before has
	if err := ends(c2); err == nil {
		t.Error("a connection outlived its sandbox")
	}
	ctx, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	if err := before.Wait(ctx); err != nil {
		t.Errorf("the gateway of before, which nobody needs any more: %v", err)
	}
}

func TestResetCutsAndGoesOn(t *testing.T) {
	s := newSite(t)
	m, _, _ := s.manager()
	id := s.box()
	must(t, m.Attach(background, id))
	must(t, m.Set(background, s.reaches(id, 1)))
	c, err := s.reach(id)
	must(t, err)
	must(t, m.Reset(background, id))
	if err := ends(c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v", err)
	}
	_, err = s.reach(id)
	must(t, err)
	for _, do := range []func(context.Context, string) error{m.Reset, m.Detach} {
		must(t, do(background, sandbox.NewID(sandbox.KindSandbox))) // of one that nobody knows
	}
	m.mu.Lock()
	n := len(m.boxes)
	m.mu.Unlock()
	if n != 1 {
		t.Errorf("%d sandboxes are remembered", n)
	}
	if err := m.Attach(background, sandbox.NewID(sandbox.KindSandbox)); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
		t.Errorf("a sandbox without a network: %v", err)
	}
}

func TestNamesAndDroppedPackets(t *testing.T) {
	s := newSite(t)
	m, _, _ := s.manager()
	id := s.box()
	a := s.reaches(id, 1)
	a.Profile.Rules = a.Profile.Rules[1:]
	must(t, m.Set(background, a))
	must(t, m.Attach(background, id))
	s.world.Name("allowed.test", 60, s.echo.Addr())
	lookup := func(name string) (addrs []netip.Addr, err error) {
		err = s.inside(id, func() error {
			c, err := net.Dial("udp4", "169.254.77.1:53")
			if err != nil {
				return err
			}
			defer c.Close()
			addrs, err = ask(c, name)
			return err
		})
		return addrs, err
	}
	addrs, err := lookup("allowed.test")
	if err != nil || !slices.Equal(addrs, []netip.Addr{s.echo.Addr()}) {
		t.Errorf("allowed.test is %v (%v)", addrs, err)
	}
	if addrs, err := lookup("denied.test"); err == nil || s.world.Asked("denied.test") > 0 {
		t.Errorf("denied.test is %v, the world was asked %d times", addrs, s.world.Asked("denied.test"))
	}
	must(t, s.inside(id, func() error {
		c, err := net.Dial("udp4", "192.0.2.1:9")
		if err == nil {
			_, err = c.Write([]byte("x"))
			_ = c.Close()
		}
		return err
	}))
	m.countAll(background)
	m.countAll(background)
	found, err := m.Audit().EgressRecords(background, sandbox.EgressAuditFilter{Sandbox: id, Kind: "packet"})
	must(t, err)
	if len(found) != 1 || found[0].Reason != "packet:udp" || found[0].Count != 1 || found[0].Project != "prj_test" || found[0].Profile != "world" {
		t.Errorf("the audit has %+v", found)
	}
}

// ask asks one question for an address.
func ask(c net.Conn, name string) (addrs []netip.Addr, err error) {
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	conn := dns.Conn{Conn: c}
	if err := conn.WriteMsg(new(dns.Msg).SetQuestion(dns.Fqdn(name), dns.TypeA)); err != nil {
		return nil, err
	}
	m, err := conn.ReadMsg()
	if err != nil {
		return nil, err
	}
	if m.Rcode != dns.RcodeSuccess {
		return nil, errors.New(dns.RcodeToString[m.Rcode])
	}
	for _, rr := range m.Answer {
		if a, ok := rr.(*dns.A); ok {
			if addr, ok := netip.AddrFromSlice(a.A.To4()); ok {
				addrs = append(addrs, addr)
			}
		}
	}
	return addrs, nil
}

func TestTheGatewayHasNoPrivileges(t *testing.T) {
	s := newSite(t)
	m, _, _ := s.manager()
	id := s.box()
	must(t, m.Attach(background, id))
	p := s.gateway(m)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID))
	must(t, err)
	for _, want := range []string{
		"Uid:\t65534\t65534\t65534\t65534", "Gid:\t65534\t65534\t65534\t65534", "Groups:\t \n", "NoNewPrivs:\t1",
		"CapInh:\t0000000000000000", "CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapAmb:\t0000000000000000",
	} {
		if !strings.Contains(string(status), want) {
			t.Errorf("its status has no %q:\n%s", want, status)
		}
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.PID))
	must(t, err)
	for _, path := range threads {
		status, err := os.ReadFile(path)
		if err == nil && (!strings.Contains(string(status), "CapEff:\t0000000000000000") || !strings.Contains(string(status), "NoNewPrivs:\t1")) {
			t.Errorf("a thread has privileges:\n%s", status)
		}
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/", p.PID))
	if err != nil || len(files) > 0 {
		t.Errorf("it sees %v (%v)", files, err)
	}
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", p.PID))
	must(t, err)
	for _, line := range strings.Split(string(limits), "\n") {
		f := strings.Fields(line)
		if strings.HasPrefix(line, "Max core file size") && f[4] != "0" || strings.HasPrefix(line, "Max open files") && f[3] != f[4] {
			t.Errorf("limit: %s", line)
		}
	}
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.PID))
	must(t, err)
	if got := strings.Split(strings.Trim(string(environ), "\x00"), "\x00"); len(got) != 1 {
		t.Errorf("environment %q", got)
	}
}

func TestAGatewayThatCannotStart(t *testing.T) {
	s := newSite(t)
	m, err := New(Options{
		RunDir: s.spec.RunDir, StateDir: s.spec.StateDir, Program: []string{"/bin/false"}, Networks: s.nets, Build: "x", Log: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	ctx, cancel := context.WithCancel(background)
	done := make(chan struct{})
	go func() { defer close(done); _ = m.Run(ctx) }()
	defer func() { cancel(); <-done }()
	id := s.box()
	must(t, m.Set(background, s.reaches(id, 1))) // nothing is attached yet
	var e *sandbox.Error
	if err := m.Attach(background, id); !errors.As(err, &e) || e.Code != "egress_gateway_down" {
		t.Errorf("attach: %v", err)
	}
	must(t, m.Reset(background, id))
	must(t, m.Detach(background, id))
	m.Forget(id)
	if st, err := m.Stats(background); err != nil || st.Up {
		t.Errorf("stats %+v (%v)", st, err)
	}
}

// A gateway that hangs is ended by the next daemon that meets it.
func TestAGatewayThatHangs(t *testing.T) {
	s := newSite(t)
	first, _, stop := s.manager()
	id := s.box()
	must(t, first.Set(background, s.reaches(id, 1)))
	must(t, first.Attach(background, id))
	p := s.gateway(first)
	stop()
	must(t, syscall.Kill(p.PID, syscall.SIGSTOP))
	m, _, _ := s.manager()
	another(t, m, p)
	if p.Exists() && s.gateway(m).Process == p.Process {
		t.Error("it is still there")
	}
	must(t, m.Set(background, s.reaches(id, 1)))
	must(t, m.Attach(background, id))
	_, err := s.reach(id)
	must(t, err)
}
