package e2e

import (
	"testing"

	"cloche.dev/cloche/test/harness"
)

// TestSmallFiles holds that reading 10 000 small files of the template takes
// at most 0.6 of the time that the same takes through a gofer directory.
func TestSmallFiles(t *testing.T) {
	s := harness.SmallFilesOf(t, 5)
	t.Logf("%d files: image %v, gofer %v (rounds %v and %v), ratio %.2f (load %s)", s.Files, s.Image, s.Gofer, s.ImageBy, s.GoBy, s.Ratio(), load())
	if s.Files < 10_000 {
		t.Errorf("the template has only %d small files", s.Files)
	}
	if s.Ratio() > 0.6 {
		t.Errorf("the image takes %.2f of the gofer's time, more than 0.6", s.Ratio())
	}
}
