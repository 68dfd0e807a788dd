package proxy

import (
	"encoding/binary"
	"strings"

	"golang.org/x/net/http2/hpack"
)

// guard2 stands before the HTTP/2 server as guard1 does before the other: it
// reads the frames that pass, and decodes each block of header fields before
// it goes on, so that what the server would refuse by itself is refused here,
// with a reason and a record.
type guard2 struct {
	out      []byte
	part     []byte // the preface, a frame's header, or a frame that is held
	prefaced bool
	remain   int // of a frame that passes as it comes
	block    []byte
	held     []byte // the frames of block
	stream   uint32 // of block; 0: none is open
	newest   uint32
	decoder  *hpack.Decoder
	fields   []field
	size     int
	last     head
	requests int
}

const preface2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

const (
	frameHeader = 9
	maxFrame    = 16 << 10 // what our SETTINGS allow

	frameHeaders      = 0x1
	framePushPromise  = 0x5
	frameContinuation = 0x9

	flagEndStream  = 0x1
	flagEndHeaders = 0x4
	flagPadded     = 0x8
	flagPriority   = 0x20

	headerTable = 4096 // both ends' default, which our SETTINGS leave
)

func newGuard2() *guard2 {
	g := &guard2{}
	g.decoder = hpack.NewDecoder(headerTable, g.emit)
	g.decoder.SetMaxStringLength(maxHead)
	return g
}

// emit is called with each field of a block.
func (g *guard2) emit(f hpack.HeaderField) {
	g.size += int(f.Size())
	if g.size <= maxHead {
		g.fields = append(g.fields, field{f.Name, f.Value})
	}
}

// passed implements guard.
func (g *guard2) passed() *[]byte { return &g.out }

// partial implements guard.
func (g *guard2) partial() bool { return g.stream != 0 }

// seen implements guard.
func (g *guard2) seen() (int, head) { return g.requests, g.last }

// feed implements guard.
func (g *guard2) feed(b []byte) string {
	for len(b) > 0 {
		if g.remain > 0 {
			n := min(len(b), g.remain)
			g.out = append(g.out, b[:n]...)
			g.remain -= n
			b = b[n:]
			continue
		}
		want := frameHeader
		switch {
		case !g.prefaced:
			want = len(preface2)
		case len(g.part) >= frameHeader:
			want = frameHeader + frameLength(g.part)
		}
		n := min(len(b), want-len(g.part))
		g.part = append(g.part, b[:n]...)
		b = b[n:]
		if len(g.part) < want {
			continue
		}
		if reason := g.whole(); reason != "" {
			return reason
		}
	}
	return ""
}

func frameLength(b []byte) int { return int(b[0])<<16 | int(b[1])<<8 | int(b[2]) }

// whole is called when part is the preface, a frame's header, or a frame with
// header fields.
func (g *guard2) whole() string {
	if !g.prefaced {
		if string(g.part) != preface2 {
			return reasonUnknownProtocol
		}
		g.prefaced = true
		g.pass()
		return ""
	}
	length, kind, flags := frameLength(g.part), g.part[3], g.part[4]
	stream := binary.BigEndian.Uint32(g.part[5:9]) & (1<<31 - 1)
	switch {
	case length > maxFrame, kind == framePushPromise:
		return reasonFrame
	case (kind == frameContinuation) != (g.stream != 0), kind == frameContinuation && stream != g.stream:
		return reasonFrame // a block's frames follow each other
	case kind != frameHeaders && kind != frameContinuation:
		g.pass()
		g.remain = length
		return ""
	case len(g.part) < frameHeader+length:
		return "" // until all of it is there
	}
	payload, ok := fragment(g.part[frameHeader:], kind, flags)
	if !ok || stream == 0 {
		return reasonFrame
	}
	g.stream = stream
	g.block = append(g.block, payload...)
	g.held = append(g.held, g.part...)
	g.part = g.part[:0]
	if len(g.held) > maxHead {
		return reasonHeaderTooLarge
	}
	if flags&flagEndHeaders == 0 {
		return ""
	}
	if reason := g.fieldsOf(stream); reason != "" {
		return reason
	}
	g.out = append(g.out, g.held...)
	g.block, g.held, g.stream = g.block[:0], g.held[:0], 0
	return ""
}

func (g *guard2) pass() {
	g.out = append(g.out, g.part...)
	g.part = g.part[:0]
}

// fragment is the part of a frame that belongs to the block.
func fragment(p []byte, kind, flags byte) ([]byte, bool) {
	if kind != frameHeaders {
		return p, true
	}
	pad := 0
	if flags&flagPadded != 0 {
		if len(p) == 0 {
			return nil, false
		}
		pad, p = int(p[0]), p[1:]
	}
	if flags&flagPriority != 0 {
		if len(p) < 5 {
			return nil, false
		}
		p = p[5:]
	}
	if pad > len(p) {
		return nil, false
	}
	return p[:len(p)-pad], true
}

// fieldsOf decodes a block: a new stream's request, or an open one's trailers.
func (g *guard2) fieldsOf(stream uint32) string {
	g.fields, g.size = g.fields[:0], 0
	if _, err := g.decoder.Write(g.block); err != nil {
		return reasonHPACK
	}
	if err := g.decoder.Close(); err != nil {
		return reasonHPACK
	}
	if g.size > maxHead {
		return reasonHeaderTooLarge
	}
	if stream <= g.newest {
		for _, f := range g.fields {
			if reason := checkTrailer(f); reason != "" || strings.ToLower(f.name) != f.name {
				return reasonTrailer
			}
		}
		return ""
	}
	if stream%2 == 0 {
		return reasonFrame
	}
	g.newest = stream
	h, reason := parseFields(g.fields)
	g.last = h
	if reason == "" {
		g.requests++
	}
	return reason
}

// parseFields checks a request's fields (RFC 9113, section 8.3).
func parseFields(fields []field) (h head, reason string) {
	pseudo := map[string]string{}
	regular := fields
	for i, f := range fields {
		if !strings.HasPrefix(f.name, ":") {
			break
		}
		regular = fields[i+1:]
		if _, twice := pseudo[f.name]; twice || !isValue(f.value) {
			return h, reasonPseudo
		}
		pseudo[f.name] = f.value
	}
	h.method, h.target, h.host = pseudo[":method"], pseudo[":path"], pseudo[":authority"]
	scheme := pseudo[":scheme"]
	if _, ok := pseudo[":protocol"]; ok || h.method == "CONNECT" {
		return h, reasonConnect
	}
	if !isToken(h.method) || len(pseudo) > 4 {
		return h, reasonPseudo
	}
	if _, ok := pseudo[":authority"]; !ok {
		return h, reasonNoHost
	}
	if len(pseudo) != 4 {
		return h, reasonPseudo
	}
	if scheme != "https" { // there is no HTTP/2 here without TLS
		return h, reasonScheme
	}
	if reason := checkHost(h.host); reason != "" {
		return h, reason
	}
	if h.target == "" || h.target[0] != '/' {
		return h, reasonTarget
	}
	if reason := checkTarget(h.target, scheme, h.host); reason != "" {
		return h, reason
	}
	return h, h.regular(regular)
}

// regular checks the fields behind the pseudo-header ones.
func (h *head) regular(fields []field) string {
	lengths, hosts := 0, 0
	for _, f := range fields {
		if strings.HasPrefix(f.name, ":") {
			return reasonPseudo
		}
		if !isToken(f.name) || strings.ToLower(f.name) != f.name || !isValue(f.value) || strings.Trim(f.value, " \t") != f.value {
			return reasonHeader
		}
		switch f.name {
		case "host":
			if hosts++; hosts > 1 {
				return reasonDuplicateHost
			}
			if !strings.EqualFold(f.value, h.host) {
				return reasonHostMismatch
			}
		case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade", "http2-settings":
			return reasonHopHeader
		case "te":
			if f.value != "trailers" {
				return reasonHopHeader
			}
		case "content-length":
			n, ok := parseLength(f.value)
			if lengths++; lengths > 1 {
				return reasonDuplicateCL
			}
			if !ok {
				return reasonCL
			}
			h.length = n
		case "expect":
			if !strings.EqualFold(f.value, "100-continue") {
				return reasonExpect
			}
		case "trailer":
			for name := range strings.SplitSeq(f.value, ",") {
				if reason := checkTrailer(field{name: strings.Trim(name, " \t")}); reason != "" {
					return reason
				}
			}
		}
	}
	return ""
}
