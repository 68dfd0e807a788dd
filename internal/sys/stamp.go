package sys

import (
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// FileStamp tells a file apart from what it was before: no write and no
// replacement by another file leaves all of it as it was.
//
// The change time is not in it. A hard link more or less changes that, and
// jails are filled with hard links to what their machines read: each creation,
// restore and removal of a machine would have images of gigabytes hashed
// again, for every other user of the same file at the same instant, too. What
// only the change time could show is a write into the file itself after which
// the modification time was set back; for that one must own the file or be
// root, and everything that is stamped is root's and read-only or in a
// directory that only root can enter. A copy that kept the times, or a file
// that got the number of an inode that was removed, has another birth.
type FileStamp struct {
	Dev   uint64 `json:"dev"`
	Inode uint64 `json:"inode"`
	Size  int64  `json:"size"`
	Mtime int64  `json:"mtime"` // in nanoseconds, as Born
	// Born is when the inode was made, which nobody can set; where the
	// filesystem does not tell, the change time stands in for it, and a link
	// costs a hash.
	Born int64 `json:"born"`
}

// StampFile returns the stamp of the file at path, which may be a link to it.
func StampFile(path string) (FileStamp, error) { return stamp(unix.AT_FDCWD, path, 0, path) }

// StampOpen returns the stamp of an open file.
func StampOpen(f *os.File) (FileStamp, error) {
	return stamp(int(f.Fd()), "", unix.AT_EMPTY_PATH, f.Name())
}

func stamp(dir int, path string, flags int, name string) (FileStamp, error) {
	var st unix.Statx_t
	const want = unix.STATX_INO | unix.STATX_SIZE | unix.STATX_MTIME | unix.STATX_CTIME | unix.STATX_BTIME
	if err := unix.Statx(dir, path, flags, want, &st); err != nil {
		return FileStamp{}, &fs.PathError{Op: "statx", Path: name, Err: err}
	}
	born := st.Ctime
	if st.Mask&unix.STATX_BTIME != 0 {
		born = st.Btime
	}
	return FileStamp{
		Dev: unix.Mkdev(st.Dev_major, st.Dev_minor), Inode: st.Ino, Size: int64(st.Size), Mtime: nanos(st.Mtime), Born: nanos(born),
	}, nil
}

func nanos(t unix.StatxTimestamp) int64 { return t.Sec*1e9 + int64(t.Nsec) }
