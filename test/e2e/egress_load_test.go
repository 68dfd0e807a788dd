package e2e

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

// hold opens N connections to site.test, every other one with TLS, and goes on
// until it is killed: each gets a download that drips, or with a second argument
// one small answer after the other. It asks for the address once: questions are
// limited, too.
const hold = `
import asyncio, resource, socket, ssl, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
at = socket.gethostbyname("site.test")
tls = ssl.create_default_context()
storm = len(sys.argv) > 2
path = b"/hello" if storm else b"/drip/1000000"
async def one(i, room):
    try:
        async with room:
            how = dict(port=443, ssl=tls, server_hostname="site.test") if i % 2 else dict(port=80)
            r, w = await asyncio.open_connection(at, **how)
            w.write(b"GET " + path + b" HTTP/1.1\r\nHost: site.test\r\n\r\n")
            await r.readline()
        while storm:
            await r.readuntil(b"hello from site.test\n")
            w.write(b"GET " + path + b" HTTP/1.1\r\nHost: site.test\r\n\r\n")
        while await r.read(1 << 16):
            pass
    except (OSError, EOFError):
        pass
async def all(n):
    room = asyncio.Semaphore(50)
    await asyncio.gather(*(one(i, room) for i in range(n)))
asyncio.run(all(int(sys.argv[1])))
`

// ask makes N requests one after the other, each on a connection of its own,
// and prints the median of how long they took, in microseconds.
const ask = `
import http.client, socket, sys, time
at = socket.gethostbyname("site.test")
took = []
for i in range(int(sys.argv[1])):
    t = time.monotonic()
    c = http.client.HTTPConnection(at, timeout=60)
    c.request("GET", "/hello", headers={"Host": "site.test"})
    assert c.getresponse().read() == b"hello from site.test\n"
    c.close()
    took.append(time.monotonic() - t)
print(int(sorted(took)[len(took) // 2] * 1e6))
`

// slow opens N connections on each of which a byte comes now and then: one half
// in the head of a request, the other in a ClientHello. It prints how many were
// ended from outside.
const slow = `
import select, socket, sys, time
at = socket.gethostbyname("site.test")
conns = {}
for i in range(int(sys.argv[1])):
    c = socket.create_connection((at, 443 if i % 2 else 80))
    c.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" if i % 2 else b"GET /hello HTTP/1.1\r\nHost: site.test\r\nX: ")
    conns[c.fileno()] = c
ended, until = 0, time.monotonic() + 60
while conns and time.monotonic() < until:
    for fd in select.select(list(conns), [], [], 0.2)[0]:
        try:
            more = conns[fd].recv(4096)
        except OSError:
            more = b""
        if not more:
            ended += 1
            del conns[fd]
    for c in list(conns.values()):
        try:
            c.sendall(b"x")
        except OSError:
            pass
print(ended)
`

// start begins a program in a sandbox and leaves it running.
func (o *outside) start(t testing.TB, box, program, args string) {
	t.Helper()
	mustScript(t, o.Daemon, box, "root", "cat > /tmp/p.py <<'EOF'\n"+program+"\nEOF\nsetsid python3 /tmp/p.py "+args+" >/tmp/p.out 2>&1 & echo $! >/tmp/p.pid")
}

// kill ends it.
func (o *outside) kill(t testing.TB, box string) {
	t.Helper()
	mustScript(t, o.Daemon, box, "root", "kill -9 $(cat /tmp/p.pid)")
}

// median is that of n requests from a sandbox.
func (o *outside) median(t testing.TB, box string, n int) time.Duration {
	t.Helper()
	us, err := strconv.Atoi(mustScript(t, o.Daemon, box, "root", fmt.Sprintf("python3 - %d <<'EOF'\n%s\nEOF", n, ask)))
	if err != nil {
		t.Fatal(err)
	}
	return time.Duration(us) * time.Microsecond
}

// unharmed demands that a sandbox's requests take at most so many times as long
// as they did without what another one does meanwhile. Both share the host's
// processors too, so that there is room.
func (o *outside) unharmed(t testing.TB, quiet, during string, alone time.Duration, times float64) {
	t.Helper()
	now := o.median(t, quiet, 100)
	ratio := now.Seconds() / alone.Seconds()
	t.Logf("%s: the median of another sandbox's requests %v, alone %v: %.1f times", during, now, alone, ratio)
	if ratio > times {
		t.Errorf("%s: another sandbox's requests take %.1f times as long as alone, more than %v", during, ratio, times)
	}
}

// demandDenials demands so many records of a sandbox with a reason, of all that
// it was denied.
func (o *outside) demandDenials(t testing.TB, box, reason string, want int) {
	t.Helper()
	c, found := newClient(t, o.Daemon, o.Key), map[string]int{}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end) && found[reason] != want; time.Sleep(100 * time.Millisecond) {
		l, err := c.EgressRecords(t.Context(), client.EgressFilter{Sandbox: box, Verdict: api.EgressDenied}, 1000)
		if err != nil {
			t.Fatal(err)
		}
		clear(found)
		for _, r := range l.Items {
			found[r.Reason]++
		}
	}
	if found[reason] != want {
		t.Errorf("not %d records with the reason %s: %v", want, reason, found)
	}
}

// held is how many descriptors the gateway has.
func (o *outside) held(t testing.TB) int {
	t.Helper()
	return harness.UsageOf(strconv.Itoa(o.gateway(t))).FDs
}

// demandHeld demands that the gateway's descriptors return to the level of
// before, with a little room.
func (o *outside) demandHeld(t testing.TB, when string, before int) {
	t.Helper()
	const room = 6
	waitFor(t, 20*time.Second, "the gateway's descriptors to be as many as "+when, func() bool { return o.held(t) <= before+room })
	t.Logf("descriptors: gateway %d (%s: %d)", o.held(t), when, before)
}

// TestEgressLoad has one sandbox do what it can to the gateway that it shares
// with another.
func TestEgressLoad(t *testing.T) {
	o := goOutside(t)
	o.tick = 500 * time.Millisecond
	o.profile(t, `{"name": "few", "default": "deny", "limits": {"connections": 20}, "rules": [{"action": "allow", "hosts": ["site.test"]}]}`)
	o.Must("rm", "--force", create(t, o.Daemon, "--egress", "site")) // what is made once is made
	gateway, daemon, control := o.held(t), o.Usage().FDs, o.ControlFDs()
	quiet, loud, few := create(t, o.Daemon, "--egress", "site"), create(t, o.Daemon, "--egress", "site"), create(t, o.Daemon, "--egress", "few")
	alone, idle := o.median(t, quiet, 100), o.held(t)

	many := atFull(1000, 200)
	trickling := atFull(200, 40)
	o.start(t, loud, hold, strconv.Itoa(many))
	waitFor(t, 90*time.Second, "so many connections at once", func() bool { return o.drips.Load() == int64(many) })
	t.Logf("the gateway's descriptors with %d connections: %d (without: %d)", many, o.held(t), idle)
	o.unharmed(t, quiet, fmt.Sprint(many, " connections"), alone, 8)
	if n := o.drips.Load(); n != int64(many) {
		t.Errorf("of %d connections %d are left", many, n)
	}
	o.kill(t, loud)
	waitFor(t, 30*time.Second, "the servers to learn of the connections' end", func() bool { return o.drips.Load() == 0 })
	o.start(t, loud, hold, strconv.Itoa(many)+" storm")
	waitFor(t, 60*time.Second, "the connections of a storm", func() bool { return o.held(t) > idle+many })
	n := o.hellos.Load()
	begin := time.Now()
	// Each is answered; how fast is told only, since the stand-in's servers, which
	// all sandboxes share, and the processors are as busy as the gateway.
	storm := o.median(t, quiet, 100)
	t.Logf("a storm of %.0f requests a second: the median of another sandbox's requests %v, alone %v: %.1f times",
		float64(o.hellos.Load()-n)/time.Since(begin).Seconds(), storm, alone, storm.Seconds()/alone.Seconds())
	o.kill(t, loud)
	o.Must("egress", "set", loud, "none") // connections to servers that are kept for the next request are closed
	o.demandHeld(t, "without load", idle)
	o.Must("egress", "set", loud, "site")

	const most, more = 20, 35
	o.start(t, few, hold, strconv.Itoa(more))
	waitFor(t, 30*time.Second, "as many connections as the profile allows", func() bool { return o.drips.Load() == most })
	o.demandDenials(t, few, "too_many_connections", more-most)

	o.start(t, loud, slow, strconv.Itoa(trickling))
	o.unharmed(t, quiet, "connections that trickle", alone, 8)
	waitFor(t, 60*time.Second, "the connections that trickle to be ended", func() bool { return mustScript(t, o.Daemon, loud, "root", "cat /tmp/p.out") != "" })
	if got := mustScript(t, o.Daemon, loud, "root", "cat /tmp/p.out"); got != strconv.Itoa(trickling) {
		t.Errorf("of %d connections that trickle the gateway has ended %s", trickling, got)
	}
	o.demandDenials(t, loud, "header_timeout", trickling)

	for _, box := range []string{quiet, loud, few} {
		o.Must("rm", "--force", box)
	}
	o.demandHeld(t, "before", gateway)
	o.DemandLevel(daemon, control)
}

// TestEgressLeavesNothing makes and deletes sandboxes that were outside.
func TestEgressLeavesNothing(t *testing.T) {
	o := goOutside(t)
	life := func() {
		box := create(t, o.Daemon, "--egress", "site")
		if got, _ := o.fetch(t, box, "https://site.test/hello"); got != "hello from site.test" {
			t.Errorf("%q", got)
		}
		o.Must("rm", "--force", box)
	}
	life()
	gateway, daemon, control := o.held(t), o.Usage().FDs, o.ControlFDs()
	before := links(t)
	const workers = 4
	boxes := atFull(500, 20)
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range boxes / workers {
				life()
			}
		})
	}
	wg.Wait()
	if left := o.WaitCensus(20 * time.Second); len(left) > 0 {
		t.Errorf("left on the host:\n%s", strings.Join(left, "\n"))
	}
	for name := range links(t) {
		if !before[name] {
			t.Errorf("a link that was not there before: %s", name)
		}
	}
	o.demandHeld(t, "before", gateway)
	o.DemandLevel(daemon, control)
}

// links are the host's network links, but for those of stand-in internets,
// which come and go with tests of other packages.
func links(t testing.TB) map[string]bool {
	t.Helper()
	entries, err := os.ReadDir("/sys/class/net")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "clow") {
			names[e.Name()] = true
		}
	}
	return names
}
