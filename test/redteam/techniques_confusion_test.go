package redteam

import (
	"bytes"
	"crypto/tls"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// onlyAllowed are the places of what allowed.test may get.
var onlyAllowed = []string{"10:80", "host allowed.test"}

// confusionTechniques go by what may be believed besides names and protocols:
// headers about headers, redirects, answers that change, slowness.
var confusionTechniques = []technique{
	{
		name: "dns-answer-in-question", what: "a question that brings its own answer", reason: "dns_malformed", uncontrolled: noServer,
		steps: question("udp", ourResolver, func(m *dns.Msg, _ string) {
			m.SetQuestion("allowed.test.", dns.TypeA)
			m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: "allowed.test.", Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 9}, A: []byte{1, 2, 3, 4}}}
		}),
	},
	{
		name: "dns-long-name", what: "a name full of data below an allowed suffix", reason: "dns_long_name",
		uncontrolled: neverSpoke, steps: question("udp", ourResolver, asType(dns.TypeA, strings.Repeat(".0123456789abcdef0123456789abcdef", 6)+".wild.test.")),
	},
	{
		name: "dns-many-labels", what: "a name of many labels below an allowed suffix", reason: "dns_long_name",
		uncontrolled: neverSpoke, steps: question("udp", ourResolver, asType(dns.TypeA, strings.Repeat(".a", 20)+".wild.test.")),
	},
	{
		name: "dns-rebind", what: "the address of an allowed name that resolves to the metadata service", reason: "closed_range", uncontrolled: neverOpen,
		steps: question("udp", ourResolver, func(m *dns.Msg, _ string) { m.SetQuestion("to-metadata.test.", dns.TypeA) }),
	},
	{
		name: "rebind-between", what: "an allowed name that has a good address and, a moment later, the metadata service's", reason: "closed_range",
		uncontrolled: neverOpen, legit: []string{"10:80", "host rebind.test"},
		steps: func(a *arena, token string) (steps []Step) {
			for range 4 {
				s := plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: rebind.test\r\nConnection: close\r\n\r\n")(a, token)[0]
				s.Pause = 1100 * time.Millisecond // an answer is kept for a second at least
				steps = append(steps, s)
			}
			return steps
		},
	},
	{
		name: "redirect-to-metadata", what: "a redirect of an allowed server to the metadata service, followed by the gateway or by the guest", reason: "bad_host",
		uncontrolled: neverOpen, legit: onlyAllowed,
		steps: func(a *arena, token string) []Step {
			first := plain(allowed, "GET /redirect/169.254.169.254/TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n")(a, token)
			return append(first, bytesTo(func(*arena) string { return "169.254.169.254:80" }, "GET /TOKEN HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n")(a, token)...)
		},
	},
	{
		name: "redirect-to-name", what: "the same by a name that has its address", reason: "closed_range", uncontrolled: neverOpen, legit: onlyAllowed,
		steps: func(a *arena, token string) []Step {
			first := plain(allowed, "GET /redirect/to-metadata.test/TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n")(a, token)
			return append(first, plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: to-metadata.test\r\n\r\n")(a, token)...)
		},
	},
	{
		name: "redirect-to-blocked", what: "a redirect of an allowed server to one that no rule has", reason: "denied_by_default", legit: onlyAllowed,
		steps: func(a *arena, token string) []Step {
			first := plain(allowed, "GET /redirect/blocked.test/TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n")(a, token)
			return append(first, plain(forbidden, "GET /TOKEN HTTP/1.1\r\nHost: blocked.test\r\n\r\n")(a, token)...)
		},
	},
	{
		name: "upstream-forged", what: "a server that takes an allowed name's place with a certificate of nobody's", reason: "upstream_certificate",
		steps: secure(impostor, "forged.test", "GET /TOKEN HTTP/1.1\r\nHost: forged.test\r\n\r\n"),
	},

	{
		name: "x-forwarded-host", what: "an allowed name in X-Forwarded-Host, another in Host", reason: "denied_by_default",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: front.test\r\nX-Forwarded-Host: allowed.test\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n"),
	},
	{
		name: "forwarded", what: "the same in Forwarded", reason: "denied_by_default",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: front.test\r\nForwarded: for=127.0.0.1;host=allowed.test;proto=https\r\n\r\n"),
	},
	{
		name: "x-original-url", what: "an allowed path in X-Original-URL, another in the request line", reason: "denied_by_default",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: api.test\r\nX-Original-URL: /ok/\r\nX-Rewrite-URL: /ok/\r\n\r\n"),
	},
	{
		name: "method-override", what: "an allowed method in X-HTTP-Method-Override, another in the request line", reason: "denied_by_default",
		steps: plain(allowed, "POST /ok/TOKEN HTTP/1.1\r\nHost: api.test\r\nX-HTTP-Method-Override: GET\r\nContent-Length: 0\r\n\r\n"),
	},
	{
		name: "proxy-authorization", what: "something for the gateway, or for who is taken for it", removed: true,
		steps: plain(allowed, "GET / HTTP/1.1\r\nHost: allowed.test\r\nProxy-Authorization: Basic TOKEN\r\nProxy-Connection: TOKEN\r\n\r\n"),
	},
	{
		name: "connection-names-header", what: "a header that Connection names", removed: true,
		steps: plain(allowed, "GET / HTTP/1.1\r\nHost: allowed.test\r\nConnection: X-Hop\r\nX-Hop: TOKEN\r\nKeep-Alive: TOKEN\r\n\r\n"),
	},
	{
		name: "connection-names-host", what: "Connection that names Host, of a site that no rule has", reason: "denied_by_default",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nConnection: Host, close\r\nHost: front.test\r\n\r\n"),
	},
	{
		name: "host-unicode", what: "Host with letters that some servers fold to ASCII", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: \u212aallowed.test\r\n\r\n"),
	},
	{
		name: "path-second-request", what: "a path that no rule has, in the second request", reason: "denied_by_default",
		steps: plain(allowed, "GET /ok/ HTTP/1.1\r\nHost: api.test\r\n\r\n", "GET /TOKEN HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},
	{
		name: "path-second-stream", what: "HTTP/2: the same in the second stream", reason: "denied_by_default",
		steps: frames(allowed, "api.test", get("api.test", "/ok/"), get("api.test", "/TOKEN")),
	},
	{
		name: "h2c-in-tls", what: "HTTP/2 at once where ALPN chose HTTP/1.1", reason: "h2c",
		steps: secure(allowed, "allowed.test", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nTOKEN"),
	},
	{
		name: "h2-cl-zero", what: "HTTP/2: a body where none was told", reason: "bad_cl",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/", "content-length", "0", "body", "GET /TOKEN HTTP/1.1")),
	},
	{
		name: "h2-cl-more", what: "HTTP/2: a body that ends before its length", reason: "bad_cl",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/", "content-length", "1000", "body", "TOKEN")),
	},
	{
		name: "websocket-smuggle", what: "a request right behind an upgrade that the server refuses", reason: "upgrade_early_data",
		steps: plain(allowed, "GET / HTTP/1.1\r\nHost: allowed.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"+
			"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\nGET /TOKEN HTTP/1.1\r\nHost: front.test\r\n\r\n"),
	},
	{
		name: "websocket-with-body", what: "a request in the body of an upgrade", reason: "upgrade",
		steps: plain(allowed, "GET / HTTP/1.1\r\nHost: allowed.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 20\r\n\r\nGET /TOKEN HTTP/1.1\r\n\r\n"),
	},
	{
		name: "chunk-extension", what: "data in the extension of a chunk", reason: "bad_chunk",
		steps: plain(allowed, "POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n1;TOKEN\r\nZ\r\n0\r\n\r\n"),
	},
	{
		name: "trailer-host", what: "Host behind the body", reason: "bad_trailer",
		steps: plain(allowed, "POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nZ\r\n0\r\nHost: front.test\r\nX: TOKEN\r\n\r\n"),
	},
	{
		name: "slowloris", what: "a head that never ends, a byte at a time", reason: "header_timeout",
		steps: func(a *arena, token string) []Step {
			s := plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\nX: ")(a, token)[0]
			s.Pause = time.Second
			for range 11 {
				s.Send = append(s.Send, []byte("y"))
			}
			return []Step{s}
		},
	},
	{
		name: "slow-hello", what: "a ClientHello that never ends", reason: "header_timeout", uncontrolled: noServer,
		steps: func(a *arena, _ string) []Step {
			return []Step{{Op: "tcp", Addr: at(a, allowed, 443), Send: [][]byte{{0x16, 3, 1, 2, 0, 1}}, Wait: 12 * time.Second}}
		},
	},
	{
		name: "sni-literal", what: "an address as TLS's name", reason: "bad_sni", uncontrolled: noServer,
		steps: hello(allowed, named("aaaaaaaaaaa.test"), renamed("aaaaaaaaaaa.test", "0169.254.169.254")),
	},
	{
		name: "sni-dot", what: "TLS's name with a final dot", reason: "bad_client_hello", uncontrolled: noServer,
		steps: hello(allowed, named("allowedx.test"), renamed("allowedx.test", "allowed.test.")),
	},
	{
		name: "sni-nul", what: "an allowed name, a zero byte and another", reason: "bad_sni", uncontrolled: noServer,
		steps: hello(allowed, named("allowed.testx.blocked.test"), renamed("allowed.testx", "allowed.test\x00")),
	},
	{
		name: "flood", what: "more connections than a sandbox may have", reason: "too_many_connections",
		uncontrolled: "it is nothing but connections, and says nothing on them",
		steps:        func(a *arena, _ string) []Step { return []Step{{Op: "flood", Addr: at(a, allowed, 80), Count: 400}} },
	},
}

func named(name string) func(string) *tls.Config {
	return func(string) *tls.Config { return &tls.Config{ServerName: name, MinVersion: tls.VersionTLS12} }
}

// renamed puts in place of a name one of the same length that no library sends.
func renamed(from, to string) func([]byte) []byte {
	return func(b []byte) []byte { return bytes.Replace(b, []byte(from), []byte(to), 1) }
}
