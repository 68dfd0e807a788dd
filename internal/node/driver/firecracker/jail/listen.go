package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
)

// Listen makes a socket in the jail that only its VMM can dial. One of that
// name is replaced: its listener is not dialled any more.
//
// The socket is bound in a directory that is root's alone, by a path that is
// always short, given to the user there, and only then moved into the jail,
// where the VMM could have put another file in the place of its name.
func (j *Jail) Listen(name string, uid int) (*net.UnixListener, error) {
	dir, err := os.Open(j.dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	temp := ".bind-" + name
	path := filepath.Join(j.dir, temp)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), temp)})
	if err != nil {
		return nil, diskError(err)
	}
	l.SetUnlinkOnClose(false) // it has another name by then
	err = errors.Join(os.Chmod(path, 0o600), os.Lchown(path, uid, uid))
	if err == nil {
		err = os.Rename(path, filepath.Join(j.root(), name))
	}
	if err != nil {
		_ = l.Close()
		_ = os.Remove(path)
		return nil, err
	}
	return l, nil
}
