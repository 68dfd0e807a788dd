package proxy

import (
	"net/url"
	"strings"
)

// The reasons for which a message is refused before anything is decided about
// it: it could be understood in two ways, or asks for what isn't spoken here.
const (
	reasonHeaderTooLarge = "header_too_large"
	reasonTruncated      = "truncated_request"
	reasonBareLF         = "bare_lf"
	reasonBareCR         = "bare_cr"
	reasonObsFold        = "obs_fold"
	reasonRequestLine    = "bad_request_line"
	reasonVersion        = "bad_version"
	reasonTarget         = "bad_target"
	reasonHeader         = "bad_header"
	reasonNoHost         = "no_host"
	reasonDuplicateHost  = "duplicate_host"
	reasonBothLengths    = "cl_te"
	reasonDuplicateCL    = "duplicate_cl"
	reasonCL             = "bad_cl"
	reasonTE             = "bad_te"
	reasonChunk          = "bad_chunk"
	reasonTrailer        = "bad_trailer"
	reasonExpect         = "bad_expect"
	reasonConnect        = "connect"
	reasonUpgrade        = "upgrade"
	reasonH2C            = "h2c"
	reasonEarlyData      = "upgrade_early_data"
	reasonHopHeader      = "connection_header" // in HTTP/2
	reasonPseudo         = "bad_pseudo_header"
	reasonScheme         = "bad_scheme"
	reasonFrame          = "bad_frame"
	reasonHPACK          = "bad_hpack"
	reasonNotServed      = "not_served" // requests that came after the end, or that the protocol's limits refused
)

// maxHead bounds a request's head: its line and fields, or a block of HTTP/2.
const maxHead = 64 << 10

// maxTrailer bounds the fields behind a body.
const maxTrailer = 8 << 10

// field is one header field.
type field struct{ name, value string }

// head is what a request says before its body.
type head struct {
	method, target, host string
	length               int64 // of the body; -1 where it is chunked
	upgrade              bool  // to a WebSocket
}

// path is the target without query, for records.
func (h *head) path() string {
	p, _, _ := strings.Cut(h.target, "?")
	return p
}

// isTokenByte tells whether c may stand in a method or a field's name.
func isTokenByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

func isToken(s string) bool {
	for i := range len(s) {
		if !isTokenByte(s[i]) {
			return false
		}
	}
	return s != ""
}

// isValue tells whether s has no control bytes but tabs.
func isValue(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// checkHost tells whether s may be a Host or an authority. Addresses may, here:
// the policy refuses them.
func checkHost(s string) string {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', strings.IndexByte("-._:[]", c) >= 0:
		default:
			return reasonBadHost
		}
	}
	if s == "" {
		return reasonNoHost
	}
	return ""
}

// checkTarget checks a request's target. An absolute one has to name the
// scheme and the host that the rest of the request does.
func checkTarget(target, scheme, host string) string {
	for i := range len(target) {
		if c := target[i]; c <= ' ' || c == 0x7f || c == '#' {
			return reasonTarget
		}
	}
	if target != "" && target[0] != '/' {
		u, ok := cutPrefixFold(target, scheme+"://")
		if !ok {
			return reasonTarget
		}
		end := strings.IndexAny(u, "/?")
		if end < 0 {
			end = len(u)
		}
		if !strings.EqualFold(u[:end], host) {
			return reasonHostMismatch
		}
	}
	if _, err := url.ParseRequestURI(target); err != nil {
		return reasonTarget
	}
	return ""
}

func cutPrefixFold(s, prefix string) (string, bool) {
	if len(s) < len(prefix) || !strings.EqualFold(s[:len(prefix)], prefix) {
		return s, false
	}
	return s[len(prefix):], true
}

// parseLength reads a Content-Length.
func parseLength(s string) (int64, bool) {
	if s == "" || len(s) > 18 {
		return 0, false
	}
	n := int64(0)
	for i := range len(s) {
		if s[i] < '0' || s[i] > '9' {
			return 0, false
		}
		n = n*10 + int64(s[i]-'0')
	}
	return n, true
}

// hasToken tells whether one of a list's elements is token.
func hasToken(list, token string) bool {
	for part := range strings.SplitSeq(list, ",") {
		if strings.EqualFold(strings.Trim(part, " \t"), token) {
			return true
		}
	}
	return false
}

// notTrailers are fields that must not come behind a body, where they were
// decided about already.
var notTrailers = []string{
	"host", "content-length", "transfer-encoding", "trailer", "te", "connection", "upgrade", "expect", "authorization",
	"cookie", "content-encoding", "content-type", "content-range", "keep-alive", "cache-control", "range", "max-forwards",
}

// checkTrailer checks one field that came behind a body, or the announcement
// of one.
func checkTrailer(f field) string {
	if !isToken(f.name) || !isValue(f.value) || len(f.name) > 256 {
		return reasonTrailer
	}
	for _, name := range notTrailers {
		if strings.EqualFold(name, f.name) {
			return reasonTrailer
		}
	}
	if _, ok := cutPrefixFold(f.name, "proxy-"); ok {
		return reasonTrailer
	}
	return ""
}
