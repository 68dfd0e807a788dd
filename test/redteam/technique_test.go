package redteam

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// technique is one way out that is tried, as root inside. Whatever it sends
// holds the token; it has come through where a stand-in saw that.
type technique struct {
	name string
	what string
	// steps are what the program inside does.
	steps func(a *arena, token string) []Step
	// reason is the code in the gateway's audit; "" where the sandbox's own
	// kernel refuses, or the gateway's kernel drops it (then counter names how).
	reason  string
	counter string
	// inside: the sandbox's kernel refuses it, which the result tells.
	inside bool
	// removed: the request is allowed, and what holds the token is taken off.
	removed bool
	// legit are places where the token may arrive: the part that is allowed.
	legit []string
	// own does and judges everything itself, the control too, where steps can't
	// say it. It returns the places where something came through.
	own func(t *testing.T, a *arena, box, token string) []string
	// uncontrolled tells why the attempt arrives nowhere under the control
	// profile either; "" is that it does.
	uncontrolled string
}

// What keeps some attempts from being controlled by removing a rule.
const (
	neverOpen  = "this range is closed whatever the rules are"
	neverSpoke = "the gateway speaks no such protocol whatever the rules are"
	noServer   = "no server takes it: it is only the gateway that it could confuse"
)

// at is an address of the world.
func at(a *arena, last byte, port int) string { return fmt.Sprintf("%s:%d", a.w.Addr(last), port) }

// plain sends raw text to a web server's port 80. TOKEN stands for the token.
func plain(last byte, chunks ...string) func(*arena, string) []Step {
	return to(last, 80, nil, chunks...)
}

// secure sends raw text to port 443 in TLS with this SNI.
func secure(last byte, sni string, chunks ...string) func(*arena, string) []Step {
	return to(last, 443, &TLS{SNI: sni, ALPN: []string{"http/1.1"}}, chunks...)
}

func to(last byte, port int, t *TLS, chunks ...string) func(*arena, string) []Step {
	return func(a *arena, token string) []Step {
		s := Step{Op: "tcp", Addr: at(a, last, port), TLS: t, Pause: 50 * time.Millisecond, Wait: 2 * time.Second}
		for _, c := range chunks {
			s.Send = append(s.Send, []byte(strings.ReplaceAll(c, "TOKEN", token)))
		}
		return []Step{s}
	}
}

// bytesTo sends bytes to any address.
func bytesTo(addr func(*arena) string, chunks ...string) func(*arena, string) []Step {
	return func(a *arena, token string) []Step {
		s := to(0, 0, nil, chunks...)(a, token)[0]
		s.Addr = addr(a)
		return []Step{s}
	}
}

// hello is for names that a TLS library of the attacker would not send:
// the client's hello is made here and sent as bytes.
func hello(last byte, config func(token string) *tls.Config, edit func([]byte) []byte) func(*arena, string) []Step {
	return func(a *arena, token string) []Step {
		b := clientHello(config(token))
		if edit != nil {
			b = edit(b)
		}
		return []Step{{Op: "tcp", Addr: at(a, last, 443), Send: [][]byte{b}, Wait: 2 * time.Second}}
	}
}

// clientHello is what a client sends first.
func clientHello(c *tls.Config) []byte {
	near, far := net.Pipe()
	go func() {
		_ = tls.Client(near, c).Handshake()
		_ = near.Close()
	}()
	defer far.Close()
	_ = far.SetDeadline(time.Now().Add(2 * time.Second))
	head := make([]byte, 5)
	if _, err := io.ReadFull(far, head); err != nil {
		return nil
	}
	body := make([]byte, int(head[3])<<8|int(head[4]))
	_, _ = io.ReadFull(far, body)
	return append(head, body...)
}

// frames speaks HTTP/2 by hand over TLS with this SNI.
func frames(last byte, sni string, requests ...[]string) func(*arena, string) []Step {
	return func(a *arena, token string) []Step {
		var out, block bytes.Buffer
		var sends [][]byte
		out.WriteString(http2.ClientPreface)
		f := http2.NewFramer(&out, nil)
		f.AllowIllegalWrites = true
		_ = f.WriteSettings()
		enc := hpack.NewEncoder(&block)
		for i, fields := range requests {
			block.Reset()
			body := ""
			for j := 0; j+1 < len(fields); j += 2 {
				value := strings.ReplaceAll(fields[j+1], "TOKEN", token)
				if fields[j] == "body" {
					body = value
					continue
				}
				_ = enc.WriteField(hpack.HeaderField{Name: fields[j], Value: value})
			}
			id := uint32(2*i + 1)
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: bytes.Clone(block.Bytes()), EndHeaders: true, EndStream: body == ""})
			if body != "" {
				_ = f.WriteData(id, true, []byte(body))
			}
			sends = append(sends, bytes.Clone(out.Bytes())) // one after the other
			out.Reset()
		}
		return []Step{{
			Op: "tcp", Addr: at(a, last, 443), TLS: &TLS{SNI: sni, ALPN: []string{"h2"}}, Send: sends, Pause: 50 * time.Millisecond, Wait: 2 * time.Second,
		}}
	}
}

// get is a request's pseudo headers, with more after them.
func get(authority, path string, more ...string) []string {
	return append([]string{":method", "GET", ":scheme", "https", ":authority", authority, ":path", path}, more...)
}

// question asks a name server at addr over UDP or TCP.
func question(network string, addr func(*arena) string, edit func(m *dns.Msg, token string)) func(*arena, string) []Step {
	return func(a *arena, token string) []Step {
		m := new(dns.Msg)
		m.SetQuestion(token+".blocked.test.", dns.TypeA)
		if edit != nil {
			edit(m, token)
		}
		b, err := m.Pack()
		if err != nil {
			a.tb.Fatal(err)
		}
		if network == "tcp" {
			b = append([]byte{byte(len(b) >> 8), byte(len(b))}, b...)
		}
		return []Step{{Op: network, Addr: addr(a), Send: [][]byte{b}, Wait: 2 * time.Second}}
	}
}

func ourResolver(*arena) string     { return "169.254.77.1:53" }
func worldResolver(a *arena) string { return at(a, resolver, 53) }
func asType(t uint16, below string) func(*dns.Msg, string) {
	return func(m *dns.Msg, token string) { m.SetQuestion(token+below, t) }
}

func udpTo(last byte, port int) func(*arena, string) []Step {
	return func(a *arena, token string) []Step {
		return []Step{{Op: "udp", Addr: at(a, last, port), Send: [][]byte{[]byte(token)}, Wait: time.Second}}
	}
}

// tableCheck holds the table itself to its form.
func tableCheck(t *testing.T, list []technique) {
	t.Helper()
	names := map[string]bool{}
	for _, k := range list {
		if k.name == "" || k.what == "" || (k.steps == nil) == (k.own == nil) || names[k.name] {
			t.Errorf("%q: a technique needs a name of its own, what it tries, and steps or something of its own", k.name)
		}
		names[k.name] = true
		if k.reason == "" && k.counter == "" && !k.inside && !k.removed && k.own == nil {
			t.Errorf("%s: how shows it that this was stopped?", k.name)
		}
	}
	if len(list) < 60 {
		t.Errorf("%d techniques; at least 60 are promised", len(list))
	}
}
