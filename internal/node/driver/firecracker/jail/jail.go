// Package jail runs a VMM process in a jail: it lays out the files that the
// process may see, starts it through Firecracker's jailer, finds it again,
// kills it and removes what it left. It knows nothing of machines: what is
// asked of the VMM, and what lies in which file, is the driver's business.
//
// What always holds:
//
//   - A jail has a user id of its own, so that nothing in it can touch another
//     jail's files or processes; uids.go gives them out.
//   - What the VMM only reads is root's and read-only (a hard link, so that all
//     jails share it), what it writes is its own.
//   - The jail's root directory belongs to the VMM, as the jailer wants it, until
//     it is sealed, and a VMM may have been taken over. So nothing there is
//     trusted by its name: what the host needs of a jail lies beside it under a
//     name that only root can change (the disk, the log), or is opened without
//     following a link. And no owner or mode is ever changed there by name, since
//     a name may be another file's by then, and that file may be every machine's.
//   - What the VMM has opened and nobody needs by name is taken out of the jail
//     (Seal) before anybody hostile runs in its guest, and from then on the VMM
//     can make no file.
//   - A process is killed by a pidfd, or for being in the jail's control group,
//     never by a bare number.
//   - The VMM outlives whoever started it. It holds no pipe that needs a reader:
//     its log is a FIFO that it can read itself, which loses what is not read.
//
// The driver is the only caller.
package jail

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"cloche.dev/cloche/internal/node/cgroup"
	"cloche.dev/cloche/internal/sandbox"
)

// Names in a jail's directory.
const (
	baseName   = "j"   // the jailer's --chroot-base-dir
	logName    = "log" // a FIFO; the same in the jail
	apiName    = "api.sock"
	binaryName = "firecracker" // the jailer wants it in the program's name, and makes a directory of it
)

// Jail is the place of one VMM. It need not exist.
type Jail struct {
	dir   string // the machine's own directory, root's alone
	name  string // as the jailer and the control group know it
	group cgroup.Group
}

// New names the jail of the sandbox id below dir, a directory of the machine's
// own that only root can enter. parent is the control group that the jail's own
// lies in.
func New(dir, id string, tree *cgroup.Tree, parent string) *Jail {
	name := NameOf(id)
	return &Jail{dir: dir, name: name, group: tree.Group(filepath.Join(parent, name))}
}

// NameOf is a sandbox's id as a jailer takes it, which knows no "_".
func NameOf(id string) string { return strings.ReplaceAll(id, "_", "-") }

// IDOf is NameOf's reverse; "" when the name is no sandbox's.
func IDOf(name string) string {
	id := strings.Replace(name, "-", "_", 1)
	if id == name || !sandbox.ValidID(sandbox.KindSandbox, id) {
		return "" // with a "_" it is another driver's
	}
	return id
}

// Group is the control group of the jail's processes.
func (j *Jail) Group() cgroup.Group { return j.group }

// root is the directory that the VMM sees as /.
func (j *Jail) root() string { return filepath.Join(j.dir, baseName, binaryName, j.name, "root") }

// Socket is the path of the VMM's API socket. What lies there is to be opened
// without following it.
func (j *Jail) Socket() string { return filepath.Join(j.root(), apiName) }

// Make makes an empty jail for a user.
func (j *Jail) Make(uid int) error {
	if err := os.MkdirAll(j.root(), 0o700); err != nil {
		return diskError(err)
	}
	return j.makeLog(uid)
}

// Share shows the jail a file of the host's, which it can only read. The file
// must never change. It stays one file where that can be, and is copied where
// it lies on another filesystem, or is not root's, or is not for all to read.
func (j *Jail) Share(ctx context.Context, source, name string) error {
	st, err := os.Stat(source)
	if err != nil {
		return err
	}
	target := filepath.Join(j.root(), name)
	if st.Mode().IsRegular() && st.Mode().Perm()&0o022 == 0 && st.Mode().Perm()&0o004 != 0 && ownedByRoot(st) {
		err := os.Link(source, target)
		if err == nil || errors.Is(err, fs.ErrExist) || errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	mode := fs.FileMode(0o444)
	if st.Mode().Perm()&0o111 != 0 {
		mode = 0o555
	}
	return copyTo(ctx, target, source, mode)
}

// Own gives the jail a file of the machine's own directory under the same name,
// for the VMM to write to. The name outside stays the one to go by.
func (j *Jail) Own(name string, uid int) error {
	path := filepath.Join(j.dir, name)
	if err := errors.Join(os.Chmod(path, 0o600), os.Chown(path, uid, uid)); err != nil {
		return err
	}
	return os.Link(path, filepath.Join(j.root(), name))
}
