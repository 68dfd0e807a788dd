package policy

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"cloche.dev/cloche/internal/sandbox"
)

func actionOf(s string) sandbox.EgressAction { return sandbox.EgressAction(s) }

func compile(t testing.TB, text string) *Policy {
	t.Helper()
	var p sandbox.EgressProfile
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatal(err)
	}
	c, err := Compile(p)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return c
}

const mixed = `{"default":"deny","rules":[
	{"name":"no-db","action":"deny","cidrs":["198.20.0.0/16"],"ports":["5432"]},
	{"name":"db","action":"allow","cidrs":["198.20.0.0/15","198.51.0.7"],"ports":["5432","8000-8010"]},
	{"name":"no-admin","action":"deny","hosts":["api.example.com"],"paths":["/admin/"]},
	{"name":"api","action":"inject","hosts":["api.example.com"],"methods":["GET","POST"],"ports":["443","80"],"inject":[{"secret":"s","kind":"header","prefix":"Bearer "}]},
	{"name":"pinned","action":"allow","hosts":["*.pinned.example"],"passthrough":true},
	{"name":"plain","action":"allow","hosts":["deb.example.org"],"schemes":["http"]},
	{"name":"banned","action":"deny","hosts":["bad.wild.example"]},
	{"name":"wild","action":"allow","hosts":["*.wild.example"],"ports":["443"]},
	{"name":"net","action":"allow","cidrs":["93.184.0.0/16"],"schemes":["https"],"ports":["443"]}]}`

func TestAddress(t *testing.T) {
	byHost := `{"default":"allow","rules":[{"action":"deny","hosts":["*.evil.example"],"ports":["443","80"]},{"action":"deny","cidrs":["1.2.3.4"]}]}`
	for _, c := range []struct {
		profile, addr string
		want          string // allow, deny, inspect
		rule          string
	}{
		{mixed, "198.20.1.1:5432", "deny", "no-db"},
		{mixed, "198.21.1.1:5432", "allow", "db"},
		{mixed, "198.51.0.7:8005", "allow", "db"},
		{mixed, "198.51.0.8:8005", "inspect", ""}, // pinned has no ports
		{mixed, "198.20.1.1:443", "inspect", ""},
		{byHost, "1.2.3.4:443", "inspect", ""},
		{byHost, "1.2.3.4:22", "deny", "rule-2"},
		{byHost, "1.2.3.5:22", "allow", "default"},
		{`{"default":"deny","rules":[{"action":"allow","ports":["22"]}]}`, "5.6.7.8:22", "allow", "rule-1"},
		{`{"default":"deny","rules":[{"action":"allow","ports":["22"]}]}`, "5.6.7.8:23", "deny", "default"},
		{`{"default":"deny","rules":[{"action":"allow","cidrs":["5.0.0.0/8"],"schemes":["http"]}]}`, "5.6.7.8:80", "inspect", ""},
		{`{"default":"deny","rules":[{"action":"allow","cidrs":["5.0.0.0/8"],"schemes":["http","tcp"]}]}`, "5.6.7.8:80", "allow", "rule-1"},
		{`{"default":"deny","rules":[{"action":"allow","cidrs":["5.0.0.0/8"]}]}`, "[::ffff:5.6.7.8]:80", "allow", "rule-1"},
		{`{"default":"deny"}`, "5.6.7.8:22", "deny", "default"},
		{`{"default":"allow"}`, "5.6.7.8:22", "allow", "default"},
	} {
		d, inspect := compile(t, c.profile).Address(netip.MustParseAddrPort(c.addr))
		got := map[bool]string{true: "allow", false: "deny"}[d.Allow]
		if inspect {
			got = "inspect"
		}
		if got != c.want || d.Rule != c.rule {
			t.Errorf("%s with %.60s: %s by %q, want %s by %q", c.addr, c.profile, got, d.Rule, c.want, c.rule)
		}
	}
	if d, inspect := compile(t, `{"default":"allow"}`).Address(netip.AddrPort{}); d.Allow || inspect {
		t.Error("no address is allowed")
	}
	var none Policy
	if d, inspect := none.Address(netip.MustParseAddrPort("1.2.3.4:5")); d.Allow || inspect {
		t.Error("the zero Policy allows")
	}
}

func TestTLS(t *testing.T) {
	cidrFirst := `{"default":"deny","rules":[{"action":"deny","cidrs":["6.0.0.0/8"]},{"action":"allow","cidrs":["5.0.0.0/8"]},{"action":"allow","hosts":["a.example"],"passthrough":true}]}`
	partFirst := `{"default":"deny","rules":[{"action":"deny","hosts":["a.example"],"methods":["POST"]},{"action":"allow","hosts":["a.example","b.example"],"passthrough":true}]}`
	for _, c := range []struct {
		profile, host string
		port          uint16
		want, rule    string // allow, pass, deny
	}{
		{mixed, "api.example.com", 443, "allow", "api"},
		{mixed, "api.example.com", 8443, "deny", "default"},
		{mixed, "x.pinned.example", 443, "pass", "pinned"},
		{mixed, "x.y.pinned.example", 9, "pass", "pinned"},
		{mixed, "pinned.example", 9, "deny", "default"},
		{mixed, "xpinned.example", 9, "deny", "default"},
		{mixed, "deb.example.org", 8443, "deny", "default"},
		{mixed, "deb.example.org", 443, "allow", "net"}, // it may have such an address
		{mixed, "bad.wild.example", 443, "deny", "banned"},
		{mixed, "x.bad.wild.example", 443, "allow", "wild"},
		{mixed, "good.wild.example", 443, "allow", "wild"},
		{mixed, "GOOD.wild.example", 443, "deny", ""},
		{mixed, "1.2.3.4", 443, "deny", ""},
		{mixed, "", 443, "deny", ""},
		{cidrFirst, "a.example", 443, "pass", "rule-3"},
		{cidrFirst, "b.example", 443, "allow", "rule-2"},
		{partFirst, "a.example", 443, "allow", "rule-2"},
		{partFirst, "b.example", 443, "pass", "rule-2"},
		{`{"default":"allow","rules":[{"action":"deny","hosts":["a.example"],"paths":["/x"]}]}`, "a.example", 443, "allow", "default"},
	} {
		d := compile(t, c.profile).TLS(c.host, c.port)
		got := map[bool]string{true: "allow", false: "deny"}[d.Allow]
		if d.Passthrough {
			got = "pass"
		}
		if got != c.want || d.Rule != c.rule {
			t.Errorf("%s:%d with %.60s: %s by %q, want %s by %q", c.host, c.port, c.profile, got, d.Rule, c.want, c.rule)
		}
	}
	// What is passed through is held to rules about addresses before it.
	p := compile(t, cidrFirst)
	for addr, want := range map[string]bool{"6.1.1.1": false, "5.1.1.1": true, "7.1.1.1": true} {
		d := p.Request(Request{Scheme: "https", Host: "a.example", Port: 443, Addr: netip.MustParseAddr(addr)})
		if d.Allow != want || d.Passthrough != want {
			t.Errorf("passed through to %s: %+v", addr, d)
		}
	}
	if d := p.Request(Request{Scheme: "https", Host: "a.example", Port: 443}); d.Allow {
		t.Errorf("passed through to an address that nobody knows: %+v", d)
	}
	for host, profile := range map[string]string{"a.example": partFirst, "api.example.com": mixed, "x.example": `{"default":"allow"}`} {
		if d := compile(t, profile).Request(Request{Scheme: "https", Host: host, Port: 443, Addr: netip.MustParseAddr("9.9.9.9")}); d.Allow || d.Reason != ReasonNotPassthrough {
			t.Errorf("%s is passed through where requests are to be seen: %+v", host, d)
		}
	}
}

func TestRequest(t *testing.T) {
	p := compile(t, mixed)
	for _, c := range []struct {
		method, url, addr string
		rule, reason      string
		allow, inject     bool
	}{
		{"GET", "https api.example.com 443 /v1", "9.9.9.9", "api", "", true, true},
		{"GET", "https api.example.com 443 /admin/x", "9.9.9.9", "no-admin", ReasonRule, false, false},
		{"GET", "https api.example.com 443 /admin;a/x", "9.9.9.9", "no-admin", ReasonRule, false, false},
		{"GET", "https api.example.com 443 /admin%2Fx", "9.9.9.9", "no-admin", ReasonRule, false, false},
		{"DELETE", "https api.example.com 443 /v1", "9.9.9.9", "default", ReasonDefault, false, false},
		{"get", "https api.example.com 443 /v1", "9.9.9.9", "default", ReasonDefault, false, false},
		{"GET", "http api.example.com 80 /v1", "9.9.9.9", "api", ReasonSecretNeedsTLS, false, false},
		{"GET", "https api.example.com 80 /v1", "9.9.9.9", "api", ReasonSecretNeedsTLS, false, false},
		{"GET", "http x.pinned.example 80 /", "9.9.9.9", "default", ReasonDefault, false, false},
		{"GET", "https x.pinned.example 443 /", "9.9.9.9", "pinned", "", true, false},
		{"GET", "http deb.example.org 8080 /", "9.9.9.9", "plain", "", true, false},
		{"GET", "https deb.example.org 443 /", "9.9.9.9", "default", ReasonDefault, false, false},
		{"GET", "https deb.example.org 443 /", "93.184.1.1", "net", "", true, false},
		{"GET", "https other.example 5432 /", "198.20.0.1", "no-db", ReasonRule, false, false},
		{"GET", "http other.example 5432 /", "198.21.0.1", "db", "", true, false},
		{"GET", "https bad.wild.example 443 /", "9.9.9.9", "banned", ReasonRule, false, false},
		{"GET", "https a.wild.example 443 /", "9.9.9.9", "wild", "", true, false},
		{"GET", "https a.wild.example 444 /", "9.9.9.9", "default", ReasonDefault, false, false},
		{"GET", "ftp a.wild.example 443 /", "9.9.9.9", "", ReasonScheme, false, false},
		{"GET", "https A.wild.example 443 /", "9.9.9.9", "", ReasonHost, false, false},
		{"GET", "https a.wild.example. 443 /", "9.9.9.9", "", ReasonHost, false, false},
		{"GET", "https 9.9.9.9 443 /", "9.9.9.9", "", ReasonHost, false, false},
		{"GET", "https a.wild.example 443 /a/../b", "9.9.9.9", "", ReasonPath, false, false},
		{"GET", "https a.wild.example 443 /%61", "9.9.9.9", "", ReasonPath, false, false},
		{"", "https a.wild.example 443 /", "9.9.9.9", "", ReasonPath, false, false},
	} {
		f := strings.Fields(c.url)
		port := netip.MustParseAddrPort("1.1.1.1:" + f[2]).Port()
		d := p.Request(Request{Scheme: f[0], Host: f[1], Port: port, Method: c.method, Path: f[3], Addr: netip.MustParseAddr(c.addr)})
		if d.Allow != c.allow || d.Rule != c.rule || d.Reason != c.reason || (len(d.Inject) > 0) != c.inject {
			t.Errorf("%s %s at %s: %+v", c.method, c.url, c.addr, d)
		}
	}
}

func TestResolves(t *testing.T) {
	for _, c := range []struct {
		profile, name string
		want          bool
	}{
		{mixed, "anything.example", true}, // it may have an address of db
		{`{"default":"deny","rules":[{"action":"deny","hosts":["a.example"]},{"action":"allow","hosts":["*.example"],"ports":["1"]}]}`, "a.example", false},
		{`{"default":"deny","rules":[{"action":"deny","hosts":["a.example"]},{"action":"allow","hosts":["*.example"],"ports":["1"]}]}`, "b.a.example", true},
		{`{"default":"deny","rules":[{"action":"deny","hosts":["a.example"]},{"action":"allow","hosts":["*.example"],"ports":["1"]}]}`, "example", false},
		{`{"default":"allow","rules":[{"action":"deny","hosts":["a.example"],"paths":["/x"]}]}`, "a.example", true},
		{`{"default":"allow","rules":[{"action":"deny","hosts":["a.example"],"schemes":["http"]}]}`, "a.example", true},
		{`{"default":"allow","rules":[{"action":"deny","hosts":["a.example"],"schemes":["http","https"]}]}`, "a.example", false},
		{`{"default":"allow","rules":[{"action":"deny"}]}`, "a.example", false},
		{`{"default":"allow","rules":[{"action":"deny","cidrs":["0.0.0.0/0"]}]}`, "a.example", false},
		{`{"default":"allow","rules":[{"action":"deny","cidrs":["0.0.0.0/1"]}]}`, "a.example", true},
		{`{"default":"deny","rules":[{"action":"allow","hosts":["*"]}]}`, "a.example", true},
		{`{"default":"deny"}`, "a.example", false},
		{`{"default":"allow"}`, "a.example", true},
		{`{"default":"allow"}`, "A.example", false},
		{`{"default":"allow"}`, "1.2.3.4", false},
	} {
		if got := compile(t, c.profile).Resolves(c.name); got != c.want {
			t.Errorf("%s with %s: %v", c.name, c.profile, got)
		}
	}
}

func TestDryRun(t *testing.T) {
	p := compile(t, `{"default":"deny","dry_run":true,"rules":[
		{"action":"deny","hosts":["a.example"]},
		{"action":"inject","hosts":["b.example"],"inject":[{"secret":"s","kind":"header"}]}]}`)
	addr := netip.MustParseAddr("9.9.9.9")
	for what, d := range map[string]Decision{
		"name":    p.Name("a.example"),
		"tls":     p.TLS("a.example", 443),
		"request": p.Request(Request{Scheme: "http", Host: "a.example", Port: 80, Method: "GET", Path: "/", Addr: addr}),
		"default": p.Request(Request{Scheme: "http", Host: "c.example", Port: 80, Method: "GET", Path: "/", Addr: addr}),
	} {
		if !d.Allow || !d.WouldDeny || d.Reason == "" || d.Passthrough {
			t.Errorf("%s: %+v", what, d)
		}
	}
	for what, d := range map[string]Decision{
		"malformed": p.Name("A"),
		"bare":      p.Request(Request{Scheme: "http", Host: "b.example", Port: 80, Method: "GET", Path: "/", Addr: addr}),
		"unseen":    p.Request(Request{Scheme: "https", Host: "b.example", Port: 443, Addr: addr}),
	} {
		if d.Allow || d.WouldDeny {
			t.Errorf("%s: %+v", what, d)
		}
	}
}

func TestPresets(t *testing.T) {
	get := Request{Scheme: "https", Host: "pypi.org", Port: 443, Method: "GET", Path: "/simple/x/", Addr: netip.MustParseAddr("9.9.9.9")}
	for name, want := range map[string][2]bool{sandbox.PresetNone: {false, false}, sandbox.PresetPublic: {true, true}, sandbox.PresetPackages: {true, false}} {
		profile, ok := Preset(name)
		if !ok {
			t.Fatalf("there is no preset %s", name)
		}
		p, err := Compile(profile)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(profile, p.Profile()); diff != "" {
			t.Errorf("%s is not in its normal form: %s", name, diff)
		}
		put := get
		put.Method = "PUT"
		if got := [2]bool{p.Request(get).Allow, p.Request(put).Allow}; got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	profile, _ := Preset(sandbox.PresetPackages)
	p, err := Compile(profile)
	if err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]bool{
		"GET https registry.npmjs.org 443 /@types%2Fnode":                      true,
		"POST https registry.npmjs.org 443 /-/npm/v1/security/advisories/bulk": true,
		"PUT https registry.npmjs.org 443 /mine":                               false,
		"POST https github.com 443 /owner/repo.git/git-upload-pack":            true,
		"POST https github.com 443 /owner/repo.git/git-receive-pack":           false,
		"GET http deb.debian.org 80 /debian/dists/":                            true,
		"GET http pypi.org 80 /simple/":                                        false,
		"GET https de.archive.ubuntu.com 443 /ubuntu/":                         true,
		"GET https archive.ubuntu.com 444 /ubuntu/":                            false,
		"GET https pypi.org.evil.example 443 /":                                false,
	} {
		f := strings.Fields(line)
		port := netip.MustParseAddrPort("1.1.1.1:" + f[3]).Port()
		d := p.Request(Request{Scheme: f[1], Host: f[2], Port: port, Method: f[0], Path: f[4], Addr: get.Addr})
		if d.Allow != want {
			t.Errorf("%s: %+v", line, d)
		}
	}
	if _, ok := Preset("everything"); ok {
		t.Error("there is a preset that nobody knows")
	}
}

func FuzzRequest(f *testing.F) {
	f.Add("https", "api.example.com", uint16(443), "GET", "/v1/%2F", []byte{9, 9, 9, 9})
	f.Add("http", "A.", uint16(0), "", "", []byte{})
	policies := []*Policy{compile(f, mixed), compile(f, `{"default":"allow","dry_run":true}`)}
	f.Fuzz(func(t *testing.T, scheme, host string, port uint16, method, path string, ip []byte) {
		a, _ := netip.AddrFromSlice(ip)
		for _, p := range policies {
			d := p.Request(Request{scheme, host, port, method, path, a})
			if c, err := CanonicalHost(host); d.Allow && (err != nil || c != host) {
				t.Errorf("%q is allowed", host)
			}
			if d.Allow && !p.Resolves(host) {
				t.Errorf("%q is allowed and not resolved", host)
			}
			if d.Allow && scheme == "https" && !p.TLS(host, port).Allow {
				t.Errorf("a request to %q is allowed and its handshake isn't", host)
			}
			p.Address(netip.AddrPortFrom(a, port))
		}
	})
}
