package policy

import (
	"net/netip"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestRanges(t *testing.T) {
	r, err := NewRanges(prefixes("10.1.0.0/16", "100.64.0.0/10", "fd00::/8"), prefixes("10.1.2.3/32", "10.1.9.0/24", "::ffff:8.8.4.4/128", "1.1.1.1/32"))
	if err != nil {
		t.Fatal(err)
	}
	for addr, want := range map[string]string{
		"93.184.216.34":                "",
		"8.8.8.8":                      "",
		"10.1.0.1":                     "", // opened
		"100.64.0.1":                   "",
		"::ffff:93.184.216.34":         "",
		"::ffff:10.1.0.1":              "",
		"2606:4700::1":                 "",
		"fd12::1":                      "",
		"1.1.1.1":                      "host",
		"8.8.4.4":                      "host",
		"10.1.2.3":                     "host", // although opened
		"10.1.9.77":                    "host",
		"::ffff:10.1.2.3":              "host",
		"10.0.0.1":                     "private",
		"172.16.0.1":                   "private",
		"172.31.255.255":               "private",
		"172.32.0.1":                   "",
		"192.168.1.1":                  "private",
		"100.100.100.200":              "metadata", // although opened
		"168.63.129.16":                "metadata",
		"169.254.169.254":              "metadata",
		"169.254.77.1":                 "link_local",
		"127.0.0.1":                    "loopback",
		"127.255.255.254":              "loopback",
		"0.0.0.0":                      "this_network",
		"0.1.2.3":                      "this_network",
		"224.0.0.1":                    "multicast",
		"239.255.255.255":              "multicast",
		"240.0.0.1":                    "reserved",
		"255.255.255.255":              "broadcast",
		"198.18.0.1":                   "benchmarking",
		"198.20.0.1":                   "",
		"192.0.0.1":                    "special",
		"192.0.2.1":                    "documentation",
		"198.51.100.1":                 "documentation",
		"203.0.113.1":                  "documentation",
		"192.88.99.1":                  "6to4",
		"::1":                          "loopback",
		"::":                           "unspecified",
		"::7f00:1":                     "loopback", // IPv4-compatible 127.0.0.1
		"::808:808":                    "mapped",
		"::ffff:127.0.0.1":             "loopback",
		"::ffff:169.254.169.254":       "metadata",
		"64:ff9b::a9fe:a9fe":           "metadata",
		"64:ff9b::7f00:1":              "loopback",
		"64:ff9b::808:808":             "nat64",
		"64:ff9b:1::808:808":           "nat64",
		"64:ff9a::1":                   "reserved",
		"2002:a00:1::1":                "private",
		"2002:7f00:1::":                "loopback",
		"2002:808:808::1":              "6to4",
		"2001:0:808:808:0:0:80ff:fffe": "loopback", // the client is 127.0.0.1
		"2001:0:808:808:0:0:f7f7:f7f7": "teredo",
		"2001:db8::1":                  "documentation",
		"2001:10::1":                   "special",
		"3fff::1":                      "documentation",
		"fe80::1":                      "link_local",
		"fe80::1%eth0":                 "invalid",
		"2606:4700::1%eth0":            "invalid",
		"fec0::1":                      "private",
		"fc00::1":                      "private",
		"fd00:ec2::254":                "metadata",
		"ff02::1":                      "multicast",
		"100::1":                       "reserved",
		"5f00::1":                      "reserved",
		"4000::1":                      "reserved",
	} {
		if want != "" {
			want = "closed_range:" + want
		}
		if got, closed := r.Closed(netip.MustParseAddr(addr)); closed != (want != "") || closed && got != want {
			t.Errorf("Closed(%s) = %q, %v; want %q", addr, got, closed, want)
		}
	}
	if _, closed := r.Closed(netip.Addr{}); !closed {
		t.Error("no address is open")
	}
	var none Ranges
	if _, closed := none.Closed(netip.MustParseAddr("127.0.0.1")); !closed {
		t.Error("the zero Ranges opens the loopback")
	}
}

func TestWhatIsNeverOpened(t *testing.T) {
	for _, s := range []string{
		"127.0.0.0/8", "127.0.0.1/32", "169.254.169.254/32", "169.254.0.0/16", "0.0.0.0/0", "::/0", "10.0.0.0/7", "8.8.8.8/32", "224.0.0.0/24", "::1/128", "fe80::/64",
		"192.88.99.0/24", "10.0.0.1/8", "::ffff:10.0.0.0/104", "64:ff9b::/96",
	} {
		if _, err := NewRanges(prefixes(s), nil); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("%s was opened: %v", s, err)
		}
	}
	for _, bad := range [][2][]netip.Prefix{{{netip.Prefix{}}, nil}, {nil, {netip.Prefix{}}}} {
		if _, err := NewRanges(bad[0], bad[1]); err == nil {
			t.Error("an invalid prefix is taken")
		}
	}
}

func FuzzClosed(f *testing.F) {
	for _, s := range []string{"10.0.0.1", "::ffff:10.0.0.1", "64:ff9b::1", "2002:a00:1::", "2001::1"} {
		a := netip.MustParseAddr(s)
		f.Add(a.AsSlice())
	}
	r, err := NewRanges(prefixes("10.1.0.0/16"), nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, ok := netip.AddrFromSlice(b)
		if !ok {
			return
		}
		_, closed := r.Closed(a)
		std := a.Unmap()
		bad := !std.IsGlobalUnicast() || std.IsPrivate() && !prefixes("10.1.0.0/16")[0].Contains(std)
		if bad && !closed {
			t.Errorf("%s is open", a)
		}
		if _, again := r.Closed(std); again != closed {
			t.Errorf("%s and %s differ", a, std)
		}
	})
}
