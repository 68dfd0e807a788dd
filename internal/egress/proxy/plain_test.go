package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/sandbox"
)

const (
	web   = "203.0.113.10:80" // made up: documentation addresses stand for the world
	other = "203.0.113.11:80"
	away  = "198.51.100.9:80" // what a sandbox dials where it doesn't matter
)

func TestDefaultDenyResets(t *testing.T) {
	w := newWorld(t, rules()).start()
	gone(t, w.dial(web))
	if r := w.record(); r.Kind != audit.TCP || r.Verdict != audit.Denied || r.Reason != "denied_by_default" || r.Rule != "default" ||
		r.Dialled != netip.MustParseAddrPort(web) || r.Profile != "test" {
		t.Errorf("the record is %+v", r)
	}
	w.none()
}

func TestNothingToDecideBy(t *testing.T) {
	w := newWorld(t, rules())
	w.p.Update(Live{})
	w.start()
	gone(t, w.dial(web))
	if r := w.record(); r.Reason != reasonNoPolicy {
		t.Errorf("the record is %+v", r)
	}
	gone(t, w.dial(w.l.Addr().String()))
	if r := w.record(); r.Reason != reasonGatewayPort {
		t.Errorf("the record is %+v", r)
	}
}

func cidr(action sandbox.EgressAction, prefix string) sandbox.EgressRule {
	return sandbox.EgressRule{Action: action, CIDRs: []string{prefix}}
}

func echo(c net.Conn) {
	_, _ = io.Copy(c, c)
	_ = c.(*net.TCPConn).CloseWrite()
}

func TestSplice(t *testing.T) {
	for _, limit := range []sandbox.EgressLimits{{}, {Bytes: 1 << 30, BytesPerSecond: 1 << 30}} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			p := rules(cidr(sandbox.EgressAllow, "203.0.113.0/24"))
			p.Limits = limit
			w := newWorld(t, p).start()
			w.listen(web, "", echo)
			c := w.dial(web)
			want := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
			go func() {
				_, _ = c.Write(want)
				_ = c.(*net.TCPConn).CloseWrite()
			}()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("%d bytes came back, %v", len(got), err)
			}
			r := w.record()
			if r.Kind != audit.TCP || r.Verdict != audit.Allowed || r.Rule != "rule-1" || r.Sent != int64(len(want)) || r.Received != int64(len(want)) || !r.Upstream.IsValid() {
				t.Errorf("the record is %+v", r)
			}
			if s := w.p.Stats(); s.Sent != int64(len(want)) || s.Received != int64(len(want)) || s.Total != 1 {
				t.Errorf("Stats: %+v", s)
			}
			w.none()
		})
	}
}

func TestSpliceRefused(t *testing.T) {
	w := newWorld(t, rules(cidr(sandbox.EgressAllow, "0.0.0.0/0"))).start()
	gone(t, w.dial(web))
	if r := w.record(); r.Verdict != audit.Failed || r.Reason != "upstream_refused" {
		t.Errorf("the record is %+v", r)
	}
	gone(t, w.dial("10.1.2.3:80"))
	if r := w.record(); r.Verdict != audit.Denied || r.Reason != "closed_range" {
		t.Errorf("the record is %+v", r)
	}
	w.none()
}

func TestUpdateCutsSpliced(t *testing.T) {
	w := newWorld(t, rules(cidr(sandbox.EgressAllow, "203.0.113.0/24"))).start()
	w.listen(web, "", echo)
	w.listen(other, "", echo)
	a, b := w.dial(web), w.dial(other)
	for _, c := range []net.Conn{a, b} {
		ping(t, c)
	}
	w.p.Update(Live{Policy: compile(t, rules(cidr(sandbox.EgressAllow, "203.0.113.11/32")))})
	gone(t, a)
	ping(t, b)
	if r := w.record(); r.Verdict != audit.Denied || r.Reason != reasonPolicyChanged || r.Sent != 4 {
		t.Errorf("the record is %+v", r)
	}
	w.p.Reset()
	gone(t, b)
	if r := w.record(); r.Verdict != audit.Failed || r.Reason != reasonReset {
		t.Errorf("the record is %+v", r)
	}
	ping(t, w.dial(other)) // it goes on serving
}

func ping(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
}

func TestLimits(t *testing.T) {
	p := rules(cidr(sandbox.EgressAllow, "203.0.113.0/24"))
	p.Limits = sandbox.EgressLimits{Connections: 2, Bytes: 20}
	w := newWorld(t, p).start()
	w.listen(web, "", echo)
	a, b := w.dial(web), w.dial(web)
	ping(t, a)
	ping(t, b)
	gone(t, w.dial(web))
	if r := w.record(); r.Reason != reasonTooMany || r.Verdict != audit.Denied {
		t.Errorf("the record is %+v", r)
	}
	_, _ = a.Write([]byte("five more")) // of 16 used, 4 are left
	gone(t, a)
	if r := w.record(); r.Reason != reasonBytesLimit || r.Sent != 4 {
		t.Errorf("the record is %+v", r)
	}
	gone(t, w.dial(web))
	if r := w.record(); r.Reason != reasonBytesLimit {
		t.Errorf("the record is %+v", r)
	}
	if s := w.p.Stats(); s.Sent+s.Received > 20 {
		t.Errorf("%+v is more than 20 bytes", s)
	}
}

func TestInspectWantsAProtocol(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test")))
	w.p.times.firstByte = 50 * time.Millisecond
	w.start()
	gone(t, w.dial(web)) // says nothing
	if r := w.record(); r.Kind != audit.TCP || r.Reason != reasonNoRequest {
		t.Errorf("the record is %+v", r)
	}
	for _, s := range []string{"\x00\x01\x02", "SSH-2.0-OpenSSH_9.9\r\n", "GET\x00", "\r\nGET / HTTP/1.1\r\n", "EHLO there\r\n", "GET /\r\n"} {
		c := w.dial(web)
		_, _ = c.Write([]byte(s))
		gone(t, c)
		if r := w.record(); r.Kind != audit.TCP || r.Reason != reasonUnknownProtocol || r.Verdict != audit.Denied {
			t.Errorf("%q: the record is %+v", s, r)
		}
	}
	w.none()
}

// hello answers with what came.
func helloHandler(rw http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	fmt.Fprintf(rw, "%s %s %s %s", r.Method, r.Host, r.URL.RequestURI(), b)
}

func TestEachRequestIsDecided(t *testing.T) {
	w := newWorld(t, rules(
		sandbox.EgressRule{Name: "paths", Action: sandbox.EgressAllow, Hosts: []string{"a.test"}, Methods: []string{"GET", "POST"}, Paths: []string{"/ok/"}},
		hosts(sandbox.EgressAllow, "b.test"),
	)).start()
	w.server(web, "a.test", false, helloHandler)
	w.server(other, "b.test", false, helloHandler)
	c := w.dial(away)
	r := bufio.NewReader(c)
	// Pipelined: two that are allowed, on two servers, and two that aren't.
	_, _ = io.WriteString(c, lines("GET http://A.test.:80/ok/1?q=1 HTTP/1.1", "Host: a.TEST.:80")+
		lines("POST /x HTTP/1.1", "Host: b.test", "Content-Length: 2")+"hi"+
		lines("GET /no HTTP/1.1", "Host: a.test")+
		lines("GET / HTTP/1.1", "Host: evil.test"))
	for _, want := range []string{"GET a.test /ok/1?q=1 ", "POST b.test /x hi"} {
		resp := answerOf(t, r, "GET")
		if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || string(b) != want {
			t.Errorf("%d %q, want %q", resp.StatusCode, b, want)
		}
	}
	resp := answerOf(t, r, "GET")
	if code, reason := refusedBody(t, resp); resp.StatusCode != 403 || !resp.Close || code != "egress_denied" || reason != "denied_by_default" {
		t.Errorf("%d %s %s, close %v", resp.StatusCode, code, reason, resp.Close)
	}
	if _, err := io.Copy(io.Discard, r); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Error(err)
	}
	for _, want := range []audit.Record{
		{Verdict: audit.Allowed, Host: "a.test", Rule: "paths", Method: "GET", Path: "/ok/1", Status: 200},
		{Verdict: audit.Allowed, Host: "b.test", Rule: "rule-2", Method: "POST", Path: "/x", Status: 200},
		{Verdict: audit.Denied, Host: "a.test", Rule: "default", Method: "GET", Path: "/no", Status: 403, Reason: "denied_by_default"},
		{Verdict: audit.Denied, Reason: reasonNotServed, Count: 1},
	} {
		got := w.record()
		if got.Kind != audit.HTTP || got.Verdict != want.Verdict || got.Host != want.Host || got.Rule != want.Rule || got.Method != want.Method ||
			got.Path != want.Path || got.Status != want.Status || got.Reason != want.Reason || got.Count != want.Count || got.Scheme != "http" {
			t.Errorf("the record is %+v, want %+v", got, want)
		}
	}
	w.none()
	for _, name := range w.asked() {
		if name != "a.test" && name != "b.test" {
			t.Errorf("%s was asked about", name)
		}
	}
	for _, at := range w.dialled() {
		if at == netip.MustParseAddrPort(away) {
			t.Error("what the sandbox dialled was connected to")
		}
	}
}

func TestDeniedRequests(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test", "*.wild.test"), hosts(sandbox.EgressAllow, "gone.test"))).start()
	w.server(web, "a.test", false, helloHandler)
	w.mu.Lock()
	w.names["gone.test"] = []netip.Addr{netip.MustParseAddr("203.0.113.99")}
	w.mu.Unlock()
	for _, c := range []struct {
		host, path, reason string
		status             int
	}{
		{"a.test:8080", "/", reasonHostMismatch, 403},
		{"a.test:080", "/", reasonHostMismatch, 403},
		{"evil.test", "/", "denied_by_default", 403},
		{"a.test.evil.test", "/", "denied_by_default", 403},
		{"wild.test", "/", "denied_by_default", 403},
		{"127.0.0.1", "/", reasonBadHost, 403},
		{"2130706433", "/", reasonBadHost, 403},
		{"0x7f.1", "/", reasonBadHost, 403},
		{"[::1]", "/", reasonBadHost, 403},
		{"[::ffff:127.0.0.1]:80", "/", reasonBadHost, 403},
		{"a.test", "/x/../y", reasonBadPath, 403},
		{"a.test", "/%2e%2e/y", reasonBadPath, 403},
		{"a.test", "/%5c", reasonBadPath, 403},
		{"x.wild.test", "/", "dns_no_name", 502},
		{"gone.test", "/", "upstream_refused", 502},
	} {
		conn := w.dial(away)
		_, _ = io.WriteString(conn, lines("GET "+c.path+" HTTP/1.1", "Host: "+c.host))
		resp := answerOf(t, bufio.NewReader(conn), "GET")
		if _, reason := refusedBody(t, resp); resp.StatusCode != c.status || reason != c.reason {
			t.Errorf("%s%s: %d %s, want %d %s", c.host, c.path, resp.StatusCode, reason, c.status, c.reason)
		}
		if r := w.record(); r.Reason != c.reason || (r.Verdict == audit.Denied) != (c.status == 403) {
			t.Errorf("%s%s: the record is %+v", c.host, c.path, r)
		}
	}
	w.none()
}

// TestMalformed: what could be understood in two ways never reaches a server.
func TestMalformed(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "*"))).start()
	w.server(web, "a.test", false, func(http.ResponseWriter, *http.Request) { t.Error("a server was reached") })
	for name, c := range malformed {
		conn := w.dial(away)
		_, _ = io.WriteString(conn, c.head)
		_ = conn.(*net.TCPConn).CloseWrite()
		gone(t, conn)
		if r := w.record(); r.Reason != c.reason || r.Verdict != audit.Denied {
			t.Errorf("%s: the record is %+v, want %s", name, r, c.reason)
		}
	}
	w.none()
}

var malformed = map[string]struct{ head, reason string }{
	"CL and TE":            {lines("POST / HTTP/1.1", "Host: a.test", "Content-Length: 4", "Transfer-Encoding: chunked") + "0\r\n\r\n", reasonBothLengths},
	"two CL":               {lines("POST / HTTP/1.1", "Host: a.test", "Content-Length: 4", "Content-Length: 4") + "abcd", reasonDuplicateCL},
	"list of CL":           {lines("POST / HTTP/1.1", "Host: a.test", "Content-Length: 4, 4") + "abcd", reasonCL},
	"signed CL":            {lines("POST / HTTP/1.1", "Host: a.test", "Content-Length: +4") + "abcd", reasonCL},
	"TE of a space":        {lines("POST / HTTP/1.1", "Host: a.test", "Transfer-Encoding : chunked"), reasonHeader},
	"TE with a tab":        {lines("POST / HTTP/1.1", "Host: a.test", "Transfer-Encoding: \x0bchunked"), reasonHeader},
	"TE twice":             {lines("POST / HTTP/1.1", "Host: a.test", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"), reasonTE},
	"TE of two":            {lines("POST / HTTP/1.1", "Host: a.test", "Transfer-Encoding: gzip, chunked"), reasonTE},
	"TE in 1.0":            {lines("POST / HTTP/1.0", "Host: a.test", "Transfer-Encoding: chunked"), reasonTE},
	"folded":               {lines("GET / HTTP/1.1", "Host: a.test", "X: a", " b"), reasonObsFold},
	"folded first":         {lines("GET / HTTP/1.1", " Host: a.test"), reasonObsFold},
	"bare LF":              {"GET / HTTP/1.1\nHost: a.test\n\n", reasonBareLF},
	"bare LF in the end":   {"GET / HTTP/1.1\r\nHost: a.test\r\n\n", reasonBareLF},
	"bare CR":              {"GET / HTTP/1.1\r\nHost: a.test\rX: y\r\n\r\n", reasonBareCR},
	"NUL":                  {"GET / HTTP/1.1\r\nHost: a.test\x00\r\n\r\n", reasonHeader},
	"two Hosts":            {lines("GET / HTTP/1.1", "Host: a.test", "Host: b.test"), reasonDuplicateHost},
	"the same Host twice":  {lines("GET / HTTP/1.1", "Host: a.test", "host: a.test"), reasonDuplicateHost},
	"no Host":              {lines("GET / HTTP/1.1", "X: y"), reasonNoHost},
	"empty Host":           {lines("GET / HTTP/1.1", "Host:"), reasonNoHost},
	"no Host in 1.0":       {lines("GET / HTTP/1.0"), reasonNoHost},
	"user in Host":         {lines("GET / HTTP/1.1", "Host: a.test@b.test"), reasonBadHost},
	"absolute, other host": {lines("GET http://b.test/ HTTP/1.1", "Host: a.test"), reasonHostMismatch},
	"absolute with a user": {lines("GET http://a.test@b.test/ HTTP/1.1", "Host: a.test"), reasonHostMismatch},
	"absolute, https":      {lines("GET https://a.test/ HTTP/1.1", "Host: a.test"), reasonTarget},
	"asterisk":             {lines("OPTIONS * HTTP/1.1", "Host: a.test"), reasonTarget},
	"fragment":             {lines("GET /#x HTTP/1.1", "Host: a.test"), reasonTarget},
	"bad escape":           {lines("GET /%zz HTTP/1.1", "Host: a.test"), reasonTarget},
	"two spaces":           {lines("GET  / HTTP/1.1", "Host: a.test"), reasonRequestLine},
	"space in target":      {lines("GET /a b HTTP/1.1", "Host: a.test"), reasonRequestLine},
	"tab in method":        {lines("GE\tT / HTTP/1.1", "Host: a.test"), reasonRequestLine},
	"version":              {lines("GET / HTTP/1.2", "Host: a.test"), reasonVersion},
	"version 2":            {lines("GET / HTTP/2.0", "Host: a.test"), reasonVersion},
	"preface":              {preface2, reasonH2C},
	"h2c":                  {lines("GET / HTTP/1.1", "Host: a.test", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAA"), reasonH2C},
	"h2c beside websocket": {lines("GET / HTTP/1.1", "Host: a.test", "Connection: upgrade", "Upgrade: websocket, h2c"), reasonH2C},
	"upgrade":              {lines("GET / HTTP/1.1", "Host: a.test", "Connection: upgrade", "Upgrade: tcp"), reasonUpgrade},
	"upgrade of a POST":    {lines("POST / HTTP/1.1", "Host: a.test", "Connection: upgrade", "Upgrade: websocket"), reasonUpgrade},
	"upgrade with a body":  {lines("GET / HTTP/1.1", "Host: a.test", "Connection: upgrade", "Upgrade: websocket", "Content-Length: 1") + "x", reasonUpgrade},
	"CONNECT":              {lines("CONNECT b.test:443 HTTP/1.1", "Host: b.test:443"), reasonConnect},
	"expect":               {lines("GET / HTTP/1.1", "Host: a.test", "Expect: 200-ok"), reasonExpect},
	"trailer of a length":  {lines("POST / HTTP/1.1", "Host: a.test", "Trailer: Content-Length", "Transfer-Encoding: chunked"), reasonTrailer},
	"no colon":             {lines("GET / HTTP/1.1", "Host: a.test", "nonsense"), reasonHeader},
	"too large":            {"GET / HTTP/1.1\r\nHost: a.test\r\nX: " + strings.Repeat("x", maxHead) + "\r\n\r\n", reasonHeaderTooLarge},
	"half":                 {"GET / HTTP/1.1\r\nHost: a.te", reasonTruncated},
}

func TestMalformedBody(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
	w.server(web, "a.test", false, helloHandler)
	for body, reason := range map[string]string{
		"4;ext=1\r\nabcd\r\n0\r\n\r\n":           reasonChunk,
		"4\nabcd\r\n0\r\n\r\n":                   reasonBareLF,
		"0x4\r\nabcd\r\n0\r\n\r\n":               reasonChunk,
		"4 \r\nabcd\r\n0\r\n\r\n":                reasonChunk,
		"4\r\nabcdX\r\n0\r\n\r\n":                reasonChunk,
		"ffffffffffffffffff\r\n":                 reasonChunk,
		"0\r\nContent-Length: 3\r\n\r\n":         reasonTrailer,
		"0\r\nHost: b.test\r\n\r\n":              reasonTrailer,
		"0\r\n folded\r\n\r\n":                   reasonObsFold,
		"4\r\nabcd\r\n0\r\n\r\nGET / HTTP/9\r\n": reasonVersion,
	} {
		c := w.dial(away)
		_, _ = io.WriteString(c, lines("POST / HTTP/1.1", "Host: a.test", "Transfer-Encoding: chunked")+body)
		_, _ = io.Copy(io.Discard, c)
		seen := map[string]int{w.record().Reason: 1} // of the request, and of what cut it short
		seen[w.record().Reason]++
		if seen[reason] != 1 {
			t.Errorf("%q: the records' reasons are %v, want %s", body, seen, reason)
		}
	}
	w.none()
}

// TestRate: what exceeds the rate waits, so it never comes where it can't.
func TestRate(t *testing.T) {
	var m meter
	m.set(sandbox.EgressLimits{BytesPerSecond: 1})
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for range minBurst / meterStep {
		if err := m.take(ctx, meterStep, &m.sent); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.take(ctx, meterStep, &m.sent); err == nil {
		t.Error("32 KiB within a minute at a byte a second")
	}
	m.set(sandbox.EgressLimits{})
	if err := m.take(ctx, meterStep, &m.sent); err != nil || !m.unlimited() {
		t.Error(err)
	}
}

// TestFlood: many connections at once are served or refused, each with one
// record, and none is left over (see start).
func TestFlood(t *testing.T) {
	p := rules(cidr(sandbox.EgressAllow, "203.0.113.0/24"), hosts(sandbox.EgressAllow, "a.test"))
	p.Limits.Connections = 20
	w := newWorld(t, p).start()
	w.listen(web, "", echo)
	w.server("203.0.113.20:80", "a.test", false, helloHandler)
	var wg sync.WaitGroup
	for n := range 200 {
		c, raw := w.dial([]string{web, away}[n%2]), n%2 == 0
		wg.Go(func() {
			if raw {
				_, _ = c.Write([]byte("ping"))
			} else {
				_, _ = io.WriteString(c, lines("GET / HTTP/1.1", "Host: a.test"))
			}
			_ = c.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, c)
		})
	}
	wg.Wait()
	for range 200 {
		w.record()
	}
	w.none()
}
