package node

import (
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// A fence holds while a call from before it can be on its way, and for good
// where there is a machine; it doesn't stay for every sandbox that ever was.
func TestFencesAreForgotten(t *testing.T) {
	n := &Node{fences: map[string]fence{}, machines: map[string]*machine{}, calls: map[string]*call{}}
	start := time.Now()
	gone, lives, busy := sandbox.NewID(sandbox.KindSandbox), sandbox.NewID(sandbox.KindSandbox), sandbox.NewID(sandbox.KindSandbox)
	n.machines[lives], n.calls[busy] = &machine{}, &call{}
	for i, id := range []string{gone, lives, busy} {
		n.raise(id, int64(i+7), start)
	}
	n.raise(gone, 3, start) // an older one changes nothing
	n.raise("other", 1, start.Add(fenceKept-time.Second))
	if n.fences[gone].generation != 7 {
		t.Errorf("the fence of a sandbox that was a moment ago is %d, not 7", n.fences[gone].generation)
	}
	n.raise("other", 1, start.Add(fenceKept))
	if _, kept := n.fences[gone]; kept {
		t.Error("the fence of a sandbox that is long gone is kept")
	}
	if n.fences[lives].generation != 8 || n.fences[busy].generation != 9 {
		t.Errorf("fences of what is there were forgotten: %v", n.fences)
	}
}
