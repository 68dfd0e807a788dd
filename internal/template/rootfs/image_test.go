package rootfs

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	goerofs "github.com/erofs/go-erofs"

	"cloche.dev/cloche/internal/template/erofs"
)

func diskUse(t *testing.T, s *Spool) int64 {
	t.Helper()
	info, err := s.f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Blocks * 512
}

// realTree makes a tar, with the tar that everybody uses, of a real tree with
// a few rare things added.
func realTree(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("tar"); err != nil {
		t.Skip("SKIP: no tar(1) here")
	}
	src := filepath.Join(t.TempDir(), "src")
	script := `set -e
mkdir -p "$1/many" "$1/deep"; cd "$1"
cp -a /usr/lib/python3 /etc/ssl /usr/share/perl5 /usr/share/zoneinfo . 2>/dev/null || cp -a /etc .
i=0; while [ $i -lt 3000 ]; do : > many/file-with-a-rather-long-name-$i; i=$((i+1)); done
truncate -s 300M sparse; printf end >> sparse; printf mid | dd of=sparse bs=1 seek=200000000 conv=notrunc status=none
ln many/file-with-a-rather-long-name-7 hard; mkfifo fifo; chmod 1777 many; printf x > suid; chmod 4711 suid
d=deep; for n in $(seq 1 60); do d=$d/level-$n; done; mkdir -p $d; printf bottom > $d/f
printf '' > empty; head -c 4096 /dev/urandom > block; head -c 4097 /dev/urandom > block1`
	if out, err := exec.Command("sh", "-c", script, "sh", src).CombinedOutput(); err != nil {
		t.Fatalf("make a tree: %v: %s", err, out)
	}
	return src
}

// describe lists what a reader sees of a file; both sides must say the same.
func describe(mode fs.FileMode, size int64, uid, gid uint32, nlink uint64, sec, nsec int64, data string) string {
	return fmt.Sprintf("%v %d %d:%d %d %d.%09d %s", mode, size, uid, gid, nlink, sec, nsec, data)
}

func hashOf(r io.Reader) string {
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}

// onDisk describes a directory tree of this host.
func onDisk(t *testing.T, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		size, data := info.Size(), ""
		switch {
		case info.Mode().IsRegular():
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			data = hashOf(f)
			_ = f.Close()
		case info.Mode()&fs.ModeSymlink != 0:
			data, err = os.Readlink(path)
		default:
			size = 0 // directories count differently everywhere
		}
		rel, _ := filepath.Rel(root, path)
		all[rel] = describe(info.Mode(), size, st.Uid, st.Gid, st.Nlink, st.Mtim.Sec, st.Mtim.Nsec, data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// byGoErofs describes an image as go-erofs reads it.
func byGoErofs(t *testing.T, image string) map[string]string {
	t.Helper()
	f, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	img, err := goerofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	err = fs.WalkDir(img, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*goerofs.Stat)
		size, data := info.Size(), ""
		switch {
		case info.Mode().IsRegular():
			r, err := img.Open(path)
			if err != nil {
				return err
			}
			data = hashOf(r)
			_ = r.Close()
		case info.Mode()&fs.ModeSymlink != 0:
			data, err = fs.ReadLink(img, path)
		default:
			size = 0
		}
		mode := info.Mode()
		if special := mode & (fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky); special != 0 {
			t.Errorf("go-erofs now tells %v of %s: compare them too", special, path)
		}
		all[path] = describe(mode, size, st.UID, st.GID, uint64(st.Nlink), int64(st.Mtime), int64(st.MtimeNs), data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func compare(t *testing.T, reader string, got, want map[string]string) {
	t.Helper()
	bad := 0
	for name, w := range want {
		if got[name] != w && bad < 10 {
			bad++
			t.Errorf("%s: %s:\n got %s\nwant %s", reader, name, got[name], w)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%s sees %d names of %d", reader, len(got), len(want))
	}
}

// TestImageReaders holds the image of a real tree to three readers that know
// nothing of this writer: Linux, fsck.erofs and go-erofs.
func TestImageReaders(t *testing.T) {
	src := realTree(t)
	want := onDisk(t, src)
	for _, format := range []string{"gnu", "pax"} {
		t.Run(format, func(t *testing.T) {
			cmd := exec.Command("tar", "-C", src, "--sparse", "--format="+format, "-cf", "-", ".")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			tree, spool, err := importTar(t, out, Limits{})
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Fatal(err)
			}
			image, img := writeImage(t, tree, spool)
			checkReaders(t, image, img, want, format == "gnu")
		})
	}
}

func checkReaders(t *testing.T, image string, img erofs.Image, want map[string]string, wholeSeconds bool) {
	t.Helper()
	if wholeSeconds { // all that GNU's format holds
		cut := map[string]string{}
		for name, d := range want {
			f := strings.SplitN(d, " ", 6)
			sec, _, _ := strings.Cut(f[4], ".")
			f[4] = sec + ".000000000"
			cut[name] = strings.Join(f, " ")
		}
		want = cut
	}
	var st syscall.Stat_t
	if err := syscall.Stat(image, &st); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d inodes, %d MB, of which %d MB on disk", img.Inodes, img.Size>>20, st.Blocks*512>>20)
	if st.Size != img.Size || st.Blocks*512 > 1<<30 {
		t.Errorf("the image has %d bytes (%d on disk), said to be %d", st.Size, st.Blocks*512, img.Size)
	}
	t.Run("go-erofs", func(t *testing.T) {
		// This reader keeps the special bits of modes to itself.
		plain := map[string]string{}
		for name, d := range want {
			f := strings.SplitN(d, " ", 2)
			plain[name] = strings.NewReplacer("dt", "d", "u", "-").Replace(f[0]) + " " + f[1]
		}
		compare(t, "go-erofs", byGoErofs(t, image), plain)
	})
	t.Run("fsck", func(t *testing.T) {
		if _, err := exec.LookPath("fsck.erofs"); err != nil {
			t.Skip("SKIP: erofs-utils is not installed")
		}
		if out, err := exec.Command("fsck.erofs", image).CombinedOutput(); err != nil {
			t.Errorf("fsck.erofs: %v: %s", err, out)
		}
	})
	t.Run("kernel", func(t *testing.T) {
		if os.Geteuid() != 0 {
			t.Skip("SKIP: mounting an image needs root")
		}
		at := t.TempDir()
		if out, err := exec.Command("mount", "-t", "erofs", "-o", "loop,ro", image, at).CombinedOutput(); err != nil {
			t.Skipf("SKIP: this kernel doesn't mount it here: %v: %s", err, out)
		}
		defer func() {
			if out, err := exec.Command("umount", at).CombinedOutput(); err != nil {
				t.Errorf("umount: %v: %s", err, out)
			}
		}()
		compare(t, "the kernel", onDisk(t, at), want)
	})
}

func TestSparseTenGigabytes(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("SKIP: hashing ten gigabytes takes a while")
	}
	if _, err := exec.LookPath("tar"); err != nil {
		t.Skip("SKIP: no tar(1) here")
	}
	src := t.TempDir()
	f, err := os.Create(filepath.Join(src, "big"))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(10 << 30); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("deep inside"), 7<<30); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	raw, err := exec.Command("tar", "-C", src, "--sparse", "-cf", "-", "big").Output()
	if err != nil {
		t.Fatal(err)
	}
	tree, spool, err := importTar(t, bytes.NewReader(raw), Limits{})
	if err != nil {
		t.Fatal(err)
	}
	if n := diskUse(t, spool); n > 1<<20 {
		t.Errorf("the spool takes %d bytes", n)
	}
	image, img := writeImage(t, tree, spool)
	var st syscall.Stat_t
	if err := syscall.Stat(image, &st); err != nil {
		t.Fatal(err)
	}
	if img.Size < 10<<30 || st.Blocks*512 > 1<<20 {
		t.Errorf("the image has %d bytes and takes %d", img.Size, st.Blocks*512)
	}
}
