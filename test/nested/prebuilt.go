package nested

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"cloche.dev/cloche/internal/node/driver/drivertest"
)

// Prebuilt is the directory in L1 with what tests there can't build: there is
// no compiler. Tests find it by $CLOCHE_TEST_PREBUILT.
const Prebuilt = "/prebuilt"

// Prebuild fills a new directory with these files:
//
//	firecracker jailer      the VMM, where firecracker is given
//	vmlinux modules         the guest's kernel and, if it has any, the archive of its modules
//	guest guest-faults      cmd/cloche-guest, and the one that can be broken
//	image.erofs inside      drivertest's image, and the program in it
//	cloche-gvisor           the gVisor engine
//	gvisor-guest            the guest of the gVisor driver's own tests
//
// firecracker is a directory with the two binaries or "".
func Prebuild(dir, firecracker string, k *Kernel) error {
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(filepath.Join(dir, "made"), 0o755)); err != nil {
		return err
	}
	made := filepath.Join(dir, "made")
	if _, err := drivertest.Prepare(made); err != nil {
		return err
	}
	move := map[string]string{"guest": "guest", "guest-faults": "guest-faults", "image.erofs": "image.erofs", "tree/bin/inside": "inside"}
	for from, to := range move {
		if err := os.Rename(filepath.Join(made, from), filepath.Join(dir, to)); err != nil {
			return err
		}
	}
	err := errors.Join(
		os.RemoveAll(made),
		drivertest.Build(filepath.Join(dir, "cloche-gvisor"), "cmd/cloche-gvisor", ""),
		drivertest.Build(filepath.Join(dir, "gvisor-guest"), "internal/node/driver/gvisor/testdata/guest", ""),
		copyFile(k.Vmlinux, filepath.Join(dir, "vmlinux"), 0o644))
	if k.Modules != "" {
		err = errors.Join(err, copyFile(k.Modules, filepath.Join(dir, "modules"), 0o644))
	}
	if firecracker != "" {
		for _, name := range []string{"firecracker", "jailer"} {
			err = errors.Join(err, copyFile(filepath.Join(firecracker, name), filepath.Join(dir, name), 0o755))
		}
	}
	return err
}

func copyFile(from, to string, mode os.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// AddDir adds the regular files right in a directory of this host.
func (t Tree) AddDir(dir, host string) error {
	entries, err := os.ReadDir(host)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return err
		}
		if info.Mode().IsRegular() {
			t[filepath.Join(dir, e.Name())] = Node{Mode: info.Mode().Perm(), Host: filepath.Join(host, e.Name())}
		}
	}
	return nil
}

// AddProgram adds a program of this host and the libraries that it loads, each
// under the path that it has here; the program itself goes to /sbin.
func (t Tree) AddProgram(name string) error {
	file, err := exec.LookPath(name)
	if err != nil {
		return err
	}
	t[filepath.Join("sbin", name)] = Node{Mode: 0o755, Host: file}
	if static(file) {
		return nil
	}
	out, err := exec.Command("ldd", file).Output()
	if err != nil {
		return err
	}
	for _, word := range strings.Fields(string(out)) {
		if filepath.IsAbs(word) {
			t[word] = Node{Mode: 0o755, Host: word}
		}
	}
	return nil
}
