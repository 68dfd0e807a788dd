// Package erofstest checks images in tests. Its reader is stricter than any
// that images are made for, and shares no code with the writer: what it accepts
// keeps every promise of package erofs. Tests of erofs, rootfs and template
// call it.
package erofstest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"
)

// File is what an image says about one name.
type File struct {
	Mode      uint16
	UID, GID  uint32
	Nlink     uint32
	Size      int64
	Mtime     int64
	MtimeNsec uint32
	Nid       uint64
	Data      []byte // of files up to MaxData bytes, and links' targets
}

// MaxData is the largest file whose contents Verify returns.
const MaxData = 64 << 10

const block = 4096

type extent struct{ start, end int64 }

type verifier struct {
	r     io.ReaderAt
	size  int64
	files map[string]File
	seen  map[uint64]string // first name by inode
	links map[uint64]uint32
	used  []extent
}

// Verify reads the whole image and returns its files by name; the root is ".".
func Verify(r io.ReaderAt, size int64) (map[string]File, error) {
	v := &verifier{r: r, size: size, files: map[string]File{}, seen: map[uint64]string{}, links: map[uint64]uint32{}}
	first, err := v.read(0, block)
	if err != nil {
		return nil, err
	}
	le, sb := binary.LittleEndian, first[1024:1152]
	sum := le.Uint32(sb[4:])
	clear(sb[4:8])
	switch {
	case le.Uint32(sb) != 0xe0f5e1e2:
		return nil, errors.New("bad magic")
	case sum != ^crc32.Checksum(first[1024:], crc32.MakeTable(crc32.Castagnoli)):
		return nil, errors.New("bad checksum")
	case le.Uint32(sb[8:]) != 1 || le.Uint32(sb[80:]) != 0 || sb[12] != 12:
		return nil, errors.New("unknown features or block size")
	case int64(le.Uint32(sb[36:]))*block != size:
		return nil, fmt.Errorf("the superblock counts %d blocks in %d bytes", le.Uint32(sb[36:]), size)
	}
	root := uint64(le.Uint16(sb[14:]))
	if err := v.directory(".", root, root); err != nil {
		return nil, err
	}
	if n := le.Uint64(sb[16:]); n != uint64(len(v.seen)) {
		return nil, fmt.Errorf("the superblock counts %d inodes of %d", n, len(v.seen))
	}
	for name, f := range v.files {
		if f.Nlink != v.links[f.Nid] {
			return nil, fmt.Errorf("%s has %d links and says %d", name, v.links[f.Nid], f.Nlink)
		}
	}
	return v.files, v.overlaps()
}

func (v *verifier) read(off, n int64) ([]byte, error) {
	if off < 0 || n < 0 || off+n > v.size {
		return nil, fmt.Errorf("range %d+%d is outside of the image", off, n)
	}
	p := make([]byte, n)
	_, err := v.r.ReadAt(p, off)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return p, err
}

// inode reads an inode, and its data where that is small enough.
func (v *verifier) inode(name string, nid uint64) (File, error) {
	p, err := v.read(int64(nid)*32, 64)
	if err != nil {
		return File{}, err
	}
	le := binary.LittleEndian
	if le.Uint16(p) != 1 || le.Uint16(p[2:]) != 0 {
		return File{}, fmt.Errorf("%s is no extended flat inode without xattrs", name)
	}
	f := File{
		Mode: le.Uint16(p[4:]), Size: int64(le.Uint64(p[8:])), UID: le.Uint32(p[24:]), GID: le.Uint32(p[28:]),
		Mtime: int64(le.Uint64(p[32:])), MtimeNsec: le.Uint32(p[40:]), Nlink: le.Uint32(p[44:]), Nid: nid,
	}
	if f.Mtime < 0 || f.MtimeNsec > 999999999 || f.Size < 0 {
		return f, fmt.Errorf("%s has impossible attributes", name)
	}
	at := int64(le.Uint32(p[16:])) * block
	_, known := v.seen[nid]
	if !known {
		v.seen[nid] = name
		v.used = append(v.used, extent{int64(nid) * 32, int64(nid)*32 + 64})
		if f.Size > 0 {
			v.used = append(v.used, extent{at, at + (f.Size+block-1)/block*block})
		}
	}
	if f.Size > 0 && (at == 0 || at+f.Size > v.size) {
		return f, fmt.Errorf("%s has data outside of the image", name)
	}
	if f.Mode>>12 == 4 || f.Size <= MaxData {
		f.Data, err = v.read(at, f.Size)
	}
	return f, err
}

// directory verifies a directory and what is below it.
func (v *verifier) directory(name string, nid, parent uint64) error {
	f, err := v.inode(name, nid)
	if err != nil {
		return err
	}
	v.files[name] = f
	if f.Mode>>12 != 4 || f.Size == 0 {
		return fmt.Errorf("%s is no directory or an empty one", name)
	}
	var last string
	for off := int64(0); off < f.Size; off += block {
		entries, err := parseBlock(f.Data[off:min(off+block, f.Size)])
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		for _, e := range entries {
			if e.name <= last {
				return fmt.Errorf("%s: %q comes after %q", name, e.name, last)
			}
			last = e.name
			if err := v.entry(name, nid, parent, e); err != nil {
				return err
			}
		}
	}
	for _, dot := range []string{".", ".."} {
		if !strings.Contains(dots(f.Data), "\x00"+dot+"\x00") {
			return fmt.Errorf("%s has no %q", name, dot)
		}
	}
	return nil
}

func (v *verifier) entry(dir string, nid, parent uint64, e entry) error {
	v.links[e.nid]++
	switch e.name {
	case ".":
		if e.nid != nid || e.typ != 2 {
			return fmt.Errorf("%s: its own entry is wrong", dir)
		}
		return nil
	case "..":
		if e.nid != parent || e.typ != 2 {
			return fmt.Errorf("%s: its parent's entry is wrong", dir)
		}
		return nil
	}
	full := e.name
	if dir != "." {
		full = dir + "/" + e.name
	}
	if e.typ == 2 {
		if _, known := v.seen[e.nid]; known {
			return fmt.Errorf("%s is a directory with two names", full)
		}
		return v.directory(full, e.nid, nid)
	}
	f, err := v.inode(full, e.nid)
	if err != nil {
		return err
	}
	want := map[uint16]byte{8: 1, 1: 5, 12: 6, 10: 7}[f.Mode>>12]
	if want == 0 || want != e.typ {
		return fmt.Errorf("%s has the mode %o and the type %d", full, f.Mode, e.typ)
	}
	v.files[full] = f
	return nil
}

// overlaps checks that no two inodes share bytes.
func (v *verifier) overlaps() error {
	slices.SortFunc(v.used, func(a, b extent) int { return int(a.start - b.start) })
	for i := 1; i < len(v.used); i++ {
		if v.used[i].start < v.used[i-1].end {
			return fmt.Errorf("the bytes at %d belong to two things", v.used[i].start)
		}
	}
	return nil
}

type entry struct {
	name string
	nid  uint64
	typ  byte
}

func parseBlock(p []byte) (list []entry, err error) {
	le := binary.LittleEndian
	if len(p) < 12 {
		return nil, errors.New("a short block of entries")
	}
	n := int(le.Uint16(p[8:])) / 12
	if n == 0 || n*12 > len(p) || le.Uint16(p[8:])%12 != 0 {
		return nil, errors.New("a bad first name offset")
	}
	for i := range n {
		d := p[i*12:]
		start, end := int(le.Uint16(d[8:])), len(p)
		if i+1 < n {
			end = int(le.Uint16(p[(i+1)*12+8:]))
		}
		if start < n*12 || start >= end || end > len(p) {
			return nil, errors.New("a bad name offset")
		}
		name := p[start:end]
		if i+1 == n {
			name = bytes.TrimRight(name, "\x00")
		}
		if len(name) == 0 || len(name) > 255 || bytes.ContainsAny(name, "/\x00") {
			return nil, fmt.Errorf("a bad name %q", name)
		}
		list = append(list, entry{string(name), le.Uint64(d), d[10]})
	}
	return list, nil
}

// dots lists a directory's names, each between NUL bytes.
func dots(data []byte) string {
	var b strings.Builder
	b.WriteByte(0)
	for off := 0; off < len(data); off += block {
		list, err := parseBlock(data[off:min(off+block, len(data))])
		if err != nil {
			return ""
		}
		for _, e := range list {
			b.WriteString(e.name + "\x00")
		}
	}
	return b.String()
}
