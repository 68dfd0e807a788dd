package redteam

import (
	"strings"
)

const head = "POST /TOKEN HTTP/1.1\r\nHost: allowed.test\r\n"

// httpTechniques try to get around by what HTTP readers disagree about.
var httpTechniques = []technique{
	{
		name: "smuggle-cl-te", what: "Content-Length and Transfer-Encoding together", reason: "cl_te",
		steps: plain(allowed, head+"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG"),
	},
	{
		name: "smuggle-te-cl", what: "Transfer-Encoding and Content-Length together", reason: "cl_te",
		steps: plain(allowed, head+"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n1\r\nZ\r\n0\r\n\r\n"),
	},
	{
		name: "smuggle-te-twice", what: "two Transfer-Encodings", reason: "bad_te",
		steps: plain(allowed, head+"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n"),
	},
	{
		name: "smuggle-te-list", what: "Transfer-Encoding: identity, chunked", reason: "bad_te",
		steps: plain(allowed, head+"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n"),
	},
	{
		name: "smuggle-te-unknown", what: "Transfer-Encoding: xchunked", reason: "bad_te",
		steps: plain(allowed, head+"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"),
	},
	{
		name: "smuggle-te-space", what: "a blank before the colon of Transfer-Encoding", reason: "bad_header",
		steps: plain(allowed, head+"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
	},
	{
		name: "smuggle-te-1.0", what: "Transfer-Encoding in HTTP/1.0", reason: "bad_te",
		steps: plain(allowed, "POST /TOKEN HTTP/1.0\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
	},
	{
		name: "smuggle-cl-twice", what: "two lengths", reason: "duplicate_cl",
		steps: plain(allowed, head+"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab"),
	},
	{
		name: "smuggle-cl-list", what: "a length that is a list", reason: "bad_cl",
		steps: plain(allowed, head+"Content-Length: 1, 2\r\n\r\nab"),
	},
	{
		name: "smuggle-cl-sign", what: "a length with a sign", reason: "bad_cl",
		steps: plain(allowed, head+"Content-Length: +2\r\n\r\nab"),
	},
	{
		name: "smuggle-cl-hex", what: "a length in hexadecimal", reason: "bad_cl",
		steps: plain(allowed, head+"Content-Length: 0x2\r\n\r\nab"),
	},
	{
		name: "obs-fold", what: "a header that goes on in the next line", reason: "obs_fold",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\nX: y\r\n z\r\n\r\n"),
	},
	{
		name: "space-before-colon", what: "a blank before the colon of Host", reason: "bad_header",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost : front.test\r\nHost: allowed.test\r\n\r\n"),
	},
	{
		name: "space-before-header", what: "a blank before the first header", reason: "obs_fold",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\n Host: front.test\r\nHost: allowed.test\r\n\r\n"),
	},
	{
		name: "bare-lf", what: "lines that end without a carriage return", reason: "bare_lf",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\nHost: allowed.test\nX: y\n\n"),
	},
	{
		name: "bare-cr", what: "a carriage return within a header", reason: "bare_cr",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\nX: a\rHost: front.test\r\n\r\n"),
	},
	{
		name: "nul-in-header", what: "a zero byte in a header", reason: "bad_header",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\nX: a\x00b\r\n\r\n"),
	},
	{
		name: "nul-in-target", what: "a zero byte in the path", reason: "unknown_protocol",
		steps: plain(allowed, "GET /TOKEN\x00 HTTP/1.1\r\nHost: allowed.test\r\n\r\n"),
	},
	{
		name: "two-spaces", what: "a request line of four words", reason: "bad_request_line",
		steps: plain(allowed, "GET /TOKEN x HTTP/1.1\r\nHost: allowed.test\r\n\r\n"),
	},
	{name: "http-0.9", what: "a request of HTTP/0.9", reason: "unknown_protocol", steps: plain(allowed, "GET /TOKEN\r\n\r\n")},
	{
		name: "http-3.0", what: "a version that there is not", reason: "bad_version",
		steps: plain(allowed, "GET /TOKEN HTTP/3.0\r\nHost: allowed.test\r\n\r\n"),
	},
	{
		name: "header-oversized", what: "a header of a megabyte", reason: "header_too_large",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\nX: "+strings.Repeat("x", 1<<20)+"\r\n\r\n"),
	},
	{
		name: "connect", what: "CONNECT through an allowed server", reason: "connect",
		steps: plain(allowed, "CONNECT blocked.test:443 HTTP/1.1\r\nHost: allowed.test\r\nX: TOKEN\r\n\r\n"),
	},
	{
		name: "connect-tls", what: "CONNECT within TLS", reason: "connect",
		steps: secure(allowed, "allowed.test", "CONNECT blocked.test:443 HTTP/1.1\r\nHost: allowed.test\r\nX: TOKEN\r\n\r\n"),
	},
	{
		name: "upgrade-h2c", what: "an upgrade to HTTP/2 in clear", reason: "h2c",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"),
	},
	{
		name: "h2c-prior-knowledge", what: "HTTP/2 in clear at once", reason: "h2c",
		steps: plain(allowed, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nTOKEN"),
	},
	{
		name: "upgrade-other", what: "an upgrade to a protocol of one's own", reason: "upgrade",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: allowed.test\r\nConnection: Upgrade\r\nUpgrade: mine\r\n\r\n"),
	},
	{
		name: "websocket-blocked", what: "a WebSocket to a host that no rule has", reason: "denied_by_default",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: front.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"),
	},
	{
		name: "options-star", what: "OPTIONS * through the gateway", reason: "bad_target",
		steps: plain(allowed, "OPTIONS * HTTP/1.1\r\nHost: allowed.test\r\nX: TOKEN\r\n\r\n"),
	},

	{
		name: "path-dots", what: "a path that leaves the allowed prefix by ..", reason: "bad_path",
		steps: plain(allowed, "GET /ok/../TOKEN HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},
	{
		name: "path-dots-encoded", what: "the same, its dots encoded", reason: "bad_path",
		steps: plain(allowed, "GET /ok/%2e%2e/TOKEN HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},
	{
		name: "path-slash-encoded", what: "the same, its slash encoded", reason: "bad_path",
		steps: plain(allowed, "GET /ok/..%2fTOKEN HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},
	{
		name: "path-double-encoded", what: "the same, encoded twice", reason: "bad_path",
		steps: plain(allowed, "GET /ok/%252e%252e%252fTOKEN HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},
	{
		name: "path-backslash", what: "the same with a backslash", reason: "bad_path",
		steps: plain(allowed, "GET /ok/..\\TOKEN HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},
	{
		name: "path-double-slash", what: "an empty segment before the prefix", reason: "denied_by_default",
		steps: plain(allowed, "GET //TOKEN/ok/ HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},
	{
		name: "path-elsewhere", what: "a path that no rule has", reason: "denied_by_default",
		steps: plain(allowed, "GET /TOKEN HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},
	{
		name: "path-case", what: "another case of the prefix", reason: "denied_by_default",
		steps: plain(allowed, "GET /OK/TOKEN HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},
	{
		name: "method-other", what: "a method that no rule has", reason: "denied_by_default",
		steps: plain(allowed, "POST /ok/TOKEN HTTP/1.1\r\nHost: api.test\r\nContent-Length: 0\r\n\r\n"),
	},
	{
		name: "method-case", what: "another case of the method", reason: "denied_by_default",
		steps: plain(allowed, "get /ok/TOKEN HTTP/1.1\r\nHost: api.test\r\n\r\n"),
	},

	{
		name: "h2-crlf-in-header", what: "HTTP/2: line breaks in a header", reason: "bad_header",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/TOKEN", "x", "a\r\nHost: front.test")),
	},
	{
		name: "h2-crlf-in-path", what: "HTTP/2: line breaks in the path", reason: "bad_pseudo_header",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/TOKEN HTTP/1.1\r\nHost: front.test\r\n\r\n")),
	},
	{
		name: "h2-te", what: "HTTP/2: Transfer-Encoding, for who translates it", reason: "connection_header",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/TOKEN", "transfer-encoding", "chunked", "body", "0\r\n\r\nGET / HTTP/1.1\r\n")),
	},
	{
		name: "h2-cl", what: "HTTP/2: a length that is not the body's", reason: "bad_cl",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/TOKEN", "content-length", "1", "body", "GET /TOKEN HTTP/1.1")),
	},
	{
		name: "h2-connect", what: "HTTP/2: CONNECT", reason: "connect",
		steps: frames(allowed, "allowed.test", []string{":method", "CONNECT", ":authority", "blocked.test:443", "x", "TOKEN"}),
	},
	{
		name: "h2-upper-case", what: "HTTP/2: a header in upper case", reason: "bad_header",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/TOKEN", "X-Upper", "y")),
	},
	{
		name: "h2-scheme", what: "HTTP/2: another scheme", reason: "bad_scheme",
		steps: frames(allowed, "allowed.test", []string{":method", "GET", ":scheme", "ftp", ":authority", "allowed.test", ":path", "/TOKEN"}),
	},
	{
		name: "h2-path-twice", what: "HTTP/2: two paths", reason: "bad_pseudo_header",
		steps: frames(allowed, "allowed.test", get("allowed.test", "/", ":path", "/TOKEN")),
	},
	{
		name: "h2-path", what: "HTTP/2: a path that no rule has", reason: "bad_path",
		steps: frames(allowed, "api.test", get("api.test", "/ok/../TOKEN")),
	},
}
