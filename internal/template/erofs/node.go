package erofs

// The file type bits of Node.Mode.
const (
	ModeType    = 0o170000
	ModeSocket  = 0o140000
	ModeSymlink = 0o120000
	ModeRegular = 0o100000
	ModeDir     = 0o040000
	ModeFifo    = 0o010000
)

// Node is one inode of a tree. A node that stands in several directories is a
// hard link; directories must stand in one. Its size matters: trees have
// millions of them.
type Node struct {
	Mode      uint16 // type and permission bits as in stat(2)
	UID, GID  uint32
	MtimeNsec uint32
	Mtime     int64   // seconds since 1970, not negative
	Size      int64   // of a regular file
	Offset    int64   // where a regular file's data starts in the data to write
	Target    string  // of a symbolic link
	Entries   []Entry // of a directory, sorted by name, without "." and ".."

	// Sum is any checksum of a regular file's data. It goes into the image's
	// UUID, so that images with other contents have other UUIDs.
	Sum uint32

	nlink uint32 // counted by the layout
	index uint32 // inode number, in slots of inodeSize from the root's
	block uint32 // where its data starts in the image
}

// Entry is a name in a directory.
type Entry struct {
	Name string
	Node *Node
}

// IsDir tells whether n is a directory.
func (n *Node) IsDir() bool { return n.Mode&ModeType == ModeDir }

// IsRegular tells whether n is a regular file.
func (n *Node) IsRegular() bool { return n.Mode&ModeType == ModeRegular }

// IsSymlink tells whether n is a symbolic link.
func (n *Node) IsSymlink() bool { return n.Mode&ModeType == ModeSymlink }

func (n *Node) nid() uint64 { return rootNid + uint64(n.index)*(inodeSize>>slotBits) }

// fileType returns the type byte of entries that name n; 0 when it is none
// that the writer knows.
func (n *Node) fileType() byte {
	switch n.Mode & ModeType {
	case ModeRegular:
		return ftRegular
	case ModeDir:
		return ftDir
	case ModeSymlink:
		return ftSymlink
	case ModeFifo:
		return ftFifo
	case ModeSocket:
		return ftSocket
	}
	return 0
}
