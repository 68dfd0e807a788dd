package e2e

import (
	"archive/tar"
	"bytes"
	"sync"
	"testing"
	"time"
)

// screen collects what a terminal shows, for one writer and any reader.
type screen struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// smallRoot is the tar of a root filesystem with hardly anything in it, the
// same bytes each time.
func smallRoot(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	at := time.Unix(1_700_000_000, 0)
	for _, e := range []struct {
		h    tar.Header
		body string
	}{
		{tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}, ""},
		{tar.Header{Name: "./etc/", Typeflag: tar.TypeDir, Mode: 0o755}, ""},
		{tar.Header{Name: "./tmp/", Typeflag: tar.TypeDir, Mode: 0o1777}, ""},
		{tar.Header{Name: "./etc/passwd", Typeflag: tar.TypeReg, Mode: 0o644}, "root:x:0:0:root:/:/bin/sh\nguest:x:1234:1234::/:/bin/sh\n"},
		{tar.Header{Name: "./etc/mark", Typeflag: tar.TypeReg, Mode: 0o640, Uid: 1234, Gid: 77}, "from the tar\n"},
		{tar.Header{Name: "./etc/same", Typeflag: tar.TypeLink, Linkname: "./etc/mark"}, ""},
		{tar.Header{Name: "./etc/link", Typeflag: tar.TypeSymlink, Linkname: "mark"}, ""},
	} {
		e.h.Size, e.h.ModTime = int64(len(e.body)), at
		if err := w.WriteHeader(&e.h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.body)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}
