package template

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

func TestSources(t *testing.T) {
	etc := t.TempDir()
	write := func(name, text string) {
		path := filepath.Join(etc, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("sources.list", "# deb http://no.example one main\ndeb [arch=amd64 signed-by=/k.gpg] http://me:secret@mirror.example/debian one main contrib # x\n"+
		"deb-src http://src.example one main\ndeb cdrom:[x]/ one main\ndeb http://tools.example nodistro main\n")
	write("sources.list.d/a.sources", "Types: deb deb-src\nURIs: http://ftp.debian.org/debian\nSuites: one one-updates one-backports\nComponents: main\nSigned-By:\n -----BEGIN\n .\n -----END\n\n"+
		"Types: deb\nEnabled: no\nURIs: http://off.example\nSuites: one\nComponents: main\n")
	write("sources.list.d/b.disabled", "deb http://disabled.example one main\n")
	picked, err := forSuite(hostSources(etc), "one", "one")
	if err != nil {
		t.Fatal(err)
	}
	text := deb822(picked)
	for _, want := range []string{"me:secret@mirror.example", "Signed-By: /k.gpg", "Suites: one one-updates\n", "Signed-By: \n -----BEGIN\n .\n -----END"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	for _, no := range []string{"no.example", "src.example", "off.example", "tools.example", "disabled.example", "cdrom", "backports"} {
		if strings.Contains(text, no) {
			t.Errorf("%q is in\n%s", no, text)
		}
	}
	if got, want := imageSources(picked), "deb http://ftp.debian.org/debian one main\ndeb http://ftp.debian.org/debian one-updates main\n"; got != want {
		t.Errorf("in the image: %q", got)
	}
	other, err := forSuite(hostSources(etc), "two", "one")
	if err != nil || !strings.Contains(deb822(other), "Suites: two two-updates\n") {
		t.Errorf("%v, %v", other, err)
	}
	if _, err := forSuite(nil, "one", "one"); sandbox.AsError(err).Code != "apt_sources_missing" {
		t.Error(err)
	}
}

func TestDebianGrammar(t *testing.T) {
	bad := map[string]sandbox.DebianSource{
		"suite_invalid": {Suite: "bookworm; id"}, "suite_invalid ": {Suite: "-x"}, "suite_invalid  ": {Suite: "a/b"},
		"package_invalid": {Packages: []string{"a b"}}, "package_invalid ": {Packages: []string{"--foo"}}, "package_invalid  ": {Packages: []string{"foo-"}},
		"package_invalid   ": {Packages: []string{"./x.deb"}}, "package_invalid    ": {Packages: []string{"git,curl"}}, "package_invalid     ": {Packages: []string{"Git"}},
		"user_invalid": {Users: []sandbox.TemplateUser{{Name: "a;id"}}}, "user_invalid ": {Users: []sandbox.TemplateUser{{Name: "-x"}}},
		"user_invalid  ": {Users: []sandbox.TemplateUser{{Name: "root"}}}, "user_invalid   ": {Users: []sandbox.TemplateUser{{Name: "a"}, {Name: "a"}}},
		"user_invalid    ": {Users: []sandbox.TemplateUser{{Name: "a\n"}}},
	}
	for code, src := range bad {
		if err := checkDebian(src); sandbox.AsError(err) == nil || sandbox.AsError(err).Code != strings.TrimSpace(code) {
			t.Errorf("%+v: %v", src, err)
		}
	}
	good := sandbox.DebianSource{Suite: "bookworm", Packages: []string{"g++", "libc6", "python3.11", "0ad"}, Users: []sandbox.TemplateUser{{Name: "user"}, {Name: "_x-1"}}}
	if err := checkDebian(good); err != nil {
		t.Error(err)
	}
	if err := checkDebian(sandbox.BaseTemplate.Debian); err != nil {
		t.Error(err)
	}
}

func TestMessages(t *testing.T) {
	var seen []string
	m := &messages{progress: func(s string) { seen = append(seen, s) }}
	if _, err := m.Write([]byte("I: using /x as tempdir\nI: running apt-get upd")); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Write([]byte("ate...\nE: http://me:secret@h/x \xff" + strings.Repeat("y", 1000) + "\n" + strings.Repeat("z\n", 5000) + "E: Failed to fetch")); err != nil {
		t.Fatal(err)
	}
	m.flush()
	if len(seen) != 1 || seen[0] != "running apt-get update..." {
		t.Errorf("progress: %q", seen)
	}
	if text := strings.Join(m.tail, "\n"); len(text) > 3*maxTail || !strings.HasSuffix(text, "Failed to fetch") || strings.Contains(text, "secret") {
		t.Errorf("tail of %d bytes", len(text))
	}
}

func TestSettleShadow(t *testing.T) {
	got := string(settleShadow([]byte("root:*:20786:0:99999:7:::\nuser:!:20786:0:::::\nx:!::0\n"), 86400*10))
	if want := "root:*:10:0:99999:7:::\nuser:!:10:0:::::\nx:!::0\n"; got != want {
		t.Errorf("%q", got)
	}
}

func TestCheck(t *testing.T) {
	for _, p := range Check(t.Context()) {
		t.Logf("this host: %s: %v", p.Code, p)
		if p.Code == "" || p.Hint == "" {
			t.Errorf("%+v", p)
		}
	}
}
