package policy

import (
	"net/netip"
	"strings"
	"testing"
)

func TestCanonicalHost(t *testing.T) {
	long := strings.Repeat("a", 63)
	for in, want := range map[string]string{
		"example.com":                           "example.com",
		"EXAMPLE.Com.":                          "example.com",
		"a_b.example.com":                       "a_b.example.com",
		"r3---sn-x.example.com":                 "r3---sn-x.example.com",
		"bücher.de":                             "xn--bcher-kva.de",
		"BÜCHER.de":                             "xn--bcher-kva.de",
		"bu\u0308cher.de":                       "xn--bcher-kva.de",
		"xn--bcher-kva.de":                      "xn--bcher-kva.de",
		"XN--BCHER-KVA.de":                      "xn--bcher-kva.de",
		"ex\u00adample.com":                     "example.com",
		"example\u3002com":                      "example.com",
		"\uff45xample.com":                      "example.com",
		"faß.de":                                "xn--fa-hia.de",
		"localhost":                             "localhost",
		"1.2.3.4.example":                       "1.2.3.4.example",
		"0x7f.example":                          "0x7f.example",
		"0xg":                                   "0xg",
		long + "." + long + "." + long + ".com": long + "." + long + "." + long + ".com",
	} {
		got, err := CanonicalHost(in)
		if err != nil || got != want {
			t.Errorf("CanonicalHost(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{
		"", ".", "..", "a..b", ".a", "a..", "-a.com", "a-.com", "a b.com", "a\x00.com", "a\n.com", "a/b.com", "a:80", "a@b.com", "a%2eb.com", "a\\.b.com", "*.com",
		"[::1]", "::1", "fe80::1%eth0", "::ffff:1.2.3.4",
		"1.2.3.4", "1.2.3.4.", "127.1", "127.0.1", "2130706433", "0x7f000001", "0X7F.1", "017700000001", "0177.0.0.1", "0x", "1.2.3.0x4", "a.1", "1.2.3.4.5", "999.1.1.999",
		"\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "①.①.①.①",
		"xn--a", "xn--", "xn--abc-", "xn--bcher-kva\u0301.de", "xn--example-.com",
		"\xff.com", "a\u200b\xc3.com", "℀.com",
		long + "a.com", strings.Repeat("a.", 127) + "com", strings.Repeat("ü", 2000),
	} {
		if got, err := CanonicalHost(in); err == nil {
			t.Errorf("CanonicalHost(%q) = %q, want an error", in, got)
		}
	}
}

func FuzzCanonicalHost(f *testing.F) {
	for _, s := range []string{"example.com", "EXAMPLE.com.", "bücher.de", "xn--bcher-kva.de", "0x7f.1", "a\u3002b", "1.2.3.4", "_a.b", "xn--0.pt"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := CanonicalHost(s)
		if err != nil {
			return
		}
		if again, err := CanonicalHost(got); err != nil || again != got {
			t.Errorf("%q gives %q, which gives %q, %v", s, got, again, err)
		}
		if upper, err := CanonicalHost(strings.ToUpper(got) + "."); err != nil || upper != got {
			t.Errorf("%q in upper case gives %q, %v", got, upper, err)
		}
		if _, err := netip.ParseAddr(got); err == nil || len(got) > maxHost || strings.Trim(got, "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" {
			t.Errorf("%q gives %q", s, got)
		}
	})
}
