package agent

import (
	"bytes"
	"testing"
)

// FuzzBundle: whatever a guest's bundle holds, our block is put in once, and
// out again without a trace.
func FuzzBundle(f *testing.F) {
	const ca = "-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n"
	for _, s := range []string{"", "x", ca, bundleBegin, bundleEnd, bundleBegin + ca, bundleBegin + ca + bundleEnd + ca, bundleEnd + bundleBegin, bundleBegin + bundleBegin + bundleEnd + bundleEnd} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		plain := withoutBlock(b)
		with := append(bytes.Clone(plain), []byte(bundleBegin+ca+bundleEnd)...)
		if got := withoutBlock(with); !bytes.Equal(got, withoutBlock(plain)) {
			t.Errorf("%q became %q", plain, got)
		}
		n := 0
		for c := range certificates(union([]byte(ca), b)) {
			if string(c) == ca {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%d times in %q", n, union([]byte(ca), b))
		}
	})
}
