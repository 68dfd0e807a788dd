package template

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"cloche.dev/cloche/internal/sandbox"
	"cloche.dev/cloche/internal/template/rootfs"
)

// Debian's grammars, a little narrower than policy: what apt would read as
// more than a name ("foo-" removes foo, "./x.deb" is a file) doesn't pass.
var (
	suiteGrammar   = regexp.MustCompile(`^[a-z][a-z0-9.-]{0,62}[a-z0-9]$`)
	packageGrammar = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{0,126}[a-z0-9+]$`)
	userGrammar    = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,30}$`)
)

const (
	maxPackages = 2000
	maxUsers    = 16
)

// BuildDebian implements sandbox.Builder: mmdebstrap installs the packages into
// a directory of its own and hands over a tar, which becomes the image.
//
// Package scripts run as root of a user namespace whose identities are nobody
// on this host (see buildCommand), so they change nothing here. One build runs
// at a time.
func (s *Store) BuildDebian(ctx context.Context, src sandbox.DebianSource, cfg sandbox.RuntimeConfig, progress func(string)) (built sandbox.Built, err error) {
	if err := checkDebian(src); err != nil {
		return built, err
	}
	if err := checkConfig(cfg); err != nil {
		return built, err
	}
	if src.Suite == "" {
		if src.Suite, err = DebianSuite(); err != nil {
			return built, err
		}
	}
	if progress == nil {
		progress = func(string) {}
	}
	if err := missingTool("mmdebstrap"); err != nil {
		return built, err
	}
	own, _ := DebianSuite() // a host without one has its sources for src.Suite or not at all
	sources, err := forSuite(hostSources("/etc/apt"), src.Suite, own)
	if err != nil {
		return built, err
	}
	select {
	case s.builds <- struct{}{}:
		defer func() { <-s.builds }()
	case <-ctx.Done():
		return built, sandbox.AsError(ctx.Err())
	}
	src.Packages = slices.Compact(slices.Sorted(slices.Values(src.Packages)))
	dir, err := s.buildDir(sources)
	if err != nil {
		return built, sandbox.AsError(err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	return s.runBuild(ctx, dir, src, cfg, sources, progress)
}

// checkDebian refuses what could mean something else to apt, useradd or a
// shell than a name.
func checkDebian(src sandbox.DebianSource) error {
	bad := func(code, format string, args ...any) error {
		return sandbox.Errorf(sandbox.Invalid, code, format, args...)
	}
	if src.Suite != "" && !suiteGrammar.MatchString(src.Suite) {
		return bad("suite_invalid", "%.80q is no name of a Debian suite", src.Suite)
	}
	if len(src.Packages) > maxPackages {
		return bad("package_invalid", "more than %d packages", maxPackages)
	}
	for _, p := range src.Packages {
		if !packageGrammar.MatchString(p) {
			return bad("package_invalid", "%.80q is no name of a Debian package", p)
		}
	}
	if len(src.Users) > maxUsers {
		return bad("user_invalid", "more than %d users", maxUsers)
	}
	seen := map[string]bool{}
	for _, u := range src.Users {
		if !userGrammar.MatchString(u.Name) || u.Name == "root" || seen[u.Name] {
			return bad("user_invalid", "%.80q is no name for a new user", u.Name)
		}
		seen[u.Name] = true
	}
	return nil
}

// buildPrefix names the directories of this store's builds. They are outside
// of STATE, which the build's identity can't pass through.
func (s *Store) buildPrefix() string { return "cloche-build-" + s.scope + "-" }

const buildRoot = "/var/tmp"

// clearBuilds removes what builds of a killed process left.
func (s *Store) clearBuilds() error {
	old, err := filepath.Glob(filepath.Join(buildRoot, s.buildPrefix()+"*"))
	if err != nil {
		return fmt.Errorf("look for old builds: %w", err)
	}
	for _, dir := range old {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("remove an old build: %w", err)
		}
	}
	return nil
}

// sourcesName is the file in a build's directory that mmdebstrap reads the apt
// sources from.
const sourcesName = "host.sources"

// buildDir makes a directory that the build's root owns, with the sources in it.
func (s *Store) buildDir(sources []aptSource) (string, error) {
	dir, err := os.MkdirTemp(buildRoot, s.buildPrefix())
	if err != nil {
		return "", fmt.Errorf("make a build's directory: %w", err)
	}
	name := filepath.Join(dir, sourcesName)
	// apt's own user must be able to pass through; the sources may hold a
	// credential and are for the build's root alone.
	err = os.WriteFile(name, []byte(deb822(sources)), 0o600)
	if err == nil {
		err = os.Chmod(dir, 0o711)
	}
	if err == nil && isRoot() {
		err = errors.Join(os.Chown(name, buildID, buildID), os.Chown(dir, buildID, buildID))
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("make a build's directory: %w", err), os.RemoveAll(dir))
	}
	return dir, nil
}

// runBuild runs mmdebstrap and imports what it writes while it writes it.
func (s *Store) runBuild(ctx context.Context, dir string, src sandbox.DebianSource, cfg sandbox.RuntimeConfig,
	sources []aptSource, progress func(string),
) (built sandbox.Built, err error) {
	start := time.Now().Unix()
	run, err := startBuild(ctx, dir, mmdebstrapArgs(dir, src), progress)
	if err != nil {
		return built, err
	}
	edit := func(tree *rootfs.Tree, spool *rootfs.Spool) error {
		// Only the tar of a build that succeeded may become a template.
		if err := run.wait(); err != nil {
			return err
		}
		progress("writing the image")
		return finishDebian(tree, spool, src, sources, start)
	}
	record := src
	built, err = s.make(ctx, run.out, cfg, Source{Kind: "debian", Debian: &record}, edit)
	if failed := run.stop(); err != nil && failed != nil && ctx.Err() == nil {
		// A build that failed on its own explains a tar that is cut off.
		return built, failed
	}
	if ctx.Err() != nil && err != nil {
		return built, sandbox.AsError(ctx.Err())
	}
	return built, err
}

func mmdebstrapArgs(dir string, src sandbox.DebianSource) []string {
	args := []string{
		"--mode=unshare", "--variant=minbase", "--format=tar",
		`--aptopt=APT::Install-Recommends "false"`,
		`--dpkgopt=force-unsafe-io`, // the directory is thrown away
	}
	if len(src.Packages) > 0 {
		args = append(args, "--include="+strings.Join(src.Packages, ","))
	}
	for _, u := range src.Users {
		// The name fits userGrammar: nothing in it means anything to a shell.
		args = append(args, `--customize-hook=chroot "$1" useradd --create-home --user-group --shell /bin/bash `+u.Name)
	}
	return append(args, src.Suite, "-", filepath.Join(dir, sourcesName))
}

// finishDebian makes the tree a template: nothing of this host, nothing of
// this moment, and the users' rights.
func finishDebian(tree *rootfs.Tree, spool *rootfs.Spool, src sandbox.DebianSource, sources []aptSource, start int64) error {
	for _, name := range []string{
		"/etc/apt/sources.list.d/*", "/etc/apt/auth.conf", "/etc/apt/auth.conf.d/*", "/etc/dpkg/dpkg.cfg.d/99mmdebstrap",
		"/var/lib/apt/lists/*", "/var/cache/apt/*.bin", "/var/cache/apt/archives/*", "/var/cache/ldconfig/aux-cache",
		"/var/log/apt/*", "/var/log/*.log", "/var/lib/dbus/machine-id", "/dev/*", "/run/*", "/tmp/*",
		// Copies that password tools keep of the files before their last change.
		"/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-", "/etc/subuid-", "/etc/subgid-",
	} {
		tree.Remove(name)
	}
	newest := tree.SettleTimes(start)
	files := []struct {
		name, text string
		perm       uint16
	}{
		{"/etc/machine-id", "", 0o444},
		{"/etc/hostname", "cloche\n", 0o644},
		{"/etc/hosts", "127.0.0.1\tlocalhost cloche\n", 0o644},
		{"/etc/resolv.conf", "", 0o644},
		{"/etc/apt/sources.list", imageSources(sources), 0o644},
	}
	for _, u := range src.Users {
		if !u.Sudo {
			continue
		}
		if d := tree.Lookup("/etc/sudoers.d"); d == nil || !d.IsDir() {
			return sandbox.Errorf(sandbox.Invalid, "sudo_missing", "the user %q shall have sudo, which isn't installed", u.Name).
				WithHint("add the package sudo")
		}
		files = append(files, struct {
			name, text string
			perm       uint16
		}{"/etc/sudoers.d/" + u.Name, u.Name + " ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440})
	}
	for _, f := range files {
		if err := tree.WriteFile(spool, f.name, []byte(f.text), f.perm, newest); err != nil {
			return err
		}
	}
	return tree.Rewrite(spool, "/etc/shadow", func(old []byte) []byte { return settleShadow(old, newest) })
}

// settleShadow gives every password the day of the newest file as the day of
// its last change, which else is the day of the build.
func settleShadow(old []byte, newest int64) []byte {
	lines := strings.Split(string(old), "\n")
	for i, line := range lines {
		f := strings.Split(line, ":")
		if len(f) < 4 || f[2] == "" || f[2] == "0" {
			continue
		}
		f[2] = fmt.Sprint(newest / (24 * 3600))
		lines[i] = strings.Join(f, ":")
	}
	return []byte(strings.Join(lines, "\n"))
}
