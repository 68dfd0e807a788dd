package rootfs

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"testing"

	"cloche.dev/cloche/internal/template/erofs"
)

// manyEntries writes a tar of n files, perDir in a directory. Most are empty,
// since the others take a block of disk each.
func manyEntries(w io.Writer, n, perDir int) error {
	b := bufio.NewWriterSize(w, 1<<20)
	tw := tar.NewWriter(b)
	for i := range n {
		h := tar.Header{Name: fmt.Sprintf("dir-%06d/file-name-%07d", i/perDir, i), Mode: 0o644, ModTime: when, Format: tar.FormatGNU}
		if i%100 == 0 {
			h.Size = 1
		}
		if err := tw.WriteHeader(&h); err != nil {
			return err
		}
		if _, err := tw.Write([]byte("x")[:h.Size]); err != nil {
			return err
		}
	}
	if err := tw.Close(); err != nil {
		return err
	}
	return b.Flush()
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestMemoryPerEntry measures what an entry costs, for directories of a usual
// size and for one that holds everything.
func TestMemoryPerEntry(t *testing.T) {
	n := 1_000_000
	if testing.Short() || raceEnabled {
		n = 50_000
	}
	for _, perDir := range []int{20, n} {
		t.Run(fmt.Sprintf("%d in a directory", perDir), func(t *testing.T) {
			before := heap()
			r, w := io.Pipe()
			go func() { w.CloseWithError(manyEntries(w, n, perDir)) }()
			tree, spool, err := importTar(t, r, Limits{})
			if err != nil {
				t.Fatal(err)
			}
			per := float64(heap()-before) / float64(n)
			f, err := os.CreateTemp(t.TempDir(), "image")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }()
			if _, err := erofs.Write(t.Context(), f, tree.Root, spool, 0); err != nil {
				t.Fatal(err)
			}
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			t.Logf("%d entries: %.0f bytes each in the tree; %d MB of the process's memory in all", n, per, m.Sys>>20)
			if per > 300 {
				t.Errorf("an entry takes %.0f bytes", per)
			}
			runtime.KeepAlive(tree)
		})
	}
}

// BenchmarkImport imports a tar of 256 MB in files of 64 KB and writes its image.
func BenchmarkImport(b *testing.B) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	rnd := rand.NewChaCha8([32]byte{})
	data := make([]byte, 64<<10)
	for i := range 4096 {
		_, _ = rnd.Read(data)
		h := tar.Header{Name: fmt.Sprintf("d%d/f%d", i/64, i), Mode: 0o644, Size: int64(len(data)), ModTime: when}
		if err := w.WriteHeader(&h); err != nil {
			b.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(buf.Len()))
	dir := b.TempDir()
	for b.Loop() {
		if err := importOnce(b.Context(), dir, buf.Bytes()); err != nil {
			b.Fatal(err)
		}
	}
}

func importOnce(ctx context.Context, dir string, raw []byte) error {
	spool, err := NewSpool(dir)
	if err != nil {
		return err
	}
	defer func() { _ = spool.Close() }()
	tree, err := Import(ctx, bytes.NewReader(raw), spool, Limits{})
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, "image")
	if err != nil {
		return err
	}
	defer func() { _ = f.Close(); _ = os.Remove(f.Name()) }()
	_, err = erofs.Write(ctx, f, tree.Root, spool, 0)
	return err
}
