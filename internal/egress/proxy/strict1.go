package proxy

import (
	"bytes"
	"strings"
	"sync/atomic"
)

// guard1 stands before the HTTP/1 server. It is fed what a sandbox sends and
// lets whole heads and framed bodies through as they are, if they can be
// understood in one way only: the server behind it, and whoever gets what it
// sends on, then see the same requests as it does.
type guard1 struct {
	scheme   string
	out      []byte // what may go on
	state    state1
	part     []byte // of a head, a chunk's size or trailers
	line     int    // where the current line of part begins
	remain   int64  // of a body or chunk
	last     head
	requests int
	raw      atomic.Bool // the server has switched protocols
}

type state1 int

const (
	inHead state1 = iota
	inBody
	inChunkSize
	inChunk
	inChunkEnd
	inTrailer
	inUpgrade // nothing may come before the server has switched
)

// maxChunkSize bounds the line of a chunk's size: 15 digits, and its end.
const maxChunkSize = 17

// passed implements guard.
func (g *guard1) passed() *[]byte { return &g.out }

// partial implements guard.
func (g *guard1) partial() bool { return g.state == inHead && len(g.part) > 0 }

// seen implements guard.
func (g *guard1) seen() (int, head) { return g.requests, g.last }

// feed implements guard.
func (g *guard1) feed(b []byte) string {
	for len(b) > 0 {
		if g.raw.Load() {
			g.out = append(g.out, b...)
			return ""
		}
		var reason string
		switch g.state {
		case inUpgrade:
			return reasonEarlyData
		case inBody, inChunk:
			b = g.body(b)
		case inHead:
			b, reason = g.lines(b, maxHead, g.headLine)
		case inTrailer:
			b, reason = g.lines(b, maxTrailer, g.trailerLine)
		default:
			b, reason = g.lines(b, maxChunkSize, g.chunkLine)
		}
		if reason != "" {
			return reason
		}
	}
	return ""
}

// body lets through what is left of a body or chunk.
func (g *guard1) body(b []byte) []byte {
	n := int(min(int64(len(b)), g.remain))
	g.out = append(g.out, b[:n]...)
	g.remain -= int64(n)
	if g.remain == 0 {
		if g.state == inChunk {
			g.state = inChunkEnd
		} else {
			g.state = inHead
		}
	}
	return b[n:]
}

// lines collects bytes in part until done says that what they are is complete;
// it is called with each line, without its end.
func (g *guard1) lines(b []byte, most int, done func(line []byte) (bool, string)) ([]byte, string) {
	for i, c := range b {
		if len(g.part) >= most {
			return nil, g.tooLong()
		}
		if reason := g.checkByte(c); reason != "" {
			return nil, reason
		}
		g.part = append(g.part, c)
		if c != '\n' {
			continue
		}
		line := g.part[g.line : len(g.part)-2]
		g.line = len(g.part)
		complete, reason := done(line)
		if reason != "" {
			return nil, reason
		}
		if complete {
			g.out = append(g.out, g.part...)
			g.part, g.line = g.part[:0], 0
			return b[i+1:], ""
		}
	}
	return nil, ""
}

func (g *guard1) tooLong() string {
	switch g.state {
	case inHead:
		return reasonHeaderTooLarge
	case inTrailer:
		return reasonTrailer
	default:
		return reasonChunk
	}
}

// checkByte refuses what no line has: a CR or LF alone, and control bytes.
func (g *guard1) checkByte(c byte) string {
	cr := len(g.part) > g.line && g.part[len(g.part)-1] == '\r'
	switch {
	case c == '\n' && !cr:
		return reasonBareLF
	case c != '\n' && cr:
		return reasonBareCR
	case c < ' ' && c != '\t' && c != '\r' && c != '\n', c == 0x7f:
		if g.state == inHead && g.line == 0 {
			return reasonUnknownProtocol
		}
		return reasonHeader
	}
	return ""
}

// headLine looks at the request line at once, since what isn't HTTP may wait
// for an answer, and at the rest when it is whole.
func (g *guard1) headLine(line []byte) (bool, string) {
	if len(g.part) == len(line)+2 {
		g.last = head{}
		_, reason := g.last.requestLine(string(line))
		return false, reason
	}
	if len(line) > 0 {
		return false, ""
	}
	h, reason := parseHead(g.part, g.scheme)
	g.last = h
	if reason != "" {
		return false, reason
	}
	g.requests++
	switch {
	case h.upgrade:
		g.state = inUpgrade
	case h.length < 0:
		g.state = inChunkSize
	case h.length > 0:
		g.state, g.remain = inBody, h.length
	}
	return true, ""
}

// chunkLine reads a chunk's size (extensions are refused: nobody needs them,
// and servers disagree about them), or the end of its data.
func (g *guard1) chunkLine(line []byte) (bool, string) {
	if g.state == inChunkEnd {
		if len(line) > 0 {
			return false, reasonChunk
		}
		g.state = inChunkSize
		return true, ""
	}
	size := int64(0)
	for _, c := range line {
		digit := strings.IndexByte("0123456789abcdef", c|0x20)
		if digit < 0 || c < '0' {
			return false, reasonChunk
		}
		size = size<<4 | int64(digit)
	}
	switch {
	case len(line) == 0:
		return false, reasonChunk
	case size == 0:
		g.state = inTrailer
	default:
		g.state, g.remain = inChunk, size
	}
	return true, ""
}

// trailerLine checks one line behind the last chunk.
func (g *guard1) trailerLine(line []byte) (bool, string) {
	if len(line) == 0 {
		g.state = inHead
		return true, ""
	}
	f, reason := parseField(string(line))
	if reason != "" {
		return false, reason
	}
	return false, checkTrailer(f)
}

// parseHead reads a whole head, each of whose lines ends with CR LF.
func parseHead(b []byte, scheme string) (h head, reason string) {
	lines := strings.Split(string(bytes.TrimSuffix(b, []byte("\r\n\r\n"))), "\r\n")
	minor, reason := h.requestLine(lines[0])
	if reason != "" {
		return h, reason
	}
	fields := make([]field, 0, len(lines))
	for _, line := range lines[1:] {
		f, reason := parseField(line)
		if reason != "" {
			return h, reason
		}
		fields = append(fields, f)
	}
	if reason := h.hostOf(fields); reason != "" {
		return h, reason
	}
	if reason := checkTarget(h.target, scheme, h.host); reason != "" {
		return h, reason
	}
	if reason := h.framing(fields, minor); reason != "" {
		return h, reason
	}
	return h, h.wishes(fields, minor)
}

// requestLine reads "METHOD target HTTP/1.x".
func (h *head) requestLine(line string) (minor int, reason string) {
	parts := strings.Split(line, " ")
	if len(parts) != 3 || !strings.HasPrefix(parts[2], "HTTP/") {
		if len(parts) > 3 && strings.HasPrefix(parts[len(parts)-1], "HTTP/") {
			return 0, reasonRequestLine
		}
		return 0, reasonUnknownProtocol
	}
	h.method, h.target = parts[0], parts[1]
	switch {
	case line == "PRI * HTTP/2.0":
		return 0, reasonH2C
	case parts[2] != "HTTP/1.1" && parts[2] != "HTTP/1.0":
		return 0, reasonVersion
	case !isToken(h.method):
		return 0, reasonRequestLine
	case h.method == "CONNECT":
		return 0, reasonConnect
	case h.target == "":
		return 0, reasonTarget
	}
	return int(parts[2][len("HTTP/1.")] - '0'), ""
}

// parseField reads "name: value".
func parseField(line string) (field, string) {
	if line != "" && (line[0] == ' ' || line[0] == '\t') {
		return field{}, reasonObsFold
	}
	name, value, ok := strings.Cut(line, ":")
	value = strings.Trim(value, " \t")
	if !ok || !isToken(name) || !isValue(value) {
		return field{}, reasonHeader
	}
	return field{name, value}, ""
}

// hostOf wants exactly one Host, of HTTP/1.0 too.
func (h *head) hostOf(fields []field) string {
	n := 0
	for _, f := range fields {
		if strings.EqualFold(f.name, "Host") {
			h.host = f.value
			n++
		}
	}
	switch {
	case n == 0:
		return reasonNoHost
	case n > 1:
		return reasonDuplicateHost
	}
	return checkHost(h.host)
}

// framing finds out how long the body is (RFC 9112, section 6), where nobody
// can find out otherwise.
func (h *head) framing(fields []field, minor int) string {
	var lengths, codings []string
	for _, f := range fields {
		switch {
		case strings.EqualFold(f.name, "Content-Length"):
			lengths = append(lengths, f.value)
		case strings.EqualFold(f.name, "Transfer-Encoding"):
			codings = append(codings, f.value)
		}
	}
	switch {
	case len(codings) > 0 && len(lengths) > 0:
		return reasonBothLengths
	case len(codings) > 1, len(codings) == 1 && (minor == 0 || !strings.EqualFold(codings[0], "chunked")):
		return reasonTE
	case len(codings) == 1:
		h.length = -1
	case len(lengths) > 1:
		return reasonDuplicateCL
	case len(lengths) == 1:
		n, ok := parseLength(lengths[0])
		if !ok {
			return reasonCL
		}
		h.length = n
	}
	return ""
}

// wishes looks at what a request wants besides an answer.
func (h *head) wishes(fields []field, minor int) string {
	var upgrades []string
	connection := ""
	for _, f := range fields {
		switch strings.ToLower(f.name) {
		case "upgrade":
			upgrades = append(upgrades, f.value)
		case "connection":
			connection += "," + f.value
		case "http2-settings":
			return reasonH2C
		case "expect":
			if !strings.EqualFold(f.value, "100-continue") || minor == 0 {
				return reasonExpect
			}
		case "trailer":
			if h.length >= 0 {
				return reasonTrailer
			}
			for name := range strings.SplitSeq(f.value, ",") {
				if reason := checkTrailer(field{name: strings.Trim(name, " \t")}); reason != "" {
					return reason
				}
			}
		}
	}
	if len(upgrades) == 0 {
		return ""
	}
	switch {
	case hasToken(strings.Join(upgrades, ","), "h2c"):
		return reasonH2C
	case len(upgrades) > 1, !strings.EqualFold(upgrades[0], "websocket"), !hasToken(connection, "upgrade"), h.method != "GET", minor == 0, h.length != 0:
		return reasonUpgrade
	}
	h.upgrade = true
	return ""
}
