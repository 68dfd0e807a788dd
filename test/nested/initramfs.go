package nested

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path"
	"sort"
	"strings"
)

// Tree is what an initial file system holds, by path without the first slash.
// Directories come by themselves, 0755.
type Tree map[string]Node

// Node is a regular file with its content in a file of this host or in memory,
// or a symbolic link.
type Node struct {
	Mode os.FileMode // permissions; 0 is 0644
	Host string      // a file of this host
	Data string      // the content, where Host is ""
	Link string      // what a symbolic link points to
}

// WriteInitramfs writes the tree as the kernel unpacks it: cpio in its format
// "newc", not compressed. The same tree gives the same bytes: all is root's,
// of 1970, in the order of its names.
func WriteInitramfs(w io.Writer, tree Tree) error {
	a := &cpio{w: bufio.NewWriterSize(w, 1<<20), made: map[string]bool{".": true}}
	names := make([]string, 0, len(tree))
	for name := range tree {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		if err := a.add(path.Clean(strings.TrimPrefix(name, "/")), tree[name]); err != nil {
			return fmt.Errorf("initial file system: %s: %w", name, err)
		}
	}
	if err := a.entry("TRAILER!!!", 0, 1, 0, strings.NewReader("")); err != nil {
		return err
	}
	return a.w.Flush()
}

// Types in a mode, as stat(2) has them.
const (
	typeDir  = 0o040000
	typeFile = 0o100000
	typeLink = 0o120000
)

type cpio struct {
	w     *bufio.Writer
	inode int
	made  map[string]bool // directories
}

func (a *cpio) add(name string, n Node) error {
	if err := a.dirs(path.Dir(name)); err != nil {
		return err
	}
	if n.Link != "" {
		return a.entry(name, typeLink|0o777, 1, int64(len(n.Link)), strings.NewReader(n.Link))
	}
	mode := int(n.Mode.Perm())
	if mode == 0 {
		mode = 0o644
	}
	if n.Host == "" {
		return a.entry(name, typeFile|mode, 1, int64(len(n.Data)), strings.NewReader(n.Data))
	}
	f, err := os.Open(n.Host)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() || st.Size() >= 1<<32 {
		return fmt.Errorf("%s is no regular file below 4 GiB", n.Host)
	}
	return a.entry(name, typeFile|mode, 1, st.Size(), f)
}

func (a *cpio) dirs(dir string) error {
	if a.made[dir] {
		return nil
	}
	if err := a.dirs(path.Dir(dir)); err != nil {
		return err
	}
	a.made[dir] = true
	return a.entry(dir, typeDir|0o755, 2, 0, strings.NewReader(""))
}

// entry writes one header, name and content, each padded to four bytes.
func (a *cpio) entry(name string, mode, links int, size int64, content io.Reader) error {
	a.inode++
	// magic, inode, mode, uid, gid, links, mtime, size, device (2), the
	// node's device (2), length of the name with its zero, checksum (none)
	fmt.Fprintf(a.w, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		a.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, len(name)+1, 0)
	fmt.Fprintf(a.w, "%s\x00%s", name, zeroes(110+len(name)+1))
	n, err := io.Copy(a.w, content)
	if err != nil {
		return err
	}
	if n != size {
		return fmt.Errorf("%d bytes were read of %d", n, size)
	}
	_, err = a.w.WriteString(zeroes(int(size % 4)))
	return err
}

// zeroes is the padding after n bytes.
func zeroes(n int) string { return strings.Repeat("\x00", (4-n%4)%4) }
