package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Value is what is to stand in a control file.
type Value struct {
	Name, Value string
	Optional    bool // not every kernel has the file
}

// Make makes a group of version 2 with these values, after giving its ancestors
// the controllers that they belong to, and returns its directory, for processes
// to be started in it. What it has made when it fails is the caller's to remove.
func (g Group) Make(values []Value) (*os.File, error) {
	if !g.tree.v2 {
		return nil, errors.New("a group of version 1 is made by whoever joins it")
	}
	var controllers []string
	for _, v := range values {
		name, _, _ := strings.Cut(v.Name, ".")
		if !slices.Contains(controllers, name) {
			controllers = append(controllers, name)
		}
	}
	dir := g.tree.root
	for name := range strings.SplitSeq(strings.Trim(g.path, "/"), "/") {
		if err := enable(dir, controllers); err != nil {
			return nil, err
		}
		dir = filepath.Join(dir, name)
		if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
			return nil, fmt.Errorf("make a control group: %w", err)
		}
	}
	for _, v := range values {
		file := filepath.Join(dir, v.Name)
		if v.Optional && !there(file) {
			continue
		}
		if err := os.WriteFile(file, []byte(v.Value), 0); err != nil {
			return nil, fmt.Errorf("limit a control group: %w", err)
		}
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("open a control group: %w", err)
	}
	return f, nil
}

// there tells whether a control file exists. Writing does not tell: the kernel
// refuses to make one as it refuses much else.
func there(file string) bool {
	_, err := os.Lstat(file)
	return err == nil
}

// enable gives the groups below a directory those of the controllers that they
// lack.
func enable(dir string, controllers []string) error {
	file := filepath.Join(dir, "cgroup.subtree_control")
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("look at a control group: %w", err)
	}
	have, order := strings.Fields(string(text)), ""
	for _, c := range controllers {
		if !slices.Contains(have, c) {
			order += "+" + c + " "
		}
	}
	if order == "" {
		return nil
	}
	err = os.WriteFile(file, []byte(order), 0)
	if errors.Is(err, syscall.EBUSY) {
		return fmt.Errorf("the control group %s has processes of its own, so that groups below it can't be limited: %w", dir, err)
	}
	if err != nil {
		return fmt.Errorf("give a control group its controllers (%s): %w", strings.TrimSpace(order), err)
	}
	return nil
}
