package policy

import "cloche.dev/cloche/internal/sandbox"

// read is what installing takes: nothing is published with it.
var read = []string{"GET", "HEAD"}

// Preset returns the profile that every project has under a name.
func Preset(name string) (sandbox.EgressProfile, bool) {
	p := sandbox.EgressProfile{Name: name, Version: 1, Default: sandbox.EgressDeny}
	switch name {
	case sandbox.PresetNone:
	case sandbox.PresetPublic:
		p.Default = sandbox.EgressAllow
	case sandbox.PresetPackages:
		p.Rules = packages()
	default:
		return sandbox.EgressProfile{}, false
	}
	return p, true
}

// packages are the public registries of languages and operating systems. Data
// can leave in the names and paths that are asked for, as with any rule about
// hosts; nothing can be written to the registries.
func packages() []sandbox.EgressRule {
	registry := func(name string, hosts ...string) sandbox.EgressRule {
		return sandbox.EgressRule{
			Name: name, Action: sandbox.EgressAllow, Hosts: hosts,
			Ports: []string{"443"}, Schemes: []string{"https"}, Methods: read,
		}
	}
	// Mirrors of systems are signed and asked without TLS by habit.
	mirror := func(name string, hosts ...string) sandbox.EgressRule {
		return sandbox.EgressRule{
			Name: name, Action: sandbox.EgressAllow, Hosts: hosts,
			Ports: []string{"80", "443"}, Methods: read,
		}
	}
	post := func(r sandbox.EgressRule, paths ...string) sandbox.EgressRule {
		r.Methods, r.Paths = []string{"POST"}, paths
		return r
	}
	return []sandbox.EgressRule{
		registry("pypi", "pypi.org", "files.pythonhosted.org"),
		registry("conda", "conda.anaconda.org", "repo.anaconda.com", "conda-static.anaconda.org"),
		registry("npm", "registry.npmjs.org", "registry.yarnpkg.com", "repo.yarnpkg.com"),
		post(registry("npm-audit", "registry.npmjs.org"), "/-/npm/v1/security/"),
		registry("node", "nodejs.org", "jsr.io", "npm.jsr.io"),
		registry("crates", "crates.io", "index.crates.io", "static.crates.io", "static.rust-lang.org"),
		registry("go", "proxy.golang.org", "sum.golang.org", "go.dev", "dl.google.com"),
		registry("rubygems", "rubygems.org", "index.rubygems.org"),
		registry("maven", "repo.maven.apache.org", "repo1.maven.org", "plugins.gradle.org", "plugins-artifacts.gradle.org", "services.gradle.org", "downloads.gradle.org"),
		registry("nuget", "api.nuget.org", "globalcdn.nuget.org"),
		registry("packagist", "packagist.org", "repo.packagist.org"),
		registry("hex", "hex.pm", "repo.hex.pm", "builds.hex.pm"),
		registry("github", "github.com", "codeload.github.com", "raw.githubusercontent.com", "objects.githubusercontent.com", "release-assets.githubusercontent.com"),
		post(registry("github-clone", "github.com"), "/*/*/git-upload-pack"),
		mirror("debian", "deb.debian.org", "security.debian.org", "ftp.debian.org", "snapshot.debian.org"),
		mirror("ubuntu", "archive.ubuntu.com", "*.archive.ubuntu.com", "security.ubuntu.com", "ports.ubuntu.com"),
		mirror("alpine", "dl-cdn.alpinelinux.org"),
		mirror("fedora", "mirrors.fedoraproject.org", "dl.fedoraproject.org", "download.fedoraproject.org", "download-ib01.fedoraproject.org"),
	}
}
