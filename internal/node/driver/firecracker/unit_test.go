package firecracker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/node/driver"
	"cloche.dev/cloche/internal/node/driver/firecracker/installed"
	"cloche.dev/cloche/internal/sandbox"
)

// plain makes a driver without any program.
func plain(t testing.TB) *Driver {
	t.Helper()
	d, err := New(Options{StateDir: t.TempDir()})
	if err != nil {
		t.Skipf("SKIP: no cgroups: %v", err)
	}
	t.Cleanup(d.stop)
	return d
}

// reporting is a machine whose guest is the test.
func reporting(t testing.TB) (m *machine, l *net.UnixListener, path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return newMachine(plain(t), record{ID: sandbox.NewID(sandbox.KindSandbox)}), l, path
}

func TestReports(t *testing.T) {
	for name, c := range map[string]struct {
		says []string // one a connection
		ends bool     // then the VMM does
		want string   // of the error
	}{
		"ready":                {[]string{string(guestapi.BootReport(nil))}, false, ""},
		"empty, then ready":    {[]string{"", "", string(guestapi.BootReport(nil))}, false, ""},
		"fails":                {[]string{string(guestapi.BootReport(errors.New("no disk")))}, false, "no disk"},
		"fails and ends":       {[]string{string(guestapi.BootReport(errors.New("no disk")))}, true, "no disk"},
		"ends":                 {nil, true, errEnded.Error()},
		"ends after nothing":   {[]string{""}, true, errEnded.Error()},
		"ready and ends":       {[]string{string(guestapi.BootReport(nil))}, true, "*"}, // whichever is seen first
		"nonsense":             {[]string{"\x00\xff\n"}, false, "malformed"},
		"more than is allowed": {[]string{strings.Repeat("x", 100_000)}, false, "too long"},
		"half a line":          {[]string{`{"ok":true}`}, false, "early"},
	} {
		m, l, path := reporting(t)
		for _, s := range c.says {
			conn, err := net.Dial("unix", path)
			if err != nil {
				t.Fatal(err)
			}
			go func() { _, _ = conn.Write([]byte(s)); _ = conn.Close() }()
		}
		if c.ends {
			close(m.exited)
		}
		err := m.report(context.Background(), l)
		switch {
		case c.want == "*":
		case c.want == "" && err != nil, c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v", name, err)
		}
	}
	m, l, _ := reporting(t)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := m.report(ctx, l); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("nobody reports: %v", err)
	}
	// One that dials and says nothing holds nobody up either.
	m, l, path := reporting(t)
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel = context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := m.report(ctx, l); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one that is silent: %v", err)
	}
}

func TestArguments(t *testing.T) {
	p := plan{spec: driver.Spec{
		Image: "/image", Hostname: "box", MaxProcs: 128, Supervisor: map[string]string{"GREETING": "hello"},
		Resources: sandbox.Resources{MilliCPU: 1500, MemoryMiB: 256, DiskMiB: 64},
	}}
	line, err := arguments(p, false)
	if err != nil {
		t.Fatal(err)
	}
	b, err := guestapi.ParseBoot(line)
	if err != nil {
		t.Fatal(err)
	}
	if b.Dial != "vsock:2:1024" || b.Report != 1023 || b.Hostname != "box" || b.MaxProcs != 128 || b.Env["GREETING"] != "hello" ||
		b.Root != guestapi.RootDisk || b.Memory != 256<<20 {
		t.Errorf("it says %+v", b)
	}
	if strings.Contains(line, "ttyS0") || !strings.HasPrefix(line, "reboot=t panic=-1 quiet 8250.nr_uarts=0 ") {
		t.Errorf("the line is %q", line)
	}
	p.spec.Image, p.spec.MaxProcs = noRoot, 0
	if line, err = arguments(p, true); err != nil || !strings.Contains(line, "console=ttyS0") {
		t.Errorf("the line is %q, %v", line, err)
	}
	if b, err = guestapi.ParseBoot(line); err != nil || b.Root != guestapi.RootNone || b.MaxProcs != defaultMaxProcs {
		t.Errorf("it says %+v, %v", b, err)
	}
	if n := p.vcpus(); n != 2 {
		t.Errorf("1500 thousandths of a core are %d processors", n)
	}
}

// TestEmptyDisks formats disks of several sizes: each is sound, sparse, and made
// once however many ask.
func TestEmptyDisks(t *testing.T) {
	if _, err := findTool("mkfs.ext4"); err != nil {
		t.Skipf("SKIP: %v", err)
	}
	d := plain(t)
	for _, size := range []int{sandbox.MinDiskMiB, 64, 8192, 100_000} {
		var wg sync.WaitGroup
		paths := make([]string, 4)
		for i := range paths {
			wg.Go(func() {
				var err error
				if paths[i], err = d.emptyDisk(context.Background(), size); err != nil {
					t.Errorf("%d MiB: %v", size, err)
				}
			})
		}
		wg.Wait()
		st, err := os.Stat(paths[0])
		if err != nil {
			t.Fatal(err)
		}
		if st.Size() != int64(size)*mib || st.Mode() != 0o444 || paths[1] != paths[0] {
			t.Errorf("%d MiB: %d bytes, %v, %v", size, st.Size(), st.Mode(), paths)
		}
		if out, err := exec.Command("du", "-k", paths[0]).Output(); err == nil {
			var kib int
			if _, err := fmt.Sscan(string(out), &kib); err != nil || kib > 4096 {
				t.Errorf("%d MiB: %s", size, out)
			}
		}
		if tool, err := exec.LookPath("/usr/sbin/e2fsck"); err == nil {
			if out, err := exec.Command(tool, "-fn", paths[0]).CombinedOutput(); err != nil {
				t.Errorf("%d MiB: %v: %s", size, err, out)
			}
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := d.emptyDisk(ctx, 77); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	left, err := filepath.Glob(filepath.Join(d.o.StateDir, Name, "disks", ".*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestPartsAreFew makes more than are kept.
func TestPartsAreFew(t *testing.T) {
	d := plain(t)
	dir := filepath.Join(d.o.StateDir, Name, "things")
	for i := range 3 * keepParts {
		if _, err := d.part("things", fmt.Sprint(i), func(path string) error { return os.WriteFile(path, nil, 0o600) }); err != nil {
			t.Fatal(err)
		}
		now := time.Now().Add(time.Duration(i-100) * time.Second)
		if err := os.Chtimes(filepath.Join(dir, fmt.Sprint(i)), now, now); err != nil {
			t.Fatal(err)
		}
	}
	old := filepath.Join(dir, ".make-old")
	if err := os.Mkdir(old, 0o700); err != nil {
		t.Fatal(err)
	}
	then := time.Now().Add(-2 * makeTime)
	if err := os.Chtimes(old, then, then); err != nil {
		t.Fatal(err)
	}
	failed := errors.New("failed")
	if _, err := d.part("things", "bad", func(string) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("a part that can't be made: %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > keepParts {
		t.Errorf("%d are kept, %v", len(entries), err)
	}
	if _, err := os.Stat(filepath.Join(dir, fmt.Sprint(3*keepParts-1))); err != nil {
		t.Errorf("the newest is gone: %v", err)
	}
}

// TestInitrds are made once for each kernel and guest.
func TestInitrds(t *testing.T) {
	d := plain(t)
	guest := filepath.Join(t.TempDir(), "guest")
	p := plan{spec: driver.Spec{Guest: guest}, kernel: installed.Kernel{Hash: strings.Repeat("k", 64)}}
	made := func(content string) string {
		t.Helper()
		if err := os.WriteFile(guest, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
		path, err := d.initrd(p)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	one, two := made("one"), made("another")
	if one == two || made("one") != one {
		t.Errorf("%s, %s", one, two)
	}
	if p.kernel.Hash = strings.Repeat("l", 64); made("one") == one {
		t.Error("another kernel has the same initramfs")
	}
	if filepath.Dir(one) != filepath.Join(d.o.StateDir, Name, "initrd") {
		t.Errorf("it lies at %s", one)
	}
	p.spec.Guest = "/no-guest"
	if _, err := d.initrd(p); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a guest: %v", err)
	}
}
