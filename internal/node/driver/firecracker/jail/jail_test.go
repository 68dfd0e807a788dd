package jail

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"cloche.dev/cloche/internal/node/cgroup"
	"cloche.dev/cloche/internal/sandbox"
)

const user = FirstUID + 7

// made makes a jail without a process.
func made(t testing.TB) *Jail { return madeIn(t, t.TempDir()) }

func madeIn(t testing.TB, dir string) *Jail {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIP: jails need root")
	}
	tree, err := cgroup.Host()
	if err != nil {
		t.Skipf("SKIP: no cgroups: %v", err)
	}
	j := New(dir, sandbox.NewID(sandbox.KindSandbox), tree, "/cloche-jail-test")
	if err := j.Make(user); err != nil {
		t.Fatal(err)
	}
	return j
}

func look(t testing.TB, path string) (os.FileInfo, *syscall.Stat_t) {
	t.Helper()
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return st, st.Sys().(*syscall.Stat_t)
}

func TestNamesGoBothWays(t *testing.T) {
	id := sandbox.NewID(sandbox.KindSandbox)
	if got := IDOf(NameOf(id)); got != id || strings.Contains(NameOf(id), "_") {
		t.Errorf("%s becomes %s and %s", id, NameOf(id), got)
	}
	for _, name := range []string{"", "sbx-", id, "sbx-short", "other-" + strings.Repeat("a", 20), NameOf(id) + "a"} {
		if got := IDOf(name); got != "" {
			t.Errorf("IDOf(%q) = %q", name, got)
		}
	}
}

// TestShare shows files of several kinds: whatever they are, what the jail gets
// is root's, can be read and can't be written to, and they stay as they were.
func TestShare(t *testing.T) {
	j := made(t)
	dir := t.TempDir()
	for name, c := range map[string]struct {
		mode   os.FileMode
		owner  int
		linked bool
	}{
		"artifact": {0o555, 0, true}, "image": {0o444, 0, true}, "plain": {0o644, 0, true},
		"secret": {0o600, 0, false}, "theirs": {0o644, 1000, false}, "shared": {0o666, 0, false}, "program": {0o700, 0, false},
	} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, []byte(name), 0o600), os.Chown(path, c.owner, c.owner), os.Chmod(path, c.mode)); err != nil {
			t.Fatal(err)
		}
		if err := j.Share(context.Background(), path, name); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		before, braw := look(t, path)
		after, araw := look(t, filepath.Join(j.root(), name))
		if os.SameFile(before, after) != c.linked || araw.Uid != 0 || after.Mode().Perm()&0o022 != 0 || after.Mode().Perm()&0o004 == 0 {
			t.Errorf("%s: in the jail it is %v of %d, the same file: %v", name, after.Mode(), araw.Uid, os.SameFile(before, after))
		}
		if runs := after.Mode().Perm()&0o001 != 0; runs != (c.mode&0o100 != 0) {
			t.Errorf("%s: in the jail it is %v", name, after.Mode())
		}
		if before.Mode() != c.mode || int(braw.Uid) != c.owner {
			t.Errorf("%s: outside it became %v of %d", name, before.Mode(), braw.Uid)
		}
		if got, err := os.ReadFile(filepath.Join(j.root(), name)); err != nil || string(got) != name {
			t.Errorf("%s: it holds %q, %v", name, got, err)
		}
		if err := j.Share(context.Background(), path, name); err == nil {
			t.Errorf("%s: it is there twice", name)
		}
	}
	if err := j.Share(context.Background(), filepath.Join(dir, "none"), "none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	other, err := os.MkdirTemp("/dev/shm", "cloche-jail-test-") // another filesystem, most likely
	if err != nil {
		t.Skipf("SKIP: no other filesystem: %v", err)
	}
	defer os.RemoveAll(other)
	far := filepath.Join(other, "far")
	if err := os.WriteFile(far, bytes.Repeat([]byte("far"), 1000), 0o444); err != nil {
		t.Fatal(err)
	}
	if err := j.Share(context.Background(), far, "far"); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(j.root(), "far")); err != nil || len(got) != 3000 {
		t.Errorf("a file of another filesystem has %d bytes, %v", len(got), err)
	}
}

// TestSealRemovesAllElse takes everything but what is named out of a jail whose
// VMM has left links and folders in it.
func TestSealRemovesAllElse(t *testing.T) {
	j := made(t)
	outside := t.TempDir()
	kept := filepath.Join(outside, "kept")
	if err := errors.Join(
		os.WriteFile(kept, []byte("of the host"), 0o600), os.WriteFile(filepath.Join(j.root(), "disk"), nil, 0o600),
		os.WriteFile(filepath.Join(j.root(), apiName), nil, 0o600), os.WriteFile(filepath.Join(j.root(), "vmlinux"), nil, 0o444),
		os.MkdirAll(filepath.Join(j.root(), "dev/net/deep"), 0o700), os.Symlink(outside, filepath.Join(j.root(), "dev/link")),
		os.Symlink(outside, filepath.Join(j.root(), "run")), os.Link(kept, filepath.Join(j.root(), "same")),
		os.MkdirAll(filepath.Join(j.root(), "template"), 0o700), os.Chown(j.root(), user, user), // as the jailer leaves it
		os.Chown(filepath.Join(j.root(), "dev/net/deep"), user, user),
	); err != nil {
		t.Fatal(err)
	}
	open, err := os.Open(filepath.Join(j.root(), "dev/net/deep"))
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	for range 2 {
		if err := j.Seal("disk", "template"); err != nil {
			t.Fatal(err)
		}
	}
	left, err := os.ReadDir(j.root())
	if err != nil || len(left) != 2 || left[0].Name() != apiName || left[1].Name() != "disk" {
		t.Errorf("left are %v, %v", left, err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Errorf("outside of the jail: %v", err)
	}
	if st, raw := look(t, j.root()); st.Mode() != os.ModeDir|0o755 || raw.Uid != 0 || raw.Gid != 0 {
		t.Errorf("its root is %v of %d:%d", st.Mode(), raw.Uid, raw.Gid)
	}
	if st, err := open.Stat(); err != nil || st.Sys().(*syscall.Stat_t).Uid != 0 {
		t.Errorf("a directory that it has kept open is still its own: %v", err)
	}
	// The host goes on to make names in it.
	l, err := j.Listen("v.sock_1024", user)
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	if room, err := j.MakeRoom("snap", user); err != nil || room.Close() != nil {
		t.Errorf("a room: %v", err)
	}
}

// TestSealIsBounded gives up on a jail whose VMM has made directories in each other
// without end.
func TestSealIsBounded(t *testing.T) {
	j := made(t)
	if err := os.MkdirAll(filepath.Join(j.root(), strings.Repeat("d/", maxDepth)), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := j.Seal(); err == nil {
		t.Error("it is sealed")
	}
}

// TestStub runs a program through the stub that the jailer gets.
func TestStub(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("SKIP: there is no stub for this processor")
	}
	defer syscall.Umask(syscall.Umask(0o077)) // as the installed unit has it
	dir := t.TempDir()
	for _, path := range []string{"/bin/sh", "/nowhere"} {
		file := filepath.Join(dir, filepath.Base(path))
		if err := writeProgram(file, stub(path)); err != nil {
			t.Fatal(err)
		}
		if st, _ := look(t, file); st.Mode() != 0o555 {
			t.Errorf("it is %v: a jail's user can't execute it", st.Mode())
		}
		cmd := exec.Command(file, "-c", `echo "$0,$1,$GREETING"; exit 7`, "a b", "")
		cmd.Env = []string{"GREETING=hello"}
		out, err := cmd.Output()
		code := cmd.ProcessState.ExitCode()
		if path == "/nowhere" {
			if code != 127 || len(out) > 0 {
				t.Errorf("a program that isn't there: %q, %d, %v", out, code, err)
			}
		} else if code != 7 || string(out) != "a b,,hello\n" {
			t.Errorf("it said %q, %d, %v", out, code, err)
		}
	}
}

// TestARoomTrustsNoName has a VMM leave other things than files of its own.
func TestARoomTrustsNoName(t *testing.T) {
	j := made(t)
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("of the host"), 0o600); err != nil {
		t.Fatal(err)
	}
	own := func(path string) error { return os.Lchown(path, user, user) }
	for name, leave := range map[string]func(path string) error{
		"a link":      func(p string) error { return errors.Join(os.Symlink(secret, p), own(p)) },
		"a FIFO":      func(p string) error { return errors.Join(syscall.Mkfifo(p, 0o666), own(p)) },
		"a directory": func(p string) error { return errors.Join(os.MkdirAll(filepath.Join(p, "in"), 0o755), own(p)) },
		"root's":      func(p string) error { return os.WriteFile(p, nil, 0o666) },
		"two names": func(p string) error {
			return errors.Join(os.WriteFile(p, nil, 0o666), own(p), os.Link(p, p+"2"))
		},
		"nothing": func(string) error { return nil },
	} {
		for _, far := range []bool{false, true} {
			room, err := j.MakeRoom("snap", user)
			if err != nil {
				t.Fatal(err)
			}
			to := t.TempDir()
			if far {
				if to, err = os.MkdirTemp("/dev/shm", "cloche-jail-test-"); err != nil {
					t.Skipf("SKIP: no other filesystem: %v", err)
				}
				defer os.RemoveAll(to)
			}
			if err := leave(filepath.Join(j.root(), "snap", "mem")); err != nil {
				t.Fatal(err)
			}
			if err := room.Take(context.Background(), "mem", to, 0o444); err == nil {
				t.Errorf("%s is taken", name)
			}
			if left, err := os.ReadDir(to); err != nil || len(left) > 0 {
				t.Errorf("%s: it is in the image: %v, %v", name, left, err)
			}
			if err := room.Close(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if st, raw := look(t, secret); st.Mode() != 0o600 || raw.Uid != 0 {
		t.Errorf("the secret became %v of %d", st.Mode(), raw.Uid)
	}
	// The whole room replaced by a link.
	room, err := j.MakeRoom("snap", user)
	if err != nil {
		t.Fatal(err)
	}
	trap := t.TempDir()
	path := filepath.Join(j.root(), "snap")
	if err := errors.Join(os.WriteFile(filepath.Join(trap, "mem"), nil, 0o600), os.Remove(path), os.Symlink(trap, path)); err != nil {
		t.Fatal(err)
	}
	if err := room.Take(context.Background(), "mem", t.TempDir(), 0o444); err == nil {
		t.Error("a file of another directory is taken")
	}
	if err := room.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(filepath.Join(trap, "mem")); err != nil {
		t.Errorf("closing the room removed what is elsewhere: %v", err)
	}
	// And one as it should be.
	if room, err = j.MakeRoom("snap", user); err != nil {
		t.Fatal(err)
	}
	defer room.Close()
	if err := errors.Join(os.WriteFile(filepath.Join(path, "mem"), []byte("memory"), 0o600), own(filepath.Join(path, "mem"))); err != nil {
		t.Fatal(err)
	}
	to := t.TempDir()
	if err := room.Take(context.Background(), "mem", to, 0o444); err != nil {
		t.Fatal(err)
	}
	if st, raw := look(t, filepath.Join(to, "mem")); st.Mode() != 0o444 || raw.Uid != 0 || room.Path("mem") != "/snap/mem" {
		t.Errorf("it is %v of %d", st.Mode(), raw.Uid)
	}
}

// TestReserve makes room for a file before anybody waits for it.
func TestReserve(t *testing.T) {
	j := made(t)
	room, err := j.MakeRoom("snap", user)
	if err != nil {
		t.Fatal(err)
	}
	defer room.Close()
	if err := room.Reserve("mem", 3<<20); err != nil {
		t.Fatal(err)
	}
	if st, raw := look(t, filepath.Join(j.root(), "snap", "mem")); st.Size() != 3<<20 || raw.Blocks*512 < 3<<20 || raw.Uid != user || st.Mode() != 0o600 {
		t.Errorf("it has %d bytes, %d on disk, and is %v of %d", st.Size(), raw.Blocks*512, st.Mode(), raw.Uid)
	}
	if st, raw := look(t, filepath.Join(j.root(), "snap")); st.Mode() != os.ModeDir|0o755 || raw.Uid != 0 {
		t.Errorf("the room is %v of %d: its VMM can make files in it", st.Mode(), raw.Uid)
	}
	if err := room.Reserve("state", 0); err != nil {
		t.Error(err)
	}
	if err := room.Reserve("mem", 1); err == nil {
		t.Error("it was made twice")
	}
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("SKIP: a small filesystem can't be mounted here: %v", err)
	}
	defer func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	small := madeIn(t, dir)
	if room, err = small.MakeRoom("snap", user); err != nil {
		t.Fatal(err)
	}
	defer room.Close()
	if err := room.Reserve("mem", 3<<20); !sandbox.IsClass(err, sandbox.NoCapacity) {
		t.Errorf("on a full disk: %v", err)
	}
}

// TestListenGivesNothingAway has a VMM put something in the place of a socket's
// name: that is replaced, and nothing else gets another owner.
func TestListenGivesNothingAway(t *testing.T) {
	j := made(t)
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(j.root(), "v.sock_1024")
	for name, put := range map[string]func() error{
		"nothing":  func() error { return nil },
		"a link":   func() error { return os.Symlink(image, path) },
		"an image": func() error { return os.Link(image, path) },
		"an old socket": func() error {
			l, err := net.Listen("unix", filepath.Join(j.dir, "s"))
			_ = l
			return errors.Join(err, os.Rename(filepath.Join(j.dir, "s"), path))
		},
	} {
		_ = os.Remove(path)
		if err := put(); err != nil {
			t.Fatal(err)
		}
		l, err := j.Listen("v.sock_1024", user)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if st, raw := look(t, path); st.Mode() != os.ModeSocket|0o600 || raw.Uid != user || raw.Gid != user {
			t.Errorf("%s: the socket is %v of %d:%d", name, st.Mode(), raw.Uid, raw.Gid)
		}
		if st, raw := look(t, image); st.Mode() != 0o444 || raw.Uid != 0 {
			t.Errorf("%s: the image became %v of %d", name, st.Mode(), raw.Uid)
		}
		_ = l.Close()
	}
	if left, err := filepath.Glob(filepath.Join(j.dir, ".bind*")); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestUsersAreGivenOnce(t *testing.T) {
	u := NewUsers(filepath.Join(t.TempDir(), "uids"))
	const n = 200
	var wg sync.WaitGroup
	uids := make([]int, n)
	ids := make([]string, n)
	for i := range n {
		ids[i] = fmt.Sprint("sbx_", i)
		wg.Go(func() {
			var err error
			if uids[i], err = u.Take(ids[i]); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	taken, err := u.List()
	if err != nil || len(taken) != n {
		t.Fatalf("%d are taken, %v", len(taken), err)
	}
	for i, uid := range uids {
		if taken[uid] != ids[i] || uid < FirstUID || uid >= FirstUID+UIDs {
			t.Errorf("%d is %q's, not %q's", uid, taken[uid], ids[i])
		}
	}
	// By the number, by a wrong number, by none, and again.
	for i, uid := range []int{uids[0], uids[0], 0} {
		for range 2 {
			if err := u.Give(ids[i], uid); err != nil {
				t.Error(err)
			}
		}
	}
	if taken, err = u.List(); err != nil || len(taken) != n-3 || slices.Contains([]string{taken[uids[0]], taken[uids[1]], taken[uids[2]]}, ids[0]) {
		t.Errorf("%d are taken, %v", len(taken), err)
	}
}
