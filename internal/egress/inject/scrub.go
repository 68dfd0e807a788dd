package inject

import (
	"errors"
	"io"
	"net/http"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// chunk is how much of a body is searched at once.
const chunk = 16 << 10

// Scrub takes what the request was given out of its answer: at once out of the
// headers, and out of the body and the trailers as they are read. An answer
// whose body is encoded is refused (secret_encoded, of class Denied) and must
// not be passed on.
func (a *Applied) Scrub(resp *http.Response) error {
	if a == nil || len(a.names) == 0 {
		return nil
	}
	if hasBody(resp) {
		for _, v := range resp.Header.Values("Content-Encoding") {
			for e := range strings.SplitSeq(v, ",") {
				if e = strings.TrimSpace(e); e != "" && !strings.EqualFold(e, "identity") {
					return sandbox.Errorf(sandbox.Denied, "secret_encoded", "the server encoded its answer although it was told not to, and secrets can't be taken out of it").
						WithHint("a host that gets secrets has to honour Accept-Encoding: identity")
				}
			}
		}
	}
	if len(a.patterns) == 0 {
		return nil
	}
	resp.Status = a.text(resp.Status)
	a.ScrubHeader(resp.Header)
	a.ScrubHeader(resp.Trailer)
	if resp.Body == nil || resp.Body == http.NoBody {
		return nil
	}
	b := &body{inner: resp.Body, applied: a, ended: func() { a.ScrubHeader(resp.Trailer) }}
	if resp.ContentLength < 0 || resp.StatusCode == http.StatusSwitchingProtocols {
		b.live = min(4, a.shortest/4)
	}
	resp.Body = b
	if w, ok := b.inner.(io.Writer); ok && resp.StatusCode == http.StatusSwitchingProtocols {
		resp.Body = &duplex{b, w}
	}
	return nil
}

func hasBody(resp *http.Response) bool {
	switch {
	case resp.Request != nil && resp.Request.Method == http.MethodHead,
		resp.StatusCode == http.StatusNoContent, resp.StatusCode == http.StatusNotModified:
		return false
	}
	return true
}

// ScrubHeader takes what the request was given out of h: the headers of an
// interim answer (1xx), of which Scrub sees nothing.
func (a *Applied) ScrubHeader(h http.Header) {
	if a == nil || len(a.patterns) == 0 {
		return
	}
	for k, values := range h {
		// A name's case changes on the way: it is compared without.
		if low := []byte(strings.ToLower(k)); a.holds(low) {
			delete(h, k)
			continue
		}
		for n := range values {
			values[n] = a.text(values[n])
		}
	}
}

// holds tells whether a name in lower case is or has a value of ours in it.
func (a *Applied) holds(low []byte) bool {
	for _, p := range a.patterns {
		if len(p.text) <= len(low) && strings.Contains(string(low), strings.ToLower(string(p.text))) {
			return true
		}
	}
	return false
}

// text is a whole text without what the request was given.
func (a *Applied) text(s string) string {
	if len(s) < minScrub {
		return s
	}
	out := []byte(s)
	a.last(out, search(a.patterns, []byte(s), out))
	return string(out)
}

// last covers the beginning of a value that the end of a text cut off, if it
// is long enough to be one.
func (a *Applied) last(out []byte, open int) {
	if open >= minScrub {
		cover(out, len(out)-open, len(out))
	}
}

// body searches what is read through it. It keeps back no more than what may
// be the beginning of a value, until more of it comes. Where an answer has no end to wait
// for (an event stream, a WebSocket), the first few bytes of a value (live; at
// most 4, and a quarter of it) are not kept back: else a message that ends
// like that would never be whole, and both ends would wait.
type body struct {
	inner   io.ReadCloser
	applied *Applied
	ended   func() // called once before the end is told
	live    int

	in        []byte
	text, out []byte // what is still to be searched, as it was and as it will be
	given     int    // bytes of out that were given already
	buf       []byte // holds ready
	ready     []byte // to be read
	err       error  // to be told when ready is empty
}

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for len(b.ready) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		b.fill()
	}
	n := copy(p, b.ready)
	b.ready = b.ready[n:]
	return n, nil
}

// fill reads once.
func (b *body) fill() {
	if b.in == nil {
		b.in = make([]byte, chunk)
	}
	n, err := b.inner.Read(b.in)
	b.err = err
	b.text, b.out = append(b.text, b.in[:n]...), append(b.out, b.in[:n]...)
	open := search(b.applied.patterns, b.text, b.out)
	keep := len(b.out) - open // what stands from here on stays
	give := keep
	switch {
	case errors.Is(err, io.EOF):
		b.applied.last(b.out, open)
		give = len(b.out)
	case err == nil && open <= b.live:
		give = len(b.out)
	}
	b.buf = append(b.buf[:0], b.out[min(b.given, give):give]...)
	b.ready = b.buf
	b.given = max(b.given, give) - keep
	b.text = append(b.text[:0], b.text[keep:]...)
	b.out = append(b.out[:0], b.out[keep:]...)
	if err != nil && b.ended != nil {
		b.ended()
		b.ended = nil
	}
}

// Close implements io.Closer.
func (b *body) Close() error { return b.inner.Close() }

// duplex is the body of an answer that switched protocols.
type duplex struct {
	*body
	io.Writer
}
