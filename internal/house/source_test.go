package house

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const root = "../.."

// maxLines bounds a file, tests included.
const maxLines = 500

// source is one Go file of ours.
type source struct {
	name      string // from the root, with slashes
	test      bool
	generated bool
	imports   []string
	tree      *ast.File
	text      string
}

var parse = sync.OnceValues(parseAll)

func sources(t *testing.T) []source {
	t.Helper()
	list, err := parse()
	if err != nil {
		t.Fatal(err)
	}
	if len(list) == 0 {
		t.Fatal("no Go file found: the walk is broken")
	}
	return list
}

func parseAll() ([]source, error) {
	var list []source
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			name := d.Name()
			if p != root && (strings.HasPrefix(name, ".") || name == "dist" || name == "bin" || name == "testdata" || name == "tools") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(p, ".go") {
			return nil
		}
		f, err := parseOne(p)
		if err == nil {
			list = append(list, f)
		}
		return err
	})
	return list, err
}

func parseOne(file string) (source, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return source{}, err
	}
	tree, err := parser.ParseFile(token.NewFileSet(), file, text, parser.ImportsOnly|parser.ParseComments)
	if err != nil {
		return source{}, err
	}
	name, err := filepath.Rel(root, file)
	if err != nil {
		return source{}, err
	}
	s := source{
		name: filepath.ToSlash(name), test: strings.HasSuffix(file, "_test.go"), generated: ast.IsGenerated(tree),
		tree: tree, text: string(text),
	}
	for _, imp := range tree.Imports {
		importPath, err := strconv.Unquote(imp.Path.Value)
		if err != nil {
			return source{}, err
		}
		s.imports = append(s.imports, importPath)
	}
	return s, nil
}

func TestFilesAreShort(t *testing.T) {
	for _, f := range sources(t) {
		if n := strings.Count(f.text, "\n"); n > maxLines && !f.generated {
			t.Errorf("%s has %d lines; split it by idea (the bound is %d)", f.name, n, maxLines)
		}
	}
}

// unfinished finds the marks that people leave on unfinished work. The words
// are put together here so that this file doesn't find itself.
var unfinished = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)

func TestNothingIsLeftUnfinished(t *testing.T) {
	for _, f := range sources(t) {
		if f.generated {
			continue
		}
		for i, line := range strings.Split(f.text, "\n") {
			if unfinished.MatchString(line) {
				t.Errorf("%s:%d: %s", f.name, i+1, strings.TrimSpace(line))
			}
		}
	}
}

// machinePath matches paths of one developer's machine and hosts of package
// registries, which have no place in the repository.
var machinePath = regexp.MustCompile(`(^|[^\w/])/(work|root|home/[a-z]+)/(main|scratch|shared|go)\b`)

func TestNoPathOfOneMachine(t *testing.T) {
	for _, f := range sources(t) {
		if f.name == "internal/house/source_test.go" {
			continue
		}
		if m := machinePath.FindString(f.text); m != "" {
			t.Errorf("%s names a path of one machine: %q", f.name, m)
		}
	}
}
