package agent

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"cloche.dev/cloche/internal/guest/fault"
)

// Where a guest's identity stands. All of it is replaced at each Setup that
// says otherwise; docs/sessions.md tells users of the generation file.
const (
	runDir         = "/run/cloche"
	generationFile = runDir + "/generation"
	bootIDFile     = runDir + "/boot_id"
	kernelBootID   = "/proc/sys/kernel/random/boot_id"
	machineIDFile  = "/etc/machine-id"
	dbusIDFile     = "/var/lib/dbus/machine-id"
	randomDevice   = "/dev/random"
)

// setMachineID writes the machine id, and D-Bus's copy where that is a file of
// its own. A template with read-only files is no reason to fail.
func (a *Agent) setMachineID(id string) {
	if id == "" {
		return
	}
	files := []string{machineIDFile}
	if st, err := os.Lstat(dbusIDFile); err == nil && st.Mode().IsRegular() {
		files = append(files, dbusIDFile)
	}
	for _, file := range files {
		if readSmall(file) == id+"\n" {
			continue
		}
		if err := renameOver(file, id+"\n", 0o444); err != nil {
			a.cfg.Log.Warn("the machine id can't be written", "file", file, "error", err)
		}
	}
}

// setBootID makes the kernel's boot id read as id, by a file mounted over it:
// no kernel lets it be changed. The mount outlives a snapshot, so that later
// only the file's content is replaced, in place.
func (a *Agent) setBootID(id string) {
	if id == "" {
		return
	}
	err := overwrite(bootIDFile, id+"\n")
	if err == nil && readVirtual(kernelBootID) != id+"\n" {
		err = os.NewSyscallError("mount", unix.Mount(bootIDFile, kernelBootID, "", unix.MS_BIND, ""))
	}
	if err == nil && readVirtual(kernelBootID) != id+"\n" {
		err = errors.New("the kernel shows another one still")
	}
	if err != nil {
		a.cfg.Log.Warn("the boot id can't be set", "error", err)
	}
}

// setGeneration tells whoever watches that the machine is another one now.
func (a *Agent) setGeneration(n uint64) {
	content := strconv.FormatUint(n, 10) + "\n"
	if n == 0 || readSmall(generationFile) == content {
		return
	}
	err := os.MkdirAll(runDir, 0o755)
	if err == nil {
		err = renameOver(generationFile, content, 0o444)
	}
	if err != nil {
		a.cfg.Log.Warn("the generation can't be written", "error", err)
	}
}

// addEntropy mixes what the host sent into the kernel's generator and makes
// it draw a new key at once. A kernel without these calls has a generator that is
// the host's own (gVisor), and needs none.
func (a *Agent) addEntropy(entropy []byte) {
	if len(entropy) == 0 || fault.Is(fault.NoReseed) {
		return
	}
	err := withFile(randomDevice, unix.O_WRONLY, func(fd int) error {
		// struct rand_pool_info: bits, bytes, the bytes.
		info := make([]byte, 8, 8+len(entropy))
		binary.NativeEndian.PutUint32(info, uint32(8*len(entropy)))
		binary.NativeEndian.PutUint32(info[4:], uint32(len(entropy)))
		info = append(info, entropy...)
		_, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info[0])))
		if e == 0 {
			_, _, e = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDRESEEDCRNG, 0)
		}
		switch e {
		case 0, unix.ENOTTY, unix.EPERM, unix.EINVAL:
			return nil
		}
		return e
	})
	if err != nil {
		a.cfg.Log.Warn("the kernel takes no entropy", "error", err)
	}
}

func withFile(path string, flags int, fn func(fd int) error) error {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	return errors.Join(fn(fd), unix.Close(fd))
}

// readVirtual reads the little that a file of /proc holds, whose size says
// nothing.
func readVirtual(path string) string {
	var b [128]byte
	n := 0
	err := withFile(path, unix.O_RDONLY, func(fd int) (err error) {
		n, err = unix.Read(fd, b[:])
		return err
	})
	if err != nil || n < 0 {
		return ""
	}
	return string(b[:n])
}

// overwrite makes content a file's content, in one write and without another
// inode, so that what is mounted shows it and nobody ever reads half of it.
func overwrite(path, content string) error {
	if readSmall(path) == content {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o444)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(content), 0)
	if err == nil {
		err = f.Truncate(int64(len(content)))
	}
	return errors.Join(err, f.Close())
}

// renameOver replaces a file by renaming a new one over it.
func renameOver(path, content string, mode os.FileMode) error {
	return renameOwned(path, []byte(content), mode, 0, 0)
}

// renameOwned replaces a file, or whatever isn't a directory, by renaming a
// new one over it. What can't be renamed over, since something is mounted there,
// is written in place, if it is a regular file.
func renameOwned(path string, content []byte, mode os.FileMode, uid, gid int) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".cloche-*")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if uid != 0 || gid != 0 {
		err = errors.Join(err, f.Chown(uid, gid))
	}
	err = errors.Join(err, f.Chmod(mode), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err == nil {
		return nil
	}
	_ = os.Remove(f.Name())
	if !errors.Is(err, unix.EBUSY) {
		return err
	}
	f, _, err = openRegular(path, os.O_WRONLY|unix.O_NOFOLLOW)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(content, 0)
	if err == nil {
		err = f.Truncate(int64(len(content)))
	}
	return errors.Join(err, f.Close())
}
