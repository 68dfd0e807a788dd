package template

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

func smallTar(t *testing.T, data string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "etc/x", Mode: 0o644, Size: int64(len(data))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write([]byte(data)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func mustImport(t *testing.T, s *Store, raw []byte, cfg sandbox.RuntimeConfig) sandbox.Built {
	t.Helper()
	built, err := s.ImportTar(t.Context(), bytes.NewReader(raw), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return built
}

func TestSameInputSameDigest(t *testing.T) {
	a, b := openStore(t), openStore(t)
	cfg := sandbox.RuntimeConfig{User: "u", Env: map[string]string{"B": "1", "A": "2"}, Command: []string{"/bin/sh"}}
	raw := smallTar(t, "one")
	first := mustImport(t, a, raw, cfg)
	if again := mustImport(t, b, raw, cfg); again.Digest != first.Digest {
		t.Errorf("%s and %s", first.Digest, again.Digest)
	}
	if other := mustImport(t, a, raw, sandbox.RuntimeConfig{}); other.Digest == first.Digest {
		t.Error("the config must be part of the digest")
	}
	if other := mustImport(t, a, smallTar(t, "two"), cfg); other.Digest == first.Digest {
		t.Error("the contents must be part of the digest")
	}
	m, err := a.Manifest(t.Context(), first.Digest)
	if err != nil || m.Config.User != "u" || m.Image.Size != first.SizeBytes || m.Source.Kind != "tar" {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestImageIsImmutableAndNotRewritten(t *testing.T) {
	s := openStore(t)
	raw := smallTar(t, "one")
	built := mustImport(t, s, raw, sandbox.RuntimeConfig{})
	path, err := s.Image(t.Context(), built.Digest)
	if err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if before.Mode().Perm() != 0o444 {
		t.Errorf("mode %v", before.Mode())
	}
	mustImport(t, s, raw, sandbox.RuntimeConfig{})
	after, err := os.Stat(path)
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("the image was written again: %v", err)
	}
	if left, err := os.ReadDir(s.tmp); err != nil || len(left) != 0 {
		t.Errorf("left in tmp: %v, %v", left, err)
	}
}

func TestImageNoticesChanges(t *testing.T) {
	s := openStore(t)
	raw := smallTar(t, "one")
	built := mustImport(t, s, raw, sandbox.RuntimeConfig{})
	path, err := s.Image(t.Context(), built.Digest)
	if err != nil {
		t.Fatal(err)
	}
	// A copy is another inode with the same bytes: hashed once, then known.
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	replace := func(data []byte) {
		if err := errors.Join(os.WriteFile(path+".new", data, 0o444), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
	}
	replace(good)
	if _, err := s.Image(t.Context(), built.Digest); err != nil {
		t.Errorf("an equal copy: %v", err)
	}
	bad := slices.Clone(good)
	bad[len(bad)-4096] ^= 1
	replace(bad)
	if _, err := s.Image(t.Context(), built.Digest); !sandbox.IsClass(err, sandbox.Internal) || sandbox.AsError(err).Code != "template_changed" {
		t.Errorf("a changed image: %v", err)
	}
	mustImport(t, s, raw, sandbox.RuntimeConfig{}) // repairs
	if _, err := s.Image(t.Context(), built.Digest); err != nil {
		t.Errorf("after a repair: %v", err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(path), manifestName+".x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(filepath.Dir(path), manifestName+".x"), filepath.Join(filepath.Dir(path), manifestName)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Image(t.Context(), built.Digest); !sandbox.IsClass(err, sandbox.Internal) {
		t.Errorf("a changed manifest: %v", err)
	}
}

func TestRemove(t *testing.T) {
	s := openStore(t)
	built := mustImport(t, s, smallTar(t, "one"), sandbox.RuntimeConfig{})
	for range 2 {
		if err := s.Remove(t.Context(), built.Digest); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Image(t.Context(), built.Digest); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("after removal: %v", err)
	}
	for _, bad := range []string{"", "sha256:", "sha256:../../../../etc", "sha256:" + strings.Repeat("A", 64), strings.Repeat("a", 64)} {
		if err := s.Remove(t.Context(), bad); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestOpenClearsWhatWasLeft(t *testing.T) {
	state := t.TempDir()
	s, err := Open(state, Limits{})
	if err != nil {
		t.Fatal(err)
	}
	build := filepath.Join(buildRoot, s.buildPrefix()+"left")
	if err := errors.Join(os.Mkdir(build, 0o700), os.Mkdir(filepath.Join(s.tmp, "make-left"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if s, err = Open(state, Limits{}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(build); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an old build is still there: %v", err)
	}
	if left, _ := os.ReadDir(s.tmp); len(left) != 0 {
		t.Errorf("left in tmp: %v", left)
	}
}

func TestManyAtOnce(t *testing.T) {
	s := openStore(t)
	raw := smallTar(t, "one")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			built, err := s.ImportTar(t.Context(), bytes.NewReader(raw), sandbox.RuntimeConfig{})
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := s.Image(t.Context(), built.Digest); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(s.locks) != 0 {
		t.Errorf("%d locks are left", len(s.locks))
	}
}

func TestConfigAndLimits(t *testing.T) {
	s, err := Open(t.TempDir(), Limits{ImageSize: 8192})
	if err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]sandbox.RuntimeConfig{
		"workdir": {Workdir: "home"}, "env": {Env: map[string]string{"A=B": ""}}, "nul": {Command: []string{"a\x00"}},
		"size": {Env: map[string]string{"A": strings.Repeat("x", maxConfigBytes)}},
	} {
		if _, err := s.ImportTar(t.Context(), bytes.NewReader(nil), cfg); sandbox.AsError(err).Code != "template_config_invalid" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := s.ImportTar(t.Context(), bytes.NewReader(smallTar(t, "x")), sandbox.RuntimeConfig{}); sandbox.AsError(err).Code != "tar_too_large" {
		t.Errorf("an image over its limit: %v", err)
	}
}
