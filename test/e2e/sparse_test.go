package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"cloche.dev/cloche/test/harness"
)

// TestSparseTemplate imports a tar that holds a sparse file of 10 GiB (5 in CI,
// more than 32 bits count): the template has it whole, and neither the import nor
// the image takes its size on the host.
func TestSparseTemplate(t *testing.T) {
	d := harness.Start(t)
	dir := t.TempDir()
	for _, args := range [][]string{
		{"truncate", fmt.Sprintf("--size=%dG", atFull(10, 5)), filepath.Join(dir, "big")},
		{"sh", "-c", "printf end >>" + filepath.Join(dir, "big")},
		{"tar", "-C", dir, "--sparse", "-cf", filepath.Join(dir, "big.tar"), "big"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	before := blocks(t, d.State)
	d.Must("template", "build", "big", "--tar", filepath.Join(dir, "big.tar"))
	if grown := blocks(t, d.State) - before; grown > 16<<10 {
		t.Errorf("the template takes %d KiB on the host", grown)
	}
	if ls := d.Must("template", "ls"); !strings.Contains(ls, "big:latest") {
		t.Errorf("the template is not listed:\n%s", ls)
	}
	d.Must("template", "rm", "big")
}

// blocks returns what a tree takes on the host, in KiB.
func blocks(t *testing.T, dir string) int {
	t.Helper()
	out, err := exec.Command("du", "-sk", dir).Output()
	if err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(strings.Fields(string(out))[0])
	if err != nil {
		t.Fatal(err)
	}
	return n
}
