package inject

import (
	"errors"
	"net/url"
	"slices"
	"strings"
)

var errEscape = errors.New("it has a bad percent escape")

// setQuery makes value the only one of the parameter name. The rest stays as
// it was written. Whatever a server might take for the same parameter is
// removed; a query that servers read in different ways is refused.
func setQuery(u *url.URL, name, value string) error {
	var b strings.Builder
	for raw := range splitQuery(u.RawQuery) {
		element, separator := raw, ""
		if n := len(raw) - 1; n >= 0 && (raw[n] == '&' || raw[n] == ';') {
			element, separator = raw[:n], raw[n:]
		}
		key, _, _ := strings.Cut(element, "=")
		plain, err := url.QueryUnescape(key)
		if err != nil {
			return errEscape
		}
		if sameParameter(plain, name) {
			continue
		}
		b.WriteString(element)
		b.WriteString(separator)
	}
	rest := strings.TrimRight(b.String(), "&;")
	if rest != "" {
		rest += "&"
	}
	u.RawQuery = rest + url.QueryEscape(name) + "=" + url.QueryEscape(value)
	return nil
}

// splitQuery yields the elements of a query, each with what separates it from
// the next. Some servers take a semicolon for a separator.
func splitQuery(q string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for q != "" {
			n := strings.IndexAny(q, "&;") + 1
			if n == 0 {
				n = len(q)
			}
			if !yield(q[:n]) {
				return
			}
			q = q[n:]
		}
	}
}

// sameParameter tells whether some server takes a for b: in other case, as an
// array ("b[]", "b[x]"), with a NUL behind, with other marks or spaces around.
func sameParameter(a, b string) bool { return parameter(a) == parameter(b) }

func parameter(s string) string {
	s, _, _ = strings.Cut(strings.TrimLeft(s, " \t\r\n"), "\x00")
	if n := strings.IndexByte(s, '['); n > 0 {
		s = s[:n]
	}
	return strings.ToLower(strings.NewReplacer(".", "_", " ", "_").Replace(strings.TrimRight(s, " \t\r\n")))
}

// pair is one parameter, escaped as AWS does.
type pair struct{ key, value string }

// awsQuery writes a query in the one form that is signed and sent, without the
// parameters that a signature in the query would have.
func awsQuery(raw string) (string, error) {
	var pairs []pair
	for element := range strings.SplitSeq(raw, "&") {
		if element == "" {
			continue
		}
		k, v, _ := strings.Cut(element, "=")
		key, err1 := url.QueryUnescape(k)
		value, err2 := url.QueryUnescape(v)
		if err1 != nil || err2 != nil {
			return "", errEscape
		}
		if slices.ContainsFunc(sigV4Parameters, func(p string) bool { return sameParameter(key, p) }) {
			continue
		}
		pairs = append(pairs, pair{awsEscape(key, false), awsEscape(value, false)})
	}
	slices.SortStableFunc(pairs, func(a, b pair) int {
		if c := strings.Compare(a.key, b.key); c != 0 {
			return c
		}
		return strings.Compare(a.value, b.value)
	})
	var b strings.Builder
	for n, p := range pairs {
		if n > 0 {
			b.WriteByte('&')
		}
		b.WriteString(p.key + "=" + p.value)
	}
	return b.String(), nil
}

// awsEscape escapes everything but RFC 3986's unreserved characters and, in
// paths, slashes.
func awsEscape(s string, path bool) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c|0x20 && c|0x20 <= 'z', '0' <= c && c <= '9', c == '-', c == '.', c == '_', c == '~', c == '/' && path:
			b.WriteByte(c)
		default:
			b.WriteString(string([]byte{'%', hex[c>>4], hex[c&15]}))
		}
	}
	return b.String()
}
