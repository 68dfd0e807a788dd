package redteam

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/internal/egress/ca"
	"cloche.dev/cloche/test/harness"
	"cloche.dev/cloche/test/internet"
)

// Step, TLS and Result are what the program inside speaks; see inside/main.go.
type (
	Step struct {
		Op      string        `json:"op"`
		Addr    string        `json:"addr,omitempty"`
		TLS     *TLS          `json:"tls,omitempty"`
		Send    [][]byte      `json:"send,omitempty"`
		Pause   time.Duration `json:"pause,omitempty"`
		Wait    time.Duration `json:"wait,omitempty"`
		Proto   int           `json:"proto,omitempty"`
		Command string        `json:"command,omitempty"`
		Count   int           `json:"count,omitempty"`
	}
	TLS struct {
		SNI  string   `json:"sni,omitempty"`
		ALPN []string `json:"alpn,omitempty"`
	}
	Result struct {
		Connected bool     `json:"connected"`
		Got       []byte   `json:"got,omitempty"`
		Err       string   `json:"err,omitempty"`
		Certs     [][]byte `json:"certs,omitempty"`
	}
)

// The last octets of the stand-ins' addresses, and what they are called.
const (
	hostEnd   = 1  // the host's own address in this network
	resolver  = 2  // the name server
	allowed   = 10 // allowed.test, api.test, a.wild.test; also front.test, which the rules don't name
	forbidden = 11 // blocked.test
	rawSink   = 12 // takes anything on port 9000, TCP and UDP
	impostor  = 13 // forged.test, with a certificate of nobody's
)

var metadata = netip.MustParseAddr("169.254.169.254")

// arena is a daemon in a stand-in internet whose servers note all that arrives.
type arena struct {
	tb     testing.TB
	w      *internet.World
	d      *harness.Daemon
	ruled  []string // sandboxes whose profile is rules
	open   string   // one whose profile is open
	inject string   // one whose profile is withSecret
	secret string   // that is injected there
	mu     sync.Mutex
	seen   map[string]*bytes.Buffer // by place
	tools  string
}

// rules is the profile under which nothing of what the suite tries may arrive.
const rules = `{"name": "rules", "default": "deny", "limits": {"connections": 300}, "rules": [
 {"name": "site", "action": "allow", "hosts": ["allowed.test", "*.wild.test", "forged.test"], "schemes": ["http", "https"], "ports": ["80", "443"]},
 {"name": "api", "action": "allow", "hosts": ["api.test"], "methods": ["GET"], "paths": ["/ok/"], "ports": ["80", "443"]},
 {"name": "inward", "action": "allow", "hosts": ["to-metadata.test", "to-host.test", "to-loopback.test", "rebind.test"], "ports": ["80", "443"]},
 {"name": "pinned", "action": "allow", "hosts": ["pinned.test"], "passthrough": true, "ports": ["443"]}
]}`

// open is the control: the same attempts arrive where no rule is in their way.
const open = `{"name": "open", "default": "allow"}`

// newArena has one sandbox for each worker that tries what is forbidden, one
// for the controls, and one with a secret.
func newArena(tb testing.TB, workers int) *arena {
	tb.Helper()
	a := newArenaOf(tb, harness.Bin(tb), workers)
	a.profile(tb, open)
	a.open = a.box("open")
	a.secret = "s3cr3t-" + token() + "/+=x"
	a.keep(tb, "api-key", a.secret, "allowed.test")
	a.profile(tb, withSecret)
	a.inject = a.box("inject")
	return a
}

// newArenaOf runs a binary, with more environment than this process has.
func newArenaOf(tb testing.TB, bin string, workers int, env ...string) *arena {
	tb.Helper()
	a := &arena{tb: tb, seen: map[string]*bytes.Buffer{}}
	a.w = internet.New(tb)
	a.furnish()
	a.tools = filepath.Join(tb.TempDir(), "inside")
	build := exec.Command("go", "build", "-trimpath", "-o", a.tools, "./inside")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		tb.Fatalf("build the program inside: %v\n%s", err, out)
	}
	dir, err := os.MkdirTemp("", "clo")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	a.d = harness.NewIn(tb, bin, dir)
	a.d.Flags, a.d.Extra = append(a.d.Flags, a.w.Flags()...), env
	a.d.Seed()
	a.d.Serve()
	a.profile(tb, rules)
	for range workers {
		a.ruled = append(a.ruled, a.box("rules"))
	}
	return a
}

// profile makes or replaces an egress profile.
func (a *arena) profile(tb testing.TB, text string) {
	tb.Helper()
	file := filepath.Join(tb.TempDir(), "profile.json")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		tb.Fatal(err)
	}
	a.d.For(tb).Must("egress", "profile", "set", file)
}

// keep makes a secret.
func (a *arena) keep(tb testing.TB, name, value string, hosts ...string) {
	tb.Helper()
	args := []string{"secret", "set", name}
	for _, h := range hosts {
		args = append(args, "--host", h)
	}
	cmd := a.d.Command(tb.Context(), args...)
	cmd.Stdin = strings.NewReader(value)
	if out, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("make a secret: %v\n%s", err, out)
	}
}

// box makes a sandbox with a profile and the program in it.
func (a *arena) box(profile string) string {
	a.tb.Helper()
	id := a.d.Must("create", "--egress", profile, "base")
	a.d.Must("cp", a.tools, id+":/usr/local/bin/inside")
	if who := a.doIn(a.tb, id, []Step{{Op: "shell", Command: "id -u"}})[0]; strings.TrimSpace(string(who.Got)) != "0" {
		a.tb.Fatalf("the program inside is not root: %q %s", who.Got, who.Err)
	}
	return id
}

// furnish names the names and opens the servers.
func (a *arena) furnish() {
	for name, last := range map[string]byte{
		"allowed.test": allowed, "api.test": allowed, "a.wild.test": allowed, "front.test": allowed, "pinned.test": allowed,
		"blocked.test": forbidden, "xn--bcher-kva.test": forbidden, "wild.test": forbidden, "evilwild.test": forbidden,
		"allowed.test.blocked.test": forbidden, "a.wild.test.blocked.test": forbidden, "dns.test": resolver, "forged.test": impostor,
	} {
		a.w.Name(name, 30, a.w.Addr(last))
	}
	a.w.Name("to-metadata.test", 0, metadata)
	a.w.Name("to-host.test", 0, a.w.Host())
	a.w.Name("to-loopback.test", 0, netip.MustParseAddr("127.0.0.1"))
	a.w.Rotate("rebind.test", a.w.Addr(allowed), metadata)
	forger, err := ca.Generate("nobody")
	if err != nil {
		a.tb.Fatal(err)
	}
	forged, err := ca.New(forger)
	if err != nil {
		a.tb.Fatal(err)
	}
	a.site(a.w.Listen(a.w.Addr(impostor), 443), "13:443", func(name string) *tls.Certificate {
		leaf, err := forged.Leaf(name)
		if err != nil {
			return nil
		}
		return leaf
	})
	for _, last := range []byte{allowed, forbidden} {
		a.site(a.w.Listen(a.w.Addr(last), 80), fmt.Sprintf("%d:80", last), nil)
		a.site(a.w.Listen(a.w.Addr(last), 443), fmt.Sprintf("%d:443", last), a.w.Leaf)
		a.datagrams(a.w.ListenUDP(a.w.Addr(last), 443), fmt.Sprintf("%d:443/udp", last))
		a.datagrams(a.w.ListenUDP(a.w.Addr(last), 5353), fmt.Sprintf("%d:5353/udp", last))
		for _, port := range []int{22, 25, 853, 7000, 8080, 9000, 15001, 15053} {
			a.sink(a.w.Listen(a.w.Addr(last), port), fmt.Sprintf("%d:%d", last, port))
		}
	}
	a.sink(a.w.Listen(a.w.Addr(rawSink), 9000), "12:9000")
	a.sink(a.w.Listen(a.w.Addr(resolver), 853), "2:853")
	a.datagrams(a.w.ListenUDP(a.w.Addr(rawSink), 9000), "12:9000/udp")
	a.sink(a.w.Listen(metadata, 80), "metadata:80")
	for _, port := range []string{"7000", "8080"} {
		a.sink(listenHere(a.tb, net.JoinHostPort(a.w.Host().String(), port)), "host:"+port)
	}
	a.sink(listenHere(a.tb, net.JoinHostPort(a.w.Host().String(), "80")), "host:80")
}

func listenHere(tb testing.TB, addr string) net.Listener {
	tb.Helper()
	l, err := net.Listen("tcp4", addr)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = l.Close() })
	return l
}

// note keeps what arrived at a place.
func (a *arena) note(place string, b []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.seen[place] == nil {
		a.seen[place] = &bytes.Buffer{}
	}
	a.seen[place].Write(b)
}

// arrived names the places that a token reached.
func (a *arena) arrived(token string) (places []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for place, b := range a.seen {
		if bytes.Contains(b.Bytes(), []byte(token)) {
			places = append(places, place)
		}
	}
	if a.w.AskedWith(token) > 0 {
		places = append(places, "name server")
	}
	return places
}

// sink takes anything and answers one line.
func (a *arena) sink(l net.Listener, place string) {
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(10 * time.Second))
				b := make([]byte, 4096)
				for {
					n, err := c.Read(b)
					a.note(place, b[:n])
					if err != nil {
						return
					}
					_, _ = io.WriteString(c, "taken at "+place+"\n")
				}
			}()
		}
	}()
}

func (a *arena) datagrams(c net.PacketConn, place string) {
	go func() {
		b := make([]byte, 64<<10)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			a.note(place, b[:n])
			_, _ = c.WriteTo([]byte("taken at "+place), from)
		}
	}()
}

// doIn has the program inside a sandbox do steps, as root.
func (a *arena) doIn(tb testing.TB, box string, steps []Step) (results []Result) {
	tb.Helper()
	script, err := json.Marshal(steps)
	if err != nil {
		tb.Fatal(err)
	}
	cmd := a.d.Command(tb.Context(), "exec", "-i", "-u", "0", box, "--", "inside")
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(script), &stderr
	stdout, failed := cmd.Output()
	dec := json.NewDecoder(bytes.NewReader(stdout))
	for {
		var got Result
		err := dec.Decode(&got)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			tb.Fatalf("the program inside: %v\n%.500s\n%.500s", err, stdout, stderr.String())
		}
		results = append(results, got)
	}
	if len(results) != len(steps) {
		tb.Fatalf("the program inside did %d of %d steps (%v): %.500s", len(results), len(steps), failed, stderr.String())
	}
	return results
}

func token() string {
	var b [6]byte
	_, _ = rand.Read(b[:])
	return "tk" + hex.EncodeToString(b[:])
}
