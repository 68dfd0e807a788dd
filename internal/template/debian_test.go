package template

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

func needDebian(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: a Debian build needs root here")
	}
	if _, err := exec.LookPath("mmdebstrap"); err != nil {
		t.Skip("SKIP: mmdebstrap is not installed")
	}
	if testing.Short() || os.Getenv("CLOCHE_TEST_DEBIAN") == "" {
		t.Skip("SKIP: a Debian build downloads a hundred megabytes; set CLOCHE_TEST_DEBIAN=1")
	}
}

func TestBuildDebianBase(t *testing.T) {
	needDebian(t)
	s := openStore(t)
	var lines []string
	var digests []string
	for range 2 {
		built, err := s.BuildDebian(t.Context(), sandbox.BaseTemplate.Debian, sandbox.BaseTemplate.Config,
			func(line string) { lines = append(lines, line) })
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%+v", built)
		digests = append(digests, built.Digest)
	}
	if !slices.Contains(lines, "done") {
		t.Errorf("no progress was told: %q", lines)
	}
	if digests[0] != digests[1] {
		t.Errorf("two builds of the same packages differ: %v", digests)
	}
	image, err := s.Image(t.Context(), digests[0])
	if err != nil {
		t.Fatal(err)
	}
	root := mountImage(t, image)
	checkBase(t, root)
	left, err := os.ReadDir(buildRoot)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range left {
		if strings.HasPrefix(e.Name(), s.buildPrefix()) {
			t.Errorf("the build left %s", e.Name())
		}
	}
}

// checkBase looks at what the base template promises.
func checkBase(t *testing.T, root string) {
	t.Helper()
	for _, name := range []string{"bin/bash", "usr/bin/python3", "usr/bin/git", "usr/bin/curl", "usr/bin/sudo", "home/user/.bashrc", "etc/ssl/certs/ca-certificates.crt"} {
		if _, err := os.Stat(root + "/" + name); err != nil {
			t.Error(err)
		}
	}
	read := func(name string) string {
		data, err := os.ReadFile(root + "/" + name)
		if err != nil {
			t.Error(err)
		}
		return string(data)
	}
	if got := read("etc/sudoers.d/user"); got != "user ALL=(ALL:ALL) NOPASSWD: ALL\n" {
		t.Errorf("sudoers: %q", got)
	}
	if !strings.Contains(read("etc/passwd"), "\nuser:x:1000:1000:") {
		t.Error("the user has not the id 1000")
	}
	if read("etc/machine-id") != "" || read("etc/resolv.conf") != "" || read("etc/hostname") != "cloche\n" {
		t.Error("the image holds something of this host")
	}
	// Every compiled module must fit its source, or Python compiles it again
	// at each start.
	const script = `
import glob, os, struct, sys
bad = total = 0
for p in glob.glob(sys.argv[1] + "/usr/lib/python3*/**/*.pyc", recursive=True):
    with open(p, "rb") as f: head = f.read(16)
    flags, mtime, size = struct.unpack("<III", head[4:])
    src = os.path.join(os.path.dirname(os.path.dirname(p)), os.path.basename(p).split(".")[0] + ".py")
    if os.path.islink(src) and os.readlink(src).startswith("/"): src = sys.argv[1] + os.readlink(src)
    if not os.path.exists(src): continue
    st = os.stat(src)
    total += 1
    if flags or int(st.st_mtime) & 0xffffffff != mtime or st.st_size != size:
        bad += 1
        if bad < 5: print("stale:", p, flags, mtime, int(st.st_mtime))
print(total, bad)
sys.exit(1 if bad or not total else 0)
`
	if out, err := exec.Command("python3", "-c", script, root).CombinedOutput(); err != nil {
		t.Errorf("compiled Python modules: %v\n%s", err, out)
	} else {
		t.Logf("compiled Python modules, stale ones: %s", out)
	}
}

func TestBuildDebianFails(t *testing.T) {
	needDebian(t)
	s := openStore(t)
	src := sandbox.DebianSource{Packages: []string{"no-such-package-anywhere"}}
	_, err := s.BuildDebian(t.Context(), src, sandbox.RuntimeConfig{}, func(string) {})
	if e := sandbox.AsError(err); e == nil || e.Code != "package_unknown" {
		t.Errorf("an unknown package: %v", err)
	}
	// Cancelled in the middle: all of its processes and files are gone.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, err = s.BuildDebian(ctx, sandbox.DebianSource{}, sandbox.RuntimeConfig{}, func(line string) {
		if strings.Contains(line, "apt-get update") {
			cancel()
		}
	})
	if !sandbox.IsClass(err, sandbox.Unavailable) || !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled build: %v", err)
	}
	if left, err := filepath.Glob(filepath.Join(buildRoot, s.buildPrefix()+"*")); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if out, err := exec.Command("pgrep", "-f", s.buildPrefix()).Output(); err == nil {
		t.Errorf("processes are left: %s", out)
	}
}

func TestMissingMmdebstrap(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := openStore(t).BuildDebian(t.Context(), sandbox.DebianSource{Suite: "bookworm"}, sandbox.RuntimeConfig{}, func(string) {})
	if e := sandbox.AsError(err); e == nil || e.Class != sandbox.FailedPrecondition || e.Code != "mmdebstrap_missing" || e.Hint != "apt-get install mmdebstrap" {
		t.Errorf("%v", err)
	}
}
