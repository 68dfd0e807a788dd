// Package cgroup looks at and empties the control groups that machines run
// in, on a host with cgroup v1 (a hierarchy per controller) or v2 (one for
// all). Whoever runs a machine makes its group and sets its limits; this
// package finds groups again, counts what they use, kills what is in them and
// removes them.
//
// Invariants: a group is named by its path below the root of every hierarchy,
// and what is done to it is done in all of them; no operation needs a record
// of how the group was made; a group that does not exist is an empty one.
// Drivers call it for their census, and an engine's control process for the
// reason of a machine's end.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// defaultRoot is where cgroups are mounted on every distribution since 2012.
const defaultRoot = "/sys/fs/cgroup"

// cgroup2Magic is what statfs calls a cgroup2 filesystem.
const cgroup2Magic = 0x63677270

// Tree is the host's cgroup filesystem.
type Tree struct {
	root  string
	v2    bool
	sleep time.Duration // between two looks at a group that is being emptied
	hold  func(pid int) (held, error)
}

// Host returns the tree of this host.
func Host() (*Tree, error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(defaultRoot, &st); err != nil {
		return nil, fmt.Errorf("look for cgroups at %s: %w", defaultRoot, err)
	}
	return &Tree{root: defaultRoot, v2: st.Type == cgroup2Magic, sleep: 2 * time.Millisecond, hold: hold}, nil
}

// Version is 1 or 2.
func (t *Tree) Version() int {
	if t.v2 {
		return 2
	}
	return 1
}

// hierarchies lists the directory of each hierarchy.
func (t *Tree) hierarchies() ([]string, error) {
	if t.v2 {
		return []string{t.root}, nil
	}
	entries, err := os.ReadDir(t.root)
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, e := range entries {
		if e.IsDir() { // not a link: "cpu" is often one to "cpu,cpuacct"
			dirs = append(dirs, filepath.Join(t.root, e.Name()))
		}
	}
	return dirs, nil
}

// List names the groups right below parent, sorted.
func (t *Tree) List(parent string) ([]string, error) {
	hierarchies, err := t.hierarchies()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, h := range hierarchies {
		entries, err := os.ReadDir(filepath.Join(h, parent))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.IsDir() {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// Group returns the group at path, which need not exist.
func (t *Tree) Group(path string) Group {
	return Group{tree: t, path: filepath.Clean("/" + path)}
}

// Group is one control group.
type Group struct {
	tree *Tree
	path string
}

// Version is the version of cgroups that the group is in, 1 or 2.
func (g Group) Version() int { return g.tree.Version() }

// Path is the group's path below the root of each hierarchy.
func (g Group) Path() string { return g.path }

// dirs lists the group's directories and those of the groups below it, the
// deepest first.
func (g Group) dirs() ([]string, error) {
	hierarchies, err := g.tree.hierarchies()
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, h := range hierarchies {
		top := filepath.Join(h, g.path)
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // it went away meanwhile
			}
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	slices.Reverse(dirs)
	return dirs, nil
}

// Exists tells whether the group is in any hierarchy.
func (g Group) Exists() (bool, error) {
	dirs, err := g.dirs()
	return len(dirs) > 0, err
}

// Procs lists the processes in the group and below it, sorted.
func (g Group) Procs() ([]int, error) {
	dirs, err := g.dirs()
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, dir := range dirs {
		data, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if gone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, f := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return nil, fmt.Errorf("%s holds %q: %w", filepath.Join(dir, "cgroup.procs"), f, err)
			}
			if pid > 0 { // 0 stands for a process of another pid namespace
				pids = append(pids, pid)
			}
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// gone tells whether err says that a group was removed while we looked at it.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV)
}

// held is a process that is held beyond the reuse of its number, until Release.
type held interface {
	Signal(sig os.Signal) error
	Release() error
}

func hold(pid int) (held, error) { return os.FindProcess(pid) } // a pidfd, where the kernel has them

// Kill kills every process in the group and below it, also those that appear
// meanwhile, and returns when there is none left.
func (g Group) Kill(ctx context.Context) error {
	if g.tree.v2 {
		// One write that no fork outruns; it is missing before Linux 5.14.
		_ = os.WriteFile(filepath.Join(g.tree.root, g.path, "cgroup.kill"), []byte("1"), 0)
	}
	for {
		pids, err := g.Procs()
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return nil
		}
		if err := g.kill(pids); err != nil {
			return err
		}
		if err := g.tree.wait(ctx); err != nil {
			return fmt.Errorf("%d processes of cgroup %s would not die: %w", len(pids), g.path, err)
		}
	}
}

// kill kills those of the processes that are in the group. A number may be
// another process's by the time of the signal: so each process is held first,
// and signalled only if the group still has its number.
func (g Group) kill(pids []int) error {
	processes := map[int]held{}
	for _, pid := range pids {
		if p, err := g.tree.hold(pid); err == nil {
			processes[pid] = p
			defer func() { _ = p.Release() }()
		}
	}
	pids, err := g.Procs()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if p := processes[pid]; p != nil {
			if err := p.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("kill process %d of cgroup %s: %w", pid, g.path, err)
			}
		}
	}
	return nil
}

func (t *Tree) wait(ctx context.Context) error {
	timer := time.NewTimer(t.sleep)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// Remove removes the group and those below it. They must be empty; what a
// dying process still holds is waited for.
func (g Group) Remove(ctx context.Context) error {
	for {
		dirs, err := g.dirs()
		if err != nil {
			return err
		}
		busy := false
		for _, dir := range dirs {
			err := syscall.Rmdir(dir)
			switch {
			case err == nil || gone(err):
			case errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.ENOTEMPTY):
				busy = true
			default:
				return fmt.Errorf("remove cgroup %s: %w", dir, err)
			}
		}
		if !busy {
			return nil
		}
		if err := g.tree.wait(ctx); err != nil {
			return fmt.Errorf("cgroup %s stays busy: %w", g.path, err)
		}
	}
}
