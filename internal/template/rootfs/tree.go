package rootfs

import (
	"cmp"
	"slices"
	"strings"

	"cloche.dev/cloche/internal/template/erofs"
)

// Tree is a filesystem in memory. Its files' data is in a Spool.
type Tree struct {
	Root    *erofs.Node
	Count   int              // nodes made, those replaced since included
	Dropped map[string]int64 // what the image can't hold, by kind

	limits    Limits
	nameBytes int64
	index     map[*erofs.Node]map[string]int32 // of wide directories, while they grow
}

// wide is the number of entries from which a directory gets an index.
const wide = 24

func newTree(l Limits) *Tree {
	return &Tree{
		Root:    &erofs.Node{Mode: erofs.ModeDir | 0o755},
		Count:   1,
		Dropped: map[string]int64{},
		limits:  l,
		index:   map[*erofs.Node]map[string]int32{},
	}
}

// find returns the position of name among dir's entries, or -1.
func (t *Tree) find(dir *erofs.Node, name string) int {
	if idx := t.index[dir]; idx != nil {
		if i, ok := idx[name]; ok {
			return int(i)
		}
		return -1
	}
	for i := range dir.Entries {
		if dir.Entries[i].Name == name {
			return i
		}
	}
	return -1
}

func (t *Tree) lookup(dir *erofs.Node, name string) *erofs.Node {
	if i := t.find(dir, name); i >= 0 {
		return dir.Entries[i].Node
	}
	return nil
}

// set puts n into dir as name, in the place of what is there.
func (t *Tree) set(dir *erofs.Node, name string, n *erofs.Node) error {
	if i := t.find(dir, name); i >= 0 {
		dir.Entries[i].Node = n
		return nil
	}
	// A name is a piece of a long path that shall not stay alive with it.
	name = strings.Clone(name)
	if err := t.charge(len(name)); err != nil {
		return err
	}
	dir.Entries = append(dir.Entries, erofs.Entry{Name: name, Node: n})
	idx := t.index[dir]
	switch {
	case idx != nil:
		idx[name] = int32(len(dir.Entries) - 1)
	case t.index != nil && len(dir.Entries) > wide:
		idx = make(map[string]int32, 2*wide)
		for i, e := range dir.Entries {
			idx[e.Name] = int32(i)
		}
		t.index[dir] = idx
	}
	return nil
}

// charge counts bytes that stay in memory.
func (t *Tree) charge(n int) error {
	t.nameBytes += int64(n)
	if t.nameBytes > t.limits.NameBytes {
		return tooLarge("bytes of names and link targets", t.limits.NameBytes)
	}
	return nil
}

// add counts and returns a new node.
func (t *Tree) add(n erofs.Node) (*erofs.Node, error) {
	if t.Count++; t.Count > t.limits.Entries {
		return nil, tooLarge("entries", int64(t.limits.Entries))
	}
	return &n, nil
}

// split checks a name from the tar and returns its components. Leading
// slashes mean nothing, as for tar(1); "." is left out.
func split(name string) ([]string, error) {
	if len(name) > maxPath {
		return nil, refuse("tar_name_too_long", "the name %q has more than %d bytes", quoted(name), maxPath)
	}
	if strings.ContainsRune(name, 0) {
		return nil, refuse("tar_bad_name", "the name %q has a NUL byte", quoted(name))
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return nil, refuse("tar_path_escapes", "the name %q has a \"..\" in it", quoted(name)).
				WithHint("make the tar from inside the root directory: tar -C ROOT -cf root.tar .")
		case len(part) > erofs.MaxNameLen:
			return nil, refuse("tar_name_too_long", "the name %q has a part of more than %d bytes", quoted(name), erofs.MaxNameLen)
		default:
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// walk goes down the directories of parts, following symbolic links inside the
// tree as under chroot(2). What is missing is made (0755, root, with the given
// time) if grow, and else answered with nil.
func (t *Tree) walk(parts []string, grow bool, mtime int64) (*erofs.Node, error) {
	stack := []*erofs.Node{t.Root}
	todo := slices.Clone(parts)
	slices.Reverse(todo) // the next part is the last
	hops := 0
	for len(todo) > 0 {
		part := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if part == ".." { // only from a link's target
			if len(stack) > 1 {
				stack = stack[:len(stack)-1]
			}
			continue
		}
		dir := stack[len(stack)-1]
		n := t.lookup(dir, part)
		switch {
		case n == nil && !grow:
			return nil, nil
		case n == nil:
			var err error
			if n, err = t.add(erofs.Node{Mode: erofs.ModeDir | 0o755, Mtime: mtime}); err != nil {
				return nil, err
			}
			if err = t.set(dir, part, n); err != nil {
				return nil, err
			}
			fallthrough
		case n.IsDir():
			if stack = append(stack, n); len(stack) > maxDepth {
				return nil, refuse("tar_too_deep", "%q is more than %d directories deep", quoted(strings.Join(parts, "/")), maxDepth)
			}
		case n.IsSymlink():
			if hops++; hops > maxLinkHops {
				return nil, refuse("tar_link_loop", "%q goes through too many symbolic links", quoted(strings.Join(parts, "/")))
			}
			if strings.HasPrefix(n.Target, "/") {
				stack = stack[:1]
			}
			target := targetParts(n.Target)
			slices.Reverse(target)
			todo = append(todo, target...)
		default:
			return nil, refuse("tar_not_a_directory", "%q is under %q, which is no directory",
				quoted(strings.Join(parts, "/")), quoted(part))
		}
	}
	return stack[len(stack)-1], nil
}

func targetParts(target string) []string {
	return slices.DeleteFunc(strings.Split(target, "/"), func(p string) bool {
		return p == "" || p == "." || len(p) > erofs.MaxNameLen
	})
}

// finish drops the indexes and sorts every directory.
func (t *Tree) finish() {
	t.index = nil
	todo := []*erofs.Node{t.Root}
	for len(todo) > 0 {
		dir := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		slices.SortFunc(dir.Entries, func(a, b erofs.Entry) int { return cmp.Compare(a.Name, b.Name) })
		for _, e := range dir.Entries {
			if e.Node.IsDir() {
				todo = append(todo, e.Node)
			}
		}
	}
}
