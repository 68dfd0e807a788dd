package boot

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"cloche.dev/cloche/internal/guestapi"
)

// treeEnv names a Debian kernel package's unpacked tree (dpkg -x): the kernel
// that a machine under QEMU boots.
const treeEnv = "CLOCHE_KERNEL_TREE"

const qemu = "qemu-system-x86_64"

// vm is a machine under QEMU: a PC, so its drives are found by other modules
// than Firecracker's, and a serial console instead of vsock.
type vm struct {
	kernel, tree string
}

func needQEMU(t *testing.T) vm {
	t.Helper()
	needTools(t, qemu, "mkfs.erofs", "mkfs.ext4", "go")
	tree := os.Getenv(treeEnv)
	if tree == "" {
		t.Skipf("SKIP: %s names no unpacked kernel package", treeEnv)
	}
	kernels, err := filepath.Glob(filepath.Join(tree, "boot", "vmlinuz-*"))
	if err != nil || len(kernels) != 1 {
		t.Fatalf("%s has these kernels: %q, %v", tree, kernels, err)
	}
	return vm{kernels[0], tree}
}

var depends = regexp.MustCompile(`\x00depends=([a-z0-9_,-]*)\x00`)

// modules returns files for an initramfs: the named modules behind those that
// they need.
func (v vm) modules(t *testing.T, names ...string) map[string][]byte {
	t.Helper()
	where := map[string]string{}
	err := filepath.WalkDir(filepath.Join(v.tree, "lib", "modules"), func(path string, _ os.DirEntry, err error) error {
		if name, ok := strings.CutSuffix(filepath.Base(path), ".ko"); ok {
			where[strings.ReplaceAll(name, "-", "_")] = path
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	var done []string
	var add func(name string)
	add = func(name string) {
		name = strings.ReplaceAll(name, "-", "_")
		if slices.Contains(done, name) {
			return
		}
		b, err := os.ReadFile(where[name])
		if err != nil {
			t.Fatalf("the module %s: %v", name, err)
		}
		if m := depends.FindSubmatch(b); m != nil && len(m[1]) != 0 {
			for _, d := range strings.Split(string(m[1]), ",") {
				add(d)
			}
		}
		files[fmt.Sprintf("modules/%03d-%s.ko", len(done), name)] = b
		done = append(done, name)
	}
	for _, name := range names {
		add(name)
	}
	return files
}

// initramfs packs files in the newc format (the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst).
func initramfs(t *testing.T, files map[string][]byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "initrd")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z := gzip.NewWriter(f)
	entry := func(ino int, name string, mode, minor int, content []byte) {
		var b bytes.Buffer
		fmt.Fprintf(&b, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00", ino, mode, 0, 0, 1, 0, len(content), 0, 0, 1, minor, len(name)+1, 0, name)
		for _, part := range [][]byte{nil, content} {
			b.Write(part)
			b.Write(make([]byte, (4-b.Len()%4)%4))
		}
		if _, err := z.Write(b.Bytes()); err != nil {
			t.Fatal(err)
		}
	}
	entry(1, "modules", 0o40755, 0, nil)
	entry(2, "dev", 0o40755, 0, nil)
	entry(3, "dev/null", 0o20666, 3, nil)
	ino := 4
	for name, content := range files {
		entry(ino, name, 0o100755, 0, content)
		ino++
	}
	entry(0, "TRAILER!!!", 0, 0, nil)
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// run boots a machine and returns what its console said until it ended, which
// must be within the time.
func (v vm) run(t *testing.T, memory int, initrd string, b guestapi.Boot, drives ...string) outcome {
	t.Helper()
	return v.runWith(t, "console=ttyS0", memory, initrd, b, drives...)
}

// runWith is told what console the kernel has.
func (v vm) runWith(t *testing.T, console string, memory int, initrd string, b guestapi.Boot, drives ...string) outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	args := []string{
		"-M", "q35", "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", fmt.Sprint(memory), "-nodefaults", "-no-user-config",
		"-nographic", "-no-reboot", "-monitor", "none", "-serial", "stdio", "-kernel", v.kernel, "-initrd", initrd,
		"-append", console + " reboot=t panic=-1 quiet random.trust_cpu=on " + strings.TrimSpace(cmdline(t, b)),
	}
	for i, d := range drives {
		args = append(args, "-drive", d+fmt.Sprintf(",if=none,format=raw,id=d%d", i), "-device", fmt.Sprintf("virtio-blk-pci,drive=d%d", i))
	}
	cmd := exec.CommandContext(ctx, qemu, args...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	started := time.Now()
	if err := cmd.Run(); err != nil || ctx.Err() != nil {
		t.Fatalf("it did not end by itself: %v, %v; it said: %s", err, ctx.Err(), said.String())
	}
	t.Logf("it took %v", time.Since(started).Round(10*time.Millisecond))
	return readOutcome(t, &said)
}

var blockModules = []string{"virtio_pci", "virtio_blk", "erofs", "overlay"}

func (v vm) own(t *testing.T, modules ...string) string {
	t.Helper()
	files := v.modules(t, modules...)
	b, err := os.ReadFile(needSelf(t))
	if err != nil {
		t.Fatal(err)
	}
	files["init"] = b
	return initramfs(t, files)
}

// TestQEMU boots a real kernel, twice over one disk. The supervisor's end is
// the machine's.
func TestQEMU(t *testing.T) {
	v := needQEMU(t)
	initrd, disk := v.own(t, blockModules...), blank(t)
	image := plant(t, nil)
	for _, persist := range []string{"", "kept"} {
		o := v.run(t, 192, initrd, order(), "readonly=on,file="+image, "file="+disk)
		if o.report != "ok" || o.seen == nil {
			t.Fatalf("it said: %s", o.all)
		}
		checkSight(t, o.seen, "65536 1048576")
		if o.seen.Persist != persist || o.seen.Mark != "from the image" {
			t.Errorf("persisted %q, want %q; mark %q", o.seen.Persist, persist, o.seen.Mark)
		}
		if o.seen.Memory < 192<<20*3/4 {
			t.Errorf("of 192 MiB it has %d", o.seen.Memory>>20)
		}
		if !strings.Contains(o.all, "Attempted to kill init") {
			t.Errorf("it did not end by its PID 1: %s", o.all)
		}
	}
}

// TestQEMUNoConsole boots a kernel that has no console at all, so that /init
// begins without a descriptor. Only the disk tells of it.
func TestQEMUNoConsole(t *testing.T) {
	v := needQEMU(t)
	initrd, disk, image := v.own(t, blockModules...), blank(t), plant(t, nil)
	drives := []string{"readonly=on,file=" + image, "file=" + disk}
	if o := v.runWith(t, "console=ttyS7 8250.nr_uarts=0", 192, initrd, order(), drives...); strings.Contains(o.all, reportMark) {
		t.Fatalf("it has a console: %s", o.all)
	}
	if o := v.run(t, 192, initrd, order(), drives...); o.seen == nil || o.seen.Persist != "kept" {
		t.Errorf("the boot without a console did not get far; the next said: %s", o.all)
	}
}

func TestQEMUEmptyRoot(t *testing.T) {
	v := needQEMU(t)
	b := order()
	b.Root = guestapi.RootNone
	o := v.run(t, 128, v.own(t, "erofs", "overlay"), b)
	if o.report != "ok" || o.seen == nil {
		t.Fatalf("it said: %s", o.all)
	}
	checkSight(t, o.seen, "65536 1048576")
	o = v.run(t, 128, v.own(t), b)
	if !strings.HasPrefix(o.report, "the kernel has no filesystem erofs and no overlay,") || o.seen != nil {
		t.Errorf("without modules it said: %s", o.all)
	}
}

// TestQEMUFailures also shows that a machine which can't start ends.
func TestQEMUFailures(t *testing.T) {
	v := needQEMU(t)
	image := plant(t, nil)
	b := order()
	t.Run("unformatted", func(t *testing.T) {
		disk := filepath.Join(t.TempDir(), "disk")
		if err := os.WriteFile(disk, make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		o := v.run(t, 192, v.own(t, blockModules...), b, "readonly=on,file="+image, "file="+disk)
		if !strings.HasPrefix(o.report, "the drive vdb (disk) holds no ext4 filesystem") || !strings.Contains(o.all, "cloche: the boot failed") {
			t.Errorf("it said: %s", o.all)
		}
	})
	t.Run("no module", func(t *testing.T) {
		o := v.run(t, 192, v.own(t, "virtio_pci", "virtio_blk"), b, "readonly=on,file="+image, "file="+blank(t))
		if !strings.Contains(o.report, `the kernel has no filesystem "erofs"`) {
			t.Errorf("it said: %s", o.all)
		}
	})
	t.Run("the real guest", func(t *testing.T) {
		// Without vsock it can tell nobody but the console.
		guest := filepath.Join(t.TempDir(), "guest")
		cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", guest, "cloche.dev/cloche/cmd/cloche-guest")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if msg, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, msg)
		}
		f, err := os.Open(guest)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		binary, err := io.ReadAll(f)
		if err != nil {
			t.Fatal(err)
		}
		files := v.modules(t, blockModules...)
		files["init"] = binary
		o := v.run(t, 256, initramfs(t, files), b, "readonly=on,file="+image, "file="+blank(t))
		if !strings.Contains(o.all, "cloche: the boot failed: the host can't be told: socket: address family not supported by protocol") {
			t.Errorf("it said: %s", o.all)
		}
	})
}
