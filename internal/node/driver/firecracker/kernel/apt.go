package kernel

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"cloche.dev/cloche/internal/sandbox"
)

// Metapackages are the packages that stand for the distribution's newest kernel
// for virtual machines: Debian's and Ubuntu's.
var Metapackages = []string{"linux-image-cloud-amd64", "linux-image-virtual"}

const (
	downloadRoot = "/var/tmp" // apt's own user can pass through it
	maxPackage   = 1 << 30
	maxAptOutput = 1 << 20
)

var (
	// Narrower than Debian's grammar, so that nothing is an option or a file.
	packageGrammar = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{0,126}[a-z0-9+]$`)
	imageGrammar   = regexp.MustCompile(`^linux-image-(unsigned-)?[0-9]`)
	modulesGrammar = regexp.MustCompile(`^linux-modules-[0-9]`)
	credential     = regexp.MustCompile(`//[^/@\s]+@`)
)

// Download fetches the kernel package that the metapackage depends on, or the
// package itself where it is one, into dir, and returns the files. "" means the
// first of Metapackages that apt knows. It uses the apt client of this host as
// an ordinary download: nothing is installed, apt fetches as its own
// unprivileged user, and what came is compared with the hash in apt's signed
// index once no other user can write to it.
func Download(ctx context.Context, metapackage, dir string, progress func(string)) ([]string, error) {
	for _, tool := range []string{"apt-cache", "apt-get"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, sandbox.Errorf(sandbox.FailedPrecondition, "apt_missing", "%s is not installed on this host", tool).
				WithHint("name a kernel package with --package FILE.deb, or an image with --vmlinux FILE")
		}
	}
	names, err := packages(ctx, metapackage)
	if err != nil {
		return nil, err
	}
	var files []string
	for _, name := range names {
		progress("downloading " + name)
		file, err := downloadOne(ctx, name, dir)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	return files, nil
}

// packages returns the package with the kernel's image and, where its modules
// are in another one, that too.
func packages(ctx context.Context, metapackage string) ([]string, error) {
	tries := Metapackages
	if metapackage != "" {
		tries = []string{metapackage}
	}
	var image string
	for _, name := range tries {
		if !packageGrammar.MatchString(name) {
			return nil, sandbox.Errorf(sandbox.Invalid, "package_invalid", "%.80q is no name of a Debian package", name)
		}
		if imageGrammar.MatchString(name) {
			image = name
			break
		}
		if deps, err := depends(ctx, name, imageGrammar); err != nil {
			return nil, err
		} else if len(deps) > 0 {
			image = deps[0]
			break
		}
	}
	if image == "" {
		return nil, sandbox.Errorf(sandbox.NotFound, "package_unknown", "apt knows no kernel by the name %s", strings.Join(tries, " or ")).
			WithHint("try `apt-get update`; `apt-cache search linux-image` lists what there is")
	}
	modules, err := depends(ctx, image, modulesGrammar)
	return append([]string{image}, modules...), err
}

// depends returns what a package depends on, as far as it fits; nothing for a
// package that apt doesn't know.
func depends(ctx context.Context, name string, fits *regexp.Regexp) (found []string, err error) {
	out, err := apt(ctx, "/", "apt-cache", "depends", "--no-recommends", "--no-suggests", name)
	var exit *exec.ExitError
	if errors.As(err, &exit) && ctx.Err() == nil {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(out)) {
		_, dep, ok := strings.Cut(line, "Depends: ")
		if dep = strings.TrimSpace(dep); ok && packageGrammar.MatchString(dep) && fits.MatchString(dep) {
			found = append(found, dep)
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// candidate is what apt's index says about a package.
type candidate struct {
	version, hash string
	size          int64
}

func lookUp(ctx context.Context, name string) (c candidate, err error) {
	out, err := apt(ctx, "/", "apt-cache", "show", "--no-all-versions", name)
	if err != nil {
		return c, aptError(ctx, err, name)
	}
	for line := range strings.Lines(string(out)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "Version":
			c.version = value
		case "SHA256":
			c.hash = value
		case "Size":
			c.size, _ = strconv.ParseInt(value, 10, 64) // 0 is refused below
		}
	}
	if b, err := hex.DecodeString(c.hash); err != nil || len(b) != sha256.Size || c.size <= 0 || c.size > maxPackage ||
		!regexp.MustCompile(`^[0-9][A-Za-z0-9.+:~-]*$`).MatchString(c.version) {
		return c, sandbox.Errorf(sandbox.FailedPrecondition, "package_unusable", "apt's index has no version, size and SHA256 of %s that can be used", name).
			WithHint("try `apt-get update`, or name a file with --package")
	}
	return c, nil
}

func downloadOne(ctx context.Context, name, dir string) (string, error) {
	c, err := lookUp(ctx, name)
	if err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(downloadRoot, "cloche-kernel-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := giveToApt(tmp); err != nil {
		return "", err
	}
	if _, err := apt(ctx, tmp, "apt-get", "-q", "download", name+"="+c.version); err != nil {
		return "", aptError(ctx, err, name)
	}
	root, err := os.OpenRoot(tmp)
	if err != nil {
		return "", err
	}
	defer root.Close() //nolint:errcheck // it is only read
	found, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil || len(found) != 1 {
		return "", sandbox.Errorf(sandbox.Unavailable, "apt_download_failed", "apt-get left %d packages, not one", len(found))
	}
	to := filepath.Join(dir, name+".deb")
	return to, copyChecked(root, filepath.Base(found[0]), to, c)
}

// giveToApt lets apt's own user write to a directory; without that apt would
// fetch as root. A host without that user has an apt that knows none.
func giveToApt(dir string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	u, err := user.Lookup("_apt")
	if err != nil {
		return nil //nolint:nilerr // as said
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return err
	}
	return os.Chown(dir, uid, -1)
}

// copyChecked copies what apt's user could still change to where only this one
// can, and compares the copy with the index.
func copyChecked(root *os.Root, name, to string, c candidate) error {
	if info, err := root.Lstat(name); err != nil || !info.Mode().IsRegular() {
		return errors.Join(err, sandbox.Errorf(sandbox.Internal, "apt_download_failed", "what apt-get left is no file"))
	}
	in, err := root.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	h := sha256.New()
	err = writeFile(to, func(w io.Writer) error {
		_, err := io.Copy(io.MultiWriter(w, h), io.LimitReader(in, c.size+1))
		return err
	})
	if err == nil && hex.EncodeToString(h.Sum(nil)) != c.hash {
		err = sandbox.Errorf(sandbox.Unavailable, "package_changed", "what was downloaded is not the package that apt's index names").
			WithHint("try `apt-get update` and then again")
	}
	return err
}

// apt runs one of apt's tools in dir, with none of this process's environment
// but the proxies, and returns what it prints. What it complains about is part
// of the error, without the passwords that its sources' addresses may hold.
func apt(ctx context.Context, dir string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "HOME=/", "DEBIAN_FRONTEND=noninteractive"}
	for _, name := range []string{"http_proxy", "https_proxy", "no_proxy"} {
		if v := os.Getenv(name); v != "" {
			cmd.Env = append(cmd.Env, name+"="+v)
		}
	}
	// The fetching processes are children of apt's, so the whole group ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	out, said := &atMost{left: maxAptOutput}, &atMost{left: 4 << 10}
	cmd.Stdout, cmd.Stderr = out, said
	err := cmd.Run()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		text := credential.ReplaceAllString(strings.ToValidUTF8(said.String(), "?"), "//")
		return nil, fmt.Errorf("%s %s: %w: %s", args[0], args[1], err, strings.TrimSpace(text))
	}
	return out.Bytes(), nil
}

func aptError(ctx context.Context, err error, name string) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return sandbox.Errorf(sandbox.Unavailable, "apt_download_failed", "apt can't fetch %s: %w", name, err).
		WithHint("try `apt-get update` on this host, or name a file with --package")
}

// atMost keeps the beginning of what is written to it.
type atMost struct {
	bytes.Buffer
	left int
}

// Write implements io.Writer.
func (b *atMost) Write(p []byte) (int, error) {
	n := min(len(p), b.left)
	b.left -= n
	b.Buffer.Write(p[:n])
	return len(p), nil
}
