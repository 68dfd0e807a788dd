package vmm

import (
	"bytes"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// The names of the programs, as ParseVersion takes them.
const (
	Firecracker = "firecracker"
	Jailer      = "jailer"
)

// maxVersionLine bounds the one line of a program's answer that is looked at.
const maxVersionLine = 64

// release is what a release of Firecracker is called. A development build
// ("1.16.0-dev") has no place here: two of one name may differ in all that
// CheckVersion and snapshots go by.
var release = regexp.MustCompile(`^(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})\.(0|[1-9][0-9]{0,3})$`)

// ParseVersion takes the release ("1.12.1") out of what program printed for
// `--version`: a first line "Firecracker v1.12.1" or "Jailer v1.12.1", whatever
// follows it. Errors are of class invalid, code firecracker_version: it is
// another program, or no release.
func ParseVersion(program string, output []byte) (string, error) {
	line, _, _ := bytes.Cut(output[:min(len(output), maxVersionLine)], []byte("\n"))
	text := strings.TrimSuffix(string(line), "\r")
	name, version, _ := strings.Cut(text, " v")
	if program == "" || !strings.EqualFold(name, program) {
		return "", versionError("%q is not how %s tells its version", clean(text), program)
	}
	if !release.MatchString(version) {
		return "", versionError("%q is not a release of %s", clean(version), program)
	}
	return version, nil
}

func versionError(format string, args ...any) error {
	return sandbox.Errorf(sandbox.Invalid, "firecracker_version", format, args...).
		WithHint("take firecracker and jailer from one upstream release")
}

// version is a release's three numbers, for comparing.
type version [3]int

func parseRelease(s string) (version, error) {
	m := release.FindStringSubmatch(s)
	if m == nil {
		return version{}, versionError("%q is not a release of Firecracker", clean(s))
	}
	var v version
	for i := range v {
		n, err := strconv.Atoi(m[i+1])
		if err != nil {
			return version{}, fmt.Errorf("version %q: %w", clean(s), err)
		}
		v[i] = n
	}
	return v, nil
}

func (v version) atMost(w version) bool { return slices.Compare(v[:], w[:]) <= 0 }

// CheckVersion tells whether this firecracker may be used with this jailer,
// both as ParseVersion returns them. Errors are of class failed_precondition:
//
//   - firecracker_mismatch: they are not of one release;
//   - firecracker_hangs: 1.16.0 and 1.16.1 hang after a pause or a restore
//     (Firecracker's issue 6074 and pull request 6100);
//   - firecracker_vulnerable: the jailers up to 1.13.1 and that of 1.14.0 follow
//     a symbolic link in a folder made before (CVE-2026-1386). Only this one is
//     let pass by allowVulnerable, which is for tests.
//
// CVE-2026-5747 is no reason: it needs --enable-pci, which the driver never
// passes.
func CheckVersion(firecracker, jailer string, allowVulnerable bool) error {
	v, err := parseRelease(firecracker)
	if err != nil {
		return err
	}
	j, err := parseRelease(jailer)
	if err != nil {
		return err
	}
	const hint = "install release 1.13.2, 1.14.4 or 1.15.1 with `cloche firecracker install`"
	switch {
	case v != j:
		return sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_mismatch", "firecracker is release %s and jailer %s; they must be of one release",
			firecracker, jailer).WithHint("take both from one upstream release")
	case v == version{1, 16, 0} || v == version{1, 16, 1}:
		return sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_hangs", "Firecracker %s hangs after a pause or a restore", firecracker).WithHint(hint)
	case !allowVulnerable && (j.atMost(version{1, 13, 1}) || j == version{1, 14, 0}):
		return sandbox.Errorf(sandbox.FailedPrecondition, "firecracker_vulnerable", "the jailer of release %s has CVE-2026-1386", jailer).WithHint(hint)
	}
	return nil
}
