package rootfs

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"path"
	"slices"

	"cloche.dev/cloche/internal/template/erofs"
)

// The functions of this file change an imported tree. They take names from
// Cloche's own code, never follow a symbolic link at their end, and quietly do
// nothing where the directory isn't there.

// at returns the directory that holds name, and name's last part.
func (t *Tree) at(name string) (*erofs.Node, string) {
	parts, err := split(name)
	if err != nil || len(parts) == 0 {
		return nil, ""
	}
	dir, err := t.walk(parts[:len(parts)-1], false, 0)
	if err != nil {
		return nil, ""
	}
	return dir, parts[len(parts)-1]
}

// Lookup returns what stands at name, or nil.
func (t *Tree) Lookup(name string) *erofs.Node {
	dir, last := t.at(name)
	if dir == nil {
		return nil
	}
	return t.lookup(dir, last)
}

// Remove takes out what matches pattern: a name whose last part may hold the
// wildcards of path.Match.
func (t *Tree) Remove(pattern string) {
	dir, last := t.at(pattern)
	if dir == nil {
		return
	}
	dir.Entries = slices.DeleteFunc(dir.Entries, func(e erofs.Entry) bool {
		ok, err := path.Match(last, e.Name)
		return err == nil && ok
	})
}

// WriteFile puts a file of root's at name, in the place of what is there.
func (t *Tree) WriteFile(spool *Spool, name string, data []byte, perm uint16, mtime int64) error {
	dir, last := t.at(name)
	if dir == nil {
		return nil
	}
	n := erofs.Node{Mode: erofs.ModeRegular | perm, Mtime: mtime}
	return t.put(spool, dir, last, n, data)
}

// Rewrite changes the contents of the regular file at name and keeps its
// attributes.
func (t *Tree) Rewrite(spool *Spool, name string, change func([]byte) []byte) error {
	dir, last := t.at(name)
	if dir == nil {
		return nil
	}
	old := t.lookup(dir, last)
	if old == nil || !old.IsRegular() {
		return nil
	}
	data := make([]byte, min(old.Size, 1<<20))
	if _, err := spool.ReadAt(data, old.Offset); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return t.put(spool, dir, last, *old, change(data))
}

func (t *Tree) put(spool *Spool, dir *erofs.Node, name string, n erofs.Node, data []byte) error {
	off, sum, err := spool.add(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		return err
	}
	n.Size, n.Offset, n.Sum = int64(len(data)), off, sum
	node, err := t.add(n)
	if err != nil {
		return err
	}
	if err := t.set(dir, name, node); err != nil {
		return err
	}
	slices.SortFunc(dir.Entries, func(a, b erofs.Entry) int { return cmp.Compare(a.Name, b.Name) })
	return nil
}

// SettleTimes gives everything that was modified at since or later the newest
// time before since, and returns that time: what a build made then looks the
// same as in any other build of the same packages.
func (t *Tree) SettleTimes(since int64) int64 {
	var newest int64
	t.each(func(n *erofs.Node) {
		if n.Mtime < since {
			newest = max(newest, n.Mtime)
		}
	})
	t.each(func(n *erofs.Node) {
		if n.Mtime >= since {
			n.Mtime, n.MtimeNsec = newest, 0
		}
	})
	return newest
}

// each calls f for the root and for every entry; for a hard link several times.
func (t *Tree) each(f func(*erofs.Node)) {
	f(t.Root)
	todo := []*erofs.Node{t.Root}
	for len(todo) > 0 {
		dir := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, e := range dir.Entries {
			f(e.Node)
			if e.Node.IsDir() {
				todo = append(todo, e.Node)
			}
		}
	}
}
