package drivertest

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Files are what the suite's machines are made from.
type Files struct {
	Guest  string // the guest
	Broken string // the guest, built so that it can be broken; only RunFaults needs it
	Image  string // the suite's image
	inside string // the image's program
	tree   string // the directory that the image was made of
}

// Prebuilt are files that were made elsewhere, on a host that has what Prepare
// needs: in dir are guest, guest-faults, image.erofs and inside, the image's
// program. What the image was made of is planted in dir anew.
func Prebuilt(dir string) (Files, error) {
	f := Files{
		Guest: filepath.Join(dir, "guest"), Broken: filepath.Join(dir, "guest-faults"), Image: filepath.Join(dir, "image.erofs"),
		inside: filepath.Join(dir, "inside"), tree: filepath.Join(dir, "tree"),
	}
	for _, path := range []string{f.Guest, f.Broken, f.Image, f.inside} {
		if _, err := os.Stat(path); err != nil {
			return f, fmt.Errorf("%w: %w", ErrMissing, err)
		}
	}
	if _, err := os.Stat(f.tree); err == nil {
		return f, nil
	}
	return f, f.plant()
}

const module = "cloche.dev/cloche/"

// insidePath is where the image has its program.
const insidePath = "/bin/inside"

// ErrMissing is Prepare's error where the host lacks a tool.
var ErrMissing = errors.New("the suite's image can't be made")

// Prepare builds the suite's files in a directory.
func Prepare(dir string) (Files, error) {
	f := Files{
		Guest: filepath.Join(dir, "guest"), Broken: filepath.Join(dir, "guest-faults"), Image: filepath.Join(dir, "image.erofs"),
		tree: filepath.Join(dir, "tree"),
	}
	f.inside = filepath.Join(f.tree, insidePath)
	if _, err := exec.LookPath("mkfs.erofs"); err != nil {
		return f, fmt.Errorf("%w: mkfs.erofs is missing (package erofs-utils)", ErrMissing)
	}
	if err := f.plant(); err != nil {
		return f, err
	}
	for _, b := range []struct{ out, pkg, tags string }{
		{f.inside, "internal/node/driver/drivertest/testdata/inside", ""},
		{f.Guest, "cmd/cloche-guest", ""},
		{f.Broken, "cmd/cloche-guest", "clochefaults"},
	} {
		if err := Build(b.out, b.pkg, b.tags); err != nil {
			return f, err
		}
	}
	return f, run("mkfs.erofs", "-Enoinline_data", "-x-1", f.Image, f.tree)
}

// Build builds one of the project's commands, statically.
func Build(out, pkg, tags string) error {
	cmd := exec.Command("go", "build", "-trimpath", "-tags", tags, "-ldflags=-s -w", "-o", out, module+pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if msg, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w: %s", pkg, err, msg)
	}
	return nil
}

func run(name string, args ...string) error {
	if msg, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, msg)
	}
	return nil
}

// plant fills the tree with what a filesystem might get wrong, the same whatever
// umask a driver is tested under.
func (f *Files) plant() error {
	defer syscall.Umask(syscall.Umask(0o022))
	for dir, mode := range map[string]os.FileMode{
		"bin": 0o755, "etc": 0o755, "home/user": 0o755, "tmp": 0o777 | os.ModeSticky, "data": 0o755, "data/closed": 0o700, "data/deep/er/still": 0o750,
		"dev": 0o755, "proc": 0o755, "sys": 0o755, "run": 0o755,
	} {
		path := filepath.Join(f.tree, dir)
		if err := errors.Join(os.MkdirAll(path, 0o755), os.Chmod(path, mode)); err != nil {
			return err
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	noise := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return string(b)
	}
	files := map[string]string{
		"etc/passwd":  "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
		"etc/group":   "root:x:0:\nuser:x:1000:\nextra:x:2000:user\nmore:x:2001:other,user\nnot:x:2002:other\n",
		"etc/mark":    "from the image",
		"data/zeroes": strings.Repeat("\x00", 100_000),
	}
	for _, n := range []int{0, 1, 4095, 4096, 4097, 1_234_567} {
		files[fmt.Sprintf("data/noise %d", n)] = noise(n)
	}
	files["data/deep/er/still/näme\nwith a line"] = "odd"
	for name, content := range files {
		path := filepath.Join(f.tree, name)
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
		when := time.Unix(1_000_000_000+int64(len(content)), 0)
		if err := os.Chtimes(path, when, when); err != nil {
			return err
		}
	}
	return errors.Join(
		os.Symlink("../etc/mark", filepath.Join(f.tree, "data/link")),
		os.Symlink("nowhere/at all", filepath.Join(f.tree, "data/dangling")),
		os.Chmod(filepath.Join(f.tree, "data/noise 1"), 0o4751),
		os.Chown(filepath.Join(f.tree, "data/noise 4096"), 1000, 2000),
	)
}

// onHost runs the image's program on the host.
func (f *Files) onHost(args ...string) ([]byte, error) {
	var out bytes.Buffer
	cmd := exec.Command(f.inside, args...)
	cmd.Stdout = &out
	err := cmd.Run()
	return out.Bytes(), err
}
