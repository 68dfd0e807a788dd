package template

import (
	"bufio"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// aptSource is one stanza of the host's apt sources, in deb822's terms.
type aptSource struct {
	URIs, Suites, Components []string
	SignedBy                 string // a file's name or, from its second line on, a key
	Trusted                  bool
}

// hostSources reads apt's sources below etc (/etc/apt). What can't be read or
// isn't understood is left out: apt itself complains about it.
func hostSources(etc string) []aptSource {
	names, _ := filepath.Glob(filepath.Join(etc, "sources.list.d", "*")) // the pattern is well-formed
	slices.Sort(names)
	var all []aptSource
	for _, name := range append([]string{filepath.Join(etc, "sources.list")}, names...) {
		data, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		switch filepath.Ext(name) {
		case ".list":
			all = append(all, parseOneLine(string(data))...)
		case ".sources":
			all = append(all, parseDeb822(string(data))...)
		}
	}
	return all
}

// parseOneLine reads lines such as "deb [signed-by=K] URI SUITE COMPONENT…".
func parseOneLine(text string) (all []aptSource) {
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb")
		if !ok || rest == "" || !strings.ContainsAny(rest[:1], " \t[") {
			continue
		}
		rest = strings.TrimSpace(rest)
		var s aptSource
		if opts, after, ok := strings.Cut(rest, "]"); ok && strings.HasPrefix(opts, "[") {
			rest = after
			for _, opt := range strings.Fields(opts[1:]) {
				key, value, _ := strings.Cut(opt, "=")
				switch strings.ToLower(key) {
				case "signed-by":
					s.SignedBy = value
				case "trusted":
					s.Trusted = value == "yes"
				}
			}
		}
		f := strings.Fields(rest)
		if len(f) < 3 {
			continue
		}
		s.URIs, s.Suites, s.Components = f[:1], f[1:2], f[2:]
		all = append(all, s)
	}
	return all
}

// parseDeb822 reads stanzas of "Field: value" lines with continuations.
func parseDeb822(text string) (all []aptSource) {
	fields, last := map[string]string{}, ""
	flush := func() {
		s := aptSource{
			URIs:       strings.Fields(fields["uris"]),
			Suites:     strings.Fields(fields["suites"]),
			Components: strings.Fields(fields["components"]),
			SignedBy:   fields["signed-by"],
			Trusted:    strings.EqualFold(fields["trusted"], "yes"),
		}
		on := !strings.EqualFold(fields["enabled"], "no") && !strings.EqualFold(fields["enabled"], "false")
		if on && slices.Contains(strings.Fields(fields["types"]), "deb") && len(s.URIs) > 0 && len(s.Components) > 0 {
			all = append(all, s)
		}
		fields, last = map[string]string{}, ""
	}
	sc := bufio.NewScanner(strings.NewReader(text))
	for sc.Scan() {
		line := sc.Text()
		switch {
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == '#':
		case line[0] == ' ' || line[0] == '\t':
			if last != "" {
				fields[last] += "\n" + line
			}
		default:
			key, value, _ := strings.Cut(line, ":")
			last = strings.ToLower(strings.TrimSpace(key))
			fields[last] = strings.TrimSpace(value)
		}
	}
	flush()
	return all
}

// forSuite picks the sources that belong to suite, with its updates. When the
// host has none, those of its own suite are taken for it: the same mirrors
// carry both.
func forSuite(all []aptSource, suite, own string) ([]aptSource, error) {
	for _, from := range []string{suite, own} {
		if from == "" {
			continue
		}
		var picked []aptSource
		for _, s := range all {
			var suites []string
			for _, name := range s.Suites {
				tail, ok := strings.CutPrefix(name, from)
				if ok && slices.Contains([]string{"", "-updates", "-security"}, tail) {
					suites = append(suites, suite+tail)
				}
			}
			s.URIs = slices.DeleteFunc(slices.Clone(s.URIs), func(u string) bool { return strings.HasPrefix(u, "cdrom:") })
			if s.Suites = suites; len(suites) > 0 && len(s.URIs) > 0 {
				picked = append(picked, s)
			}
		}
		if len(picked) > 0 {
			return picked, nil
		}
	}
	return nil, sandbox.Errorf(sandbox.FailedPrecondition, "apt_sources_missing",
		"this host's apt sources have nothing for the suite %q", suite).
		WithHint("add a source for it to /etc/apt, or import a tar: cloche template build --tar")
}

// deb822 writes sources for apt on the host.
func deb822(all []aptSource) string {
	var b strings.Builder
	for _, s := range all {
		b.WriteString("Types: deb\nURIs: " + strings.Join(s.URIs, " ") +
			"\nSuites: " + strings.Join(s.Suites, " ") +
			"\nComponents: " + strings.Join(s.Components, " ") + "\n")
		if s.SignedBy != "" {
			b.WriteString("Signed-By: " + s.SignedBy + "\n")
		}
		if s.Trusted {
			b.WriteString("Trusted: yes\n")
		}
		b.WriteString("\n")
	}
	return b.String()
}

// imageSources writes the sources.list for the image: of the host's sources
// only Debian's own public servers, since any other name, and any credential
// in it, is this host's business.
func imageSources(all []aptSource) string {
	var b strings.Builder
	for _, s := range all {
		for _, raw := range s.URIs {
			u, err := url.Parse(raw)
			if err != nil || u.User != nil || u.Port() != "" || !strings.HasSuffix(u.Hostname(), ".debian.org") {
				continue
			}
			for _, suite := range s.Suites {
				b.WriteString("deb " + raw + " " + suite + " " + strings.Join(s.Components, " ") + "\n")
			}
		}
	}
	if b.Len() == 0 {
		return "# The host that built this template has sources of its own, which stayed there.\n"
	}
	return b.String()
}
