package sys

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// sparse makes a file with data at some offsets and holes between.
func sparse(t *testing.T, size int64, at map[int64]string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for off, s := range at {
		if _, err := f.WriteAt([]byte(s), off); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func TestCopySparseCopiesContentAndHoles(t *testing.T) {
	const size = 40<<20 + 5
	for name, at := range map[string]map[int64]string{
		"empty":   {},
		"ends":    {0: "first", size - 4: "last"},
		"middle":  {20 << 20: "middle"},
		"unequal": {4095: "over a page's end", 8 << 20: "x"},
	} {
		src := sparse(t, size, at)
		dst := sparse(t, 0, nil)
		if err := CopySparse(context.Background(), dst, src); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		want, err := os.ReadFile(src.Name())
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(dst.Name())
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s: the copy is another", name)
		}
		var st syscall.Stat_t
		if err := syscall.Stat(dst.Name(), &st); err != nil {
			t.Fatal(err)
		}
		if st.Blocks*512 > 1<<20 {
			t.Errorf("%s: the copy has %d bytes on disk", name, st.Blocks*512)
		}
	}
}

func TestCopySparseEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := CopySparse(ctx, sparse(t, 0, nil), sparse(t, 1<<20, map[int64]string{0: "x"})); !errors.Is(err, context.Canceled) {
		t.Errorf("CopySparse = %v", err)
	}
}
