package redteam

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"cloche.dev/cloche/test/harness"
)

// marks are in a binary whose gateway can be weakened, and in no other.
var marks = []string{"CLOCHE_WEAK", "internal/egress/proxy/weak_on.go"}

// weakBin returns the binary that was built with the tag clocheweak.
func weakBin(t *testing.T) string {
	t.Helper()
	bin := os.Getenv("CLOCHE_WEAK_BIN")
	if bin == "" {
		bin = filepath.Join("..", "..", "dist", "weak", "cloche")
	}
	bin, err := filepath.Abs(bin)
	if err == nil {
		_, err = os.Stat(bin)
	}
	if err != nil {
		t.Skipf("SKIP: no weakened binary (%v); `make dist/weak/cloche` builds it", err)
	}
	return bin
}

// TestNothingWeakIsShipped: an ordinary build can't be weakened.
func TestNothingWeakIsShipped(t *testing.T) {
	for bin, want := range map[string]bool{harness.Bin(t): false, weakBin(t): true} {
		text, err := os.ReadFile(bin)
		if err != nil {
			t.Fatal(err)
		}
		for _, mark := range marks {
			if bytes.Contains(text, []byte(mark)) != want {
				t.Errorf("%s has %q: %v, want %v", bin, mark, !want, want)
			}
		}
	}
}

// TestWeakGateway has the same techniques find their way out of a gateway that
// decides by addresses only, and of one that looks at first requests only: the
// suite can fail.
func TestWeakGateway(t *testing.T) {
	bin := weakBin(t)
	for weakness, must := range map[string][]string{
		"address": {
			"host-blocked", "sni-blocked-at-allowed-address", "fronting", "h2-coalescing", "path-elsewhere", "method-other", "smuggle-cl-te", "connect",
		},
		"first": {"host-second-request", "host-pipelined", "fronting-second", "h2-coalescing-second", "path-second-request", "path-second-stream"},
	} {
		t.Run(weakness, func(t *testing.T) {
			a := newArenaOf(t, bin, workers/2, "CLOCHE_WEAK="+weakness)
			through := a.sweep(t)
			t.Logf("%d bypasses of %d techniques: %s", len(through), len(swept()), strings.Join(through, " "))
			for _, name := range must {
				if !slices.Contains(through, name) {
					t.Errorf("%s must come through a gateway whose weakness is %q, and did not", name, weakness)
				}
			}
			// Each weakness is one, and not an open door.
			for _, name := range []string{"metadata", "host-service", "sni-blocked"} {
				if slices.Contains(through, name) {
					t.Errorf("%s came through a gateway whose weakness is %q", name, weakness)
				}
			}
		})
	}
}

// swept are the techniques that need nothing but their steps.
func swept() (list []technique) {
	for _, k := range techniques {
		if k.own == nil && k.reason != "" && k.uncontrolled == "" || k.name == "metadata" || k.name == "host-service" {
			list = append(list, k)
		}
	}
	return list
}

// sweep tries many techniques at a time and names those that came through.
func (a *arena) sweep(t *testing.T) (through []string) {
	t.Helper()
	batches := make(chan []technique)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, box := range a.ruled {
		wg.Go(func() {
			for batch := range batches {
				var steps []Step
				tokens := map[string]technique{}
				for _, k := range batch {
					tok := token()
					tokens[tok] = k
					steps = append(steps, k.steps(a, tok)...)
				}
				a.doIn(t, box, steps)
				for tok, k := range tokens {
					if len(k.through(a.arrived(tok))) > 0 {
						mu.Lock()
						through = append(through, k.name)
						mu.Unlock()
					}
				}
			}
		})
	}
	for batch := range slices.Chunk(swept(), 12) {
		batches <- batch
	}
	close(batches)
	wg.Wait()
	slices.Sort(through)
	return through
}
