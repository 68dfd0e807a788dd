package sys

import (
	"io/fs"

	"golang.org/x/sys/unix"
)

// FileStamp tells a file apart from what it was before: no write, replacement
// or change of owner leaves all of it as it was.
type FileStamp struct {
	Dev   uint64 `json:"dev"`
	Inode uint64 `json:"inode"`
	Size  int64  `json:"size"`
	Ctime int64  `json:"ctime"` // in nanoseconds
}

// StampFile returns the stamp of the file at path.
func StampFile(path string) (FileStamp, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return FileStamp{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	return FileStamp{Dev: st.Dev, Inode: st.Ino, Size: st.Size, Ctime: st.Ctim.Nano()}, nil
}
