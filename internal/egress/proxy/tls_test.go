package proxy

import (
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	tlsWeb   = "203.0.113.10:443"
	tlsOther = "203.0.113.11:443"
	tlsAway  = "198.51.100.9:443"
)

func get(t *testing.T, c *http.Client, url string) (*http.Response, string) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

func TestTerminate(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprint("h2 ", h2), func(t *testing.T) {
			w := newWorld(t, rules(sandbox.EgressRule{Action: sandbox.EgressAllow, Hosts: []string{"a.test"}, Paths: []string{"/ok/"}})).start()
			w.server(tlsWeb, "a.test", true, helloHandler)
			client := w.client(tlsAway, h2)
			for n := range 3 {
				resp, body := get(t, client, "https://a.test/ok/x%2fy?a=1;b=%zz")
				if body != "GET a.test /ok/x%2Fy?a=1;b=%zz " || resp.ProtoMajor == 2 != h2 {
					t.Errorf("%s %q", resp.Proto, body)
				}
				resp, body = get(t, client, "https://a.test/no")
				if resp.StatusCode != 403 || !strings.Contains(body, "denied_by_default") {
					t.Errorf("%d %s", resp.StatusCode, body)
				}
				a, d := w.record(), w.record()
				if a.Verdict != audit.Allowed || a.Kind != audit.HTTP || a.Scheme != "https" || a.Host != "a.test" || a.Status != 200 || !a.Upstream.IsValid() || a.Received == 0 {
					t.Errorf("the record is %+v", a)
				}
				if d.Verdict != audit.Denied || d.Status != 403 || d.Path != "/no" {
					t.Errorf("the record is %+v", d)
				}
				if dials := len(w.dialled()); dials != 1 {
					t.Errorf("after round %d there were %d connections to the server", n, dials)
				}
			}
			w.none()
		})
	}
}

func TestHostIsTheSNI(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test", "b.test"))).start()
	w.server(tlsWeb, "a.test", true, helloHandler)
	w.server(tlsOther, "b.test", true, helloHandler)
	for _, h2 := range []bool{false, true} {
		client := w.client(tlsAway, h2)
		for host, ok := range map[string]bool{"b.test": false, "a.test:443": true, "A.TEST.": true, "a.test:8443": false, "203.0.113.10": false} {
			req, _ := http.NewRequest("GET", "https://a.test/", nil)
			req.Host = host
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if (resp.StatusCode == 200) != ok {
				t.Errorf("h2 %v, Host %s: %d", h2, host, resp.StatusCode)
			}
			if r := w.record(); (r.Verdict == audit.Allowed) != ok || !ok && r.Reason != reasonHostMismatch && r.Reason != reasonBadHost {
				t.Errorf("Host %s: the record is %+v", host, r)
			}
		}
	}
	for _, at := range w.dialled() {
		if at == netip.MustParseAddrPort(tlsOther) {
			t.Error("the other host's server was connected to")
		}
	}
}

// TestSharedAddress: two names of one address never share a connection.
func TestSharedAddress(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test", "b.test"))).start()
	w.server(tlsWeb, "a.test", true, helloHandler)
	w.mu.Lock()
	w.names["b.test"] = w.names["a.test"]
	w.mu.Unlock()
	for _, name := range []string{"a.test", "b.test"} {
		if _, body := get(t, w.client(tlsAway, true), "https://"+name+"/"); !strings.Contains(body, name) {
			t.Error(body)
		}
	}
	if n := len(w.dialled()); n != 2 {
		t.Errorf("there were %d connections", n)
	}
}

func TestHellosRefused(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"), sandbox.EgressRule{Action: sandbox.EgressAllow, Hosts: []string{"pinned.test"}, Passthrough: true})).start()
	for name, c := range map[string]struct {
		conf   *tls.Config
		reason string
	}{
		"no SNI":      {&tls.Config{InsecureSkipVerify: true}, reasonNoSNI},
		"IP literal":  {&tls.Config{ServerName: "203.0.113.10"}, reasonNoSNI}, // Go leaves it out
		"decimal":     {&tls.Config{ServerName: "3405803786"}, reasonBadSNI},
		"other":       {&tls.Config{ServerName: "evil.test"}, "denied_by_default"},
		"ALPN":        {&tls.Config{ServerName: "a.test", NextProtos: []string{"imap"}}, reasonALPN},
		"old":         {&tls.Config{ServerName: "a.test", MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}, reasonTLSVersion},
		"pinned, ECH": {&tls.Config{ServerName: "hidden.test", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echConfig(t, "pinned.test")}, reasonECH},
	} {
		raw := w.dial(tlsAway)
		if err := tls.Client(raw, c.conf).Handshake(); err == nil {
			t.Errorf("%s: it went on", name)
		}
		if r := w.record(); r.Kind != audit.TLS || r.Verdict != audit.Denied || r.Reason != c.reason || r.Scheme != "https" {
			t.Errorf("%s: the record is %+v, want %s", name, r, c.reason)
		}
	}
	raw := w.dial(tlsAway)
	_, _ = raw.Write([]byte("\x16\x03\x01\x00\x05hello"))
	gone(t, raw)
	if r := w.record(); r.Reason != reasonBadHello {
		t.Errorf("the record is %+v", r)
	}
	if err := tls.Client(w.dial(tlsAway), &tls.Config{ServerName: "a.test", RootCAs: w.trusted}).Handshake(); err == nil {
		t.Error("an authority that isn't the project's was believed")
	}
	if r := w.record(); r.Verdict != audit.Failed || r.Reason != reasonTLSHandshake {
		t.Errorf("the record is %+v", r)
	}
	// The hidden name of a connection that ends here is not even looked at.
	hidden := &tls.Config{ServerName: "hidden.test", MinVersion: tls.VersionTLS13, EncryptedClientHelloConfigList: echConfig(t, "a.test")}
	if err := tls.Client(w.dial(tlsAway), hidden).Handshake(); err == nil {
		t.Error("a hidden name was taken")
	}
	if r := w.record(); r.Host != "a.test" || r.Verdict != audit.Failed || r.Reason != reasonTLSHandshake {
		t.Errorf("the record is %+v", r)
	}
	w.none()
	if a := w.asked(); len(a) != 0 {
		t.Errorf("names were asked about: %v", a)
	}
}

// echConfig is a list of one ECHConfig with a public name.
func echConfig(t *testing.T, public string) []byte {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	b := []byte{1, 0, 0x20, 0, 32} // id, DHKEM(X25519), the key's length
	b = append(b, key.PublicKey().Bytes()...)
	b = append(b, 0, 4, 0, 1, 0, 1, 32, byte(len(public))) // HKDF-SHA256, AES-128-GCM, the longest name
	b = append(append(b, public...), 0, 0)
	b = append(binary.BigEndian.AppendUint16([]byte{0xfe, 0x0d}, uint16(len(b))), b...)
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

func TestSlowHello(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test")))
	w.p.times.handshake = 50 * time.Millisecond
	w.start()
	c := w.dial(tlsAway)
	_, _ = c.Write([]byte("\x16\x03\x01\x10\x00"))
	gone(t, c)
	if r := w.record(); r.Kind != audit.TLS || r.Reason != reasonHeaderTimeout {
		t.Errorf("the record is %+v", r)
	}
}

func TestPassthrough(t *testing.T) {
	p := rules(cidr(sandbox.EgressDeny, "203.0.113.66/32"), sandbox.EgressRule{Name: "pinned", Action: sandbox.EgressAllow, Hosts: []string{"pinned.test", "lost.test"}, Passthrough: true})
	w := newWorld(t, p).start()
	w.server(tlsWeb, "pinned.test", true, helloHandler)
	c := tls.Client(w.dial(tlsAway), &tls.Config{ServerName: "pinned.test", RootCAs: w.trusted}) // the server's own certificate
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(c, lines("GET /x HTTP/1.1", "Host: pinned.test", "Connection: close"))
	if b, err := io.ReadAll(c); err != nil || !strings.Contains(string(b), "GET pinned.test /x") {
		t.Errorf("%q %v", b, err)
	}
	c.Close()
	if r := w.record(); r.Kind != audit.TLS || r.Verdict != audit.Allowed || r.Rule != "pinned" || r.Host != "pinned.test" || r.Sent == 0 || r.Received == 0 || !r.Upstream.IsValid() {
		t.Errorf("the record is %+v", r)
	}
	// A name whose address an earlier rule denies.
	w.put("203.0.113.66:443", "lost.test", "127.0.0.1:1")
	if err := tls.Client(w.dial(tlsAway), &tls.Config{ServerName: "lost.test"}).Handshake(); err == nil {
		t.Error("it went on")
	}
	if r := w.record(); r.Verdict != audit.Denied || r.Kind != audit.TLS {
		t.Errorf("the record is %+v", r)
	}
	// A change cuts what is passed through.
	c = tls.Client(w.dial(tlsAway), &tls.Config{ServerName: "pinned.test", RootCAs: w.trusted})
	if err := c.Handshake(); err != nil {
		t.Fatal(err)
	}
	live := *w.p.live.Load()
	live.Policy = compile(t, rules(hosts(sandbox.EgressAllow, "pinned.test")))
	w.p.Update(live)
	if _, err := io.Copy(io.Discard, c); err == nil {
		t.Error("it wasn't cut")
	}
	if r := w.record(); r.Reason != reasonPolicyChanged {
		t.Errorf("the record is %+v", r)
	}
}

func TestUpstreamCertificate(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test", "b.test", "plain.test"))).start()
	w.server(tlsWeb, "a.test", true, helloHandler).TLS.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return w.servers.Leaf("wrong.test") }
	stranger, _ := authority(t)
	w.server(tlsOther, "b.test", true, helloHandler).TLS.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return stranger.Leaf("b.test") }
	w.server("203.0.113.12:443", "plain.test", false, helloHandler)
	for name, reason := range map[string]string{"a.test": reasonUpstreamCertificate, "b.test": reasonUpstreamCertificate, "plain.test": reasonUpstreamTLS} {
		resp, body := get(t, w.client(tlsAway, true), "https://"+name+"/")
		if resp.StatusCode != 502 || !strings.Contains(body, reason) {
			t.Errorf("%s: %d %s", name, resp.StatusCode, body)
		}
		if r := w.record(); r.Verdict != audit.Failed || r.Reason != reason {
			t.Errorf("%s: the record is %+v", name, r)
		}
	}
}

func TestInject(t *testing.T) {
	const secret = "very-secret-token-value"
	p := rules(sandbox.EgressRule{Action: sandbox.EgressInject, Hosts: []string{"api.test", "other.test"}, Inject: []sandbox.Injection{{Secret: "token", Kind: sandbox.InjectHeader, Prefix: "Bearer "}}})
	w := newWorld(t, p, sandbox.SecretValue{Name: "token", Hosts: []string{"api.test"}, Value: []byte(secret)}).start()
	seen := make(chan http.Header, 10)
	reflect := func(rw http.ResponseWriter, r *http.Request) {
		seen <- r.Header
		rw.Header().Set("Link", "<"+secret+">")
		rw.WriteHeader(http.StatusEarlyHints)
		rw.Header().Set("X-Reflected", r.Header.Get("Authorization"))
		fmt.Fprintf(rw, "you said %s", r.Header.Get("Authorization"))
	}
	w.server(tlsWeb, "api.test", true, reflect)
	w.server(web, "", false, reflect)
	w.server(tlsOther, "other.test", true, reflect)

	for _, h2 := range []bool{false, true} {
		req, _ := http.NewRequest("GET", "https://api.test/", nil)
		req.Header.Set("Authorization", "Bearer mine")
		req.Header.Set("Connection", "authorization")
		if h2 {
			req.Header.Del("Connection")
		}
		hints := 0
		req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			if hints++; strings.Contains(fmt.Sprint(h), secret) {
				t.Errorf("the interim answer %d tells the secret", code)
			}
			return nil
		}}))
		resp, err := w.client(tlsAway, h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		if hints != 1 {
			t.Errorf("there were %d interim answers", hints)
		}
		if got := (<-seen)["Authorization"]; len(got) != 1 || got[0] != "Bearer "+secret {
			t.Errorf("the server got %q", got)
		}
		if all := fmt.Sprint(resp.Header, string(body)); strings.Contains(all, secret) || !strings.Contains(string(body), "redacted") {
			t.Errorf("the sandbox got %s", all)
		}
		if r := w.record(); r.Verdict != audit.Allowed || len(r.Injected) != 1 || r.Injected[0] != "token" || strings.Contains(fmt.Sprint(r), secret) {
			t.Errorf("the record is %+v", r)
		}
	}
	for url, reason := range map[string]string{"http://api.test/": "secret_needs_tls", "https://other.test/": "secret_host"} {
		to := tlsAway
		if strings.HasPrefix(url, "http:") {
			to = away
		}
		if resp, body := get(t, w.client(to, false), url); resp.StatusCode != 403 || !strings.Contains(body, reason) {
			t.Errorf("%s: %d %s", url, resp.StatusCode, body)
		}
		if r := w.record(); r.Verdict != audit.Denied || r.Reason != reason {
			t.Errorf("%s: the record is %+v", url, r)
		}
	}
	live := *w.p.live.Load()
	live.Injector = nil
	w.p.Update(live)
	if resp, body := get(t, w.client(tlsAway, true), "https://api.test/"); resp.StatusCode != 403 || !strings.Contains(body, "secret_missing") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if len(seen) != 0 {
		t.Error("a request went out bare")
	}
}

func TestDryRun(t *testing.T) {
	p := rules(hosts(sandbox.EgressDeny, "a.test"))
	p.DryRun = true
	w := newWorld(t, p).start()
	w.server(tlsWeb, "a.test", true, helloHandler)
	if resp, _ := get(t, w.client(tlsAway, true), "https://a.test/"); resp.StatusCode != 200 {
		t.Error(resp.Status)
	}
	if r := w.record(); r.Verdict != audit.Allowed || !r.WouldDeny || r.Reason != "denied_by_rule" {
		t.Errorf("the record is %+v", r)
	}
	c := w.dial(tlsAway)
	_, _ = c.Write([]byte{0})
	gone(t, c)
	if r := w.record(); r.Verdict != audit.Denied || r.Reason != reasonUnknownProtocol {
		t.Errorf("the record is %+v", r)
	}
}

func TestNoAuthority(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test")))
	w.p.Update(Live{Policy: w.p.live.Load().Policy})
	w.start()
	if err := tls.Client(w.dial(tlsAway), &tls.Config{ServerName: "a.test"}).Handshake(); err == nil {
		t.Error("it went on")
	}
	if r := w.record(); r.Reason != reasonNoAuthority {
		t.Errorf("the record is %+v", r)
	}
}

// TestNotHTTPInside: what is in a terminated connection has to be HTTP, too.
func TestNotHTTPInside(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
	for in, want := range map[string]string{"SSH-2.0-x\r\n": reasonUnknownProtocol, preface2: reasonH2C} {
		c := w.tls(tlsAway, "a.test")
		_, _ = io.WriteString(c, in)
		_, _ = io.Copy(io.Discard, c)
		if r := w.record(); r.Reason != want || r.Host != "a.test" {
			t.Errorf("%q: the record is %+v", in, r)
		}
	}
	c := w.tls(tlsAway, "a.test", "h2")
	_, _ = io.WriteString(c, lines("GET / HTTP/1.1", "Host: a.test"))
	_, _ = io.Copy(io.Discard, c)
	if r := w.record(); r.Reason != reasonUnknownProtocol || r.Kind != audit.TLS {
		t.Errorf("the record is %+v", r)
	}
	w.none()
}
