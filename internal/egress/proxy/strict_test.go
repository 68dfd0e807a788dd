package proxy

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"io"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"cloche.dev/cloche/internal/egress/audit"
	"cloche.dev/cloche/internal/sandbox"
)

func f2(s ...string) []hpack.HeaderField {
	var out []hpack.HeaderField
	for i := 0; i < len(s); i += 2 {
		out = append(out, hpack.HeaderField{Name: s[i], Value: s[i+1]})
	}
	return out
}

func block(fields []hpack.HeaderField) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, f := range fields {
		_ = e.WriteField(f)
	}
	return b.Bytes()
}

var good2 = []string{":method", "GET", ":scheme", "https", ":authority", "a.test", ":path", "/"}

func with2(more ...string) []hpack.HeaderField {
	return f2(append(append([]string(nil), good2...), more...)...)
}

var malformed2 = map[string]struct {
	fields []hpack.HeaderField
	reason string
}{
	"transfer-encoding":    {with2("transfer-encoding", "chunked"), reasonHopHeader},
	"connection":           {with2("connection", "close"), reasonHopHeader},
	"upgrade":              {with2("upgrade", "websocket"), reasonHopHeader},
	"te":                   {with2("te", "gzip"), reasonHopHeader},
	"CL twice":             {with2("content-length", "1", "content-length", "1"), reasonDuplicateCL},
	"bad CL":               {with2("content-length", "-1"), reasonCL},
	"other Host":           {with2("host", "b.test"), reasonHostMismatch},
	"two Hosts":            {with2("host", "a.test", "host", "a.test"), reasonDuplicateHost},
	"upper case":           {with2("X-Y", "z"), reasonHeader},
	"space in name":        {with2("x y", "z"), reasonHeader},
	"CRLF in value":        {with2("x", "a\r\nhost: b.test"), reasonHeader},
	"CRLF in name":         {with2("x: y\r\nz", "a"), reasonHeader},
	"late pseudo":          {with2("x", "y", ":path", "/z"), reasonPseudo},
	"two paths":            {with2(":path", "/z"), reasonPseudo},
	"unknown pseudo":       {with2(":status", "200"), reasonPseudo},
	"two authorities":      {with2(":authority", "b.test"), reasonPseudo},
	"no authority":         {f2(":method", "GET", ":scheme", "https", ":path", "/", "host", "a.test"), reasonNoHost},
	"empty authority":      {f2(":method", "GET", ":scheme", "https", ":authority", "", ":path", "/"), reasonNoHost},
	"user in authority":    {f2(":method", "GET", ":scheme", "https", ":authority", "u@a.test", ":path", "/"), reasonBadHost},
	"no path":              {f2(":method", "GET", ":scheme", "https", ":authority", "a.test"), reasonPseudo},
	"no method":            {f2(":scheme", "https", ":authority", "a.test", ":path", "/"), reasonPseudo},
	"method with CRLF":     {f2(":method", "GET / HTTP/1.1\r\n", ":scheme", "https", ":authority", "a.test", ":path", "/"), reasonPseudo},
	"path with a space":    {f2(":method", "GET", ":scheme", "https", ":authority", "a.test", ":path", "/ HTTP/1.1"), reasonTarget},
	"absolute path":        {f2(":method", "GET", ":scheme", "https", ":authority", "a.test", ":path", "https://b.test/"), reasonTarget},
	"asterisk":             {f2(":method", "OPTIONS", ":scheme", "https", ":authority", "a.test", ":path", "*"), reasonTarget},
	"http":                 {f2(":method", "GET", ":scheme", "http", ":authority", "a.test", ":path", "/"), reasonScheme},
	"CONNECT":              {f2(":method", "CONNECT", ":authority", "b.test:443"), reasonConnect},
	"extended CONNECT":     {f2(":method", "CONNECT", ":protocol", "websocket", ":scheme", "https", ":authority", "a.test", ":path", "/"), reasonConnect},
	"expect":               {with2("expect", "x"), reasonExpect},
	"announced CL":         {with2("trailer", "content-length"), reasonTrailer},
	"too large":            {with2("x", strings.Repeat("x", maxHead-10)), reasonHeaderTooLarge},
	"too large by indexes": {with2(repeated(1100)...), reasonHeaderTooLarge},
}

func repeated(n int) []string {
	var s []string
	for range n {
		s = append(s, "x", "the same value of some bytes, which the table holds")
	}
	return s
}

func TestMalformed2(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "*"))).start()
	for name, c := range malformed2 {
		conn := w.tls(tlsAway, "a.test", "h2")
		fr := h2client(conn)
		b := block(c.fields)
		first := min(len(b), 16000)
		_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: b[:first], EndStream: true, EndHeaders: first == len(b)})
		for b = b[first:]; len(b) > 0; {
			n := min(len(b), 16000)
			_ = fr.WriteContinuation(1, n == len(b), b[:n])
			b = b[n:]
		}
		_, _ = io.Copy(io.Discard, conn)
		if r := w.record(); r.Reason != c.reason || r.Verdict != audit.Denied || r.Kind != audit.HTTP || r.Host != "a.test" {
			t.Errorf("%s: the record is %+v, want %s", name, r, c.reason)
		}
	}
	if len(w.dialled()) != 0 {
		t.Error("a server was connected to")
	}
	w.none()
}

func h2client(c *tls.Conn) *http2.Framer {
	_, _ = io.WriteString(c, preface2)
	fr := http2.NewFramer(c, c)
	fr.AllowIllegalWrites = true
	_ = fr.WriteSettings()
	return fr
}

// TestFrames2: streams are decided one by one, and frames that could hide a
// block end the connection.
func TestFrames2(t *testing.T) {
	w := newWorld(t, rules(sandbox.EgressRule{Action: sandbox.EgressAllow, Hosts: []string{"a.test"}, Paths: []string{"/ok"}})).start()
	w.server(tlsWeb, "a.test", true, helloHandler)
	conn := w.tls(tlsAway, "a.test", "h2")
	fr := h2client(conn)
	var buf bytes.Buffer
	enc := hpack.NewEncoder(&buf) // one table for the connection, as clients have
	for n, path := range []string{"/ok", "/no", "/ok"} {
		buf.Reset()
		for _, f := range f2(":method", "GET", ":scheme", "https", ":authority", "a.test", ":path", path, "cookie", "a=b") {
			_ = enc.WriteField(f)
		}
		_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*n + 1), BlockFragment: buf.Bytes(), EndStream: true, EndHeaders: true, PadLength: 7, Priority: http2.PriorityParam{Weight: 3}})
	}
	fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	got := map[uint32]string{}
	for len(got) < 3 {
		f, err := fr.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if h, ok := f.(*http2.MetaHeadersFrame); ok {
			got[h.StreamID] = h.PseudoValue("status")
		}
	}
	if got[1] != "200" || got[3] != "403" || got[5] != "200" {
		t.Errorf("the answers are %v", got)
	}
	for range 3 {
		w.record()
	}
	for name, send := range map[string]func(*http2.Framer){
		"push":  func(fr *http2.Framer) { _ = fr.WriteRawFrame(http2.FramePushPromise, 4, 1, []byte{0, 0, 0, 2}) },
		"large": func(fr *http2.Framer) { _ = fr.WriteRawFrame(http2.FrameData, 0, 1, make([]byte, maxFrame+1)) },
		"between": func(fr *http2.Framer) {
			_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block(with2())})
			_ = fr.WritePing(false, [8]byte{})
		},
		"of another": func(fr *http2.Framer) {
			_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1})
			_ = fr.WriteContinuation(3, true, block(with2()))
		},
		"alone": func(fr *http2.Framer) { _ = fr.WriteContinuation(1, true, block(with2())) },
		"stream 0": func(fr *http2.Framer) {
			_ = fr.WriteHeaders(http2.HeadersFrameParam{BlockFragment: block(with2()), EndHeaders: true})
		},
		"server's stream": func(fr *http2.Framer) {
			_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 2, BlockFragment: block(with2()), EndHeaders: true})
		},
		"padding": func(fr *http2.Framer) {
			_ = fr.WriteRawFrame(http2.FrameHeaders, flagPadded|flagEndHeaders, 1, []byte{9, 1})
		},
	} {
		conn := w.tls(tlsAway, "a.test", "h2")
		send(h2client(conn))
		_, _ = io.Copy(io.Discard, conn)
		if r := w.record(); r.Reason != reasonFrame {
			t.Errorf("%s: the record is %+v", name, r)
		}
	}
	conn = w.tls(tlsAway, "a.test", "h2")
	_ = h2client(conn).WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0xff, 0xff, 0xff, 0xff, 0xff}, EndHeaders: true})
	_, _ = io.Copy(io.Discard, conn)
	if r := w.record(); r.Reason != reasonHPACK {
		t.Errorf("the record is %+v", r)
	}
	w.none()
}

// TestBodies2: a body that is not as long as was told ends the connection, and is
// told of once, however far the request has come.
func TestBodies2(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
	w.server(tlsWeb, "a.test", true, helloHandler)
	type part struct {
		data, pad int
		end       bool
	}
	for name, tt := range map[string]struct {
		length string
		parts  []part
		reason string
	}{
		"as told":           {"5", []part{{2, 0, false}, {3, 0, true}}, ""},
		"padded":            {"5", []part{{2, 9, false}, {3, 200, true}}, ""},
		"an empty one last": {"5", []part{{5, 0, false}, {0, 0, true}}, ""},
		"nothing":           {"0", []part{{0, 0, true}}, ""},
		"more":              {"5", []part{{2, 0, false}, {4, 0, true}}, reasonCL},
		"more, padded":      {"5", []part{{6, 7, false}}, reasonCL},
		"less":              {"5", []part{{4, 0, true}}, reasonCL},
		"where none was":    {"0", []part{{1, 0, true}}, reasonCL},
		"no body at all":    {"5", nil, reasonCL},
	} {
		conn := w.tls(tlsAway, "a.test", "h2")
		fr := h2client(conn)
		_ = fr.WriteHeaders(http2.HeadersFrameParam{
			StreamID: 1, EndHeaders: true, EndStream: tt.parts == nil,
			BlockFragment: block(f2(":method", "POST", ":scheme", "https", ":authority", "a.test", ":path", "/", "content-length", tt.length)),
		})
		for _, p := range tt.parts {
			if p.pad > 0 {
				_ = fr.WriteDataPadded(1, p.end, make([]byte, p.data), make([]byte, p.pad))
			} else {
				_ = fr.WriteData(1, p.end, make([]byte, p.data))
			}
		}
		if tt.reason != "" {
			_, _ = io.Copy(io.Discard, conn)
		}
		r := w.record()
		if r.Verdict == audit.Allowed && tt.reason != "" {
			r = w.record() // it was answered before the rest came, and what the rest was is told too
		}
		if r.Reason != tt.reason || r.Method != "POST" || r.Host != "a.test" {
			t.Errorf("%s: the record is %+v", name, r)
		}
		_ = conn.Close()
	}
	w.none()
}

// feedAll feeds a guard in pieces and returns what it let through.
func feedAll(g guard, b []byte, piece int) (string, []byte) {
	for len(b) > 0 {
		n := min(piece, len(b))
		if reason := g.feed(b[:n]); reason != "" {
			return reason, *g.passed()
		}
		b = b[n:]
	}
	return "", *g.passed()
}

// FuzzGuard1: what passes is the beginning of what came, doesn't depend on how
// it came, and net/http reads the same requests from it.
func FuzzGuard1(f *testing.F) {
	for _, c := range malformed {
		f.Add([]byte(c.head))
	}
	f.Add([]byte(lines("GET /a?b HTTP/1.1", "Host: a.test") + lines("POST http://a.test/ HTTP/1.1", "Host: a.test", "Transfer-Encoding: chunked", "Trailer: X") + "3\r\nabc\r\n0\r\nX: y\r\n\r\n" + upgrade))
	f.Fuzz(func(t *testing.T, in []byte) {
		g := &guard1{scheme: "http"}
		reason, out := feedAll(g, in, len(in))
		again := &guard1{scheme: "http"}
		if r, o := feedAll(again, in, 1); r != reason || !bytes.Equal(o, out) || again.requests != g.requests {
			t.Fatalf("in pieces: %s, %q; whole: %s, %q", r, o, reason, out)
		}
		if !bytes.HasPrefix(in, out) {
			t.Fatalf("%q became %q", in, out)
		}
		r := bufio.NewReader(bytes.NewReader(out))
		n := 0
		for {
			if _, err := r.Peek(1); err != nil {
				break
			}
			req, err := http.ReadRequest(r)
			if err != nil {
				t.Fatalf("net/http can't read %q: %v", out, err)
			}
			if n++; n > g.requests {
				t.Fatalf("net/http sees more than %d requests in %q", g.requests, out)
			}
			if _, err := io.Copy(io.Discard, req.Body); err != nil {
				if n < g.requests || g.state == inHead {
					t.Fatalf("the body in %q: %v", out, err)
				}
				break // it isn't whole
			}
		}
		if n != g.requests {
			t.Fatalf("net/http sees %d requests in %q, the guard %d", n, out, g.requests)
		}
	})
}

// FuzzGuard2: what passes is the beginning of what came, however it came.
func FuzzGuard2(f *testing.F) {
	for _, c := range malformed2 {
		var b bytes.Buffer
		b.WriteString(preface2)
		_ = http2.NewFramer(&b, nil).WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block(c.fields), EndHeaders: true})
		f.Add(b.Bytes())
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		reason, out := feedAll(newGuard2(), in, len(in))
		if r, o := feedAll(newGuard2(), in, 1); r != reason || !bytes.Equal(o, out) {
			t.Fatalf("in pieces: %s, %q; whole: %s, %q", r, o, reason, out)
		}
		if !bytes.HasPrefix(in, out) {
			t.Fatalf("%q became %q", in, out)
		}
	})
}

func FuzzText(f *testing.F) {
	f.Add("a\nb")
	f.Add(strings.Repeat("\u00e4", 400))
	f.Fuzz(func(t *testing.T, s string) {
		if out := text(s); len(out) > audit.MaxText || strings.ContainsAny(out, "\r\n\x00\x1b\u2028") {
			t.Fatalf("%q", out)
		}
	})
}

// TestUpdateCutsUnreadStream: a stream whose sandbox doesn't read is reset too.
func TestUpdateCutsUnreadStream(t *testing.T) {
	w := newWorld(t, rules(hosts(sandbox.EgressAllow, "a.test"))).start()
	w.server(tlsWeb, "a.test", true, func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.Copy(rw, zeros{}) })
	conn := w.tls(tlsAway, "a.test", "h2")
	fr := h2client(conn)
	_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block(with2()), EndStream: true, EndHeaders: true})
	const window = 65535
	for got := 0; ; {
		f, err := fr.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if d, ok := f.(*http2.DataFrame); ok {
			if got += len(d.Data()); got == window { // nothing more may come
				break
			}
		}
	}
	live := *w.p.live.Load()
	live.Policy = compile(t, rules(sandbox.EgressRule{Action: sandbox.EgressAllow, Hosts: []string{"a.test"}, Paths: []string{"/other"}}))
	w.p.Update(live)
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := f.(*http2.RSTStreamFrame); ok {
			break
		}
	}
	if r := w.record(); r.Verdict != audit.Denied || r.Reason != reasonPolicyChanged || r.Received == 0 {
		t.Errorf("the record is %+v", r)
	}
}

// TestTrackAsksAgain: a change between a decision and its flow isn't missed.
func TestTrackAsksAgain(t *testing.T) {
	w := newWorld(t, rules()).start()
	decided := w.p.live.Load()
	w.p.Update(Live{})
	var cut []string
	w.p.track(&flow{complies: func(l *Live) bool { return l.Policy != nil }, cut: func(reason string) { cut = append(cut, reason) }}, decided)()
	if len(cut) != 1 || cut[0] != reasonPolicyChanged {
		t.Errorf("it was cut for %v", cut)
	}
}
