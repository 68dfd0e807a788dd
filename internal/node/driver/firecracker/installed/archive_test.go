package installed

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

type member struct {
	name, content string
	kind          byte
}

// release is an archive as upstream has them, and more members.
func release(version, arch string, more ...member) []byte {
	dir := "release-v" + version + "-" + arch + "/"
	return tgz(append([]member{
		{name: dir, kind: tar.TypeDir},
		{name: dir + "firecracker-v" + version + "-" + arch + ".debug", content: "symbols"},
		{name: dir + "firecracker-v" + version + "-" + arch, content: script("Firecracker", version, "")},
		{name: dir + "seccompiler-bin-v" + version + "-" + arch, content: "other"},
		{name: dir + "jailer-v" + version + "-" + arch, content: script("Jailer", version, "")},
		{name: dir + "SHA256SUMS", content: "sums"},
	}, more...)...)
}

func tgz(members ...member) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for _, m := range members {
		h := &tar.Header{Name: m.name, Typeflag: m.kind, Mode: 0o755, Size: int64(len(m.content))}
		if m.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Typeflag == tar.TypeSymlink || h.Typeflag == tar.TypeLink {
			h.Linkname, h.Size = m.content, 0
		}
		if err := w.WriteHeader(h); err != nil {
			panic(err)
		}
		if h.Size > 0 {
			_, _ = w.Write([]byte(m.content))
		}
	}
	_ = w.Close()
	_ = z.Close()
	return b.Bytes()
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}

func file(t *testing.T, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "release.tgz")
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestUnpack(t *testing.T) {
	for _, b := range [][]byte{
		release("1.15.1", machine()),
		tgz(member{name: "./jailer-v1.15.1-" + machine(), content: script("Jailer", "1.15.1", "")}, member{name: "firecracker-v1.15.1-" + machine(), content: script("Firecracker", "1.15.1", "")}),
	} {
		r, err := Unpack(ctx, file(t, b), t.TempDir())
		if err != nil || r.Version != "1.15.1" {
			t.Fatalf("%+v, %v", r, err)
		}
		for path, want := range map[string]string{r.Firecracker: script("Firecracker", "1.15.1", ""), r.Jailer: script("Jailer", "1.15.1", "")} {
			if got, err := os.ReadFile(path); err != nil || string(got) != want {
				t.Errorf("%q, %v", got, err)
			}
		}
	}
}

func TestHostileArchives(t *testing.T) {
	arch := machine()
	f, j := "firecracker-v1.15.1-"+arch, "jailer-v1.15.1-"+arch
	whole := release("1.15.1", arch)
	many := make([]member, maxEntries)
	for i := range many {
		many[i].name = "x"
	}
	for name, c := range map[string]struct {
		b    []byte
		code string
	}{
		"nothing":        {nil, "archive_invalid"},
		"no gzip":        {[]byte("hello"), "archive_invalid"},
		"cut off":        {whole[:len(whole)/2], "archive_invalid"},
		"no jailer":      {tgz(member{name: f, content: "x"}), "archive_invalid"},
		"twice":          {release("1.15.1", arch, member{name: "x/" + f, content: "y"}), "archive_invalid"},
		"two versions":   {tgz(member{name: f, content: "x"}, member{name: "jailer-v1.14.4-" + arch, content: "x"}), "archive_invalid"},
		"links":          {tgz(member{name: f, content: "/bin/sh", kind: tar.TypeSymlink}, member{name: j, content: "/bin/sh", kind: tar.TypeLink}), "archive_invalid"},
		"a device":       {tgz(member{name: f, kind: tar.TypeChar}, member{name: j, content: "x"}), "archive_invalid"},
		"outside":        {tgz(member{name: "../../" + f, content: "x"}, member{name: "../../" + j, content: "x"}), "archive_invalid"},
		"a strange name": {tgz(member{name: "firecracker-v1/../../x-" + arch, content: "x"}, member{name: j, content: "x"}), "archive_invalid"},
		"many":           {tgz(many...), "archive_invalid"},
		"for another":    {release("1.15.1", map[string]string{"x86_64": "aarch64", "aarch64": "x86_64"}[arch]), "archive_architecture"},
	} {
		outer := t.TempDir()
		dir := filepath.Join(outer, "a", "b")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if r, err := Unpack(ctx, file(t, c.b), dir); code(err) != c.code {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
		if list, err := filepath.Glob(filepath.Join(outer, "*")); err != nil || len(list) != 1 {
			t.Errorf("%s left %v", name, list)
		}
	}
	// Members that say how large they are, and bombs, are bounded.
	if err := save(filepath.Join(t.TempDir(), "x"), strings.NewReader("too long"), 3); err == nil {
		t.Error("a long member")
	}
	bomb := &bounded{ctx: ctx, r: zeros{}, left: 1 << 20}
	if n, err := io.Copy(io.Discard, bomb); !errors.Is(err, errTooLarge) || n > 1<<20 {
		t.Errorf("a bomb: %d, %v", n, err)
	}
	stopped, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Unpack(stopped, file(t, whole), t.TempDir()); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

func TestFetch(t *testing.T) {
	whole := release("1.15.1", machine())
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/ok":
			_, _ = w.Write(whole)
		case "/moved":
			http.Redirect(w, r, "/ok", http.StatusFound)
		case "/loop":
			http.Redirect(w, r, "/loop", http.StatusFound)
		case "/elsewhere":
			http.Redirect(w, r, "file:///etc/passwd", http.StatusFound)
		case "/short":
			w.Header().Set("Content-Length", "100000")
			_, _ = w.Write(whole)
		case "/stuck":
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			http.NotFound(w, r)
		}
	}))
	defer s.Close()
	pin := sum(whole)
	for _, pin := range []string{pin, "sha256:" + strings.ToUpper(pin)} {
		for _, path := range []string{"/ok", "/moved"} {
			got, err := Fetch(ctx, s.URL+path, pin, t.TempDir())
			if err != nil {
				t.Errorf("%s: %v", path, err)
				continue
			}
			if b, err := os.ReadFile(got); err != nil || !bytes.Equal(b, whole) {
				t.Errorf("%s: %d bytes, %v", path, len(b), err)
			}
		}
	}
	secret := strings.Replace(s.URL, "://", "://user:password@", 1)
	for _, c := range []struct{ url, pin, code string }{
		{s.URL + "/ok", "", "hash_missing"},
		{s.URL + "/ok", "abc", "hash_invalid"},
		{s.URL + "/ok", strings.Repeat("0", 64), "hash_differs"},
		{secret + "/nothing?password", pin, "fetch_failed"},
		{secret + "/loop", pin, "fetch_failed"},
		{secret + "/elsewhere", pin, "fetch_failed"},
		{s.URL + "/short", pin, "fetch_failed"},
		{"http://127.0.0.1:1/password", pin, "fetch_failed"},
		{"ftp://host/x", pin, "url_invalid"},
		{"file:///etc/passwd", pin, "url_invalid"},
		{"https://user:password@ho st/x", pin, "url_invalid"},
	} {
		if got, err := Fetch(ctx, c.url, c.pin, t.TempDir()); code(err) != c.code || strings.Contains(err.Error(), "password") {
			t.Errorf("%s: %s, %v", c.url, got, err)
		}
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if _, err := Fetch(short, s.URL+"/stuck", pin, t.TempDir()); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a server that hangs: %v", err)
	}
}

// From https nothing leads to http, and a certificate that nobody vouches for
// is refused.
func TestFetchTLS(t *testing.T) {
	whole := release("1.15.1", machine())
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(whole) }))
	defer plain.Close()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/down" {
			http.Redirect(w, r, plain.URL, http.StatusFound)
			return
		}
		_, _ = w.Write(whole)
	}))
	defer s.Close()
	if _, err := Fetch(ctx, s.URL+"/ok", sum(whole), t.TempDir()); code(err) != "fetch_failed" {
		t.Errorf("a certificate of nobody: %v", err)
	}
	c := client()
	c.Transport = s.Client().Transport
	for path, want := range map[string]string{"/ok": "", "/down": "fetch_failed"} {
		u, err := url.Parse(s.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := fetch(ctx, c, u, sum(whole), t.TempDir()); code(err) != want {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestFetchFile(t *testing.T) {
	whole := release("1.15.1", machine())
	path := file(t, whole)
	if got, err := Fetch(ctx, path, "", t.TempDir()); err != nil || got != path {
		t.Errorf("%s, %v", got, err)
	}
	if got, err := Fetch(ctx, path, sum(whole), t.TempDir()); err != nil || got == path {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := Fetch(ctx, path, strings.Repeat("0", 64), t.TempDir()); !sandbox.IsClass(err, sandbox.Invalid) {
		t.Error(err)
	}
	if _, err := Fetch(ctx, path+"x", sum(whole), t.TempDir()); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// FuzzUnpack: whatever an archive has, only the two files come out.
func FuzzUnpack(f *testing.F) {
	f.Add("firecracker-v1.15.1-x86_64", "jailer-v1.15.1-x86_64", byte('0'), []byte("x"))
	f.Add("../firecracker-v1-x86_64", "x/jailer-v1-x86_64", byte('2'), []byte("/etc"))
	f.Fuzz(func(t *testing.T, one, two string, kind byte, raw []byte) {
		dir := t.TempDir()
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		w := tar.NewWriter(z)
		for _, name := range []string{one, two} {
			if w.WriteHeader(&tar.Header{Name: name, Typeflag: kind, Linkname: "x"}) != nil {
				t.Skip()
			}
		}
		_, _ = z.Write(raw)
		_ = z.Close()
		r, err := unpack(ctx, &b, dir)
		list, _ := os.ReadDir(dir)
		if len(list) > 2 || err == nil && (len(list) != 2 || r.Version == "") {
			t.Fatalf("%+v, %v, %v", r, err, list)
		}
	})
}
