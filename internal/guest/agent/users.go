package agent

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"

	"cloche.dev/cloche/internal/sandbox"
)

const (
	passwdFile  = "/etc/passwd"
	groupFile   = "/etc/group"
	maxUserFile = 16 << 20 // they are the guest's own; this only bounds our time
)

// account is a user as processes need it.
type account struct {
	name, home, shell string
	uid, gid          uint32
	groups            []uint32
}

// resolveUser finds "", "name", "uid", and each with ":group" or ":gid", in
// the guest's own files. "" is root. A number that no file knows is a user
// without a name, whose group has the same number and whose home is /.
func resolveUser(spec string) (account, error) {
	if spec == "" {
		spec = "0"
	}
	user, group, hasGroup := strings.Cut(spec, ":")
	a, err := findUser(user)
	if err != nil {
		return account{}, err
	}
	if hasGroup {
		gid, err := findGroup(group)
		if err != nil {
			return account{}, err
		}
		a.gid, a.groups = gid, nil
		return a, nil
	}
	a.groups, err = groupsOf(a.name)
	return a, err
}

func findUser(user string) (account, error) {
	uid, isNumber := parseID(user)
	var found *account
	err := eachLine(passwdFile, func(f []string) bool {
		if len(f) < 7 || f[0] != user && (!isNumber || f[2] != strconv.FormatUint(uint64(uid), 10)) {
			return true
		}
		u, ok1 := parseID(f[2])
		g, ok2 := parseID(f[3])
		if ok1 && ok2 {
			found = &account{name: f[0], uid: u, gid: g, home: f[5], shell: f[6]}
		}
		return found == nil
	})
	switch {
	case err != nil:
		return account{}, err
	case found != nil:
		return *found, nil
	case isNumber:
		return account{uid: uid, gid: uid, home: "/"}, nil
	}
	return account{}, sandbox.Errorf(sandbox.NotFound, "no_such_user", "there is no user %q in the sandbox", user)
}

func findGroup(group string) (uint32, error) {
	if gid, ok := parseID(group); ok {
		return gid, nil
	}
	gid, found := uint32(0), false
	err := eachLine(groupFile, func(f []string) bool {
		if len(f) >= 3 && f[0] == group {
			gid, found = parseID(f[2])
		}
		return !found
	})
	if err == nil && !found {
		err = sandbox.Errorf(sandbox.NotFound, "no_such_group", "there is no group %q in the sandbox", group)
	}
	return gid, err
}

func groupsOf(name string) ([]uint32, error) {
	var out []uint32
	if name == "" {
		return nil, nil
	}
	err := eachLine(groupFile, func(f []string) bool {
		if len(f) < 4 {
			return true
		}
		for m := range strings.SplitSeq(f[3], ",") {
			if gid, ok := parseID(f[2]); ok && m == name {
				out = append(out, gid)
				break
			}
		}
		return len(out) < 256
	})
	return out, err
}

func parseID(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n != 1<<32-1 // -1 means "leave it" to chown
}

// eachLine calls fn with the fields of each line until it returns false. A
// missing file is empty.
func eachLine(path string, fn func([]string) bool) error {
	f, err := os.Open(path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	sc := bufio.NewScanner(io.LimitReader(f, maxUserFile))
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		if !fn(strings.Split(sc.Text(), ":")) {
			return nil
		}
	}
	return sc.Err()
}
