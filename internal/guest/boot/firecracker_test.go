package boot

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"cloche.dev/cloche/internal/guestapi"
	"cloche.dev/cloche/internal/guestapi/guestv1"
	"cloche.dev/cloche/internal/node/driver/firecracker/kernel"
	"cloche.dev/cloche/internal/node/driver/firecracker/vmm"
	"cloche.dev/cloche/internal/node/guestlink"
	"cloche.dev/cloche/internal/sandbox"
)

// prebuiltEnv names the directory with a real Firecracker, a guest kernel, the
// real guest and drivertest's image. test/nested sets it where KVM works.
const prebuiltEnv = "CLOCHE_TEST_PREBUILT"

// inside is the program of drivertest's image.
const inside = "/bin/inside"

// fire is a machine of a real Firecracker, without a jail or a driver.
type fire struct {
	t        *testing.T
	dir      string
	cfg      vmm.Config
	client   *vmm.Client
	said     bytes.Buffer // by the VMM; read once ended is closed
	ended    chan struct{}
	reports  net.Listener
	agents   net.Listener
	prebuilt string
}

func needFirecracker(t *testing.T) *fire {
	t.Helper()
	needTools(t, "mkfs.ext4")
	f := &fire{t: t, dir: t.TempDir(), ended: make(chan struct{}), prebuilt: os.Getenv(prebuiltEnv)}
	if f.prebuilt == "" {
		t.Skipf("SKIP: %s names no real Firecracker: run it in test/nested", prebuiltEnv)
	}
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Skipf("SKIP: no KVM: %v", err)
	}
	initrd, err := os.Create(filepath.Join(f.dir, "initrd"))
	if err != nil {
		t.Fatal(err)
	}
	err = kernel.Initrd(initrd, filepath.Join(f.prebuilt, "modules"), filepath.Join(f.prebuilt, "guest"))
	if err := errors.Join(err, initrd.Close()); err != nil {
		t.Fatal(err)
	}
	f.cfg = vmm.Config{
		VCPUs: 1, MemoryMiB: 192, Kernel: filepath.Join(f.prebuilt, "vmlinux"), Initrd: initrd.Name(),
		Drives:   []vmm.Drive{{ID: "template", Path: filepath.Join(f.prebuilt, "image.erofs"), ReadOnly: true}},
		VsockCID: 3, VsockPath: filepath.Join(f.dir, "v.sock"), Entropy: true,
	}
	return f
}

func (f *fire) listen(port string) net.Listener {
	f.t.Helper()
	l, err := net.Listen("unix", filepath.Join(f.dir, "v.sock_"+port))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = l.Close() })
	return l
}

func (f *fire) ctx(d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	f.t.Cleanup(cancel)
	return ctx
}

// boot starts the machine and returns its boot report.
func (f *fire) boot(b guestapi.Boot) error {
	t := f.t
	t.Helper()
	f.reports, f.agents = f.listen("1023"), f.listen("1024")
	socket := filepath.Join(f.dir, "api")
	vm := exec.Command(filepath.Join(f.prebuilt, "firecracker"), "--api-sock", socket)
	vm.Stdout, vm.Stderr = &f.said, &f.said
	if err := vm.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(f.ended)
		_ = vm.Wait()
	}()
	f.client = vmm.New(socket)
	t.Cleanup(func() {
		f.client.Close()
		_ = vm.Process.Kill()
		<-f.ended
		if t.Failed() {
			t.Logf("the VMM said: %s", &f.said)
		}
	})
	ctx := f.ctx(2 * time.Minute)
	for _, err := f.client.Info(ctx); err != nil; _, err = f.client.Info(ctx) {
		if ctx.Err() != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	f.cfg.Args = "reboot=t panic=-1 quiet 8250.nr_uarts=0 i8042.noaux i8042.nomux i8042.dumbkbd random.trust_cpu=on " + strings.TrimSpace(cmdline(t, b))
	if err := f.client.Configure(ctx, f.cfg); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := f.client.Start(ctx); err != nil {
		t.Fatal(err)
	}
	stop := context.AfterFunc(ctx, func() { _ = f.reports.Close() })
	defer stop()
	conn, err := f.reports.Accept()
	if err != nil {
		t.Fatalf("no boot report: %v", err)
	}
	defer conn.Close()
	err = guestapi.ReadBootReport(conn)
	t.Logf("the boot report came %v after the start", time.Since(began).Round(time.Millisecond))
	return err
}

// end waits for the VMM's end, which must come by itself.
func (f *fire) end() {
	f.t.Helper()
	select {
	case <-f.ended:
	case <-time.After(30 * time.Second):
		f.t.Error("the VMM did not end")
	}
}

// box is the machine's guest.
type box struct {
	t    *testing.T
	link *guestlink.Link
}

func (f *fire) link(setup *guestv1.SetupRequest) *box {
	f.t.Helper()
	l := guestlink.Start(guestlink.Config{
		Listen: func() (net.Listener, error) { return f.agents, nil }, Key: guestapi.NewKey(), Epoch: 1, Setup: setup,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	f.t.Cleanup(l.Close)
	if err := l.Ready(f.ctx(time.Minute)); err != nil {
		f.t.Fatal(err)
	}
	return &box{f.t, l}
}

// run runs the image's program and returns what it said and how it ended.
func (x *box) run(user string, args ...string) (string, *guestv1.Exit) {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	c, err := x.link.Client(ctx)
	if err != nil {
		x.t.Fatal(err)
	}
	id := sandbox.NewID(sandbox.KindSession)
	if _, err := c.Start(ctx, connect.NewRequest(&guestv1.StartRequest{Session: id, User: user, Args: append([]string{inside}, args...)})); err != nil {
		x.t.Fatalf("start %q: %v", args, err)
	}
	s, err := c.Follow(ctx, connect.NewRequest(&guestv1.FollowRequest{Session: id}))
	if err != nil {
		x.t.Fatalf("follow %q: %v", args, err)
	}
	defer s.Close()
	var out bytes.Buffer
	for s.Receive() {
		out.Write(s.Msg().GetStdout())
		if e := s.Msg().GetExit(); e != nil {
			return out.String(), e
		}
	}
	x.t.Fatalf("%q: %v", args, s.Err())
	return "", nil
}

// read reads a file by the agent itself.
func (x *box) read(path string) string {
	x.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, closer, err := x.link.Extra(ctx)
	if err != nil {
		x.t.Errorf("a connection for %s: %v", path, err)
		return ""
	}
	defer closer.Close()
	s, err := c.Read(ctx, connect.NewRequest(&guestv1.ReadRequest{Path: path, Whole: true}))
	if err != nil {
		x.t.Errorf("read %s: %v", path, err)
		return ""
	}
	var all []byte
	for s.Receive() {
		all = append(all, s.Msg().GetData()...)
	}
	return strings.TrimSpace(string(all))
}

// TestFirecracker boots the real guest on a real Firecracker and lives in it.
func TestFirecracker(t *testing.T) {
	f := needFirecracker(t)
	f.cfg.Drives = append(f.cfg.Drives, vmm.Drive{ID: "disk", Path: blank(t), Writeback: true})
	b := order()
	b.Memory = int64(f.cfg.MemoryMiB) << 20
	if err := f.boot(b); err != nil {
		t.Fatal(err)
	}
	const bootID = "01234567-89ab-4def-8123-456789abcdef"
	x := f.link(&guestv1.SetupRequest{Hostname: "other", BootId: bootID, MachineId: strings.Repeat("ab", 16), Generation: 1})
	first, _ := x.link.Generation()
	for _, c := range []struct{ args, want string }{
		{"init", guestPath + " supervisor "},
		{"hostname", "other"},
		{"cat /etc/mark", "from the image"},
		{"cat /proc/sys/kernel/random/boot_id", bootID + "\n"},
		{"cat /etc/machine-id", strings.Repeat("ab", 16) + "\n"},
		{"cat /proc/self/oom_score_adj", "0\n"},
		{"zombies", "0"},
		{"dial 169.254.169.254:80", "done\n"},
	} {
		if out, e := x.run("root", strings.Fields(c.args)...); out != c.want || e.GetCode() != 0 {
			t.Errorf("%s: %q, %v", c.args, out, e)
		}
	}
	if adj := x.read("/proc/self/oom_score_adj"); adj != "-999" {
		t.Errorf("the agent's oom_score_adj is %q", adj)
	}
	if out, _ := x.run("root", "interfaces"); !strings.Contains(out, "lo true true") {
		t.Errorf("interfaces: %q", out)
	}
	out, _ := x.run("user", "memory")
	t.Logf("of %d MiB the guest has %s bytes", f.cfg.MemoryMiB, out)
	x.outOfMemory()
	for range 100 { // each is a connection that the agent dials
		if x.read("/etc/mark") != "from the image" {
			t.Fatal("a file can't be read")
		}
	}
	x.run("user", "orphan", "5")
	if now, _ := x.link.Generation(); now != first {
		t.Errorf("the agent connected %d times", now-first+1)
	}
	c, err := x.link.Client(f.ctx(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	// A kernel that panics, as for the end of PID 1, ends the machine.
	_, _ = c.Start(f.ctx(10*time.Second), connect.NewRequest(&guestv1.StartRequest{
		Session: sandbox.NewID(sandbox.KindSession), User: "root", Args: []string{inside, "write", "/proc/sysrq-trigger", "c"},
	}))
	f.end()
}

// outOfMemory has users take more memory than there is, while others sit there.
func (x *box) outOfMemory() {
	x.t.Helper()
	for _, user := range []string{"user", "root"} {
		began := time.Now()
		if out, e := x.run(user, "anon", "1000"); e.GetSignal() != 9 {
			x.t.Errorf("%s, out of memory: %q, %v", user, out, e)
		}
		x.t.Logf("%s was out of memory after %v", user, time.Since(began).Round(time.Millisecond))
	}
	for _, dir := range []string{"/dev/shm", "/run"} {
		if out, _ := x.run("root", "fill", dir+"/big", "1000"); !strings.HasPrefix(out, "full ") {
			x.t.Errorf("filling %s: %q", dir, out)
		}
	}
	if out, e := x.run("user", "anon", "1000"); e.GetSignal() != 9 {
		x.t.Errorf("out of memory with both full: %q, %v", out, e)
	}
	x.run("root", "rm", "/dev/shm/big")
	x.run("root", "rm", "/run/big")
}

// TestFirecrackerRefuses looks for the reason and the end of machines that
// can't start.
func TestFirecrackerRefuses(t *testing.T) {
	t.Run("disk", func(t *testing.T) {
		f := needFirecracker(t)
		disk := filepath.Join(f.dir, "disk")
		if err := os.WriteFile(disk, make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		f.cfg.Drives = append(f.cfg.Drives, vmm.Drive{ID: "disk", Path: disk, Writeback: true})
		if err := f.boot(order()); !sandbox.IsClass(err, sandbox.FailedPrecondition) || !strings.Contains(err.Error(), "the drive vdb (disk) holds no ext4 filesystem") {
			t.Errorf("it said: %v", err)
		}
		f.end()
	})
	t.Run("template", func(t *testing.T) {
		f := needFirecracker(t)
		f.cfg.Drives[0].Path = filepath.Join(f.prebuilt, "guest")
		f.cfg.Drives = append(f.cfg.Drives, vmm.Drive{ID: "disk", Path: blank(t), Writeback: true})
		if err := f.boot(order()); !sandbox.IsClass(err, sandbox.FailedPrecondition) || !strings.Contains(err.Error(), "the drive vda (template) holds no erofs filesystem") {
			t.Errorf("it said: %v", err)
		}
		f.end()
	})
}

// TestFirecrackerEmptyRoot boots as a probe does.
func TestFirecrackerEmptyRoot(t *testing.T) {
	f := needFirecracker(t)
	f.cfg.Drives, f.cfg.MemoryMiB = nil, 128
	b := order()
	b.Root = guestapi.RootNone
	if err := f.boot(b); err != nil {
		t.Fatal(err)
	}
	x := f.link(nil)
	if host := x.read("/proc/sys/kernel/hostname"); host != "box" {
		t.Errorf("its name is %q", host)
	}
}
