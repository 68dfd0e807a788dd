package erofs_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"cloche.dev/cloche/internal/template/erofs"
	"cloche.dev/cloche/internal/template/erofs/erofstest"
)

func dir(entries ...erofs.Entry) *erofs.Node {
	return &erofs.Node{Mode: erofs.ModeDir | 0o755, Entries: entries}
}

func write(t *testing.T, root *erofs.Node, data []byte, limit int64) (*os.File, erofs.Image, error) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "image")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	img, err := erofs.Write(t.Context(), f, root, bytes.NewReader(data), limit)
	return f, img, err
}

// TestDirectorySizes walks the entries of a directory over every edge of a
// block: with names of all lengths, the last block is once full, once nearly.
func TestDirectorySizes(t *testing.T) {
	for n := range 200 {
		var entries []erofs.Entry
		for i := range n {
			name := fmt.Sprintf("%04d%s", i, strings.Repeat("n", (i*7+n)%252))
			entries = append(entries, erofs.Entry{Name: name, Node: &erofs.Node{Mode: erofs.ModeSocket | 0o600, UID: 1 << 31}})
		}
		f, img, err := write(t, dir(erofs.Entry{Name: "!", Node: dir(entries...)}), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		files, err := erofstest.Verify(f, img.Size)
		if err != nil || len(files) != n+2 {
			t.Fatalf("%d entries: %d files, %v", n, len(files), err)
		}
	}
}

func TestWriteIsDeterministic(t *testing.T) {
	tree := func() *erofs.Node {
		shared := &erofs.Node{Mode: erofs.ModeRegular | 0o644, Size: 5000, Sum: 1}
		return dir(erofs.Entry{Name: "a", Node: shared}, erofs.Entry{Name: "b", Node: dir(erofs.Entry{Name: "c", Node: shared})})
	}
	data := bytes.Repeat([]byte("x"), 5000)
	root := tree()
	_, first, err := write(t, root, data, 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, root := range map[string]*erofs.Node{"the same tree again": root, "an equal tree": tree()} {
		if _, again, err := write(t, root, data, 0); err != nil || again != first {
			t.Errorf("%s: %+v, %v", name, again, err)
		}
	}
	other := tree()
	other.Entries[0].Node.Sum = 2
	if _, img, err := write(t, other, data, 0); err != nil || img.UUID == first.UUID {
		t.Errorf("other contents, the same UUID: %v", err)
	}
}

func TestWriteRefuses(t *testing.T) {
	reg := &erofs.Node{Mode: erofs.ModeRegular}
	twice := dir()
	for name, root := range map[string]*erofs.Node{
		"root":         reg,
		"order":        dir(erofs.Entry{Name: "b", Node: reg}, erofs.Entry{Name: "a", Node: reg}),
		"duplicate":    dir(erofs.Entry{Name: "a", Node: reg}, erofs.Entry{Name: "a", Node: reg}),
		"slash":        dir(erofs.Entry{Name: "a/b", Node: reg}),
		"dots":         dir(erofs.Entry{Name: "..", Node: reg}),
		"long":         dir(erofs.Entry{Name: strings.Repeat("x", 256), Node: reg}),
		"device":       dir(erofs.Entry{Name: "a", Node: &erofs.Node{Mode: 0o020000}}),
		"no target":    dir(erofs.Entry{Name: "a", Node: &erofs.Node{Mode: erofs.ModeSymlink}}),
		"time":         dir(erofs.Entry{Name: "a", Node: &erofs.Node{Mode: erofs.ModeRegular, Mtime: -1}}),
		"two places":   dir(erofs.Entry{Name: "a", Node: twice}, erofs.Entry{Name: "b", Node: twice}),
		"negative":     dir(erofs.Entry{Name: "a", Node: &erofs.Node{Mode: erofs.ModeRegular, Size: -1}}),
		"missing data": dir(erofs.Entry{Name: "a", Node: &erofs.Node{Mode: erofs.ModeRegular, Size: 10}}),
	} {
		if _, _, err := write(t, root, nil, 0); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	var large *erofs.TooLargeError
	huge := dir(erofs.Entry{Name: "a", Node: &erofs.Node{Mode: erofs.ModeRegular, Size: 1 << 62}})
	if _, _, err := write(t, huge, nil, 1<<20); !errors.As(err, &large) {
		t.Errorf("over the limit: %v", err)
	}
}
