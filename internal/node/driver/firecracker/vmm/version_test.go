package vmm

import (
	"strings"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

func TestParseVersion(t *testing.T) {
	for _, c := range []struct{ program, output, want string }{
		// As releases 1.12.1 print it, and a line by itself.
		{Firecracker, "Firecracker v1.12.1\n\n2026-11-30T00:46:00.999158738 [anonymous-instance:main] Firecracker exiting successfully. exit_code=0\n", "1.12.1"},
		{Jailer, "Jailer v1.12.1\n\n", "1.12.1"},
		{Firecracker, "Firecracker v1.15.10", "1.15.10"},
		{Firecracker, "Firecracker v1.15.1\r\nmore", "1.15.1"},

		{Firecracker, "Jailer v1.12.1\n", ""},
		{Jailer, "Firecracker v1.12.1\n", ""},
		{Firecracker, "", ""},
		{Firecracker, "\nFirecracker v1.12.1\n", ""},
		{Firecracker, "Firecracker 1.12.1\n", ""},
		{Firecracker, "Firecracker v1.12\n", ""},
		{Firecracker, "Firecracker v1.12.1.2\n", ""},
		{Firecracker, "Firecracker v1.012.1\n", ""},
		{Firecracker, "Firecracker v1.12.12345\n", ""},
		{Firecracker, "Firecracker v1.16.0-dev\n", ""},
		{Firecracker, "Firecracker v1.12.1 v1.12.1\n", ""},
		{Firecracker, "Firecracker v1.12.1" + strings.Repeat(" ", 1<<20), ""},
		{Firecracker, "QEMU emulator version 7.2.22\n", ""},
		{"", " v1.12.1\n", ""},
	} {
		got, err := ParseVersion(c.program, []byte(c.output))
		if got != c.want || (err == nil) != (c.want != "") {
			t.Errorf("%s, %.40q: %q, %v", c.program, c.output, got, err)
		}
		if err != nil && (!sandbox.IsClass(err, sandbox.Invalid) || len(err.Error()) > 512) {
			t.Errorf("%.40q: %v", c.output, err)
		}
	}
}

func TestCheckVersion(t *testing.T) {
	for _, c := range []struct {
		firecracker, jailer string
		allow               bool
		want                string // the error's code; "" when they may be used
	}{
		{"1.13.2", "1.13.2", false, ""},
		{"1.14.1", "1.14.1", false, ""},
		{"1.14.4", "1.14.4", false, ""},
		{"1.15.0", "1.15.0", false, ""},
		{"1.15.1", "1.15.1", false, ""},
		{"1.16.2", "1.16.2", false, ""},
		{"1.17.0", "1.17.0", false, ""},
		{"2.0.0", "2.0.0", false, ""},

		{"1.12.1", "1.12.1", false, "firecracker_vulnerable"},
		{"1.13.1", "1.13.1", false, "firecracker_vulnerable"},
		{"1.14.0", "1.14.0", false, "firecracker_vulnerable"},
		{"0.25.0", "0.25.0", false, "firecracker_vulnerable"},
		{"1.12.1", "1.12.1", true, ""},
		{"1.13.1", "1.13.1", true, ""},
		{"1.14.0", "1.14.0", true, ""},

		{"1.16.0", "1.16.0", false, "firecracker_hangs"},
		{"1.16.1", "1.16.1", false, "firecracker_hangs"},
		{"1.16.0", "1.16.0", true, "firecracker_hangs"},
		{"1.16.1", "1.16.1", true, "firecracker_hangs"},

		{"1.15.1", "1.15.0", false, "firecracker_mismatch"},
		{"1.15.1", "1.12.1", true, "firecracker_mismatch"},
		{"1.12.1", "1.15.1", true, "firecracker_mismatch"},

		{"v1.15.1", "1.15.1", false, "firecracker_version"},
		{"1.15.1", "", false, "firecracker_version"},
		{"1.15.1-dev", "1.15.1-dev", true, "firecracker_version"},
	} {
		err := CheckVersion(c.firecracker, c.jailer, c.allow)
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.firecracker, err)
			}
			continue
		}
		if e := sandbox.AsError(err); e == nil || e.Code != c.want || e.Hint == "" {
			t.Errorf("%s with jailer %s: %v; want %s", c.firecracker, c.jailer, err, c.want)
		}
	}
}
