package redteam

import (
	"time"
)

// packetTechniques try to get around below HTTP: other protocols, addresses and
// ports. What gVisor itself refuses is sent from the machine's end of the link
// in the tests of internal/node/netns.
var packetTechniques = []technique{
	{name: "udp", what: "datagrams to a server", counter: "packet:udp", uncontrolled: neverSpoke, steps: udpTo(rawSink, 9000)},
	{name: "quic", what: "datagrams to port 443", counter: "packet:udp", uncontrolled: neverSpoke, steps: udpTo(allowed, 443)},
	{
		name: "icmp", what: "a ping that carries a message", inside: true, uncontrolled: neverSpoke,
		steps: raw(1, "\x08\x00\x00\x00\x00\x01\x00\x01TOKEN"),
	},
	{name: "gre", what: "another IP protocol", inside: true, uncontrolled: neverSpoke, steps: raw(47, "\x00\x00\x08\x00TOKEN")},
	{
		name: "packet-socket", what: "frames of one's own", inside: true, uncontrolled: neverSpoke,
		steps: func(_ *arena, token string) []Step {
			frame := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 2, 8, 6}, []byte(token)...)
			return []Step{{Op: "packet", Send: [][]byte{frame}}}
		},
	},
	{
		name: "ipv6", what: "an IPv6 address", inside: true, uncontrolled: neverSpoke,
		steps: bytesTo(func(*arena) string { return "[2001:db8::1]:80" }, "TOKEN"),
	},
	{name: "tcp-raw", what: "a protocol of one's own on a port that no rule has", reason: "denied_by_default", steps: to(rawSink, 9000, nil, "TOKEN\n")},
	{name: "ssh-on-443", what: "SSH on an allowed port", reason: "unknown_protocol", steps: to(allowed, 443, nil, "SSH-2.0-TOKEN\r\n")},
	{name: "ssh", what: "SSH", reason: "denied_by_default", steps: to(allowed, 22, nil, "SSH-2.0-TOKEN\r\n")},
	{name: "smtp", what: "mail", reason: "denied_by_default", steps: to(allowed, 25, nil, "EHLO TOKEN\r\n")},
	{name: "binary-on-80", what: "bytes that are no protocol on an allowed port", reason: "unknown_protocol", steps: to(allowed, 80, nil, "\x00\x01\x02TOKEN")},
	{
		name: "tls-on-80-no-sni", what: "TLS without a name on the port of HTTP", reason: "no_sni",
		steps: to(allowed, 80, &TLS{}, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n"), uncontrolled: noServer,
	},
	{
		name: "silent", what: "a connection that never says what it is", reason: "no_request", uncontrolled: noServer,
		steps: func(a *arena, _ string) []Step {
			return []Step{{Op: "tcp", Addr: at(a, allowed, 80), Wait: 12 * time.Second}}
		},
	},
	{
		name: "other-port", what: "an allowed site on a port that no rule has", reason: "denied_by_default",
		steps: to(allowed, 8080, nil, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n"),
	},
	{
		name: "metadata", what: "the metadata service by its address", reason: "bad_host", uncontrolled: neverOpen,
		steps: bytesTo(func(*arena) string { return "169.254.169.254:80" }, "GET /TOKEN HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n"),
	},
	{
		name: "host-service", what: "a service of the host by its address", reason: "denied_by_default", uncontrolled: neverOpen,
		steps: to(hostEnd, 8080, nil, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\n\r\n"),
	},
	{
		name: "host-service-http", what: "the same on the port of HTTP", reason: "bad_host", uncontrolled: neverOpen,
		steps: func(a *arena, token string) []Step {
			return to(hostEnd, 80, nil, "GET /"+token+" HTTP/1.1\r\nHost: "+a.w.Host().String()+"\r\n\r\n")(a, token)
		},
	},
	{
		name: "this-network", what: "0.0.0.0 of the gateway", reason: "denied_by_default", uncontrolled: neverOpen,
		steps: bytesTo(func(*arena) string { return "0.0.0.1:8080" }, "TOKEN"),
	},
	{
		name: "carrier-nat", what: "an address of carriers' networks", reason: "denied_by_default", uncontrolled: neverOpen,
		steps: bytesTo(func(*arena) string { return "100.64.0.1:8080" }, "TOKEN"),
	},
	{
		name: "private", what: "a private address", reason: "denied_by_default", uncontrolled: neverOpen,
		steps: bytesTo(func(*arena) string { return "192.168.0.1:8080" }, "TOKEN"),
	},
	{
		name: "knock-proxy", what: "the port on which the gateway takes connections", counter: "packet:gateway_port", uncontrolled: neverOpen,
		steps: bytesTo(func(*arena) string { return "169.254.77.1:15001" }, "TOKEN"),
	},
	{
		name: "knock-resolver", what: "the port on which the gateway answers questions", counter: "packet:gateway_port", uncontrolled: neverOpen,
		steps: bytesTo(func(*arena) string { return "169.254.77.1:15053" }, "TOKEN"),
	},
	{
		name: "knock-resolver-udp", what: "the same by UDP", counter: "packet:gateway_port", uncontrolled: neverOpen,
		steps: func(_ *arena, token string) []Step {
			return []Step{{Op: "udp", Addr: "169.254.77.1:15053", Send: [][]byte{[]byte(token)}, Wait: time.Second}}
		},
	},
	{name: "knock-elsewhere", what: "the proxy's port at another address", reason: "denied_by_default", steps: to(allowed, 15001, nil, "TOKEN")},
	{name: "knock-resolver-elsewhere", what: "the resolver's port at another address", reason: "denied_by_default", steps: to(forbidden, 15053, nil, "TOKEN")},
	{
		name: "gateway-ports", what: "the gateway's own address", reason: "denied_by_default", uncontrolled: neverOpen,
		steps: bytesTo(func(*arena) string { return "169.254.77.1:8080" }, "TOKEN"),
	},
}

func raw(proto int, payload string) func(*arena, string) []Step {
	return func(a *arena, token string) []Step {
		s := to(0, 0, nil, payload)(a, token)[0]
		return []Step{{Op: "raw", Addr: a.w.Addr(rawSink).String(), Proto: proto, Send: s.Send}}
	}
}
