package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

// tree is the files of one kernel as its packages have them.
type tree struct {
	fsys    fs.FS
	release string
	image   string // name in fsys
	modules string // directory in fsys

	builtin map[string]bool     // names of modules that the image has
	files   map[string]string   // files in fsys by their module's name
	aliases map[string][]string // names of modules by alias; made when first asked for
}

func findTree(fsys fs.FS) (*tree, error) {
	t := &tree{fsys: fsys}
	var found []string
	for _, pattern := range []string{"boot/vmlinuz-*", "boot/vmlinux-*"} {
		names, err := fs.Glob(fsys, pattern)
		if err != nil {
			return nil, err
		}
		found = append(found, names...)
	}
	switch len(found) {
	case 0:
		return nil, invalid("there is no kernel in it (boot/vmlinuz-VERSION)")
	case 1:
		t.image = found[0]
	default:
		return nil, invalid("there are %d kernels in it, like %s and %s; one is wanted", len(found), found[0], found[1])
	}
	_, t.release, _ = strings.Cut(path.Base(t.image), "-")
	for _, dir := range []string{"lib/modules", "usr/lib/modules"} {
		if info, err := fs.Stat(fsys, path.Join(dir, t.release)); err == nil && info.IsDir() {
			t.modules = path.Join(dir, t.release)
			return t, t.index()
		}
	}
	return nil, invalid("the kernel %s is there without its modules (lib/modules/%[1]s)", t.release).
		WithHint("some distributions have them in a package of their own: name both, --package twice")
}

// readFile reads a file of at most limit bytes.
func (t *tree) readFile(name string, limit int64) ([]byte, error) {
	f, err := t.fsys.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // it was only read
	return readAll(f, name, limit)
}

// readImage returns the ELF image.
func (t *tree) readImage() ([]byte, error) {
	b, err := t.readFile(t.image, maxImage)
	if err != nil {
		return nil, err
	}
	image, _, err := extract(b)
	return image, err
}

// index lists the modules that the image has and those that are files.
func (t *tree) index() error {
	t.builtin, t.files = map[string]bool{}, map[string]string{}
	list, err := t.readFile(path.Join(t.modules, "modules.builtin"), maxModule)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for line := range strings.Lines(string(list)) {
		t.builtin[fileModule(strings.TrimSpace(line))] = true
	}
	return fs.WalkDir(t.fsys, t.modules, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if m := fileModule(name); m != "" && t.files[m] == "" {
			t.files[m] = name
		}
		if len(t.files) > maxEntries {
			return invalid("it has more than %d modules", maxEntries)
		}
		return nil
	})
}

// fileModule returns the name of the module in a file; "" for other files.
func fileModule(name string) string {
	base, rest, ok := strings.Cut(path.Base(name), ".ko")
	if !ok || rest != "" && rest != ".xz" && rest != ".zst" && rest != ".gz" {
		return ""
	}
	return moduleName(base)
}

// read returns a module's uncompressed bytes.
func (t *tree) read(module string) ([]byte, error) {
	name := t.files[module]
	packed, err := t.readFile(name, maxModule)
	if err != nil {
		return nil, err
	}
	_, suffix, _ := strings.Cut(path.Base(name), ".ko")
	damaged := func(err error) error { return invalid("the module %s is damaged: %w", name, err) }
	r, done, err := decompress(suffix, bytes.NewReader(packed))
	if err != nil {
		return nil, damaged(err)
	}
	defer done()
	b, err := readAll(r, name, maxModule)
	if err != nil {
		return nil, damaged(err)
	}
	return b, nil
}

// aliased returns the module that provides an alias, like a name of a
// cryptographic algorithm; "" for none. Several may: one of the image's wins,
// then a generic one, since others want certain processors.
func (t *tree) aliased(alias string) (string, error) {
	if t.aliases == nil {
		if err := t.indexAliases(); err != nil {
			return "", err
		}
	}
	best := ""
	for _, m := range t.aliases[moduleName(alias)] {
		switch {
		case t.builtin[m]:
			return m, nil
		case best == "" || strings.HasSuffix(m, "_generic") && !strings.HasSuffix(best, "_generic"):
			best = m
		}
	}
	return best, nil
}

// indexAliases reads the aliases of the image's modules and of those that lie
// among cryptography, which are the only ones that others name by alias.
func (t *tree) indexAliases() error {
	t.aliases = map[string][]string{}
	add := func(alias, module string) {
		alias = moduleName(alias)
		t.aliases[alias] = append(t.aliases[alias], module)
	}
	info, err := t.readFile(path.Join(t.modules, "modules.builtin.modinfo"), maxModule)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for field := range strings.SplitSeq(string(info), "\x00") {
		key, value, _ := strings.Cut(field, "=")
		if module, ok := strings.CutSuffix(key, ".alias"); ok {
			add(value, moduleName(module))
		}
	}
	// In the order of names, so that the choice is the same each time.
	for _, module := range sortedKeys(t.files) {
		if !strings.Contains(t.files[module], "/crypto/") {
			continue
		}
		b, err := t.read(module)
		if err != nil {
			return err
		}
		fields, err := modinfo(b)
		if err != nil {
			return fmt.Errorf("%s: %w", t.files[module], err)
		}
		for _, alias := range fields["alias"] {
			add(alias, module)
		}
	}
	return nil
}

// lacks is the error for a module that is nowhere.
func (t *tree) lacks(module, by string) error {
	what := "the kernel " + t.release + " has no " + module
	if by != "" {
		what += ", which " + by + " needs"
	}
	return sandbox.Errorf(sandbox.FailedPrecondition, "kernel_lacks_module", "%s", what).
		WithHint("take the distribution's cloud kernel: `cloche kernel install` without flags")
}
