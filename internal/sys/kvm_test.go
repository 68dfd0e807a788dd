package sys

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"
)

// The probe runs in a child, as it must: KVM may never give the thread back.
func TestTryKVM(t *testing.T) {
	if os.Getenv("CLOCHE_TEST_KVM") != "" {
		r := TryKVM(func(s string) { _, _ = io.WriteString(os.Stderr, s+"\n") })
		_ = json.NewEncoder(os.Stderr).Encode(r)
		os.Exit(0)
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skip("SKIP: no /dev/kvm here")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestTryKVM$")
	cmd.Env = append(os.Environ(), "CLOCHE_TEST_KVM=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("the probe did not end by itself: %v\n%s", err, out)
	}
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	var r KVMReport
	if err := json.Unmarshal(lines[len(lines)-1], &r); err != nil {
		t.Fatalf("no report in %q: %v", out, err)
	}
	if !r.Exists || r.Step == "" {
		t.Errorf("report = %+v, want one that saw /dev/kvm and names its last step", r)
	}
	if r.Runs != (r.Problem == "") {
		t.Errorf("Runs = %v with problem %q", r.Runs, r.Problem)
	}
	if r.Runs && (r.MIPS() <= 0 || r.TrapTime <= 0) {
		t.Errorf("it ran, yet without a speed: %+v", r)
	}
	t.Logf("%.1f MIPS in ring 0, %v per page-table switch and exception", r.MIPS(), r.TrapTime)
}
