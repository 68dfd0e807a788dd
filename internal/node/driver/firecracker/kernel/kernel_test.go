package kernel

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"cloche.dev/cloche/internal/sandbox"
)

func build(t *testing.T, sources ...string) (Files, error) {
	t.Helper()
	return Build(context.Background(), sources, t.TempDir())
}

func contents(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// However a kernel comes, the same files are made of it, each time.
func TestBuild(t *testing.T) {
	all := kernelTree(t)
	var usr []entry
	for _, e := range all {
		if strings.HasPrefix(e.name, "lib/") {
			e.name = "usr/" + e.name
		}
		usr = append(usr, e)
	}
	image, modules := without(all, "lib/modules"), without(all, "boot/")
	sources := map[string][]string{
		"xz": {deb(t, ".xz", all)}, "zst": {deb(t, ".zst", all)}, "gz": {deb(t, ".gz", all)}, "plain": {deb(t, "", all)},
		"below usr": {deb(t, "", usr)}, "two packages": {deb(t, "", image), deb(t, ".xz", modules)},
		"directory": {writeTree(t, all)}, "again": {writeTree(t, all)},
	}
	var first []byte
	for name, src := range sources {
		f, err := build(t, src...)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if f.Name != release || strings.Join(f.Loads, " ") != loads {
			t.Errorf("%s: %s loads %s", name, f.Name, strings.Join(f.Loads, " "))
		}
		if !bytes.Equal(contents(t, f.Image), vmlinux()) {
			t.Errorf("%s: another image", name)
		}
		got := contents(t, f.Modules)
		if first == nil {
			first = got
		}
		if !bytes.Equal(got, first) {
			t.Errorf("%s: another archive", name)
		}
	}
}

func TestBuildBare(t *testing.T) {
	dir := t.TempDir()
	for name, b := range map[string][]byte{"vmlinux": vmlinux(), "bzImage": bzImage(sized(pack(t, ".zst", vmlinux()), len(vmlinux())))} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := build(t, file)
		if err != nil || !strings.HasPrefix(f.Name, release+"-") || f.Modules != "" || f.Loads != nil || !bytes.Equal(contents(t, f.Image), vmlinux()) {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
	if f, err := build(t, filepath.Join(dir, "nothing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%+v, %v", f, err)
	}
}

func TestBuildRefuses(t *testing.T) {
	all := kernelTree(t)
	dir := "lib/modules/" + release + "/"
	with := func(e ...entry) []entry { return append(append([]entry{}, all...), e...) }
	other := func(part string, e entry) []entry { return append(without(all, part), e) }
	cut := deb(t, ".xz", all)
	if err := os.Truncate(cut, 2000); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		src   []string
		class sandbox.Class
		say   string
	}{
		"no module":       {[]string{writeTree(t, without(all, "/overlay"))}, sandbox.FailedPrecondition, "no overlay"},
		"no dependency":   {[]string{writeTree(t, without(all, "/vsock.ko"))}, sandbox.FailedPrecondition, "no vsock, which vmw_vsock"},
		"a circle":        {[]string{writeTree(t, other("/vsock.ko", entry{name: dir + "kernel/vsock.ko", data: ko("depends=vmw_vsock_virtio_transport")}))}, sandbox.Invalid, "each other"},
		"no ELF module":   {[]string{writeTree(t, other("/overlay", entry{name: dir + "kernel/overlay.ko", data: []byte("x")}))}, sandbox.Invalid, "overlay.ko is damaged"},
		"no modinfo":      {[]string{writeTree(t, other("/overlay", entry{name: dir + "kernel/overlay.ko", data: vmlinux()}))}, sandbox.Invalid, "overlay.ko is damaged"},
		"damaged module":  {[]string{writeTree(t, other("/overlay", entry{name: dir + "kernel/overlay.ko.xz", data: []byte("x")}))}, sandbox.Invalid, "overlay.ko.xz is damaged"},
		"no modules":      {[]string{deb(t, "", without(all, "lib/"))}, sandbox.Invalid, "without its modules"},
		"no kernel":       {[]string{deb(t, "", without(all, "boot/"))}, sandbox.Invalid, "no kernel in it"},
		"two kernels":     {[]string{deb(t, "", with(entry{name: "boot/vmlinuz-2"}))}, sandbox.Invalid, "2 kernels"},
		"a name twice":    {[]string{deb(t, "", with(all[0]))}, sandbox.Invalid, "exists"},
		"a file as dir":   {[]string{deb(t, "", with(entry{name: dir + "kernel/net/vsock.ko/a.ko"}))}, sandbox.Invalid, "exists"},
		"two directories": {[]string{writeTree(t, all), writeTree(t, all)}, sandbox.Invalid, "no other package"},
		"cut off":         {[]string{cut}, sandbox.Invalid, "no Debian package"},
		"nothing":         {nil, sandbox.Invalid, "no kernel package"},
	} {
		f, err := build(t, c.src...)
		if got := sandbox.AsError(err); got == nil || got.Class != c.class || !strings.Contains(got.Message, c.say) {
			t.Errorf("%s: %+v, %v", name, f, err)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Build(ctx, []string{deb(t, "", all)}, t.TempDir()); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// A hostile package leaves nothing outside of its directory, and no links.
func TestHostileDeb(t *testing.T) {
	dir := "lib/modules/" + release + "/kernel/"
	hostile := append([]entry{
		{name: "../../boot/vmlinuz-6", kind: tar.TypeReg, data: []byte("x")},
		{name: "/boot/vmlinuz-6", kind: tar.TypeReg, data: []byte("x")},
		{name: "lib/modules/../../../x/kernel/a.ko", kind: tar.TypeReg, data: []byte("x")},
		{name: dir + "link.ko", link: "/etc/passwd", kind: tar.TypeSymlink},
		{name: dir + "hard.ko", link: "boot/vmlinuz-" + release, kind: tar.TypeLink},
		{name: dir + "fifo.ko", kind: tar.TypeFifo},
		{name: "lib", link: "/tmp", kind: tar.TypeSymlink},
	}, kernelTree(t)...)
	outer := t.TempDir()
	work := filepath.Join(outer, "work")
	if err := os.Mkdir(work, 0o700); err != nil {
		t.Fatal(err)
	}
	if f, err := Build(context.Background(), []string{deb(t, "", hostile)}, work); err != nil || strings.Join(f.Loads, " ") != loads {
		t.Errorf("%+v, %v", f, err)
	}
	if list, err := os.ReadDir(outer); err != nil || len(list) != 1 {
		t.Errorf("beside the directory lie %v, %v", list, err)
	}
	err := filepath.WalkDir(work, func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() && !d.Type().IsRegular() {
			t.Errorf("%s is no file", p)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	bomb := &bounded{ctx: context.Background(), r: zeros{}, left: 1 << 20}
	if n, err := io.Copy(io.Discard, bomb); err == nil || n > 1<<20 {
		t.Errorf("a bomb: %d bytes, %v", n, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// unpackCpio reads a gzipped archive and returns what follows it.
func unpackCpio(t *testing.T, b []byte) (names []string, files map[string][]byte, rest []byte) {
	t.Helper()
	in := bytes.NewReader(b)
	z, err := gzip.NewReader(in)
	if err != nil {
		t.Fatal(err)
	}
	z.Multistream(false)
	data, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if len(data)%4 != 0 {
		t.Errorf("an archive of %d bytes", len(data))
	}
	rest, files = b[len(b)-in.Len():], map[string][]byte{}
	for at := 0; ; {
		field := func(i int) int {
			v, err := strconv.ParseUint(string(data[at+6+8*i:at+14+8*i]), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			return int(v)
		}
		if string(data[at:at+6]) != "070701" || field(5) != 0 || field(2) != 0 || field(3) != 0 {
			t.Fatalf("a bad header at %d", at)
		}
		mode, size, name := field(1), field(6), at+110
		end := name + field(11)
		body := (end + 3) / 4 * 4
		n := string(data[name : end-1])
		at = (body + size + 3) / 4 * 4
		if n == "TRAILER!!!" {
			if at != len(data) {
				t.Errorf("%d bytes behind the end", len(data)-at)
			}
			return names, files, rest
		}
		names = append(names, n+" "+strconv.FormatInt(int64(mode), 8))
		files[n] = data[body : body+size]
	}
}

func TestInitrd(t *testing.T) {
	f, err := build(t, writeTree(t, kernelTree(t)))
	if err != nil {
		t.Fatal(err)
	}
	guest := filepath.Join(t.TempDir(), "guest")
	if err := os.WriteFile(guest, []byte("a guest"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, archive := range []string{f.Modules, ""} {
		var one, two bytes.Buffer
		for _, w := range []io.Writer{&one, &two} {
			if err := Initrd(w, archive, guest); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(one.Bytes(), two.Bytes()) {
			t.Error("the second is another")
		}
		names, files, rest := unpackCpio(t, one.Bytes())
		want := []string{"modules 40755"}
		if archive != "" {
			for i, m := range strings.Fields(loads) {
				want = append(want, "modules/"+string([]byte{'0', '0' + byte(i/10), '0' + byte(i%10)})+"-"+m+".ko 100644")
			}
			if got := files["modules/006-virtio_rng.ko"]; !bytes.Equal(got, ko("depends=rng-core,virtio", "license=GPL")) {
				t.Errorf("a module is %q", got)
			}
		}
		if strings.Join(names, "\n") != strings.Join(want, "\n") {
			t.Errorf("archive 1: %q", names)
		}
		names, files, rest = unpackCpio(t, rest)
		if len(rest) != 0 || strings.Join(names, ", ") != "dev 40755, dev/null 20666, init 100755" || string(files["init"]) != "a guest" {
			t.Errorf("archive 2: %q, and %d bytes more", names, len(rest))
		}
	}
	if err := Initrd(io.Discard, "", t.TempDir()); !sandbox.IsClass(err, sandbox.Invalid) {
		t.Errorf("a directory as guest: %v", err)
	}
	c := &cpioWriter{}
	if _, err := c.Write([]byte("x")); err == nil {
		t.Error("more is written than was said")
	}
}

// TestRealPackage takes a distribution's own package: $CLOCHE_KERNEL_PACKAGE.
func TestRealPackage(t *testing.T) {
	file := os.Getenv("CLOCHE_KERNEL_PACKAGE")
	if file == "" {
		t.Skip("SKIP: CLOCHE_KERNEL_PACKAGE names no package of a kernel (apt-get download of what linux-image-cloud-amd64 depends on)")
	}
	f, err := build(t, file)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s loads %s", f.Name, strings.Join(f.Loads, " "))
	position := map[string]int{}
	for i, m := range f.Loads {
		position[m] = i + 1
	}
	for before, after := range map[string]string{"virtio": "virtio_mmio", "virtio_ring": "virtio_blk", "vsock": "vmw_vsock_virtio_transport", "libcrc32c": "erofs"} {
		if b, a := position[before], position[after]; a == 0 || b >= a {
			t.Errorf("%s is at %d, %s at %d", before, b, after, a)
		}
	}
	if image := contents(t, f.Image); checkELF(image) != nil || len(image) < 10<<20 {
		t.Errorf("an image of %d bytes", len(image))
	}
	if dpkg, err := exec.LookPath("dpkg-deb"); err == nil {
		dir := t.TempDir()
		if out, err := exec.Command(dpkg, "-x", file, dir).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		d, err := build(t, dir)
		if err != nil || !bytes.Equal(contents(t, d.Modules), contents(t, f.Modules)) || !bytes.Equal(contents(t, d.Image), contents(t, f.Image)) {
			t.Errorf("what dpkg unpacked gives other files: %v", err)
		}
	}
}
