package drivertest

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Traces describes what of a host bears one of a machine's names: files and
// links below dirs, mounts, and processes by their arguments or control groups.
// The mount of the suite's own network namespace of id is none. Harnesses'
// Leftovers begin with it.
func Traces(id string, names []string, dirs ...string) ([]string, error) {
	var found []string
	mentions := func(text string) bool {
		return slices.ContainsFunc(names, func(name string) bool { return strings.Contains(text, name) })
	}
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil {
				return err
			}
			if mentions(filepath.Base(path)) {
				found = append(found, path)
			}
			if to, lerr := os.Readlink(path); lerr == nil && mentions(to) {
				found = append(found, path+" -> "+to)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(mounts)) {
		if mentions(line) && !strings.Contains(line, "/net/"+id) {
			found = append(found, "mount "+line)
		}
	}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, p := range procs {
		for _, name := range []string{"cmdline", "cgroup"} {
			data, err := os.ReadFile(filepath.Join(p, name))
			if err == nil && mentions(string(data)) && filepath.Base(p) != fmt.Sprint(os.Getpid()) {
				found = append(found, "process "+p+" "+name)
			}
		}
	}
	return found, nil
}
