package policy

import (
	"net/url"
	"slices"
	"strings"
	"testing"
)

func TestCanonicalPath(t *testing.T) {
	for in, want := range map[string]string{
		"":                                   "/",
		"/":                                  "/",
		"/a/b":                               "/a/b",
		"/a/b/":                              "/a/b/",
		"//a///b//":                          "/a/b/",
		"/%61%2Db%7e":                        "/a-b~",
		"/%c3%bc":                            "/%C3%BC",
		"/\xc3\xbc":                          "/%C3%BC",
		"/a b":                               "/a%20b",
		"/a%20b":                             "/a%20b",
		"/lib%2b%2b6":                        "/lib%2B%2B6",
		"/lib++6":                            "/lib++6",
		"/@types%2fnode":                     "/@types%2Fnode",
		"/a[1]{2}|\"<>^`":                    "/a%5B1%5D%7B2%7D%7C%22%3C%3E%5E%60",
		"/a%3Fb%23":                          "/a%3Fb%23",
		"/.well-known/x":                     "/.well-known/x",
		"/a/..b/...":                         "/a/..b/...",
		"/a;v=1/b":                           "/a;v=1/b",
		"/;v=1":                              "/;v=1",
		"/100%25":                            "/100%25",
		"/100%25ab":                          "/100%25ab", // twice decoded it is another character, of no structure
		"/$&'()*+,=:@!":                      "/$&'()*+,=:@!",
		"/a%2F":                              "/a%2F",
		"/" + strings.Repeat("a", maxPath-1): "/" + strings.Repeat("a", maxPath-1),
	} {
		got, err := CanonicalPath(in)
		if err != nil || got != want {
			t.Errorf("CanonicalPath(%.40q) = %.40q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{
		"a", "*", "http://a/", "/%", "/%2", "/%zz", "/%u002e", "/a\x00", "/a%00", "/a%0d%0aX:", "/a\r\n", "/\x7f", "/%7f", `/a\b`, "/a%5cb", "/a?b", "/a#b",
		"/.", "/..", "/a/./b", "/a/../b", "/a/..", "/%2e%2e/b", "/a/%2E./b", "/a/.%2e", "/..;/b", "/a/..;x=1/b", "/a/.;", "/a/..%3b/b", "/a/..%2fb", "/a%2f..%2fb", "/a%2f%2e%2e/b",
		"/a%2f%2fb", "/%2fa", "/a/%2fb", "/a/;x/b", "/;x/b", "/a%2f;x", "/a/;x",
		"/%252e%252e/b", "/a%252fb", "/a%255cb", "/a%2525", "/%25%32%66", "/%25%2532", "/a%250db",
		"/" + strings.Repeat("a", maxPath), "/" + strings.Repeat("\xff", maxPath/2),
	} {
		if got, err := CanonicalPath(in); err == nil {
			t.Errorf("CanonicalPath(%.40q) = %.40q, want an error", in, got)
		}
	}
}

func FuzzCanonicalPath(f *testing.F) {
	for _, s := range []string{"/a/b", "//a", "/%2e%2e/", "/a%2fb", "/%25%32%66", "/a;b/c", "/\xff", "/lib%2b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := CanonicalPath(s)
		if err != nil {
			return
		}
		if again, err := CanonicalPath(got); err != nil || again != got {
			t.Fatalf("%q gives %q, which gives %q, %v", s, got, again, err)
		}
		for range 2 { // what a server makes of it, and one that decodes twice
			decoded, err := url.PathUnescape(got)
			if err != nil {
				return // of "%25zz": the second time there is no escape
			}
			if slices.ContainsFunc(strings.Split(decoded, "/"), func(s string) bool {
				name, _, _ := strings.Cut(s, ";")
				return name == "." || name == ".."
			}) || strings.ContainsAny(decoded, "\x00\r\n\\") {
				t.Fatalf("%q gives %q, which decodes to %q", s, got, decoded)
			}
			got = decoded
		}
	})
}

func TestPathPatterns(t *testing.T) {
	for _, c := range []struct {
		pattern, path string
		allow, deny   bool // whether an allowing and a denying rule with it match
	}{
		{"/a/", "/a/", true, true},
		{"/a/", "/a/b/c", true, true},
		{"/a/", "/a", false, false},
		{"/a/", "/ab", false, false},
		{"/a/", "/A/b", false, false},
		{"/a/", "/%61/b", true, true},
		{"/a", "/a", true, true},
		{"/a", "/a/", false, false},
		{"/a!", "/a%21", true, true},
		{"/a%21", "/a!", true, true},
		{"/lib+", "/lib%2B", true, true},
		{"/*/x", "/a/x", true, true},
		{"/*/x", "/a/b/x", false, false},
		{"/**/x", "/a/b/x", true, true},
		{"/a*c", "/abc", true, true},
		{"/a*c", "/a/c", false, false},
		{"/a*c", "/a%2Fc", false, true}, // one reading has a slash
		{"/r/*/", "/r/a/b/c", true, true},
		{"/a.c", "/abc", false, false}, // no regular expression
		{"/a.*", "/a.\xc3\xbc", true, true},
		{"/a%2A*", "/a*b", true, true},
		{"/a%2A*", "/ab", false, false},
		{"/@types%2Fnode", "/@types%2fnode", true, true},
		{"/@types/node", "/@types%2fnode", false, true},
		{"/@types%2Fnode", "/@types/node", false, true},
		{"/admin/", "/admin;x=1/y", false, true}, // some servers drop parameters
		{"/admin/", "/admin%2Fy", false, true},
		{"/admin/", "/admin%3Bx/y", false, true},
		{"/pub/", "/pub/a;v=1", true, true},
		{"/pub/", "/pub/a%2Fb", true, true},
		{"/", "/anything", true, true},
		{"/**", "/anything/at%2Fall;x", true, true},
	} {
		p, normal, err := compilePath(c.pattern)
		if err != nil {
			t.Errorf("%q: %v", c.pattern, err)
			continue
		}
		if _, again, err := compilePath(normal); err != nil || again != normal {
			t.Errorf("%q: its normal form %q gives %q, %v", c.pattern, normal, again, err)
		}
		path, err := CanonicalPath(c.path)
		if err != nil {
			t.Errorf("%q: %v", c.path, err)
			continue
		}
		for action, want := range map[string]bool{"allow": c.allow, "inject": c.allow, "deny": c.deny} {
			r := rule{action: actionOf(action), paths: []pathPattern{p}}
			if got := r.matchesPath(readingsOf(path)); got != want {
				t.Errorf("%s %q matches %q: %v", action, c.pattern, c.path, got)
			}
		}
	}
}
