package kernel

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

// fakeApt puts an apt into PATH whose index has packages by name, each with
// what it depends on and its content.
type fakeApt struct{ dir string }

func newFakeApt(t *testing.T) fakeApt {
	t.Helper()
	a := fakeApt{dir: t.TempDir()}
	t.Setenv("PATH", a.dir+":"+os.Getenv("PATH"))
	t.Setenv("SECRET", "secret")
	a.tool(t, "apt-cache", `
[ -z "$SECRET" ] || exit 9
[ "$1" = show ] && cat "$0.d/$3.show" && exit
for name; do :; done
cat "$0.d/$name.depends" || exit 100`)
	a.tool(t, "apt-get", `
[ "$1 $2" = "-q download" ] || exit 9
cp "$(dirname "$0")/apt-cache.d/${3%=*}.deb" "${3%=*}_1_amd64.deb"`)
	if err := os.Mkdir(filepath.Join(a.dir, "apt-cache.d"), 0o755); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a fakeApt) tool(t *testing.T, name, script string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(a.dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

func (a fakeApt) add(t *testing.T, name, content string, depends ...string) {
	t.Helper()
	sum := sha256.Sum256([]byte(content))
	deps := name + "\n"
	for _, d := range depends {
		deps += "  Depends: " + d + "\n"
	}
	show := fmt.Sprintf("Package: %s\nVersion: 1:2.3-4~x\nSize: %d\nSHA256: %s\n", name, len(content), hex.EncodeToString(sum[:]))
	for suffix, text := range map[string]string{".deb": content, ".depends": deps, ".show": show} {
		if err := os.WriteFile(filepath.Join(a.dir, "apt-cache.d", name+suffix), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func download(t *testing.T, name string) (got string, err error) {
	t.Helper()
	dir, said := t.TempDir(), ""
	files, err := Download(context.Background(), name, dir, func(s string) { said += s + "\n" })
	for _, f := range files {
		if filepath.Dir(f) != dir {
			t.Errorf("%s is elsewhere", f)
		}
		got += string(contents(t, f)) + " "
	}
	if err == nil && !strings.Contains(said, "downloading ") {
		t.Errorf("it said %q", said)
	}
	return strings.TrimSpace(got), err
}

func TestDownload(t *testing.T) {
	a := newFakeApt(t)
	a.add(t, "linux-image-virtual", "meta", "linux-image-6.8-generic", "linux-headers-6.8")
	a.add(t, "linux-image-6.8-generic", "image", "kmod", "linux-modules-6.8-generic", "<linux-modules-9>")
	a.add(t, "linux-modules-6.8-generic", "modules")
	for _, name := range []string{"", "linux-image-virtual", "linux-image-6.8-generic"} {
		if got, err := download(t, name); err != nil || got != "image modules" {
			t.Errorf("%q: %q, %v", name, got, err)
		}
	}
	a.add(t, "linux-image-cloud-amd64", "meta", "linux-image-6.1.0-1-cloud-amd64")
	a.add(t, "linux-image-6.1.0-1-cloud-amd64", "cloud")
	if got, err := download(t, ""); err != nil || got != "cloud" {
		t.Errorf("%q, %v", got, err)
	}
	for _, name := range []string{"-x", "./x.deb", "a b", "X", "linux-image-6.1/sid"} {
		if _, err := download(t, name); !sandbox.IsClass(err, sandbox.Invalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if _, err := download(t, "unknown"); !sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("unknown: %v", err)
	}
	before, err := filepath.Glob(filepath.Join(downloadRoot, "cloche-kernel-*"))
	if err != nil || len(before) != 0 {
		t.Errorf("left over: %v, %v", before, err)
	}
}

// What apt's own user, or the network, made of a package is not believed.
func TestDownloadChecks(t *testing.T) {
	a := newFakeApt(t)
	const name = "linux-image-6.1.0-1-cloud-amd64"
	a.add(t, name, "good")
	for what, c := range map[string]struct {
		script string
		class  sandbox.Class
	}{
		"another content": {`echo evil > x.deb`, sandbox.Unavailable},
		"a longer one":    {`printf goodmore > x.deb`, sandbox.Unavailable},
		"a link":          {`ln -s "$(dirname "$0")/apt-cache.d/` + name + `.deb" x.deb`, sandbox.Internal},
		"a pipe":          {`mkfifo x.deb`, sandbox.Internal},
		"two":             {`printf good > x.deb; printf good > y.deb`, sandbox.Unavailable},
		"none":            {`:`, sandbox.Unavailable},
		"a failure":       {`echo "E: Failed to fetch http://user:password@host/x" >&2; exit 100`, sandbox.Unavailable},
	} {
		a.tool(t, "apt-get", c.script)
		got, err := download(t, name)
		if !sandbox.IsClass(err, c.class) || strings.Contains(err.Error(), "password") {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
	for _, show := range []string{
		"", "Version: 1\nSize: 4\nSHA256: abc\n", "Version: -x\nSize: 4\nSHA256: " + strings.Repeat("a", 64) + "\n",
		"Version: 1\nSize: 9999999999\nSHA256: " + strings.Repeat("a", 64) + "\n",
	} {
		if err := os.WriteFile(filepath.Join(a.dir, "apt-cache.d", name+".show"), []byte(show), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := download(t, name); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
			t.Errorf("%q: %v", show, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Download(ctx, name, t.TempDir(), func(string) {}); err == nil || sandbox.IsClass(err, sandbox.NotFound) {
		t.Errorf("cancelled: %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := download(t, ""); !sandbox.IsClass(err, sandbox.FailedPrecondition) {
		t.Errorf("without apt: %v", err)
	}
}
