package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"cloche.dev/cloche/test/harness"
	"cloche.dev/cloche/test/internet"
)

// outside is a daemon in a stand-in internet with one site, site.test, and one
// that no profile names, other.test.
type outside struct {
	*harness.Daemon
	w     *internet.World
	drips atomic.Int64 // downloads under way
	tick  time.Duration

	hellos atomic.Int64 // that were answered
}

const siteOnly = `{"name": "site", "default": "deny", "rules": [{"name": "site", "action": "allow", "hosts": ["site.test"]}]}`

func goOutside(t *testing.T) *outside {
	t.Helper()
	harness.Bin(t)
	o := &outside{w: internet.New(t), tick: 50 * time.Millisecond}
	o.w.Name("site.test", 30, o.w.Addr(10))
	o.w.Name("other.test", 30, o.w.Addr(11))
	mux := http.NewServeMux()
	mux.HandleFunc("/hello", func(w http.ResponseWriter, r *http.Request) {
		o.hellos.Add(1)
		fmt.Fprintf(w, "hello from %s\n", r.Host)
	})
	mux.HandleFunc("/drip/{n}", o.drip)
	o.w.Site(o.w.Addr(10), mux)
	o.w.Site(o.w.Addr(11), mux)
	o.Daemon = harness.New(t)
	o.Flags = append(o.Flags, o.w.Flags()...)
	o.Seed()
	o.Serve()
	o.profile(t, siteOnly)
	return o
}

// drip sends a line a tick, n of them.
func (o *outside) drip(w http.ResponseWriter, r *http.Request) {
	n, _ := strconv.Atoi(r.PathValue("n"))
	o.drips.Add(1)
	defer o.drips.Add(-1)
	for i := range n {
		if _, err := fmt.Fprintf(w, "%08d\n", i); err != nil {
			return
		}
		_ = http.NewResponseController(w).Flush()
		select {
		case <-time.After(o.tick):
		case <-r.Context().Done():
			return
		}
	}
}

func (o *outside) profile(t testing.TB, text string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "profile.json")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	o.For(t).Must("egress", "profile", "set", file)
}

// fetch asks for a URL in a sandbox, as any program would, and returns what
// came, and curl's exit code.
func (o *outside) fetch(t testing.TB, box, url string) (string, int) {
	t.Helper()
	r := script(t, o.Daemon, box, "root", "curl -sS --max-time 15 "+url)
	return strings.TrimSpace(r.Stdout + r.Stderr), r.Code
}

func (o *outside) demandRules(t testing.TB, box, when string) {
	t.Helper()
	for _, scheme := range []string{"http", "https"} {
		if got, _ := o.fetch(t, box, scheme+"://site.test/hello"); got != "hello from site.test" {
			t.Errorf("%s: what is allowed by %s: %q", when, scheme, got)
		}
		if got, code := o.fetch(t, box, scheme+"://other.test/hello"); strings.Contains(got, "hello") {
			t.Errorf("%s: what no rule allows by %s: %d %q", when, scheme, code, got)
		}
		direct := fmt.Sprintf("-k --resolve other.test:443:%s --resolve other.test:80:%[1]s ", o.w.Addr(11))
		if got, code := o.fetch(t, box, direct+scheme+"://other.test/hello"); strings.Contains(got, "hello") {
			t.Errorf("%s: what no rule allows by %s, its address known: %d %q", when, scheme, code, got)
		}
	}
}

// TestEgressRulesHold lives a sandbox's life and asks after every step what it
// may reach.
func TestEgressRulesHold(t *testing.T) {
	o := goOutside(t)
	none := create(t, o.Daemon)
	if got, code := o.fetch(t, none, "http://site.test/hello"); code == 0 {
		t.Errorf("without a profile something was let out: %q", got)
	}
	box := create(t, o.Daemon, "--egress", "site")
	o.demandRules(t, box, "at first")
	o.Must("suspend", box)
	o.Must("restore", box)
	o.demandRules(t, box, "after suspend and restore")
	child := strings.Fields(o.Must("fork", box))[0]
	o.demandRules(t, child, "in a fork")
	o.demandRules(t, box, "in what was forked")
	o.Must("pause", box)
	o.Must("resume", box)
	o.Must("stop", box)
	o.Must("start", box)
	o.demandRules(t, box, "after stop and start")
	o.Kill9()
	o.Serve()
	o.demandRules(t, box, "after a kill of the daemon")
	o.demandRules(t, child, "after a kill of the daemon, in the fork")
	o.Must("egress", "set", box, "none")
	if got, code := o.fetch(t, box, "http://site.test/hello"); code == 0 {
		t.Errorf("with profile none something was let out: %q", got)
	}
	o.Must("egress", "set", box, "site")
	o.demandRules(t, box, "with the profile again")
	o.profile(t, strings.Replace(siteOnly, "site.test", "other.test", 1))
	if got, _ := o.fetch(t, box, "https://other.test/hello"); got != "hello from other.test" {
		t.Errorf("after a change of the profile: %q", got)
	}
	if got, code := o.fetch(t, box, "https://site.test/hello"); code == 0 && strings.Contains(got, "hello from") {
		t.Errorf("what the profile does not allow any more: %q", got)
	}
}

// TestEgressPrograms has programs of several languages find the project's
// authority by themselves.
func TestEgressPrograms(t *testing.T) {
	o := goOutside(t)
	box := create(t, o.Daemon, "--egress", "site")
	for name, text := range map[string]string{
		"curl":          "curl -sS https://site.test/hello",
		"curl, user":    "su user -c 'curl -sS https://site.test/hello'",
		"python":        `python3 -c 'import urllib.request as u; print(u.urlopen("https://site.test/hello").read().decode())'`,
		"openssl store": `curl -sS --capath /etc/ssl/certs https://site.test/hello`,
	} {
		if got := mustScript(t, o.Daemon, box, "root", text); got != "hello from site.test" {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// downloads starts n downloads in a sandbox and waits until all are under way.
func (o *outside) downloads(t *testing.T, box string, n, lines int) {
	t.Helper()
	mustScript(t, o.Daemon, box, "root", fmt.Sprintf(
		"mkdir -p /tmp/d; for i in $(seq %d); do (curl -sS --max-time 120 -o /tmp/d/$i http://site.test/drip/%d; echo $? > /tmp/d/$i.code) >/dev/null 2>&1 & done", n, lines))
	waitFor(t, 30*time.Second, "the downloads to begin", func() bool { return o.drips.Load() == int64(n) })
}

// TestEgressOutlivesTheDaemon kills the daemon under 50 downloads.
func TestEgressOutlivesTheDaemon(t *testing.T) {
	o := goOutside(t)
	const n, lines = 50, 200
	box := create(t, o.Daemon, "--egress", "site")
	o.downloads(t, box, n, lines)
	o.Kill9()
	time.Sleep(time.Second) // nobody is there; not a wait for anything
	o.Serve()
	got := mustScript(t, o.Daemon, box, "root", "cd /tmp/d; for t in $(seq 600); do [ $(ls *.code | wc -l) = 50 ] && break; sleep 0.1; done; cat *.code | sort | uniq -c; cat $(ls | grep -v code) | sha256sum; wc -l $(ls | grep -v code) | tail -1")
	if !strings.Contains(got, "50 0") || !strings.Contains(got, fmt.Sprint(n*lines)+" total") {
		t.Errorf("of %d downloads of %d lines:\n%s", n, lines, got)
	}
}

// TestEgressOfADeadGateway kills the gateway: what was open ends, nothing else
// gets out meanwhile, and it is back.
func TestEgressOfADeadGateway(t *testing.T) {
	o := goOutside(t)
	box := create(t, o.Daemon, "--egress", "site")
	o.downloads(t, box, 5, 10000)
	gateway := o.gateway(t)
	killed := time.Now()
	if err := syscall.Kill(gateway, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	waitFor(t, 10*time.Second, "the downloads to end", func() bool { return o.drips.Load() == 0 })
	for {
		if got, _ := o.fetch(t, box, "https://site.test/hello"); got == "hello from site.test" {
			break
		}
		if time.Since(killed) > 30*time.Second {
			t.Fatal("the gateway is not back after 30 s")
		}
	}
	t.Logf("back %v after the kill, seen from inside", time.Since(killed).Round(time.Millisecond))
	if now := o.gateway(t); now == gateway {
		t.Error("it is still the killed process")
	}
	o.demandRules(t, box, "after a kill of the gateway")
}

// gateway finds the daemon's gateway process.
func (o *outside) gateway(t testing.TB) int {
	t.Helper()
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(b), "egress-gateway") && strings.Contains(string(b), o.Run) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			return pid
		}
	}
	t.Fatal("no gateway process")
	return 0
}

// TestEgressCutsWhatNoLongerComplies changes rules under load, and freezes a
// connection into a snapshot.
func TestEgressCutsWhatNoLongerComplies(t *testing.T) {
	o := goOutside(t)
	box := create(t, o.Daemon, "--egress", "site")
	o.downloads(t, box, 10, 100000)
	changed := time.Now()
	o.Must("egress", "set", box, "none")
	waitFor(t, 5*time.Second, "the downloads to be cut", func() bool { return o.drips.Load() == 0 })
	t.Logf("cut %v after the change was asked for", time.Since(changed).Round(time.Millisecond))
	codes := mustScript(t, o.Daemon, box, "root", "sleep 1; cat /tmp/d/*.code | sort | uniq -c")
	if strings.Contains(codes, " 0") || !strings.Contains(codes, "10 ") {
		t.Errorf("curl's codes: %s", codes)
	}
	o.Must("egress", "set", box, "site")
	mustScript(t, o.Daemon, box, "root", "rm -rf /tmp/d")
	o.downloads(t, box, 5, 100000)
	o.Must("suspend", box)
	waitFor(t, 5*time.Second, "the suspended sandbox's connections to end", func() bool { return o.drips.Load() == 0 })
	o.Must("restore", box)
	codes = mustScript(t, o.Daemon, box, "root", "for t in $(seq 100); do [ $(ls /tmp/d/*.code 2>/dev/null | wc -l) = 5 ] && break; sleep 0.1; done; cat /tmp/d/*.code | sort | uniq -c")
	if strings.Contains(codes, " 0") || !strings.Contains(codes, "5 ") {
		t.Errorf("the stale connections of a restored sandbox don't end: %s", codes)
	}
}

// waitFor waits until something holds.
func waitFor(t testing.TB, patience time.Duration, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %v for %s", patience, what)
		}
	}
}
