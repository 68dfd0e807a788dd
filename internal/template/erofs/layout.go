package erofs

import (
	"fmt"
	"strings"
)

// layout is the plan of an image: which inode gets which number, and which
// block each one's data starts at.
//
// Order: inodes by directory, so that what one readdir names lies side by
// side; then the directories' entries and link targets in the same order; then
// the files' data, again in the same order.
type layout struct {
	nodes  []*Node         // by index; each once
	parent map[*Node]*Node // of directories
	blocks uint32          // of the whole image
}

// newLayout numbers the tree below root and places its data. It refuses trees
// that can't be an image, and images larger than maxSize bytes.
func newLayout(root *Node, maxSize int64) (*layout, error) {
	l := &layout{parent: make(map[*Node]*Node)}
	if !root.IsDir() {
		return nil, fmt.Errorf("the root is not a directory")
	}
	if err := l.number(root); err != nil {
		return nil, err
	}
	meta := int64(superOffset+superSize) + int64(len(l.nodes))*inodeSize
	next := blocksOf(meta)
	place := func(n *Node, size int64) error {
		n.block = 0
		if size == 0 {
			return nil
		}
		if (next+blocksOf(size))*BlockSize > maxSize {
			return &TooLargeError{Limit: maxSize}
		}
		n.block = uint32(next)
		next += blocksOf(size)
		return nil
	}
	for _, n := range l.nodes {
		if n.IsRegular() {
			continue
		}
		if err := place(n, metaSize(n)); err != nil {
			return nil, err
		}
	}
	for _, n := range l.nodes {
		if !n.IsRegular() {
			continue
		}
		if n.Size < 0 {
			return nil, fmt.Errorf("a file has a negative size")
		}
		if n.Size > maxSize {
			return nil, &TooLargeError{Limit: maxSize}
		}
		if err := place(n, n.Size); err != nil {
			return nil, err
		}
	}
	l.blocks = uint32(next)
	return l, nil
}

// number gives every node its index, and counts links.
func (l *layout) number(root *Node) error {
	// A node's number is taken for set when the list says so; what an earlier
	// layout of the same tree left behind doesn't count.
	known := func(n *Node) bool { return int(n.index) < len(l.nodes) && l.nodes[n.index] == n }
	add := func(n *Node) {
		n.index, n.nlink = uint32(len(l.nodes)), 0
		l.nodes = append(l.nodes, n)
	}
	add(root)
	root.nlink = 2
	l.parent[root] = root
	stack := []*Node{root}
	for len(stack) > 0 {
		dir := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		first := len(stack)
		for i, e := range dir.Entries {
			if err := checkEntry(dir.Entries, i); err != nil {
				return err
			}
			n := e.Node
			switch {
			case n.IsDir() && known(n):
				return fmt.Errorf("directory %q stands in two places", e.Name)
			case !known(n):
				add(n)
			}
			n.nlink++
			if n.IsDir() {
				n.nlink++ // its own "."
				dir.nlink++
				l.parent[n] = dir
				stack = append(stack, n)
			}
		}
		// The first subdirectory shall come next.
		for a, b := first, len(stack)-1; a < b; a, b = a+1, b-1 {
			stack[a], stack[b] = stack[b], stack[a]
		}
	}
	return nil
}

// checkEntry refuses an entry that no image can hold.
func checkEntry(entries []Entry, i int) error {
	name, n := entries[i].Name, entries[i].Node
	switch {
	case name == "" || name == "." || name == ".." || len(name) > MaxNameLen || strings.ContainsAny(name, "/\x00"):
		return fmt.Errorf("%q is no file name", name)
	case i > 0 && entries[i-1].Name >= name:
		return fmt.Errorf("the entries %q and %q are not in order", entries[i-1].Name, name)
	case n.fileType() == 0:
		return fmt.Errorf("%q has the unknown mode %#o", name, n.Mode)
	case n.IsSymlink() && (n.Target == "" || len(n.Target) > MaxTargetLen || strings.Contains(n.Target, "\x00")):
		return fmt.Errorf("the symbolic link %q has a bad target", name)
	case n.Mtime < 0 || n.MtimeNsec > 999_999_999:
		return fmt.Errorf("%q has a bad modification time", name)
	}
	return nil
}

// dirents lists the directory's entries as the image has them, in dst.
func (l *layout) dirents(dir *Node, dst []dirent) []dirent {
	dst = dst[:0]
	self := dirent{".", dir.nid(), ftDir}
	up := dirent{"..", l.parent[dir].nid(), ftDir}
	// Names that sort before "." or between the two exist ("!x", ".-x").
	for _, e := range dir.Entries {
		if self.name != "" && e.Name > self.name {
			dst = append(dst, self)
			self.name = ""
		}
		if up.name != "" && e.Name > up.name {
			dst = append(dst, up)
			up.name = ""
		}
		dst = append(dst, dirent{e.Name, e.Node.nid(), e.Node.fileType()})
	}
	if self.name != "" {
		dst = append(dst, self)
	}
	if up.name != "" {
		dst = append(dst, up)
	}
	return dst
}

// metaSize returns the data size of what isn't a regular file: a link's target
// or a directory's blocks.
func metaSize(n *Node) int64 {
	switch {
	case n.IsSymlink():
		return int64(len(n.Target))
	case n.IsDir():
		return dirSize(n)
	}
	return 0
}

// dirSize does packDirents' arithmetic without its bytes.
func dirSize(dir *Node) int64 {
	lens := func(at int) int { return len(dir.Entries[at].Name) }
	// Where "." and ".." stand among the names.
	dot, dotdot := 0, 0
	for _, e := range dir.Entries {
		if e.Name < "." {
			dot++
		}
		if e.Name < ".." {
			dotdot++
		}
	}
	dotdot++ // "." comes before it
	total := len(dir.Entries) + 2
	nameLen := func(i int) int {
		switch {
		case i == dot:
			return 1
		case i == dotdot:
			return 2
		case i > dotdot:
			return lens(i - 2)
		case i > dot:
			return lens(i - 1)
		}
		return lens(i)
	}
	var full int64
	for at := 0; ; {
		n, used := direntsPerBlock(total-at, func(i int) int { return nameLen(at + i) })
		at += n
		if at == total {
			return full + int64(used)
		}
		full += BlockSize
	}
}

func blocksOf(size int64) int64 { return (size + BlockSize - 1) / BlockSize }
