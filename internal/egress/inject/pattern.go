package inject

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"html"
	"slices"
	"strings"
	"sync"
)

// minScrub is the length from which on a value is searched for: a shorter one
// would be found everywhere.
const minScrub = 8

// pattern is one text that must not reach the sandbox.
type pattern struct {
	text []byte
	fail []int32 // of Knuth, Morris and Pratt: by length, the longest proper border
}

// patternsOf are the forms in which a value is searched for.
func patternsOf(value []byte) []*pattern {
	if len(value) < minScrub {
		return nil
	}
	s := string(value)
	forms := []string{s, strings.ReplaceAll(s, " ", "+"), strings.ReplaceAll(s, "/", `\/`), jsonEscape(s), html.EscapeString(s)}
	for shift := range 3 {
		std := aligned(base64.RawStdEncoding, value, shift)
		forms = append(forms, std, strings.ReplaceAll(std, "/", `\/`), aligned(base64.RawURLEncoding, value, shift))
	}
	slices.Sort(forms)
	var out []*pattern
	for _, f := range slices.Compact(forms) {
		out = append(out, newPattern([]byte(f)))
	}
	return out
}

func jsonEscape(s string) string {
	b, err := json.Marshal(s)
	if err != nil || !strings.Contains(string(b), `\`) {
		return s
	}
	return string(b[1 : len(b)-1])
}

// aligned is what base64 makes of value behind shift other bytes (modulo 3):
// the characters that depend on nothing else.
func aligned(enc *base64.Encoding, value []byte, shift int) string {
	s := enc.EncodeToString(append(make([]byte, shift), value...))
	return s[(8*shift+5)/6 : (8*(shift+len(value)))/6]
}

func newPattern(text []byte) *pattern {
	p := &pattern{text: text, fail: make([]int32, len(text)+1)}
	k := int32(0)
	for n := 1; n < len(text); n++ {
		for k > 0 && text[n] != text[k] {
			k = p.fail[k]
		}
		if text[n] == text[k] {
			k++
		}
		p.fail[n+1] = k
	}
	return p
}

// begun is the length of the longest end of b that p begins with, short of the
// whole of p.
func (p *pattern) begun(b []byte) int {
	b = b[max(0, len(b)-len(p.text)+1):]
	k := int32(0)
	for _, c := range b {
		for k > 0 && c != p.text[k] {
			k = p.fail[k]
		}
		if c == p.text[k] {
			k++
		}
	}
	return int(k)
}

// cover writes over b[from:to].
func cover(b []byte, from, to int) {
	const mark = "[redacted]"
	b = b[from:to]
	for n := range b {
		b[n] = '*'
	}
	if len(b) > len(mark) {
		copy(b, mark)
	}
}

// found calls hit for each range of text that is one of the patterns.
func found(patterns []*pattern, text []byte, hit func(from, to int)) {
	for _, p := range patterns {
		from, to := -1, -1
		for at := 0; ; at++ {
			n := bytes.Index(text[at:], p.text)
			if n < 0 {
				break
			}
			at += n
			if at > to && to >= 0 { // those that overlap are one
				hit(from, to)
				from = -1
			}
			if from < 0 {
				from = at
			}
			to = at + len(p.text)
		}
		if to >= 0 {
			hit(from, to)
		}
	}
}

// decoded is a text with its percent escapes undone. What may yet become an
// escape, at its end, is left out.
type decoded struct {
	text []byte
	at   []int32 // where each byte of text, and the end, stands in the source
}

var spare = sync.Pool{New: func() any { return new(decoded) }}

// undo undoes b's escapes; it returns false where there are none.
func (d *decoded) undo(b []byte) bool {
	first := -1
	for n := 0; n < len(b); n++ {
		k := bytes.IndexByte(b[n:], '%')
		if k < 0 {
			break
		}
		n += k
		if len(b)-n < 3 && (len(b)-n == 1 || isHex(b[n+1])) || len(b)-n >= 3 && isHex(b[n+1]) && isHex(b[n+2]) {
			first = n
			break
		}
	}
	if first < 0 {
		return false
	}
	d.text, d.at = d.text[:0], d.at[:0]
	n := 0
	for n < len(b) {
		c, size := b[n], 1
		if c == '%' {
			rest := b[n+1:]
			if len(rest) == 0 || len(rest) == 1 && isHex(rest[0]) {
				break
			}
			if len(rest) >= 2 && isHex(rest[0]) && isHex(rest[1]) {
				c, size = unhex(rest[0])<<4|unhex(rest[1]), 3
			}
		}
		d.text, d.at = append(d.text, c), append(d.at, int32(n))
		n += size
	}
	d.at = append(d.at, int32(n))
	return true
}

func isHex(c byte) bool { return '0' <= c && c <= '9' || 'a' <= c|0x20 && c|0x20 <= 'f' }

func unhex(c byte) byte {
	if c <= '9' {
		return c - '0'
	}
	return c | 0x20 - 'a' + 10
}

// search covers in out what the patterns find in text, which is what out was
// at first, and returns how many bytes at its end may be the beginning of more.
func search(patterns []*pattern, text, out []byte) (open int) {
	found(patterns, text, func(from, to int) { cover(out, from, to) })
	for _, p := range patterns {
		open = max(open, p.begun(text))
	}
	d := spare.Get().(*decoded)
	defer spare.Put(d)
	if !d.undo(text) {
		return open
	}
	found(patterns, d.text, func(from, to int) { cover(out, int(d.at[from]), int(d.at[to])) })
	for _, p := range patterns {
		open = max(open, len(text)-int(d.at[len(d.text)-p.begun(d.text)]))
	}
	return open
}
