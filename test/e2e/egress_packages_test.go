package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/cgi"
	"net/netip"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/api"
	"cloche.dev/cloche/client"
	"cloche.dev/cloche/internal/egress/policy"
	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/test/harness"
	"cloche.dev/cloche/test/internet"
)

// programs is a template of what people run inside. npm is not among its
// packages: Debian's is hundreds of them, the registry's is one file.
var programs = []string{
	"programs", "--debian", "bookworm", "--package", "ca-certificates", "--package", "curl", "--package", "git",
	"--package", "nodejs", "--package", "python3-pip", "--package", "python3-requests", "--package", "openjdk-17-jre-headless",
}

// npmVersion runs on the template's Node.
const npmVersion = "10.9.4"

// registries returns rules of the preset `packages` by their names.
func registries(t *testing.T, names ...string) (rules []sandbox.EgressRule) {
	t.Helper()
	preset, _ := policy.Preset(sandbox.PresetPackages)
	for _, r := range preset.Rules {
		if slices.Contains(names, r.Name) {
			rules = append(rules, r)
		}
	}
	if len(rules) != len(names) {
		t.Fatalf("the preset %s has not all of the rules %v", preset.Name, names)
	}
	return rules
}

// opened are serve's flags that open what of the registries' addresses is in a
// closed range here: where tests run, mirrors are often in a private network.
func opened(rules []sandbox.EgressRule) (flags []string) {
	closed, _ := policy.NewRanges(nil, nil)
	for _, r := range rules {
		for _, host := range r.Hosts {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			addrs, _ := net.DefaultResolver.LookupNetIP(ctx, "ip4", host)
			cancel()
			for _, a := range addrs {
				p := netip.PrefixFrom(a.Unmap(), 32)
				_, shut := closed.Closed(p.Addr())
				if _, err := policy.NewRanges([]netip.Prefix{p}, nil); shut && err == nil && !slices.Contains(flags, p.String()) {
					flags = append(flags, "--egress-open", p.String())
				}
			}
		}
	}
	return flags
}

// reachable skips, with the reason, what the host itself can't fetch.
func reachable(t *testing.T, url string) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{}, Timeout: 15 * time.Second} // as the gateway: no proxy
	defer c.CloseIdleConnections()
	resp, err := c.Get(url)
	if err != nil {
		t.Skipf("SKIP: this host does not reach the registry, so that no sandbox can: %v", err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Skipf("SKIP: this host's registry has not what the test installs: %s: %s", url, resp.Status)
	}
}

// demandDenied waits for the audit to tell that something of a host was denied.
func demandDenied(t *testing.T, d *harness.Daemon, box, host string, reasons ...string) {
	t.Helper()
	c := newClient(t, d, d.Key)
	waitFor(t, 5*time.Second, "a record of "+host+" with a reason of "+strings.Join(reasons, ", "), func() bool {
		l, err := c.EgressRecords(t.Context(), client.EgressFilter{Sandbox: box, Verdict: api.EgressDenied}, 1000)
		return err == nil && slices.ContainsFunc(l.Items, func(r api.EgressRecord) bool {
			return r.Host == host && slices.Contains(reasons, r.Reason)
		})
	})
}

// TestEgressPackages installs packages of real registries, as their programs
// are when nobody has configured them, with the host's resolver and roots.
func TestEgressPackages(t *testing.T) {
	harness.Bin(t)
	rules := registries(t, "pypi", "npm", "debian")
	d := harness.New(t)
	d.Flags = append(d.Flags, opened(rules)...)
	d.SeedWith(programs...)
	d.Serve()
	o := &outside{Daemon: d}
	box := d.Must("create", "--egress", sandbox.PresetPackages, "programs")
	pypi, npm := "https://"+rules[0].Hosts[0], "https://"+rules[1].Hosts[0]
	const pip = "pip install --break-system-packages -q --no-cache-dir iniconfig && python3 -c 'import iniconfig; print(iniconfig.__name__)'"
	t.Run("pip", func(t *testing.T) {
		reachable(t, pypi+"/simple/iniconfig/")
		if got := mustScript(t, d, box, "root", pip); got != "iniconfig" {
			t.Errorf("%q", got)
		}
	})
	t.Run("npm", func(t *testing.T) {
		file := npm + "/npm/-/npm-" + npmVersion + ".tgz"
		reachable(t, file)
		if got := mustScript(t, d, box, "root", `set -e; mkdir -p /opt/npm /tmp/n; cd /tmp/n; curl -sSf `+file+` | tar -xz -C /opt/npm --strip-components 1
			node /opt/npm/bin/npm-cli.js install --silent is-number >&2; node -p 'require("is-number")("5")'`); got != "true" {
			t.Errorf("%q", got)
		}
	})
	t.Run("apt-get", func(t *testing.T) {
		preset, _ := policy.Preset(sandbox.PresetPackages)
		allowed, err := policy.Compile(preset)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(mustScript(t, d, box, "root", "grep ^deb /etc/apt/sources.list")) {
			f := strings.Fields(line)
			u, err := url.Parse(f[1])
			if err != nil || !allowed.Resolves(u.Hostname()) {
				t.Skipf("SKIP: this host's mirror, which templates get too, is none that the preset allows: %s", line)
			}
			reachable(t, f[1]+"/dists/"+f[2]+"/InRelease")
		}
		if got := mustScript(t, d, box, "root", `set -e; export DEBIAN_FRONTEND=noninteractive
			apt-get -qq -o Acquire::Languages=none -o APT::Update::Error-Mode=any update >&2; apt-get -qq install hello >&2; hello`); got != "Hello, world!" {
			t.Errorf("%q", got)
		}
	})
	t.Run("a profile of one's own", func(t *testing.T) {
		reachable(t, pypi+"/simple/iniconfig/")
		text, err := json.Marshal(map[string]any{"name": "python", "default": "deny", "rules": rules[:1]})
		if err != nil {
			t.Fatal(err)
		}
		o.profile(t, string(text))
		other := d.For(t).Must("create", "--egress", "python", "programs")
		if got := mustScript(t, d, other, "root", pip); got != "iniconfig" {
			t.Errorf("%q", got)
		}
		if got, code := o.fetch(t, other, "-f "+npm+"/is-number"); code == 0 {
			t.Errorf("what the profile does not allow: %q", got)
		}
		demandDenied(t, d, other, rules[1].Hosts[0], "dns_name")
		if r := script(t, d, other, "root", "curl -sSf -X POST -d x "+pypi+"/legacy/"); r.Code == 0 {
			t.Errorf("something was published: %q", r.Stdout)
		}
		demandDenied(t, d, other, rules[0].Hosts[0], "denied_by_default")
	})
}

// TestEgressLanguages has clients of several languages, none of which is told
// anything, go through the gateway's TLS, and clones from it by the rules that
// the preset `packages` has for that.
func TestEgressLanguages(t *testing.T) {
	harness.Bin(t)
	w := internet.New(t)
	o := &outside{w: w}
	mux := http.NewServeMux()
	mux.HandleFunc("/hello", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "hello from %s\n", r.Host) })
	mux.Handle("/acme/", gitServer(t))
	crl := revocations(t)
	mux.HandleFunc("/list.crl", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(crl) })
	for _, name := range []string{"site.test", "git.test"} {
		w.Name(name, 30, w.Addr(10))
	}
	w.Site(w.Addr(10), mux)
	o.Daemon = harness.New(t)
	o.Flags = append(o.Flags, w.Flags()...)
	o.SeedWith(programs...)
	o.Serve()
	rules := registries(t, "github", "github-clone")
	for i := range rules {
		rules[i].Hosts = []string{"git.test"}
	}
	rules = append(rules, sandbox.EgressRule{Name: "site", Action: sandbox.EgressAllow, Hosts: []string{"site.test"}})
	text, err := json.Marshal(map[string]any{"name": "site", "default": "deny", "rules": rules})
	if err != nil {
		t.Fatal(err)
	}
	o.profile(t, string(text))
	box := o.Must("create", "--egress", "site", "programs")
	for name, text := range map[string]string{
		"curl":       "curl -sS https://site.test/hello",
		"requests":   `python3 -c 'import requests; print(requests.get("https://site.test/hello").text)'`,
		"urllib":     `python3 -c 'import urllib.request as u; print(u.urlopen("https://site.test/hello").read().decode())'`,
		"node fetch": `node -e 'fetch("https://site.test/hello").then(r => r.text()).then(console.log)'`,
		"node https": `node -e 'require("https").get("https://site.test/hello", r => r.pipe(process.stdout))'`,
		"node http2": `node -e 'const c = require("http2").connect("https://site.test"), s = c.request({":path": "/hello"}); s.pipe(process.stdout); s.on("end", () => c.close())'`,
	} {
		t.Run(name, func(t *testing.T) {
			if got := mustScript(t, o.Daemon, box, "root", text); got != "hello from site.test" {
				t.Errorf("%q", got)
			}
		})
	}
	t.Run("java", func(t *testing.T) { // a JRE's one program that fetches a URL and says what was there
		const fetch = " -printcrl -file https://site.test/list.crl"
		if got := mustScript(t, o.Daemon, box, "root", "keytool"+fetch); !strings.Contains(got, "a list that was fetched") {
			t.Errorf("%q", got)
		}
		r := script(t, o.Daemon, box, "root", "keytool -J-Djavax.net.ssl.trustStore=/etc/ssl/certs/java/cacerts"+fetch)
		if r.Code == 0 || !strings.Contains(r.Stdout+r.Stderr, "PKIX") {
			t.Errorf("it is not JAVA_TOOL_OPTIONS that makes it work: %d %q", r.Code, r.Stdout)
		}
	})
	t.Run("git", func(t *testing.T) {
		if got := mustScript(t, o.Daemon, box, "root", "cd /tmp && git clone -q https://git.test/acme/tree.git && git -C tree log --format=%s"); got != "the first" {
			t.Errorf("%q", got)
		}
		r := script(t, o.Daemon, box, "root", "cd /tmp/tree && git push -q origin HEAD:refs/heads/more")
		if r.Code == 0 {
			t.Error("what may be cloned was pushed to")
		}
		demandDenied(t, o.Daemon, box, "git.test", "denied_by_default")
	})
}

// gitServer serves /acme/tree.git, with one commit, to be cloned and pushed to.
func gitServer(t *testing.T) http.Handler {
	t.Helper()
	root := t.TempDir()
	bare, work := filepath.Join(root, "acme", "tree.git"), filepath.Join(root, "work")
	git := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("git", args...).CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	git("init", "-q", "--bare", bare)
	git("-C", bare, "config", "http.receivepack", "true")
	git("init", "-q", work)
	git("-C", work, "-c", "user.name=e2e", "-c", "user.email=e2e@site.test", "commit", "-q", "--allow-empty", "-m", "the first")
	git("-C", work, "push", "-q", bare, "HEAD")
	return &cgi.Handler{
		Path: filepath.Join(git("--exec-path"), "git-http-backend"),
		Env: []string{
			"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1",
			"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=safe.directory", "GIT_CONFIG_VALUE_0=*",
		},
	}
}

// revocations is a list that names who made it.
func revocations(t *testing.T) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	issuer := &x509.Certificate{Subject: pkix.Name{CommonName: "a list that was fetched"}, KeyUsage: x509.KeyUsageCRLSign, SubjectKeyId: []byte{1}}
	now := time.Now()
	list, err := x509.CreateRevocationList(rand.Reader, &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: now, NextUpdate: now.Add(time.Hour)}, issuer, key)
	if err != nil {
		t.Fatal(err)
	}
	return list
}
