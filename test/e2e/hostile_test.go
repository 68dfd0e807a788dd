package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/test/harness"
)

// arena is a daemon with a neighbour, which must not notice anything.
type arena struct {
	*harness.Daemon
	t         *testing.T
	neighbour string
}

// fresh makes the sandbox that shall be hostile.
func (a arena) fresh() string {
	a.t.Helper()
	return create(a.t, a.Daemon, "--memory", "512MiB", "--disk", "256MiB")
}

// healthy demands that the neighbour answers and that new sandboxes can be
// made while the hostile one does its worst.
func (a arena) healthy() {
	a.t.Helper()
	begin := time.Now()
	if out := mustScript(a.t, a.Daemon, a.neighbour, "user", "echo $((6*7))"); out != "42" {
		a.t.Errorf("the neighbour answers %q", out)
	}
	if took := time.Since(begin); took > 20*time.Second {
		a.t.Errorf("the neighbour took %v to answer", took)
	}
	if rss := a.Usage().RSS; rss > 512<<20 {
		a.t.Errorf("the daemon has grown to %d MiB", rss>>20)
	}
}

// state reads what the API tells about a sandbox.
func (a arena) state(box string) api.Sandbox {
	a.t.Helper()
	var s api.Sandbox
	if err := json.Unmarshal([]byte(a.Must("--json", "inspect", box)), &s); err != nil {
		a.t.Fatal(err)
	}
	return s
}

// usable demands that a sandbox still runs and answers.
func (a arena) usable(box string) {
	a.t.Helper()
	if s := a.state(box); s.State != api.SandboxRunning {
		a.t.Errorf("the sandbox is %s (%+v) instead of running", s.State, s.End)
		return
	}
	eventually(a.t, "the sandbox answers", 30*time.Second, func() bool {
		r := script(a.t, a.Daemon, box, "root", "echo alive")
		return r.Code == 0 && r.Stdout == "alive\n"
	})
}

// died demands that a sandbox has failed for one of the reasons.
func (a arena) died(box string, reasons ...string) {
	a.t.Helper()
	var s api.Sandbox
	eventually(a.t, "the sandbox's end is told", 30*time.Second, func() bool { s = a.state(box); return s.State == api.SandboxFailed })
	for _, r := range reasons {
		if s.End != nil && s.End.Reason == r {
			a.t.Logf("ended: %s, %s", s.End.Reason, s.End.Detail)
			return
		}
	}
	a.t.Errorf("the sandbox ended by %+v, not %v", s.End, reasons)
}

// background runs a command for a bounded time and returns what came of it.
func (a arena) background(box, user, text string) <-chan harness.Result {
	done := make(chan harness.Result, 1)
	go func() { done <- a.CLI("exec", "--timeout", "60s", "-u", user, box, "--", "bash", "-c", text) }()
	return done
}

// TestHostile lets guests do their worst, beside a neighbour.
func TestHostile(t *testing.T) {
	d := harness.Start(t)
	a := arena{Daemon: d, t: t, neighbour: create(t, d)}
	warm := create(t, d)
	d.Must("rm", warm)
	fds, control := d.Usage().FDs, d.ControlFDs()
	for _, c := range []struct {
		name string
		run  func(arena)
	}{
		{"fork bomb", forkBomb},
		{"memory bomb", memoryBomb},
		{"memory bomb in shm", shmBomb},
		{"memory bomb of root", rootMemoryBomb},
		{"disk filler", diskFiller},
		{"disk filler in tmp", tmpFiller},
		{"one long line", longLine},
		{"tiny writes", tinyWrites},
		{"ignores SIGTERM", ignoresTerm},
		{"orphan holds stdout", orphan},
		{"garbled protocol", garbled},
		{"agent killed", agentKilled},
		{"agent stopped", agentStopped},
		{"PID 1 killed", initKilled},
	} {
		ok := t.Run(c.name, func(t *testing.T) {
			begin := time.Now()
			b := arena{Daemon: d.For(t), t: t, neighbour: a.neighbour}
			c.run(b)
			b.healthy()
			t.Logf("took %.1f s; the daemon has %d MiB, %d descriptors", time.Since(begin).Seconds(), d.Usage().RSS>>20, d.Usage().FDs)
		})
		if !ok && !d.Running() {
			t.Fatal("the daemon has died")
		}
		for _, id := range strings.Fields(d.Must("ls", "--ids")) {
			if id != a.neighbour {
				d.Must("rm", id)
			}
		}
	}
	a.usable(a.neighbour)
	d.DemandLevel(fds, control)
}

func forkBomb(a arena) {
	box := a.fresh()
	bomb := a.background(box, "user", ":(){ :|:& };:; sleep 8; exit 0")
	time.Sleep(3 * time.Second) // the bomb is at its height
	a.healthy()
	r := <-bomb
	a.t.Logf("the bomb's shell ended with %d", r.Code)
	a.usable(box)
	if out := mustScript(a.t, a.Daemon, box, "root", "kill -9 $(stat -c '%U %n' /proc/[0-9]* | sed -n 's|^user /proc/||p'); echo done"); out != "done" {
		a.t.Errorf("root can't clean up after the bomb: %q", out)
	}
}

func memoryBomb(a arena) {
	box := a.fresh()
	// oom_score of the reader: its own process is what must die.
	r := a.CLI("exec", "--timeout", "60s", box, "--", "python3", "-c", "x=[]\nwhile True: x.append(bytearray(b'x')*(16<<20))")
	if r.Code == 0 || r.Code == 125 {
		a.t.Errorf("the bomb ended with %d: %s", r.Code, r.Stderr)
	}
	a.usable(box)
}

func shmBomb(a arena) {
	box := a.fresh()
	r := a.CLI("exec", "--timeout", "60s", box, "--", "bash", "-c", "head -c 2G /dev/zero > /dev/shm/x; rm /dev/shm/x; echo survived")
	if r.Code != 0 || !strings.Contains(r.Stderr, "No space left") || r.Stdout != "survived\n" {
		a.t.Errorf("/dev/shm beyond its size: %+v", r)
	}
	a.usable(box)
}

func rootMemoryBomb(a arena) {
	box := a.fresh()
	// Root may mount a tmpfs without a limit, whose pages are the sentry's own.
	r := a.CLI("exec", "--timeout", "60s", "-u", "root", box, "--", "bash", "-c", "mkdir -p /bomb && mount -t tmpfs none /bomb && head -c 4G /dev/zero > /bomb/x")
	a.t.Logf("the bomb ended with %d", r.Code)
	s := a.state(box)
	if s.State == api.SandboxRunning {
		a.usable(box)
		return
	}
	a.died(box, "oom")
}

func diskFiller(a arena) {
	box := a.fresh()
	r := a.CLI("exec", "--timeout", "60s", box, "--", "bash", "-c", "head -c 2G /dev/zero > ~/fill; stat -c %s ~/fill; rm ~/fill; echo again > ~/x && cat ~/x")
	if !strings.Contains(r.Stderr, "No space left") || !strings.HasSuffix(r.Stdout, "again\n") {
		a.t.Errorf("beyond the disk's quota: %+v", r)
	}
	var n int64
	if _, _ = fmt.Sscan(r.Stdout, &n); n > 260<<20 {
		a.t.Errorf("it wrote %d MiB over a quota of 256", n>>20)
	}
	a.usable(box)
}

func tmpFiller(a arena) {
	box := a.fresh()
	r := a.CLI("exec", "--timeout", "60s", box, "--", "bash", "-c", "head -c 2G /dev/zero > /tmp/fill; rm /tmp/fill; echo again > /tmp/x && cat /tmp/x")
	if !strings.Contains(r.Stderr, "No space left") || r.Stdout != "again\n" {
		a.t.Errorf("beyond the quota in /tmp: %+v", r)
	}
	a.usable(box)
}

func longLine(a arena) {
	box := a.fresh()
	before := a.Usage().RSS
	begin := time.Now()
	ses := a.Must("exec", "-d", box, "--", "bash", "-c", "head -c 1000000000 /dev/zero; exit 6")
	most := before
	c := newClient(a.t, a.Daemon, a.Key)
	eventually(a.t, "the command that prints one line of 1 GB ends", 3*time.Minute, func() bool {
		most = max(most, a.Usage().RSS)
		i, err := c.Session(box, ses).Get(a.t.Context())
		return err == nil && i.State == api.SessionExited && i.Exit.Code == 6 && i.OffsetNext == 1_000_000_000
	})
	a.t.Logf("1 GB in %.1f s (load %s); the daemon grew from %d to %d MiB", time.Since(begin).Seconds(), load(), before>>20, most>>20)
	if most > before+200<<20 {
		a.t.Errorf("the daemon grew by %d MiB", (most-before)>>20)
	}
}

func tinyWrites(a arena) {
	box := a.fresh()
	begin := time.Now()
	r := a.CLI("exec", "--timeout", "240s", box, "--", "python3", "-c", "import os\nfor i in range(1000000): os.write(1, b'x')")
	if r.Code != 0 || len(r.Stdout) != 1_000_000 || strings.Trim(r.Stdout, "x") != "" {
		a.t.Errorf("a million writes: code %d, %d bytes, %s", r.Code, len(r.Stdout), r.Stderr)
	}
	a.t.Logf("a million writes of one byte in %.1f s (load %s)", time.Since(begin).Seconds(), load())
}

func ignoresTerm(a arena) {
	box := a.fresh()
	stubborn := "import signal,time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)"
	r := a.CLI("exec", "--timeout", "2s", box, "--", "python3", "-c", stubborn)
	if r.Code != 128+9 || r.Took > 40*time.Second {
		a.t.Errorf("a timeout over what ignores SIGTERM: %+v", r)
	}
	c := newClient(a.t, a.Daemon, a.Key)
	ses := a.Must("exec", "-d", box, "--", "python3", "-c", stubborn)
	s := c.Session(box, ses)
	eventually(a.t, "it is up", 20*time.Second, func() bool { i, err := s.Get(a.t.Context()); return err == nil && i.OffsetNext > 0 })
	if err := s.Signal(a.t.Context(), api.SIGTERM); err != nil {
		a.t.Error(err)
	}
	if err := s.Signal(a.t.Context(), api.SIGKILL); err != nil {
		a.t.Error(err)
	}
	eventually(a.t, "SIGKILL ends it", 20*time.Second, func() bool {
		i, err := s.Get(a.t.Context())
		return err == nil && i.State == api.SessionExited && i.Exit.Signal == 9
	})
}

func orphan(a arena) {
	box := a.fresh()
	r := a.CLI("exec", box, "--", "bash", "-c", "(while :; do echo noise; echo tick >> /tmp/ticks; sleep 0.2; done) & echo main; exit 3")
	if r.Code != 3 || !strings.Contains(r.Stdout, "main\n") || r.Took > 15*time.Second {
		a.t.Errorf("an orphan that holds stdout: %+v", r)
	}
	a.t.Logf("the exit was told after %v", r.Took)
	if out := mustScript(a.t, a.Daemon, box, "user", "a=$(wc -l < /tmp/ticks); sleep 2; b=$(wc -l < /tmp/ticks); [ $b -gt $a ] && echo lives"); out != "lives" {
		a.t.Error("the orphan did not live on")
	}
}

// flood connects to the agent's socket as root and says what no agent says.
const flood = `
import socket, os, random, struct, time, sys
kinds = [b'', b'\0' * 5, b'\xff' * 64, struct.pack('>I', 1 << 31) + b'x', struct.pack('>I', 4096) + b'\x08', struct.pack('>I', 20) + os.urandom(20),
         b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + os.urandom(4096), b'GET / HTTP/1.1\r\nHost: x\r\n\r\n']
held, made, refused = [], 0, 0
end = time.time() + float(sys.argv[1])
while time.time() < end:
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(2)
    try:
        s.connect('/.cloche/host/agent.sock')
        made += 1
        s.send(random.choice(kinds))
        if random.random() < 0.3:
            s.recv(100)
            s.send(os.urandom(random.randrange(1, 70000)))
        held.append(s)
    except OSError:
        refused += 1
        s.close()
    if len(held) > 200:
        held.pop(random.randrange(len(held))).close()
print(made, refused)
`

func garbled(a arena) {
	box := a.fresh()
	fds, rss := a.Usage().FDs, a.Usage().RSS
	done := make(chan harness.Result, 1)
	go func() {
		done <- a.CLI("exec", "--timeout", "60s", "-u", "root", box, "--", "python3", "-c", flood, "8")
	}()
	most := harness.Usage{}
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		u := a.Usage()
		most.FDs, most.RSS = max(most.FDs, u.FDs), max(most.RSS, u.RSS)
	}
	if r := script(a.t, a.Daemon, box, "user", "echo during"); r.Stdout != "during\n" {
		a.t.Errorf("the sandbox does not answer while its root floods the protocol: %+v", r)
	}
	r := <-done
	a.t.Logf("connections made and refused: %s(code %d); the daemon's descriptors %d → at most %d, memory %d → at most %d MiB", r.Stdout, r.Code, fds, most.FDs, rss>>20, most.RSS>>20)
	if r.Code != 0 {
		a.t.Errorf("the flood's own session: %+v", r)
	}
	if most.FDs > fds+100 {
		a.t.Errorf("the flood takes %d descriptors of the daemon", most.FDs-fds)
	}
	a.usable(box)
	eventually(a.t, "the descriptors are given back", 30*time.Second, func() bool { return a.Usage().FDs <= fds+8 })
}

func agentKilled(a arena) {
	box := a.fresh()
	ses := a.Must("exec", "-d", box, "--", "bash", "-c", "for i in $(seq 50); do echo line $i; sleep 0.1; done; exit 8")
	for range 5 {
		if r := a.CLI("exec", "-u", "root", box, "--", "python3", "-c", killAgent, "9"); r.Code != 0 || !strings.HasPrefix(r.Stdout, "agent") {
			a.t.Errorf("kill the agent: %+v", r)
		}
	}
	r := a.CLI("attach", box, ses)
	var want strings.Builder
	for i := range 50 {
		fmt.Fprintf(&want, "line %d\n", i+1)
	}
	if r.Code != 8 || r.Stdout != want.String() {
		a.t.Errorf("the command under killed agents: code %d, %q, %s", r.Code, r.Stdout, r.Stderr)
	}
	a.usable(box)
}

func agentStopped(a arena) {
	box := a.fresh()
	go a.CLI("exec", "--timeout", "5s", "-u", "root", box, "--", "python3", "-c", killAgent, "19")
	time.Sleep(3 * time.Second) // it is stopped by then
	ctx, cancel := context.WithTimeout(a.t.Context(), 2*time.Minute)
	defer cancel()
	c, err := client.New(client.Options{URL: a.URL, Key: a.Key, Retry: -1}) // the CLI would try again for two minutes
	if err != nil {
		a.t.Fatal(err)
	}
	begin := time.Now()
	r, err := c.Exec(ctx, box, api.ExecRequest{Args: []string{"echo", "hello"}})
	a.t.Logf("a call to a stopped agent: after %.1f s: %v, %+v", time.Since(begin).Seconds(), err, r)
	if ctx.Err() != nil {
		a.t.Error("a call to a stopped agent never ends")
	}
	if err == nil && r.Exited && string(r.Stdout) != "hello\n" || err != nil && !client.IsClass(err, api.ClassUnavailable) {
		a.t.Errorf("no clear answer: %v, %+v", err, r)
	}
	begin = time.Now()
	if r := a.CLI("rm", box); r.Code != 0 || time.Since(begin) > 20*time.Second {
		a.t.Errorf("delete over a stopped agent: %+v", r)
	}
}

func initKilled(a arena) {
	box := a.fresh()
	ses := a.Must("exec", "-d", box, "--", "bash", "-c", "echo something; sleep 600")
	r := a.CLI("exec", "-u", "root", box, "--", "bash", "-c", "kill -9 1; sleep 5")
	if r.Code == 0 {
		a.t.Errorf("the killer's own session: %+v", r)
	}
	a.died(box, "exited", "crashed")
	var in struct {
		Sessions []api.Session `json:"sessions"`
	}
	if err := json.Unmarshal([]byte(a.Must("--json", "inspect", box)), &in); err != nil {
		a.t.Fatal(err)
	}
	for _, s := range in.Sessions {
		if s.Id == ses && s.State != api.SessionLost {
			a.t.Errorf("the session of a dead machine is %s", s.State)
		}
	}
	if out := a.Must("logs", box, ses); out != "something" {
		a.t.Errorf("what was printed before the end: %q", out)
	}
	if r := a.CLI("exec", box, "--", "true"); r.Code != 125 || !strings.Contains(r.Stderr, "cloche: ") {
		a.t.Errorf("exec in a dead sandbox: %+v", r)
	}
	other := a.fresh()
	a.usable(other)
}
