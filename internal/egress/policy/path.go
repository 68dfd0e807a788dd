package policy

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
)

const (
	maxPath      = 8 << 10
	maxPattern   = 512
	maxWildcards = 16
)

var (
	errPathStart  = errors.New("does not begin with a slash")
	errPathLong   = fmt.Errorf("is longer than %d bytes", maxPath)
	errPathEscape = errors.New("has a malformed escape")
	errPathByte   = errors.New("has a control byte, a backslash, or a question or number sign")
	errPathDots   = errors.New("has a dot segment")
	errPathEmpty  = errors.New("has an empty segment behind an escaped slash or before a semicolon")
	errPathTwice  = errors.New("has an escape that another escape hides")
)

const upperHex = "0123456789ABCDEF"

// CanonicalPath returns the one form of an escaped path without its query, so
// that rules see what servers see: what needs no escape has none, what needs
// one has it in upper case, and slashes don't come in rows. What servers read
// in different ways is an error: dot segments (those before path parameters,
// "..;", too), backslashes, control bytes, escapes of escapes. An escaped
// slash stays, since registries of packages have it in names; then rules have
// to agree about both readings. Callers send what it returns.
func CanonicalPath(escaped string) (string, error) {
	if len(escaped) > maxPath {
		return "", errPathLong
	}
	if escaped == "" {
		return "/", nil
	}
	if escaped[0] != '/' {
		return "", errPathStart
	}
	var b strings.Builder
	b.Grow(len(escaped))
	for i, slash := 0, false; i < len(escaped); i++ {
		c, coded := escaped[i], false
		if c == '%' {
			if i+2 >= len(escaped) || unhex(escaped[i+1]) < 0 || unhex(escaped[i+2]) < 0 {
				return "", errPathEscape
			}
			c, coded = byte(unhex(escaped[i+1])<<4|unhex(escaped[i+2])), true
			i += 2
		}
		switch {
		case c < ' ' || c == 0x7f || c == '\\' || !coded && (c == '?' || c == '#'):
			return "", errPathByte
		case unreserved(c), !coded && strings.IndexByte("/!$&'()*+,;=:@", c) >= 0:
			if c != '/' || !slash {
				b.WriteByte(c)
			}
		default:
			b.Write([]byte{'%', upperHex[c>>4], upperHex[c&15]})
		}
		slash = c == '/' && !coded
	}
	path := b.String()
	if len(path) > maxPath {
		return "", errPathLong
	}
	if hidesEscape(path) {
		return "", errPathTwice
	}
	if err := checkSegments(path); err != nil {
		return "", err
	}
	return path, nil
}

// hidesEscape tells whether a server that decodes twice would find something
// of the path's structure behind an escaped percent sign.
func hidesEscape(path string) bool {
	if strings.Contains(path, "%25%25") {
		return true
	}
	for _, rest := range strings.Split(path, "%25")[1:] {
		if len(rest) < 2 || unhex(rest[0]) < 0 || unhex(rest[1]) < 0 {
			continue
		}
		c := unhex(rest[0])<<4 | unhex(rest[1])
		if c < ' ' || c == 0x7f || strings.IndexByte(`./\%;`, byte(c)) >= 0 {
			return true
		}
	}
	return false
}

// checkSegments looks at the reading that has most segments and least in them.
func checkSegments(path string) error {
	segments := strings.Split(strings.ReplaceAll(path, "%2F", "/"), "/")[1:]
	for i, s := range segments {
		name, _, params := strings.Cut(strings.ReplaceAll(s, "%3B", ";"), ";")
		if name == "." || name == ".." {
			return errPathDots
		}
		if name == "" && (i < len(segments)-1 || params && i > 0) {
			return errPathEmpty
		}
	}
	return nil
}

func unreserved(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("-._~", c) >= 0
}

func unhex(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// reading is one way in which servers may read a path, decoded as far as it
// has one meaning: an escaped slash is part of a segment (mark) or a slash, and
// path parameters belong to their segments or don't.
type reading struct {
	text string
	form int // of patterns: 0 with mark, 1 with slashes
}

// mark stands for an escaped slash that is no slash. No path holds it.
const mark = "\x01"

func readingsOf(path string) []reading {
	r := []reading{{decode(path, mark), 0}, {decode(path, "/"), 1}}
	if strings.Contains(r[1].text, ";") {
		r = append(r, reading{withoutParameters(r[0].text), 0}, reading{withoutParameters(r[1].text), 1})
	}
	return r
}

// decode undoes the escapes of what is printable ASCII, but of the percent sign.
func decode(path, slash string) string {
	if !strings.Contains(path, "%") {
		return path
	}
	var b strings.Builder
	b.Grow(len(path))
	for i := 0; i < len(path); i++ {
		if path[i] != '%' {
			b.WriteByte(path[i])
			continue
		}
		switch c := byte(unhex(path[i+1])<<4 | unhex(path[i+2])); { // a canonical path's escapes are whole
		case c == '/':
			b.WriteString(slash)
		case ' ' < c && c < 0x7f && c != '%':
			b.WriteByte(c)
		default:
			b.WriteString(path[i : i+3])
		}
		i += 2
	}
	return b.String()
}

func withoutParameters(path string) string {
	segments := strings.Split(path, "/")
	for i, s := range segments {
		segments[i], _, _ = strings.Cut(s, ";")
	}
	return strings.Join(segments, "/")
}

// pathPattern is one of a rule's paths: a prefix, or a whole path, or a glob;
// each in the reading that has no escaped slashes and in the one that has.
type pathPattern struct {
	prefix bool
	text   [2]string // decoded with mark, and with a slash
	glob   [2]*regexp.Regexp
}

func (p *pathPattern) matches(r reading) bool {
	switch {
	case p.glob[r.form] != nil:
		return p.glob[r.form].MatchString(r.text)
	case p.prefix:
		return strings.HasPrefix(r.text, p.text[r.form])
	}
	return r.text == p.text[r.form]
}

// compilePath returns the pattern of one of a rule's paths and its normal form.
func compilePath(s string) (pathPattern, string, error) {
	var p pathPattern
	if len(s) > maxPattern {
		return p, "", fmt.Errorf("is longer than %d bytes", maxPattern)
	}
	if strings.Count(s, "*") > maxWildcards {
		return p, "", fmt.Errorf("has more than %d wildcards", maxWildcards)
	}
	if s == "" {
		return p, "", errPathStart
	}
	c, err := CanonicalPath(s)
	switch {
	case err != nil:
		return p, "", err
	case strings.Contains(c, ";") || strings.Contains(c, "%3B"):
		return p, "", errors.New("has path parameters, which servers read in different ways")
	case strings.Contains(c, "***"):
		return p, "", errors.New("has three stars in a row")
	case strings.Contains(s, "//"):
		return p, "", errors.New("has an empty segment")
	}
	p.prefix = strings.HasSuffix(c, "/")
	for form, slash := range []string{mark, "/"} {
		if !strings.Contains(c, "*") {
			p.text[form] = decode(c, slash)
			continue
		}
		if p.glob[form], err = regexp.Compile(globOf(c, slash, p.prefix)); err != nil {
			return p, "", err
		}
	}
	return p, c, nil
}

// globOf makes a regular expression, which Go matches in linear time.
func globOf(c, slash string, prefix bool) string {
	var b strings.Builder
	b.WriteString(`\A`)
	for i, across := range strings.Split(c, "**") {
		if i > 0 {
			b.WriteString(`(?s:.*)`)
		}
		for j, within := range strings.Split(across, "*") {
			if j > 0 {
				b.WriteString(`[^/]*`)
			}
			b.WriteString(regexp.QuoteMeta(decode(within, slash)))
		}
	}
	if !prefix {
		b.WriteString(`\z`)
	}
	return b.String()
}
