package agent_test

import (
	"testing"
	"time"
)

// TestSpeed tells how fast output comes, beside what the pipe alone can do there.
func TestSpeed(t *testing.T) {
	g := newGuest(t, nil)
	for _, c := range []struct{ name, script string }{
		{"pipe inside", "head -c 300000000 /dev/zero | cat > /dev/null"},
		{"output", "head -c 300000000 /dev/zero"},
		{"output with dd", "dd if=/dev/zero bs=64k count=4578 2>/dev/null"},
	} {
		began := time.Now()
		_, r := g.hashOf(g.sh(c.script), nil)
		d := time.Since(began)
		t.Logf("%s: %d bytes told, 300 MB in %v: %.0f MB/s", c.name, r.offset, d, 300/d.Seconds())
	}
}
