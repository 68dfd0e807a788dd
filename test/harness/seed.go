package harness

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

var seedOnce sync.Mutex

// seed gives d a state directory that has the template `base`. Building it
// takes a minute, so it is built once, kept in dist/seed (or $CLOCHE_SEED) and
// copied from then on. A $CLOCHE_SEED that is a tar is taken as it is.
func seed(tb testing.TB, d *Daemon) {
	tb.Helper()
	if file := os.Getenv("CLOCHE_SEED"); strings.HasSuffix(file, ".tar") {
		unpack(tb, d, file)
		return
	}
	seedWith(tb, d, "", "base")
}

// SeedWith gives a daemon that has not been started one template and no other:
// what `template build` makes of args. It is built once, as the other one is.
func (d *Daemon) SeedWith(args ...string) {
	d.tb.Helper()
	sum := sha256.Sum256([]byte(strings.Join(args, "\x00")))
	seedWith(d.tb, d, "-"+hex.EncodeToString(sum[:4]), args...)
}

func seedWith(tb testing.TB, d *Daemon, suffix string, args ...string) {
	tb.Helper()
	seedOnce.Lock()
	defer seedOnce.Unlock()
	dir := os.Getenv("CLOCHE_SEED")
	switch {
	case dir == "":
		dir = filepath.Join(repoRoot(tb), "dist", "seed")
	case strings.HasSuffix(dir, ".tar"):
		dir = filepath.Dir(dir)
	}
	tarball := filepath.Join(dir, "state-"+recipe(tb)+suffix+".tar")
	if _, err := os.Stat(tarball); err != nil {
		makeSeed(tb, dir, tarball, args)
	}
	unpack(tb, d, tarball)
}

func unpack(tb testing.TB, d *Daemon, tarball string) {
	tb.Helper()
	if err := os.MkdirAll(d.State, 0o700); err != nil {
		tb.Fatal(err)
	}
	run(tb, "tar", "-C", d.State, "-xf", tarball)
}

// recipe is a hash over the sources that decide what a seed looks like, so
// that a changed image format or store makes a new one.
func recipe(tb testing.TB) string {
	tb.Helper()
	h := sha256.New()
	for _, dir := range []string{"internal/template", "internal/store", "internal/sandbox/build.go"} {
		err := filepath.WalkDir(filepath.Join(repoRoot(tb), dir), func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || strings.HasSuffix(path, "_test.go") {
				return err
			}
			b, err := os.ReadFile(path)
			h.Write(b)
			return err
		})
		if err != nil {
			tb.Fatal(err)
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

func makeSeed(tb testing.TB, dir, tarball string, args []string) {
	tb.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		tb.Fatal(err)
	}
	tb.Logf("building the template %s once, for every suite", strings.Join(args, " "))
	d := New(tb)
	d.Serve()
	d.Must(append([]string{"template", "build"}, args...)...)
	d.Stop()
	run(tb, "tar", "-C", d.State, "--sparse", "-cf", tarball+".tmp", ".")
	if err := os.Rename(tarball+".tmp", tarball); err != nil {
		tb.Fatal(err)
	}
}

func run(tb testing.TB, name string, args ...string) {
	tb.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		tb.Fatalf("%s: %v\n%s", name, err, out)
	}
}
