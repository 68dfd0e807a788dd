package backup

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// told is how many faults an error names.
const told = 5

// Verify reads every file of a backup and compares it with what was written.
// The error, where it is not a failure to read, is FailedPrecondition
// ("backup_corrupt") and names what is wrong.
func Verify(ctx context.Context, dir string) (Report, error) {
	m, err := readManifest(dir)
	if err != nil {
		return Report{}, err
	}
	m.Report.Dir = dir
	var faults []string
	known := map[string]bool{manifestName: true}
	for _, f := range m.Files {
		path := filepath.FromSlash(f.Path)
		if !filepath.IsLocal(path) {
			return m.Report, corrupt("it names the file %q", f.Path)
		}
		known[path] = true
		fault, err := compare(ctx, filepath.Join(dir, path), f)
		if err != nil {
			return m.Report, err
		}
		if fault != "" {
			faults = append(faults, f.Path+" "+fault)
		}
	}
	others, err := unknown(dir, known)
	if err != nil {
		return m.Report, err
	}
	for _, name := range others {
		faults = append(faults, name+" does not belong to it")
	}
	if len(faults) == 0 {
		return m.Report, nil
	}
	rest := ""
	if len(faults) > told {
		faults, rest = faults[:told], ", and more"
	}
	return m.Report, corrupt("%s%s", strings.Join(faults, ", "), rest)
}

func compare(ctx context.Context, path string, f file) (fault string, err error) {
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "is missing", nil
	case err != nil:
		return "", err
	case !st.Mode().IsRegular():
		return "is no file", nil
	case st.Size() != f.Size:
		return "has another size", nil
	}
	_, sum, err := measure(ctx, path)
	if err == nil && sum != f.SHA256 {
		fault = "has another content"
	}
	return fault, err
}

// unknown lists the files that are not known.
func unknown(dir string, known map[string]bool) (list []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err == nil && !known[rel] {
			list = append(list, rel)
		}
		return err
	})
	slices.Sort(list)
	return list, err
}
