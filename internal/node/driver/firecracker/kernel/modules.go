package kernel

import (
	"bytes"
	"debug/elf"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Module is one kernel module.
type Module struct {
	Name string // with _ for -
	Data []byte // the uncompressed file
}

// resolver orders modules by what they depend on.
type resolver struct {
	*tree
	state map[string]int // 1 while what it depends on is looked at, 2 when it is in out
	out   []Module
}

// resolve returns the named modules and all that they depend on, those that the
// image has left out, in an order in which they can be loaded. What a module
// depends on is taken from the module itself, where modules.dep has it from: a
// package does not hold that file, which is made when it is installed.
func (t *tree) resolve(names []string) ([]Module, error) {
	r := &resolver{tree: t, state: map[string]int{}}
	for _, name := range names {
		if err := r.add(name, ""); err != nil {
			return nil, err
		}
	}
	return r.out, nil
}

func (r *resolver) add(name, by string) error {
	switch {
	case r.builtin[name] || r.state[name] == 2:
		return nil
	case r.state[name] == 1:
		return invalid("the modules %s and %s depend on each other", name, by)
	case r.files[name] == "":
		return r.lacks(name, by)
	case len(r.state) >= maxModules:
		return invalid("more than %d modules depend on each other", maxModules)
	}
	r.state[name] = 1
	data, err := r.read(name)
	if err != nil {
		return err
	}
	info, err := modinfo(data)
	if err != nil {
		return invalid("the module %s is damaged: %w", r.files[name], err)
	}
	if err := r.addSoft(name, info["softdep"]); err != nil {
		return err
	}
	for _, list := range info["depends"] {
		for dep := range strings.SplitSeq(list, ",") {
			if dep == "" {
				continue
			}
			if err := r.add(moduleName(dep), name); err != nil {
				return err
			}
		}
	}
	r.state[name] = 2
	r.out = append(r.out, Module{Name: name, Data: data})
	return nil
}

// addSoft adds what a module asks to be loaded before it, "pre: NAME…": what it
// calls by a name at run time, like a checksum, without which its start may
// fail. It may name an alias, and what is nowhere, which is no error.
func (r *resolver) addSoft(by string, lists []string) error {
	for _, list := range lists {
		pre := false
		for _, word := range strings.Fields(list) {
			if strings.HasSuffix(word, ":") {
				pre = word == "pre:"
				continue
			}
			name := moduleName(word)
			if !pre || r.builtin[name] {
				continue
			}
			if r.files[name] == "" {
				var err error
				if name, err = r.aliased(word); err != nil {
					return err
				}
			}
			// One that is being looked at already can't come before itself.
			if name == "" || r.state[name] == 1 {
				continue
			}
			if err := r.add(name, by); err != nil {
				return err
			}
		}
	}
	return nil
}

// modinfo reads what a module says about itself: lines KEY=VALUE that end in
// NUL, in a section of their own.
func modinfo(module []byte) (map[string][]string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return nil, err
	}
	s := f.Section(".modinfo")
	if s == nil {
		return nil, fmt.Errorf("it has no section .modinfo")
	}
	if s.Size > maxModule || s.FileSize > uint64(len(module)) {
		return nil, fmt.Errorf("its section .modinfo is damaged")
	}
	data, err := s.Data()
	if err != nil {
		return nil, err
	}
	info := map[string][]string{}
	for field := range strings.SplitSeq(string(data), "\x00") {
		if key, value, ok := strings.Cut(field, "="); ok {
			info[key] = append(info[key], value)
		}
	}
	return info, nil
}

func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }
