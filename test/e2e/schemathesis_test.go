package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"cloche.dev/cloche/test/harness"
)

// TestContract fuzzes a live daemon against api/openapi.yaml: no undocumented
// status, no 500, and every operation answers 2xx at least once.
func TestContract(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("SKIP: schemathesis needs python3")
	}
	d := harness.Start(t)
	cmd := exec.CommandContext(t.Context(), filepath.Join(root, "test", "schemathesis", "run.sh"))
	cmd.Env = append(d.Env(), "FUZZ_EXAMPLES="+orElse(os.Getenv("FUZZ_EXAMPLES"), "12"))
	out, err := cmd.CombinedOutput()
	text := string(out)
	if err != nil && (strings.Contains(text, "No module named venv") || strings.Contains(text, "Could not find a version") || strings.Contains(text, "ensurepip is not")) {
		t.Skipf("SKIP: schemathesis can't be installed here (`make deps` does it):\n%s", text)
	}
	if len(text) > 12_000 {
		text = text[:4000] + "\n…\n" + text[len(text)-8000:]
	}
	t.Log(text)
	if err != nil {
		t.Errorf("the live server breaks its contract: %v", err)
	}
}

func orElse(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
