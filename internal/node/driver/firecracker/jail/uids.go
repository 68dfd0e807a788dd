package jail

import (
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"cloche.dev/cloche/internal/sandbox"
)

// The range of user ids that jails get, each used as a group id too. No
// distribution gives out ids as high as this one.
const (
	FirstUID = 1_000_000_000
	UIDs     = 65_536
)

// Users give out user ids. One that is taken is a symbolic link in a directory,
// named by the number, whose target is the sandbox's id: making it is exclusive
// among all processes, and tells whose it is, in one step. So an id is known
// before anything has it, and can be given back from the sandbox's id alone.
type Users struct{ dir string }

// NewUsers returns what gives them out, keeping its links in dir.
func NewUsers(dir string) *Users { return &Users{dir: dir} }

// Take takes a user id for a sandbox that has none.
func (u *Users) Take(id string) (int, error) {
	if err := os.MkdirAll(u.dir, 0o700); err != nil {
		return 0, err
	}
	// Where the search begins depends on the sandbox, so that it is short, and
	// that several daemons on one host, each with its own directory, are not
	// likely to use the same ids.
	h := fnv.New32a()
	_, _ = h.Write([]byte(u.dir + id)) // never fails
	for i := range UIDs {
		uid := FirstUID + (int(h.Sum32()%UIDs)+i)%UIDs
		err := os.Symlink(id, u.link(uid))
		if err == nil {
			return uid, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return 0, fmt.Errorf("take a user id: %w", err)
		}
	}
	return 0, sandbox.Errorf(sandbox.NoCapacity, "no_uid", "all %d user ids of jails are taken", UIDs)
}

func (u *Users) link(uid int) string { return filepath.Join(u.dir, strconv.Itoa(uid)) }

// Give gives back the user id of a sandbox. uid is the one that it is thought to
// have; where that is not so, as with 0, all are looked through.
func (u *Users) Give(id string, uid int) error {
	if owner, err := os.Readlink(u.link(uid)); err == nil && owner == id {
		return os.Remove(u.link(uid))
	}
	taken, err := u.List()
	if err != nil {
		return err
	}
	for n, owner := range taken {
		if owner == id {
			err = errors.Join(err, remove(u.link(n)))
		}
	}
	return err
}

// List tells whose the ids are that are taken.
func (u *Users) List() (map[int]string, error) {
	entries, err := os.ReadDir(u.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	taken := map[int]string{}
	for _, e := range entries {
		uid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue // not ours
		}
		if owner, err := os.Readlink(u.link(uid)); err == nil {
			taken[uid] = owner
		}
	}
	return taken, nil
}
