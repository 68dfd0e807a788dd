package erofs

import (
	"encoding/binary"
	"hash/crc32"
)

// The on-disk constants that this writer needs.
const (
	BlockSize = 4096

	magic            = 0xe0f5e1e2
	blockBits        = 12
	superOffset      = 1024
	superSize        = 128
	slotBits         = 5
	inodeSize        = 64
	direntSize       = 12
	formatExtended   = 1 // bit 0: extended inode; bits 1-3: layout 0, flat plain
	compatSuperCksum = 1
	rootNid          = (superOffset + superSize) >> slotBits

	// MaxNameLen is the longest name of a directory entry.
	MaxNameLen = 255
	// MaxTargetLen is the longest target of a symbolic link that every reader
	// gives back whole.
	MaxTargetLen = 4095
)

// The file types in directory entries.
const (
	ftRegular = 1
	ftDir     = 2
	ftFifo    = 5
	ftSocket  = 6
	ftSymlink = 7
)

// superBlock fills buf[superOffset:] of the first block. Everything else in
// the block must be in place, for the checksum covers it.
func superBlock(buf []byte, uuid [16]byte, inodes uint64, blocks uint32) {
	le, sb := binary.LittleEndian, buf[superOffset:superOffset+superSize]
	clear(sb)
	le.PutUint32(sb[0:], magic)
	le.PutUint32(sb[8:], compatSuperCksum)
	sb[12] = blockBits
	le.PutUint16(sb[14:], rootNid)
	le.PutUint64(sb[16:], inodes)
	// Build time (24, 28) stays zero: it is the mtime of compact inodes only.
	le.PutUint32(sb[36:], blocks)
	// meta_blkaddr (40) is 0: inode numbers count slots from the image's start.
	copy(sb[48:64], uuid[:])
	sum := ^crc32.Checksum(buf[superOffset:BlockSize], crc32.MakeTable(crc32.Castagnoli))
	le.PutUint32(sb[4:], sum)
}

// putInode encodes n into buf, which is inodeSize long and zero.
func putInode(buf []byte, n *Node, size uint64) {
	le := binary.LittleEndian
	le.PutUint16(buf[0:], formatExtended)
	le.PutUint16(buf[4:], n.Mode)
	le.PutUint64(buf[8:], size)
	le.PutUint32(buf[16:], n.block)
	le.PutUint32(buf[20:], n.index+1)
	le.PutUint32(buf[24:], n.UID)
	le.PutUint32(buf[28:], n.GID)
	le.PutUint64(buf[32:], uint64(n.Mtime))
	le.PutUint32(buf[40:], n.MtimeNsec)
	le.PutUint32(buf[44:], n.nlink)
}

// dirent is one entry of a directory while its blocks are made.
type dirent struct {
	name string
	nid  uint64
	typ  byte
}

// packDirents hands the directory's blocks to emit, each of them BlockSize
// long but the last, which is as long as what it holds. entries is sorted; buf
// is scratch of BlockSize bytes.
func packDirents(entries []dirent, buf []byte, emit func([]byte) error) error {
	le := binary.LittleEndian
	for len(entries) > 0 {
		n, used := direntsPerBlock(len(entries), func(i int) int { return len(entries[i].name) })
		clear(buf)
		off := n * direntSize
		for i, e := range entries[:n] {
			d := buf[i*direntSize:]
			le.PutUint64(d[0:], e.nid)
			le.PutUint16(d[8:], uint16(off))
			d[10] = e.typ
			off += copy(buf[off:], e.name)
		}
		entries = entries[n:]
		out := buf[:BlockSize]
		if len(entries) == 0 {
			out = buf[:used]
		}
		if err := emit(out); err != nil {
			return err
		}
	}
	return nil
}

// direntsPerBlock tells how many of the next entries fit into one block, and
// how many bytes they take.
func direntsPerBlock(n int, nameLen func(int) int) (count, used int) {
	for count < n {
		need := direntSize + nameLen(count)
		if used+need > BlockSize {
			break
		}
		used += need
		count++
	}
	return count, used
}
